"""What a device runs in a compute step: generated code, made once for devices with equal work."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx

from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.local import LocalLayer, local_module
from parplan.plan import Strategy
from parplan.runtime import batch_norm
from parplan.runtime.program import Code, Compute, Program, Transfer

__all__ = ["Codes", "written_buffers"]

Function = Callable[..., tuple[Tensor, ...]]


class Codes:
    """The code of one program's compute steps.

    Args:
        graph, strategies: what the program was lowered from.
        program: the steps.
        dropout: whether dropout drops anything.
    """

    def __init__(self, graph: LayerGraph, strategies: Mapping[str, Strategy], program: Program, dropout: bool) -> None:
        self._graph = graph
        self._strategies = strategies
        self._slots = program.slots
        self._dropout = dropout
        self._made: dict[tuple[int, int, int], Function] = {}

    def get(self, step: Compute, device: int) -> Function:
        """What `device` runs in `step`; its arguments are the step's operands, then its states."""
        column = step.grid.position(device)[1] if step.grid.shards > 1 else 0
        key = (id(step), column, step.batch(device))
        if key not in self._made:
            self._made[key] = self._make(step, column, step.batch(device))
        return self._made[key]

    def _make(self, step: Compute, column: int, batch: int) -> Function:
        if step.code is Code.STATISTICS:
            dtype = self._slots[step.results[0].slot].dtype
            return lambda x: (batch_norm.statistics(x, dtype),)
        if step.code is Code.NORMALISE:
            return _normaliser(self._graph.layers[step.layers[0]], step)
        parts = [LocalLayer(self._graph.layers[n], self._strategies[n], column, batch) for n in step.layers]
        inputs = [*(operand.name for operand in step.operands), *(state.name for state in step.states)]
        made = local_module(self._graph, parts, inputs, [result.name for result in step.results], self._dropout)
        return made.forward


def written_buffers(graph: LayerGraph, step: Compute | Transfer) -> frozenset[str]:
    """Buffers that a step writes: the running statistics of batch norm in training."""
    if isinstance(step, Transfer):
        return frozenset()
    nodes = [node for name in step.layers for node in graph.layers[name].nodes]
    norms = [node for node in nodes if node.target is torch.ops.aten.batch_norm.default and node.args[5]]
    return frozenset(a.name for node in norms for a in node.args[3:5] if isinstance(a, fx.Node))


def _normaliser(layer: Layer, step: Compute) -> Function:
    """The second half of a batch norm: its arguments are the step's operands and states, by name."""
    node = next(node for node in layer.nodes if node.target is torch.ops.aten.batch_norm.default)
    weight, bias, mean, variance = (getattr(argument, "name", "") for argument in node.args[1:5])
    momentum, eps = (float(str(argument)) for argument in node.args[6:8])
    names = [*(operand.name for operand in step.operands), *(state.name for state in step.states)]

    def run(x: Tensor, parts: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        known = dict(zip(names[2:], states, strict=True))
        affine, running = (known.get(weight), known.get(bias)), (known.get(mean), known.get(variance))
        return (batch_norm.normalise(x, parts, *affine, *running, momentum, eps),)

    return run
