"""Ops in plain form: sizes that depend on values are refused as what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture


class Positive(nn.Module):
    """The positive values, behind one zero or each repeated twice: as many as there are."""

    def __init__(self, repeated: bool) -> None:
        super().__init__()
        self.repeated = repeated

    def forward(self, x: Tensor) -> Tensor:
        """Their sum."""
        chosen = x[x > 0]
        longer = chosen.unsqueeze(0).repeat(2, 1) if self.repeated else torch.cat([x.new_zeros(1), chosen])
        return longer.sum()


@pytest.mark.parametrize("repeated", [False, True])
def test_sizes_that_depend_on_values_are_refused(repeated: bool) -> None:
    with pytest.raises(CaptureError):
        capture(Positive(repeated), (torch.randn(4, 8),))
