"""Products of rows with the matrices of their experts: the op's row is proved cut and uncut, and in groups."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from parplan.graph.axes.experts import EXPERT_PRODUCTS, GroupedInDouble, run_expert_products
from tests.graph.axes.test_table import assert_proved
from tests.graph.single_op import OneOp, part_results, whole_results

ROWS, EXPERTS, IN, OUT = 12, 6, 6, 6


def operands(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, matrices, and the expert of each row; expert 1 has no rows."""
    generator = torch.Generator().manual_seed(seed)
    rows, weight = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((ROWS, IN), (EXPERTS, IN, OUT))
    )
    experts = torch.randint(0, EXPERTS, (ROWS,), generator=generator)
    return rows, weight, torch.where(experts == 1, 4, experts)


def test_every_row_meets_the_matrix_of_its_expert() -> None:
    rows, weight, experts = operands()
    wanted = torch.einsum("ri,rio->ro", rows, weight[experts])
    torch.testing.assert_close(run_expert_products(rows, weight, experts), wanted, rtol=1e-12, atol=1e-12)


def test_parts_of_rows_features_and_experts_make_the_whole() -> None:
    op = OneOp.of(EXPERT_PRODUCTS, (*operands(), EXPERTS), {})
    whole, axes = whole_results(op), op.open_axes()
    assert len(axes) == 4
    for axis in axes:
        for parts in (2, 3):
            assert_proved("expert_products", part_results(op, axis, [axis.units // parts] * parts), whole, axis)
        if not axis.partial:
            uneven = part_results(op, axis, [1, axis.units - 1], as_batch=True)
            assert_proved("expert_products", uneven, whole, axis)


def test_tables_of_experts_looked_up_by_a_list_add_up() -> None:
    _, weight, experts = operands()
    op = OneOp.of(torch.ops.aten.index.Tensor, (weight, [experts - EXPERTS]), {})
    whole = whole_results(op)
    (axis,) = (axis for axis in op.open_axes() if axis.partial)
    for parts in (2, 3):
        assert_proved("index", part_results(op, axis, [axis.units // parts] * parts), whole, axis)


@pytest.mark.parametrize("rows", [ROWS, 0])
def test_groups_in_float64_are_products_of_each_expert(rows: int) -> None:
    x, weight, experts = operands()
    x, experts = x[:rows], experts[:rows].sort()[0]
    ends = torch.bincount(experts, minlength=EXPERTS).cumsum(0).int()
    with GroupedInDouble():
        found = functional.grouped_mm(x, weight, offs=ends)
    wanted = torch.einsum("ri,rio->ro", x, weight[experts])
    pull = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(found, (x, weight), pull), torch.autograd.grad(wanted, (x, weight), pull), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_other_precisions_stay_with_torchs_kernel() -> None:
    x, weight, experts = (each.detach() for each in operands())
    ends = torch.bincount(experts, minlength=EXPERTS).cumsum(0).int()
    x, weight = torch.zeros(ROWS, 8), torch.zeros(EXPERTS, 8, 8)
    with GroupedInDouble():
        assert functional.grouped_mm(x, weight, offs=ends).dtype is torch.float32
