"""Every row of the axis table is proved: cut and uncut calls give the same numbers, forward and backward."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import Tensor

from parplan.graph.axes import elementwise
from parplan.graph.axes.table import TABLE, overload
from parplan.graph.layer_graph import Axis
from tests.every_case import every_case, run_all
from tests.graph.samples import SAMPLES, Sizes
from tests.graph.single_op import OneOp, Results, part_results, whole_results

aten = torch.ops.aten
# Whatever was in memory, or drawn: only shapes can be compared.
EMPTY = (
    *("empty_like", "empty.memory_format", "new_empty", "rand", "rand_like", "randint", "randint.low", "randint_like"),
    *("randint_like.low_dtype", "randn", "randn_like", "exponential", "uniform"),
)


# Ops by the module that their rows are written in; those of one element at a time apart, as they are so many.
GROUPS: dict[str, list[str]] = defaultdict(list)
for name in SAMPLES:
    row = TABLE[overload(name)]
    GROUPS["pointwise" if row is elementwise.pointwise else row.__module__.rpartition(".")[2]].append(name)


def one_op(op: str, number: int, parts: int, seed: int) -> OneOp:
    sizes = Sizes(parts, seed)
    sample = SAMPLES[op][number]
    args = [sizes.value(argument) for argument in sample.args]
    return OneOp.of(overload(op), args, {name: sizes.value(value) for name, value in sample.kwargs.items()})


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str, exact: bool = True) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        assert found[name].shape == value.shape, f"{what}: {name}"
        if exact:
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}")


def assert_proved(op: str, found: Results, expected: Results, axis: Axis, sample: str = "") -> None:
    what = f"{op}{sample} cut along {dict(axis.dims)}"
    assert_same(found.outputs, expected.outputs, what, exact=op not in EMPTY)
    assert_same(found.gradients, expected.gradients, f"gradients of {what}")


def test_every_op_of_the_table_has_a_sample_and_every_sample_an_op() -> None:
    assert {str(op) for op in TABLE} == {str(overload(name)) for name in SAMPLES}


@every_case("op", SAMPLES)
def test_every_row_opens_an_axis(op: str) -> None:
    assert any(one_op(op, number, 2, 0).open_axes() for number in range(len(SAMPLES[op])))


def shards_compute_the_whole(op: str) -> None:
    for number, parts in itertools.product(range(len(SAMPLES[op])), (2, 3)):
        call = one_op(op, number, parts, seed=parts)
        whole = whole_results(call)
        for axis in call.open_axes():
            if axis.units % parts == 0:
                shares = [axis.units // parts] * parts
                sample = f", sample {number}, in {parts} shards"
                assert_proved(op, part_results(call, axis, shares), whole, axis, sample)


def uneven_replicas_compute_the_whole(op: str) -> None:
    for number in range(len(SAMPLES[op])):
        call = one_op(op, number, parts=3, seed=1)
        whole = whole_results(call)
        for axis in call.open_axes():
            shared = any(any(sections.limits) for sections in axis.sections.values())
            if axis.units > 1 and not axis.partial and not shared:  # samples are never shared
                shares = [1, axis.units - 1]
                sample = f", sample {number}, in replicas of {shares}"
                assert_proved(op, part_results(call, axis, shares, as_batch=True), whole, axis, sample)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("group", GROUPS)
def test_shards_compute_the_whole(group: str) -> None:
    run_all((op, partial(shards_compute_the_whole, op)) for op in GROUPS[group])


@pytest.mark.full
@pytest.mark.parametrize("group", GROUPS)
def test_uneven_replicas_compute_the_whole(group: str) -> None:
    run_all((op, partial(uneven_replicas_compute_the_whole, op)) for op in GROUPS[group])
