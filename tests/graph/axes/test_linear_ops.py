"""The ops that terms of a sum go through one by one are linear, on the samples of the axis table."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import pytest
import torch

from parplan.graph.axes.linear_ops import _BOTH_OPS, _EITHER_OPS, _FIRST_OPS
from parplan.graph.axes.table import overload
from tests.graph.samples import SAMPLES, Sizes

NAMES = {overload(name): name for name in SAMPLES}


@pytest.mark.parametrize(
    ("ops", "operands"), [(_FIRST_OPS, [0]), (_EITHER_OPS, [0]), (_EITHER_OPS, [1]), (_BOTH_OPS, [0, 1])]
)
def test_what_an_op_gives_of_a_sum_is_the_sum_of_what_it_gives(ops: Collection[object], operands: list[int]) -> None:
    for op in ops:
        assert callable(op)
        for sample in SAMPLES[NAMES[op]]:
            sizes = Sizes(2, 0)
            args = [sizes.value(argument) for argument in sample.args]
            kwargs = {name: sizes.value(value) for name, value in sample.kwargs.items()}
            given = [args[place] for place in operands]
            if not all(isinstance(one, torch.Tensor) and one.is_floating_point() for one in given):
                continue
            other, both = [*args], [*args]
            for place, one in zip(operands, given, strict=True):
                other[place] = torch.randn_like(one)
                both[place] = one + other[place]
            parts = op(*args, **kwargs) + op(*other, **kwargs)
            found = op(*both, **kwargs)
            torch.testing.assert_close(parts, found, rtol=1e-5, atol=1e-5, msg=partial("{}: {}".format, op))
