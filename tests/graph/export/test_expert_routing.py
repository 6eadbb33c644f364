"""Rows sorted by expert are put back into their own order where all readers are understood, else left as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parplan.graph.axes.experts import GroupedInDouble
from parplan.graph.export.expert_routing import unsort_experts
from parplan.graph.kinds import op_name

EXPERTS, WIDTH, TIMES = 3, 4, 2


class Routed(nn.Module):
    """Rows [tokens * 2] of tokens, sorted by expert and multiplied; `does` puts them together."""

    def __init__(self, does: Callable[..., Tensor], bins: int = EXPERTS, descending: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64))
        self.does, self.bins, self.descending = does, bins, descending

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        order = experts.sort(descending=self.descending)[1]
        ends = torch.histc(experts.double(), self.bins, 0, self.bins - 1).cumsum(0).int()
        ends = ends if self.bins == EXPERTS else ends[:EXPERTS]
        rows = nn.functional.grouped_mm(x[order // TIMES], self.weight, offs=ends)
        return self.does(rows, order, x)


def put_back(rows: Tensor, order: Tensor, x: Tensor) -> Tensor:
    return rows[order.argsort()].view(-1, TIMES, WIDTH).sum(1)


def sorted_back(rows: Tensor, order: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(rows).mul_(2.0)[order.sort()[1]].view(-1, TIMES, WIDTH).sum(1)


def added(rows: Tensor, order: Tensor, x: Tensor) -> Tensor:
    return torch.ones_like(x).index_add(0, order // TIMES, rows)


def added_in_place(rows: Tensor, order: Tensor, x: Tensor) -> Tensor:
    found = x * 3
    found.index_add_(0, order // TIMES, rows)
    return found + 1


UNSORTED = [put_back, sorted_back, added, added_in_place]


def exported(model: nn.Module) -> tuple[torch.export.ExportedProgram, tuple[Tensor, Tensor]]:
    given = torch.randn(5, WIDTH, dtype=torch.float64), torch.tensor([2, 0, 1, 2, 2, 0, 0, 1, 2, 0])
    with GroupedInDouble():
        return torch.export.export(model, given, strict=False), given


@pytest.mark.parametrize("does", UNSORTED)
def test_rows_in_their_own_order_give_the_same(does: Callable[..., Tensor]) -> None:
    model = Routed(does)
    program, given = exported(model)
    unsort_experts(program.graph)
    names = {op_name(node) for node in program.graph.nodes}
    assert "expert_products" in names
    assert names.isdisjoint({"sort", "argsort", "grouped_products", "index_put"})
    program.graph.lint()
    with GroupedInDouble():
        wanted = model(*given)
    torch.testing.assert_close(program.module()(*given), wanted, rtol=1e-12, atol=1e-12)


def in_sorted_order(rows: Tensor, order: Tensor, x: Tensor) -> Tensor:
    return rows


def mixed(rows: Tensor, order: Tensor, x: Tensor) -> Tensor:
    return put_back(rows.cumsum(0), order, x)


def beside_unsorted(rows: Tensor, order: Tensor, x: Tensor) -> Tensor:
    return put_back(rows + x.repeat_interleave(TIMES, 0), order, x)


def view_read_later(rows: Tensor, order: Tensor, x: Tensor) -> Tensor:
    first = rows[:, :2]
    rows.mul_(2.0)
    return put_back(rows, order, x) + put_back(torch.cat([first, first], 1), order, x)


def positions(rows: Tensor, order: Tensor, x: Tensor) -> Tensor:
    return put_back(rows, order, x) + order.sum()


def chosen_by_value(rows: Tensor, order: Tensor, x: Tensor) -> Tensor:
    return rows[rows[:, 0] > 0].sum(0)


LEFT = [chosen_by_value, in_sorted_order, mixed, beside_unsorted, view_read_later, positions]


@pytest.mark.parametrize("model", [*map(Routed, LEFT), Routed(put_back, descending=True), Routed(put_back, bins=4)])
def test_a_sort_of_which_more_is_read_stays(model: nn.Module) -> None:
    program, _ = exported(model)
    before = str(program.graph)
    unsort_experts(program.graph)
    assert str(program.graph) == before
