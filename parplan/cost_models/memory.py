"""Bytes each device holds for a layer: one model for every strategy and every cost model.

A value that autograd keeps is counted once, by the layer that makes it, however many layers keep it, and so is a view
of it; masks, indices and statistics are counted by the layer whose ops make them. A user input is counted by the first
layer that takes it, and so is a parameter that several layers share. An input that every shard needs whole is gathered,
so the layer that keeps it counts its own copy too (an upper bound: the producer may already have it whole).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from parplan.cost_models.costs import LayerMemory
from parplan.cost_models.op_calls import OpCall, Operand, op_calls, total_bytes
from parplan.cost_models.saved import saved_by
from parplan.errors import ParplanError
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer, local_shape
from parplan.plan import Strategy

__all__ = ["OPTIMIZER_STATES", "MemoryModel", "optimizer_states"]

# Tensors of a parameter's size and type that an optimizer keeps beside it.
OPTIMIZER_STATES: Mapping[str, int] = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}


def optimizer_states(optimizer: str) -> int:
    """How many tensors per parameter `optimizer` keeps.

    Raises:
        ParplanError: unknown optimizer; the text lists those known.
    """
    if optimizer not in OPTIMIZER_STATES:
        known = ", ".join(OPTIMIZER_STATES)
        raise ParplanError(f"the state of optimizer {optimizer!r} is not known; use the closest of {known}")
    return OPTIMIZER_STATES[optimizer]


class MemoryModel:
    """Memory of the layers of one graph.

    Args:
        graph: the captured model.
        optimizer: whose state is counted, a key of OPTIMIZER_STATES.
    """

    def __init__(self, graph: LayerGraph, optimizer: str) -> None:
        self._graph = graph
        self._states = optimizer_states(optimizer)
        self._roots: dict[str, str] = {}
        wholes = [(name, op_calls(graph, _whole(graph, name))) for name in graph.layers]
        self._calls = [(name, call) for name, calls in wholes for call in calls]
        for _, call in self._calls:
            if call.is_view:
                self._roots.update({out.name: self._root(call.inputs[0].name) for out in call.outputs if call.inputs})
        self._homes = self._find_homes()
        self._owners = _first_users(graph)

    def layer_memory(self, local: LocalLayer) -> LayerMemory:
        """Bytes on the device that has `local`."""
        graph, layer = self._graph, local.layer
        own = [name for name in layer.parameters if self._owners[graph.parameters[name]] == layer.name]
        trained = [name for name in own if graph.values[name].requires_grad]
        gradients_bytes = self._nbytes(local, trained)
        calls = op_calls(graph, local)
        kept_bytes = sum(saved_by(call).inner_bytes for call in calls)
        moved_bytes = self._nbytes(local, (*layer.inputs, *layer.outputs))
        return LayerMemory(
            weights_bytes=self._nbytes(local, own) + self._nbytes(local, layer.buffers),
            gradients_bytes=gradients_bytes,
            optimizer_bytes=self._states * gradients_bytes,
            saved_bytes=self._nbytes(local, (*self._homes.get(layer.name, ()), *self._gathered(local, calls)))
            + kept_bytes,
            transient_bytes=moved_bytes + _workspace_bytes(calls, layer.outputs),
        )

    def _gathered(self, local: LocalLayer, calls: Iterable[OpCall]) -> list[str]:
        """Inputs that this layer keeps for its backward and that its shards need whole."""
        if local.axis is None:
            return []
        kept = {name for call in calls for name in saved_by(call).values}
        whole = [name for name in local.layer.inputs if name not in local.axis.dims]
        return [name for name in whole if name in kept and name in self._graph.producer]

    def _nbytes(self, local: LocalLayer, names: Iterable[str]) -> int:
        values = self._graph.values
        return sum(
            Operand(name, local_shape(self._graph, local, name), values[name].dtype).nbytes
            for name in names
            if name in values
        )

    def _root(self, name: str) -> str:
        return self._roots.get(name, name)

    def _find_homes(self) -> dict[str, list[str]]:
        """Values that are kept, by the layer that counts them."""
        makers = {out.name: layer for layer, call in self._calls for out in call.outputs}
        takers: dict[str, str] = {}
        for layer, call in self._calls:
            for operand in call.inputs:
                takers.setdefault(operand.name, layer)
        kept = dict.fromkeys(self._root(name) for _, call in self._calls for name in sorted(saved_by(call).values))
        homes: dict[str, list[str]] = {}
        for name in kept:
            homes.setdefault(makers.get(name) or takers[name], []).append(name)
        return homes


def _whole(graph: LayerGraph, name: str) -> LocalLayer:
    return LocalLayer(graph.layers[name], Strategy(), 0, graph.batch or 1)


def _first_users(graph: LayerGraph) -> dict[str, str]:
    """The first layer that uses each parameter, by the parameter's dotted name."""
    owners: dict[str, str] = {}
    for layer in graph.layers.values():
        for placeholder in layer.parameters:
            owners.setdefault(graph.parameters[placeholder], layer.name)
    return owners


def _workspace_bytes(calls: Iterable[OpCall], outputs: Iterable[str]) -> int:
    """The largest temporary: a value inside the layer, or what a convolution unfolds of one sample (an estimate)."""
    leaving = set(outputs)
    inside = [total_bytes(out for out in call.outputs if out.name not in leaving) for call in calls if not call.is_view]
    unfolded = [_unfolded_bytes(call) for call in calls if call.op.startswith("conv") and len(call.inputs) > 1]
    return max((*inside, *unfolded), default=0)


def _unfolded_bytes(call: OpCall) -> int:
    weight, out = call.inputs[1], call.outputs[0]
    positions = out.elements // max(1, out.shape[0] * out.shape[1]) if len(out.shape) > 1 else 1
    return positions * weight.elements // max(1, weight.shape[0]) * out.dtype.itemsize
