"""What a forward leaves alive for its backward."""

from __future__ import annotations

import torch
from torch import nn

from tests.runtime.helpers import Made, compiled, spread


def test_values_that_no_backward_reads_are_freed_in_the_forward() -> None:
    """The partial sums of two shards are handed on to be put together; the gradient of a sum reads neither."""
    x = torch.randn(16, 8).double()
    model = compiled(nn.Linear(8, 64, bias=False).double(), spread(2, "in-features"), 2)
    model(x).sum().backward()
    model.zero_grad()
    with Made() as made:
        loss = model(x).sum()
        weights, operands = 8 * 64 * 8, 16 * 8 * 8
        assert made.live_bytes == weights + operands + loss.nbytes
        loss.backward()
