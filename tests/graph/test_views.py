"""Random views: cutting before and after a merge, split, permutation or expansion is the same."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parplan.graph.axes.table import overload
from tests.graph.single_op import OneOp, part_results, whole_results

SIZES = st.sampled_from([1, 2, 3, 4, 6])


def assert_cuts_agree(op: str, *args: Any) -> None:
    call = OneOp.of(overload(op), args, {})
    whole = whole_results(call)
    for axis in call.open_axes():
        for parts in {p for p in (2, 3, axis.units) if p > 1 and axis.units % p == 0}:
            found = part_results(call, axis, [axis.units // parts] * parts)
            assert all(torch.equal(found.outputs[name], value) for name, value in whole.outputs.items())
            assert all(torch.allclose(found.gradients[name], value) for name, value in whole.gradients.items())


def tensor(shape: list[int]) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()


@st.composite
def factorisations(draw: st.DrawFn, size: int) -> list[int]:
    """A shape of `size` elements, ones among it."""
    shape: list[int] = []
    while size > 1:
        factor = draw(st.sampled_from([f for f in range(2, size + 1) if size % f == 0]))
        shape.append(factor)
        size //= factor
    return draw(st.permutations(shape + [1] * draw(st.integers(0, 2))))


@pytest.mark.full
@given(st.data())
def test_merges_and_splits(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([6, 12, 24, 36]))
    before, after = data.draw(factorisations(size)), data.draw(factorisations(size))
    assert_cuts_agree("view", tensor(before), after)


@pytest.mark.parametrize(
    ("before", "after", "axes"),
    [
        ([2, 3, 4], [2, 12], {(0, 0), (1, 1)}),
        ([6, 4], [2, 3, 4], {(0, 0), (1, 2)}),
        ([2, 6], [4, 3], {(0, 0)}),
        ([1, 4, 6], [4, 1, 6], {(1, 0), (2, 2)}),
        ([4], [4, 1, 1], {(0, 0)}),
        ([1, 1], [1], set()),
        ([2, 3, 2, 3], [2, 6, 3], {(0, 0), (1, 1), (3, 2)}),
    ],
)
def test_which_axes_a_view_keeps(before: list[int], after: list[int], axes: set[tuple[int, int]]) -> None:
    call = OneOp.of(overload("view"), (tensor(before), after), {})
    (result,) = call.layer.outputs
    leading = [axis for axis in call.open_axes() if set(axis.outer.values()) == {1}]
    assert {(axis.dims["x0"], axis.dims[result]) for axis in leading} == axes


@pytest.mark.full
@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_permutations(shape: list[int], data: st.DataObject) -> None:
    assert_cuts_agree("permute", tensor(shape), data.draw(st.permutations(range(len(shape)))))


@pytest.mark.full
@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=3), st.lists(SIZES, max_size=2))
def test_expansions(dims: list[tuple[int, bool]], more: list[int]) -> None:
    before = [1 if repeated else size for size, repeated in dims]
    assert_cuts_agree("expand", tensor(before), more + [size for size, _ in dims])


@pytest.mark.full
@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_squeezes(shape: list[int], data: st.DataObject) -> None:
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))
    assert_cuts_agree("squeeze.dims", tensor(shape), dims)
