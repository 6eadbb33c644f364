"""Ops in plain form: sizes that depend on values are refused as what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from parplan.graph.kinds import op_name
from tests.graph.by_hand import assert_same_numbers


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("repeated", [False, True])
def test_sizes_that_depend_on_values_are_refused(repeated: bool) -> None:
    with pytest.raises(CaptureError):
        capture(Positive(repeated), (torch.randn(4, 8),))


class Listed(nn.Module):
    """One index as a list, from the front or from the back; then what it took is written, or its source is."""

    def __init__(self, written: str = "") -> None:
        super().__init__()
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 4) to (N, 2, 4)."""
        x = x * 2
        first, last = x[:, [0]], x[:, [-1]]
        if self.written == "taken":
            first += 1
        if self.written == "source":
            x[:, 0] = 0
        return torch.cat([first, last], dim=1) + x.sum(1, keepdim=True)


@pytest.mark.full
@pytest.mark.parametrize(("written", "slices"), [("", 2), ("taken", 1), ("source", 0)])
def test_a_list_of_one_index_is_a_section_where_nobody_writes(written: str, slices: int) -> None:
    model, x = Listed(written).double(), torch.randn(4, 3, 4, dtype=torch.float64)
    graph = capture(model, (x,))
    ops = [op_name(node) for layer in graph.layers.values() for node in layer.nodes]
    assert (ops.count("slice"), ops.count("index")) == (slices, 2 - slices)
    assert_same_numbers(graph, model, (x,))
