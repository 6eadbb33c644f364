"""Passes: which samples each has, and where they lie in a tensor of the whole batch.

Layers with fewer replicas than those in front may run several times, each time on an equal share of the samples (see
lowering/stages.py). A value of the whole batch is split into the parts of the passes where it lies, without moving
anything; what the passes made is joined where it is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from parplan.errors import PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Range
from parplan.lowering.stages import Stage, Stages, shares
from parplan.lowering.step_setting import StepSetting, samples_per_replica
from parplan.plan import Strategy

__all__ = ["Pass", "early_periods", "local_ranges", "passes_of", "put", "take", "update_periods"]


@dataclass(frozen=True)
class Pass:
    """One trip through the layers that run in passes.

    Args:
        number: which one, from 0.
        ranges: its samples in the whole batch, one range per group of front replicas.
    """

    number: int
    ranges: tuple[Range, ...]

    @cached_property
    def batch(self) -> int:
        """Samples of this pass."""
        return sum(len(extent) for extent in self.ranges)

    def rows(self, replicas: int) -> tuple[int, ...]:
        """Samples per replica; where the ranges divide into replicas, each takes its own as they are."""
        return samples_per_replica(tuple(map(len, self.ranges)), replicas)


def passes_of(stages: Stages, step_setting: StepSetting) -> tuple[Pass, ...]:
    """The passes of one step; none when all layers run once."""
    if stages.passes == 1:
        return ()
    found = shares(step_setting.rows(stages.max_replicas), stages, step_setting.scheme)
    return tuple(Pass(number, own) for number, own in enumerate(found))


def update_periods(graph: LayerGraph, strategies: Mapping[str, Strategy], stages: Stages) -> dict[str, int]:
    """After how many passes each parameter (placeholder) of the layers that run in passes is updated.

    Raises:
        PlanError: layers that share a parameter want it updated at different moments.
    """
    inside, found = set(stages.layers(Stage.PASSES)), dict[str, int]()
    for name, layer in graph.layers.items():
        period = (strategies[name].update_period or stages.passes) if name in inside else stages.passes
        for parameter in layer.parameters:
            if found.setdefault(parameter, period) != period:
                raise PlanError(
                    f"{name}: shares {graph.parameters[parameter]} with a layer that updates it every "
                    f"{found[parameter]} passes, not every {period}; give both the same update_period"
                )
    return {p: found[p] for name in graph.layers if name in inside for p in graph.layers[name].parameters}


def early_periods(graph: LayerGraph, strategies: Mapping[str, Strategy], stages: Stages) -> dict[str, int]:
    """The update periods of those parameters that do not wait for the last pass.

    Raises:
        PlanError: a period does not divide the passes, or layers that share a parameter have different ones.
    """
    found = update_periods(graph, strategies, stages)
    for parameter, period in found.items():
        if stages.passes % period:
            raise PlanError(
                f"{graph.parameters[parameter]}: an update period of {period} does not divide {stages.passes} passes "
                "(R8); use one that does"
            )
    return {parameter: period for parameter, period in found.items() if period < stages.passes}


def local_ranges(ranges: Sequence[Range], held: Range, per_sample: int) -> tuple[Range, ...]:
    """Where the samples in `ranges` lie in a block that holds the indices `held`.

    Args:
        ranges: of samples.
        held: of indices, `per_sample` for each sample.
    """
    found = (Range(one.start * per_sample, one.stop * per_sample).intersection(held) for one in ranges)
    return tuple(one.shifted(-held.start) for one in found if len(one))


def take(tensor: Tensor, dim: int, ranges: Sequence[Range]) -> Tensor:
    """The indices in `ranges` along `dim`: a view where they are in one piece."""
    parts = [tensor.narrow(dim, one.start, len(one)) for one in ranges] or [tensor.narrow(dim, 0, 0)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def put(whole: Tensor, dim: int, ranges: Sequence[Range], part: Tensor) -> None:
    """The reverse of `take`: write `part` to the indices in `ranges`."""
    start = 0
    for one in ranges:
        whole.narrow(dim, one.start, len(one)).copy_(part.narrow(dim, start, len(one)))
        start += len(one)
