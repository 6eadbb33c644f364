"""Views by strides read the same elements wherever and however their operand lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from tests.graph.by_hand import assert_same_numbers, halves
from tests.runtime.helpers import compiled, differences, outcome, spread

View = Callable[[Tensor], Tensor]


class Strided(nn.Module):
    """A view between two layers."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self.view, self.before, self.after = view, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 6, 4) to the result of a layer on a view of the result of another one."""
        result: Tensor = self.after(self.view(self.before(x)))
        return result


def chunks(h: Tensor) -> Tensor:
    """Overlapping windows of 4 of 6 positions, of a transposed tensor."""
    h = h.transpose(0, 1).contiguous().transpose(0, 1)
    sample, position, feature = h.stride()
    return h.as_strided((h.shape[0], 2, 4, 4), (sample, 2 * position, position, feature))


def with_an_offset(h: Tensor) -> Tensor:
    return h.as_strided((h.shape[0], 5, 4), h.stride(), 4)


def of_sliced_rows(h: Tensor) -> Tensor:
    h = h.permute(2, 0, 1)
    return h.as_strided((h.shape[1], 3, 4), (24, 8, 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("view", [chunks, with_an_offset, of_sliced_rows])
def test_replicas_read_what_the_plain_model_reads(view: View) -> None:
    torch.manual_seed(0)
    model, x = Strided(view).double(), torch.randn(8, 6, 4, dtype=torch.float64)
    assert_same_numbers(capture(model, (x,)), model, (x,), choose=halves)
    split = compiled(model, spread(2, "data"), 2)
    assert differences(outcome(split.module, split, x), outcome(model, model, x)) == {}


def test_a_view_of_memory_beside_its_operand_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"as_strided of .*reads memory beside it at .*test_strided_views.py"):
        capture(Strided(lambda h: h[:, 1:].as_strided((8, 5, 4), (24, 4, 1), 0)), (torch.randn(8, 6, 4),))


def written(h: Tensor) -> Tensor:
    h = h * 2
    h.as_strided((h.shape[0], 6, 1), (24, 4, 1)).zero_()
    return h


def test_a_view_that_is_written_is_refused_where_it_cannot_be_kept() -> None:
    with pytest.raises(CaptureError, match="writes into an as_strided view in place"):
        capture(Strided(written), (torch.randn(8, 6, 4),))
