"""`torch.utils.checkpoint` around a compiled model: the forward is computed again once, whatever the plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.runtime.helpers import CLOSE, compiled, differences, outcome, spread
from tests.runtime.nets import conv_net


@pytest.mark.parametrize(
    ("kind", "reentrant", "threads"),
    [("hybrid", False, False), ("hybrid", True, False), ("out-features", False, False), ("hybrid", False, True)],
)
def test_a_checkpoint_computes_again_once(kind: str, reentrant: bool, threads: bool) -> None:
    plain = conv_net()
    model = compiled(plain, spread(2, kind), 2, threads=threads)
    calls: list[int] = []

    def part(x: Tensor) -> Tensor:
        calls.append(len(x))
        result: Tensor = model(x)
        return result

    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    found = outcome(model, lambda x: checkpoint(part, x, use_reentrant=reentrant), x)
    wanted = outcome(plain, lambda x: checkpoint(plain, x, use_reentrant=reentrant), x)
    assert differences(found, wanted) == {}
    assert calls == [6, 6]


def test_a_kept_graph_goes_back_twice_through_a_checkpoint() -> None:
    plain = conv_net()
    model = compiled(plain, spread(2, "hybrid"), 2)
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    for module in (plain, model):
        loss = checkpoint(module, x, use_reentrant=False).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for parameter, twin in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=CLOSE, atol=CLOSE)
