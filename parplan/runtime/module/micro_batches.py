"""The micro-batches of a call: its inputs cut along the samples, each with the program of its size.

Every process cuts its own samples, and all run equally many micro-batches, so that they meet in every transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from torch import Tensor

from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Range, split_evenly
from parplan.lowering.micro_batches import combinations
from parplan.lowering.passes import local_ranges, take
from parplan.lowering.pipeline.orders import Action, merged, orders
from parplan.plan import SCHEDULES
from parplan.runtime.calls import ModelCall
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.staged_run import LossInside, MicroBatch
from parplan.runtime.programs.program_cache import Captured, Programs
from parplan.runtime.transport.base import Transport

__all__ = ["Parts", "parts_of"]


@dataclass(frozen=True)
class Parts:
    """The micro-batches of a call.

    Args:
        micro_batches: in the order in which they run.
        ranges: the samples of this process that each has.
        sizes: per micro-batch the samples of every process.
    """

    micro_batches: Sequence[MicroBatch]
    ranges: Sequence[Range]
    sizes: Sequence[tuple[int, ...]]

    @property
    def executor(self) -> Executor:
        """That of the last micro-batch."""
        return self.micro_batches[-1].executor

    def with_loss(self, captured: Captured, whole: bool) -> LossInside:
        """The step, where a result is the loss.

        Args:
            whole: the loss is that of all processes' samples.
        """
        graph, found = captured.graph, combinations(captured.graph)
        assert captured.loss is not None  # else there is no such step
        own = [sum(sizes) if whole else len(extent) for sizes, extent in zip(self.sizes, self.ranges, strict=True)]
        samples, counts, rows = max(1, sum(own)), found[captured.loss].counts, 0.0
        if counts is not None:
            *shape, _ = graph.values[counts].shape
            rows = prod(shape) / (graph.batch or 1) * samples
        return LossInside(
            self.micro_batches,
            [(found[value], graph.batch_dims.get(value)) for value in graph.results],
            graph.results.index(captured.loss),
            [size / samples for size in own],
            whole,
            {name: graph.batch_dims.get(name) for name in self.micro_batches[0].inputs},
            rows,
            self._actions(captured.schedule),
        )

    def _actions(self, schedule: str) -> tuple[Action, ...]:
        """The order of pipeline stages, which all processes follow; empty where micro-batches go one by one."""
        if schedule == SCHEDULES[0]:
            return ()
        numbers = [one.executor.pipeline.numbers for one in self.micro_batches]
        stages = max(one.count for one in numbers)
        return merged(orders(schedule, len(numbers[0].groups), stages, len(self.micro_batches)))


def parts_of(
    programs: Programs, captured: Captured, call: ModelCall, samples: tuple[int, ...], transport: Transport
) -> Parts:
    """The micro-batches of a call.

    Args:
        samples: of every process.
    """
    count = max(1, min(captured.micro_batches, max(samples)))
    sizes = list(zip(*(split_evenly(own, count) for own in samples), strict=True))
    graph, rank = captured.graph, transport.rank if transport.processes > 1 else 0
    ends = accumulate((own[rank] for own in sizes), initial=0)
    ranges = [Range(*pair) for pair in pairwise(ends)]
    inputs = call.named(graph.user_inputs)
    own = captured.of_micro_batch
    micro_batches = [
        MicroBatch(programs.executor(own, size), {name: _cut(graph, name, inputs[name], extent) for name in inputs})
        for size, extent in zip(sizes, ranges, strict=True)
    ]
    return Parts(micro_batches, ranges, sizes)


def _cut(graph: LayerGraph, name: str, tensor: Tensor, extent: Range) -> Tensor:
    """A micro-batch's part of an input; the whole of one without samples."""
    dim = graph.batch_dims.get(name)
    if dim is None:
        return tensor
    each = graph.values[name].shape[dim] // (graph.batch or 1)
    return take(tensor, dim, local_ranges((extent,), Range(0, tensor.shape[dim]), each))
