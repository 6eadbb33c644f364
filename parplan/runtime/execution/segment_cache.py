"""Generated code of compute steps, made once for devices with equal work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from parplan.graph import batch_norm
from parplan.graph.kinds import writes_statistics
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer, Marks, local_module
from parplan.lowering.program import Code, Compute, Program
from parplan.runtime.execution.module_hooks import HookCalls
from parplan.runtime.execution.random_state import SeededOps

__all__ = ["Function", "SegmentCache", "written_buffers"]

Function = Callable[..., tuple[Tensor, ...]]


class SegmentCache:
    """The code of one program's compute steps.

    Args:
        graph: that the program was lowered from.
        program: the steps.
        seeded: ops that draw random numbers on several devices at once.
        dropout: whether dropout drops anything.
        places: where each device of this process lives.
        hooks: the hooks of the user's modules.
        marks: called where a layer begins and where it ends.
    """

    def __init__(
        self,
        graph: LayerGraph,
        program: Program,
        seeded: SeededOps,
        dropout: bool,
        places: Mapping[int, torch.device],
        hooks: HookCalls,
        marks: Marks | None = None,
    ) -> None:
        self._graph = graph
        self._strategies = program.strategies
        self._slots = program.slots
        self._seeded = seeded
        self._dropout = dropout
        self._places = places
        self._hooks = hooks
        self._marks = marks
        self._made: dict[_Key, Function] = {}

    def get(self, step: Compute, device: int) -> Function:
        """The code that `device` runs in `step`; its arguments are the step's operands, then its states."""
        row, column = step.grid.position(device)
        own_row, own_column = row if self._seeded.any or self._graph.sites else 0, column if step.grid.shards > 1 else 0
        key = _Key(id(step), own_row, own_column, step.batch(device), self._places[device])
        if key not in self._made:
            self._made[key] = self._make(step, key)
        return self._made[key]

    def _make(self, step: Compute, key: _Key) -> Function:
        if step.code is Code.STATISTICS:
            dtype = self._slots[step.results[0].slot].dtype
            return self._marked(step, lambda x: (batch_norm.statistics(x, dtype),))
        if step.code is Code.NORMALISE:
            normalise = batch_norm.normaliser(self._graph.layers[step.layers[0]])
            names = [state.name for state in step.states]
            return self._marked(step, lambda x, parts, *own: normalise(x, parts, dict(zip(names, own, strict=True))))
        parts = [LocalLayer(self._graph.layers[n], self._strategies[n], key.column, key.batch) for n in step.layers]
        inputs = [*(operand.name for operand in step.operands), *(state.name for state in step.states)]
        results = [result.name for result in step.results]
        made = local_module(self._graph, parts, inputs, results, self._dropout, self._marks, key.place)
        for part in parts if self._dropout else ():
            self._seeded.apply(made, part, key.row)
        self._hooks.apply(made, key.row, step.pass_number)
        code: Function = made.forward
        # Numbers, as the code knows them, lie in slots that have one entry per replica.
        taken = [self._slots[operand.slot].per_replica for operand in step.operands] + [False] * len(step.states)
        given = [self._slots[result.slot].per_replica for result in step.results]
        if not any(taken) and not any(given):
            return code

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            results = code(*(t.squeeze(0) if entry else t for t, entry in zip(tensors, taken, strict=True)))
            return tuple(t.unsqueeze(0) if entry else t for t, entry in zip(results, given, strict=True))

        return run

    def _marked(self, step: Compute, code: Function) -> Function:
        """The code of half a layer, with the layer's marks around it."""
        if self._marks is None:
            return code
        (layer,) = step.layers
        before, after = self._marks.before(layer), self._marks.after(layer)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            before()
            results = code(*tensors)
            after(results)
            return results

        return run


@dataclass(frozen=True)
class _Key:
    """The facts that devices which share code have in common; `row` counts only where random numbers or hooks do."""

    step: int
    row: int
    column: int
    batch: int
    place: torch.device


def written_buffers(graph: LayerGraph, step: Compute) -> frozenset[str]:
    """Buffers that a step writes: the running statistics of batch and instance norm in training."""
    nodes = [node for name in step.layers for node in graph.layers[name].nodes]
    norms = filter(writes_statistics, nodes)
    return frozenset(a.name for node in norms for a in node.args[3:5] if isinstance(a, fx.Node))
