"""Compares one step of the planned program with the plain module's, on one process's samples or on all processes'.

Under torchrun every process runs the plain module on the samples of all of them, and compares its own rows of results
and its own blocks of gradients: the gradient of a parameter is the mean over processes there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from parplan.graph.user_line import failing_module, user_line
from parplan.layout import shape_of
from parplan.runtime.execution.executor import Executor
from parplan.runtime.programs.program_cache import Captured, Programs
from parplan.runtime.self_check.checked_step import StepValues, executed_step, isolated, plain_step, with_callers_modes
from parplan.runtime.self_check.comparison import GroupDifference, compare_group, largest_of
from parplan.runtime.self_check.double_copy import double_casts
from parplan.runtime.self_check.gathered_batch import Batch
from parplan.runtime.sharded_state.sharded_tensor import local_tensor
from parplan.runtime.transport.base import Transport, block_values

__all__ = ["GROSS", "CheckedModel", "PlainFailure", "StepDifference"]


# How far rounding may take two runs in one type, relative to a tensor's largest element, or to the share `_FLOORS` of
# the largest of all tensors in its group where that is more. A difference beyond is repeated in float64, so these need
# not be wide; those of float64 are final.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_FLOORS = {torch.float64: 1e-4, torch.float32: 0.1, torch.float16: 0.1, torch.bfloat16: 0.1}
_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
# Beyond this a difference is no rounding in its type, where the same graph cannot be run in float64.
GROSS = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}


STRUCTURE = "structure"
"""The name of what differs where results are not alike."""


class PlainFailure(Exception):
    """The plain module itself fails on what it is given."""


@dataclass(frozen=True)
class StepDifference:
    """The comparison of two steps.

    Args:
        differences: by group.
        limit: that a difference may reach by rounding.
        precision: the shortest floating-point type in the step.
        plain: the plain module's step, of all samples.
        unknown: ops whose random draws could not be replaced.
    """

    differences: tuple[GroupDifference, ...]
    limit: float
    precision: torch.dtype
    plain: StepValues
    unknown: frozenset[str]

    @property
    def off(self) -> frozenset[str]:
        """Names of tensors that differ."""
        found = (pair for group in self.differences for pair in group.differences.items())
        return frozenset(name for name, value in found if not value <= self.limit)

    @property
    def alike(self) -> bool:
        """Whether results are tensors of the same types in the same places, which no rounding changes."""
        return all(group.worst != STRUCTURE for group in self.differences)

    @property
    def agrees(self) -> bool:
        """Whether all differences are rounding."""
        return all(group.difference <= self.limit for group in self.differences)

    def lines(self) -> list[str]:
        """A line for every group."""
        found = []
        for group in self.differences:
            if group.difference <= self.limit:
                found.append(f"{group.group}: {group.count} agree")
            elif group.difference == math.inf:
                what = "has another shape, type or structure, other whole numbers, or infinities elsewhere"
                found.append(f"{group.group}: {group.worst} {what}")
            else:
                off = sum(not difference <= self.limit for difference in group.differences.values())
                found.append(
                    f"{group.group}: {off} of {group.count} differ, most {group.worst}: {group.difference:.2g} of its "
                    f"largest element (tolerance {self.limit:.0e})"
                )
        return found


@dataclass(frozen=True)
class CheckedModel:
    """A module, and a capture of it that is to be compared with it.

    Args:
        module: the plain module.
        programs: lowers the capture.
        transport: which devices there are.
        captured: the capture.
        training: the mode that the module is called in.
        gradients: whether they are compared too.
        double: casts to shorter types are casts to float64.
    """

    module: nn.Module
    programs: Programs
    transport: Transport
    captured: Captured
    training: bool
    gradients: bool
    double: bool = False

    def plain(self, batch: Batch, unknown: set[str]) -> StepValues:
        """The plain module's step on all samples; names ops whose random draws could not be replaced.

        Raises:
            PlainFailure: the module fails.
        """
        graph = self.captured.graph
        weigh = partial(batch.whole_weights, graph) if self.gradients else None
        for accumulated in (False, True):
            try:
                alone = isolated(self.module, graph, self.gradients)
                with self.whole(), with_callers_modes(), alone as constants, double_casts(self.double):
                    found = plain_step(self.module, batch.whole.first(None), self.training, weigh, accumulated)
                unknown |= constants.unknown if constants is not None else set()
                return found
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if accumulated or not self.gradients:
                    line, reason = user_line(error), next(iter(str(error).strip().splitlines()), "")
                    layer = failing_module(error, self.module)
                    where = f"{type(error).__name__}: {reason}{f' in {layer}' if layer else ''}"
                    where += f" at {line}" if line else ""
                    raise PlainFailure(f"the plain module fails on these inputs with {where}") from error
        raise AssertionError("unreachable")

    def whole(self) -> AbstractContextManager[None]:
        """A context in which parameters have their whole values; every process has to enter it if they are cut."""
        sharding = self.programs.sharding
        apart = sharding is not None and (sharding.cuts or sharding.fresh)
        return sharding.whole_values() if sharding is not None and apart else nullcontext()

    def compare(self, batch: Batch, plain: StepValues, unknown: set[str], keep: bool) -> StepDifference:
        """Run the planned program and compare its step with the plain module's.

        Args:
            keep: its executor may serve the step itself.
        """
        graph = self.captured.graph
        weigh = partial(batch.own_weights, graph) if self.gradients else None
        with isolated(self.module, graph, self.gradients) as constants:
            executor = self.programs.checking_executor(self.captured, batch.sizes, keep)
            planned = executed_step(self.module, executor, batch.own.first(None), weigh)
        found = unknown | (constants.unknown if constants is not None else set())
        if self.transport.processes > 1:
            expected, planned = self._own_share(batch, plain, planned, executor, self.transport.rank)
        else:
            expected = plain
        types = {_REAL.get(spec.dtype, spec.dtype) for spec in graph.values.values()}
        # The shortest floating-point type that anything is computed in.
        precision = max(types & _TOLERANCES.keys(), key=_TOLERANCES.__getitem__, default=torch.float32)
        differences = _differences(plain, expected, planned, _FLOORS[precision])
        return StepDifference(differences, _TOLERANCES[precision], precision, plain, frozenset(found))

    def _own_share(
        self, batch: Batch, plain: StepValues, planned: StepValues, executor: Executor, rank: int
    ) -> tuple[StepValues, StepValues]:
        """The shares of both steps that this process can compare."""
        graph, holdings = executor.graph, executor.program.holdings
        held = {path: holdings[name].get(rank) for name, path in graph.parameters.items() if name in holdings}
        wanted: dict[str, Tensor | None] = {}
        given: dict[str, Tensor | None] = {}
        for path, gradient in plain.gradients.items():
            region, own = held.get(path, ()), planned.gradients[path]
            if region is None:
                continue
            wanted[path] = block_values(gradient, region) if gradient is not None else None
            own = local_tensor(own) if own is not None else None
            given[path] = own if own is None or tuple(own.shape) == shape_of(region) else block_values(own, region)
        own_inputs = [n for n in plain.input_gradients if not batch.shares_input(int(n.removeprefix("input ")))]
        wholes = {name: plain.input_gradients[name] for name in own_inputs}
        wanted_inputs = {n: batch.own_input(g) if g is not None else None for n, g in wholes.items()}
        # A process's inputs see its own loss, of which the mean has a share.
        given_inputs = {n: g / batch.processes if g is not None else None for n, g in planned.input_gradients.items()}
        sharding = self.programs.sharding
        fresh = dict(sharding.fresh) if sharding is not None else {}
        fresh |= self.programs.fresh_buffers(graph, executor.program)
        up_to_date = [name for name in plain.buffers if name not in fresh or rank in fresh[name]]
        regions = {name: fresh[name][rank] if name in fresh else () for name in up_to_date}
        expected = StepValues(
            batch.own_results(graph, plain.results), wanted, wanted_inputs,
            {name: block_values(plain.buffers[name], region) for name, region in regions.items()},
        )  # fmt: skip
        found = StepValues(
            planned.results, given, given_inputs,
            {name: block_values(planned.buffers[name], region) for name, region in regions.items()},
        )  # fmt: skip
        return expected, found


def _differences(
    whole: StepValues, expected: StepValues, planned: StepValues, floor: float
) -> tuple[GroupDifference, ...]:
    wanted, given = _tensors(expected.results), _tensors(planned.results)
    pulled = largest_of(whole.gradients, whole.input_gradients)
    groups = [
        ("results", wanted, given, largest_of(_tensors(whole.results))),
        ("gradients", expected.gradients, planned.gradients, pulled),
        ("input gradients", expected.input_gradients, planned.input_gradients, pulled),
        ("buffers", expected.buffers, planned.buffers, largest_of(whole.buffers)),
    ]
    # As many leaves, tensors of the same types in the same places, and the same values in the others.
    alike, simple = len(expected.results) == len(planned.results), (bool, int, float, str, bytes)
    for a, b in zip(expected.results, planned.results, strict=False):
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            alike = alike and isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype
        elif isinstance(a, simple) and isinstance(b, simple):
            alike = alike and (a == b or (a != a and b != b))
        else:
            alike = alike and type(a) is type(b)
    found = [compare_group(n, a, b, floor * largest) for n, a, b, largest in groups[0 if alike else 1 :] if a]
    if not alike:
        found.insert(0, GroupDifference("results", len(expected.results), math.inf, STRUCTURE, {}))
    return tuple(found)


def _tensors(results: Sequence[object]) -> dict[str, Tensor | None]:
    return {f"result {i}": leaf for i, leaf in enumerate(results) if isinstance(leaf, Tensor)}
