"""Bytes each device holds for a layer, and when: one model for every strategy and every cost model.

Every tensor is counted by one layer: a value by the layer that makes it, however many layers keep it or view it; a user
input by the first layer that takes it, and so is a parameter that several layers share. An input that every shard
needs whole is gathered, so the layer that takes it counts its own copy too (an upper bound: the producer may already
have it whole). What a layer's ops hold inside at the same time is followed op by op.

Assumed is the usual step: gradients are set to None before the forward, so they live from their layer's backward to the
update; and a loss outside the model that holds two tensors of the size of the results, as cross entropy does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from parplan.cost_models.costs import Held, LayerMemory, Moments
from parplan.cost_models.memory.lifetimes import Lifetime, Lifetimes
from parplan.cost_models.ops.op_calls import OpCall, op_calls, total_bytes
from parplan.cost_models.ops.saved import Saved, saved_by
from parplan.cost_models.optimizers import optimizer_memory
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer, local_shape
from parplan.layout import IntArray
from parplan.lowering.holdings import ALONE_BYTES

__all__ = ["MemoryModel"]

# What torch's caching allocator rounds every tensor up to (kMinBlockSize in c10/cuda/CUDACachingAllocator). On the CPU
# torch counts what was asked for.
_CUDA_BLOCK_BYTES = 512


Bytes = TypeVar("Bytes", int, IntArray)


@dataclass(frozen=True)
class _Span:
    """Bytes from op time `start` to `stop`, both included (see Lifetimes); `stop` beyond the backward: to the end."""

    start: int
    stop: int
    nbytes: int


class MemoryModel:
    """Memory of the layers of one graph.

    Args:
        graph: the captured model.
        optimizer: whose state is counted: a name in optimizers.py, or how many tensors it keeps per parameter.
        on_cpu: where kernels and optimizers differ, take the CPU's; else CUDA's.

    Attributes:
        graph, on_cpu: as given.
        optimizer: what it keeps beside every parameter, and needs to update one.
        moments: the time points at which memory is counted.
        users: the layers that use each parameter, in order, by placeholder.
    """

    def __init__(self, graph: LayerGraph, optimizer: str, on_cpu: bool = False) -> None:
        self.graph = graph
        self.optimizer = optimizer_memory(optimizer)
        self.on_cpu = on_cpu
        self._times = Lifetimes(graph, on_cpu)
        self.moments = Moments(len(graph.layers))
        self._index = {name: index for index, name in enumerate(graph.layers)}
        self._owned: dict[str, list[Lifetime]] = defaultdict(list)
        for lifetime in (*self._times.values, *self._times.gradients, *self._times.state_gradients.values()):
            self._owned[lifetime.layer].append(lifetime)
        self._layer_at = [self._index[n] for n, layer in graph.layers.items() for _ in layer.nodes]
        # Of every op time, and of the one beyond the backward.
        self._moments_at = [self._moment(time) for time in range(self._times.back(0) + 2)]
        self.users: dict[str, list[str]] = {}
        for layer in graph.layers.values():
            for parameter in layer.parameters:
                self.users.setdefault(parameter, []).append(layer.name)

    def layer_memory(self, local: LocalLayer) -> LayerMemory:
        """Bytes on the device that has `local`."""
        layer, calls, trained_bytes = local.layer, op_calls(self.graph, local), sum(self.trained_bytes(local))
        moved_bytes = self._nbytes(local, (*layer.inputs, *layer.outputs))
        held: dict[tuple[int, int], int] = defaultdict(int)
        for one in (*self._own(local, calls), *self._around(local)):
            held[one.start, one.end] += one.nbytes
        return LayerMemory(
            weights_bytes=self._nbytes(local, self._stored(local)),
            gradients_bytes=trained_bytes,
            optimizer_bytes=self.optimizer.states * trained_bytes,
            saved_bytes=self._saved_bytes(local, calls),
            transient_bytes=moved_bytes + _workspace_bytes(calls, layer.outputs),
            held=tuple(Held(*interval, nbytes) for interval, nbytes in sorted(held.items()) if nbytes > 0),
        )

    def trained_bytes(self, local: LocalLayer) -> list[int]:
        """Bytes of each trained parameter on the device, counted by the first layer that uses it."""
        return [self._nbytes(local, [name]) for name in self._trained(local)]

    def own(self, local: LocalLayer) -> list[Held]:
        """What the layer's own tensors take, whatever runs around it: an interval may come more than once."""
        return self._own(local, op_calls(self.graph, local))

    def _own(self, local: LocalLayer, calls: Sequence[OpCall]) -> list[Held]:
        sizes = [self._taken(local, [name]) for name in self._trained(local)]
        always = self._taken(local, self._stored(local)) + self.optimizer.states * sum(sizes)
        # The optimizer's temporaries: of the largest parameter, or of all.
        if self.on_cpu:
            time, temporary = self.moments.update(self._index[local.layer.name]), max(sizes, default=0)
            temporary *= self.optimizer.one_by_one
        else:
            time, temporary = self.moments.update(), self.optimizer.together * sum(sizes)
        spans = self._spans(local, calls)
        return [Held(0, self.moments.end, always), Held(time, time + 1, temporary), *self._held(spans)]

    def _around(self, local: LocalLayer) -> list[Held]:
        """What it adds depending on the layers around it: user inputs, gathered copies, messages, the loss."""
        layer, index = local.layer, self._index[local.layer.name]
        inputs = [value for value, taker in self._times.inputs.items() if taker == layer.name]
        back, end = self.moments.backward(index), self.moments.end
        # Copies of the gradients that several devices sum, as one process per device makes them.
        cut = local.axis.dims.keys() if local.axis is not None else set(layer.parameters)
        shards, axis = local.strategy.shards, local.axis
        shared = {n for n in cut if axis is not None and axis.sharers(n, shards) > 1}
        summed = [n for n in self._trained(local) if local.strategy.replicas > 1 or n not in cut or n in shared]
        messages_bytes = sum(nbytes for name in summed if (nbytes := self._taken(local, [name])) < ALONE_BYTES)
        alone = layer.outputs if local.shares_statistics else ()
        return [
            *(Held(self.last_held(value) + 1, back + 1, self._taken(local, [value])) for value in alone),
            Held(0, end, self._taken(local, inputs)),
            Held(index, back + 1, self._taken(local, self._gathered(local))),
            # The CPU's are kept from step to step.
            Held(0 if self.on_cpu else back, end if self.on_cpu else self.moments.update(), messages_bytes),
            Held(self.moments.loss, self.moments.loss + 1, 2 * self._taken(local, self.delivered(layer.outputs))),
        ]

    def allocated(self, nbytes: Bytes) -> Bytes:
        """Bytes the allocator counts for a tensor of so many, or for each of an array of them."""
        return nbytes if self.on_cpu else -(-nbytes // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES

    def delivered(self, values: Iterable[str]) -> list[str]:
        """Those of `values` that a loss outside the model is taken to read: results that are no single number."""
        specs = self.graph.values
        outputs = [value for value in values if value in self.graph.user_outputs]
        return [value for value in outputs if specs[value].requires_grad and specs[value].elements > 1]

    def last_held(self, value: str) -> int:
        """The last moment at which `own` counts a value (or what it is a view of)."""
        return self._moments_at[self._times.last_held(value)]

    def adds_apart(self, parameter: str) -> bool:
        """Whether `own` counts a sum beside the terms of a shared parameter's gradient."""
        return parameter in self._times.added_apart

    def _trained(self, local: LocalLayer) -> list[str]:
        return [name for name in self._own_parameters(local) if self.graph.values[name].requires_grad]

    def _own_parameters(self, local: LocalLayer) -> list[str]:
        return [name for name in local.layer.parameters if self.users[name][0] == local.layer.name]

    def _stored(self, local: LocalLayer) -> list[str]:
        return [*self._own_parameters(local), *local.layer.buffers]

    # -- by op --

    def _spans(self, local: LocalLayer, calls: Sequence[OpCall]) -> list[_Span]:
        """What the layer's own tensors take, by op time."""
        times, name = self._times, local.layer.name
        found = [_Span(one.start, one.stop, self._taken(local, [one.value])) for one in self._owned[name]]
        for position, call in enumerate(calls, times.first[name]):
            saved, back = self._saved(local, call), times.back(position)
            found.append(_Span(position, back, saved.inner_bytes))
            found.append(_Span(position, position, saved.forward_bytes))
            found.append(_Span(back, back, saved.backward_bytes))
        return found

    def _held(self, spans: Iterable[_Span]) -> list[Held]:
        """By moments of the step: what crosses a moment's border as it is, of the rest the most at once."""
        found: list[Held] = []
        within: dict[int, list[_Span]] = defaultdict(list)
        crossing: dict[int, int] = defaultdict(int)
        for span in spans:
            start, stop = self._moments_at[span.start], self._moments_at[span.stop]
            within[start].append(span)
            if start != stop:
                found.append(Held(start, stop + 1, span.nbytes))
                within[stop].append(span)
                crossing[start] += span.nbytes
                crossing[stop] += span.nbytes
        for moment, here in within.items():
            ticks = {time for s in here for time in (s.start, s.stop) if self._moments_at[time] == moment}
            most = max(sum(s.nbytes for s in here if s.start <= tick <= s.stop) for tick in ticks)
            found.append(Held(moment, moment + 1, max(0, most - crossing[moment])))
        return found

    def _moment(self, time: int) -> int:
        times, moments = self._times, self.moments
        if time < times.ops:
            return self._layer_at[time]
        if time == times.ops:
            return moments.loss
        return moments.backward(self._layer_at[2 * times.ops - time]) if time <= times.back(0) else moments.end - 1

    # -- whole amounts --

    def _saved(self, local: LocalLayer, call: OpCall) -> Saved:
        """What an op keeps, with what the runtime's own forms of it need."""
        saved = saved_by(call, self.on_cpu)
        if local.shares_statistics and "batch_norm" in call.op:
            # graph/batch_norm.py: two products of the size of its input.
            return replace(saved, backward_bytes=saved.backward_bytes + 2 * call.inputs[0].nbytes)
        summed = local.axis is not None and call.outputs[0].name in local.axis.partial
        if call.op in ("embedding_bags", "offset_bags") and summed:
            # graph/axes/bags.py: local indices, and a factor for each that is zero where its row is elsewhere.
            indices = call.inputs[1].elements
            inner = (8 + call.outputs[0].dtype.itemsize) * indices
            return replace(saved, inner_bytes=inner, forward_bytes=11 * indices, backward_bytes=0)
        if call.op == "embedding" and summed:
            # graph/local.py: indices of its own and which of them are here; rows before others are set to zero.
            indices, rows_bytes = call.inputs[1].elements, call.outputs[0].nbytes
            return replace(saved, inner_bytes=9 * indices, forward_bytes=rows_bytes, backward_bytes=rows_bytes)
        return saved

    def _saved_bytes(self, local: LocalLayer, calls: Iterable[OpCall]) -> int:
        inner = sum(saved_by(call, self.on_cpu).inner_bytes for call in calls)
        gathered = [name for name in self._gathered(local) if self._times.keeps(local.layer.name, name)]
        return self._nbytes(local, (*self._times.kept[local.layer.name], *gathered)) + inner

    def _gathered(self, local: LocalLayer) -> list[str]:
        """Inputs that this layer's shards need whole."""
        if local.axis is None:
            return []
        return [n for n in local.layer.inputs if n not in local.axis.dims and n in self.graph.producer]

    def _taken(self, local: LocalLayer, names: Iterable[str]) -> int:
        return sum(self.allocated(self._nbytes(local, [name])) for name in names)

    def _nbytes(self, local: LocalLayer, names: Iterable[str]) -> int:
        values = self.graph.values
        return sum(
            prod(local_shape(self.graph, local, name)) * values[name].dtype.itemsize for name in names if name in values
        )


def _workspace_bytes(calls: Iterable[OpCall], outputs: Iterable[str]) -> int:
    """The largest temporary: a value inside the layer, or what a convolution unfolds of one sample (an estimate)."""
    leaving = set(outputs)
    inside = [total_bytes(out for out in call.outputs if out.name not in leaving) for call in calls if not call.is_view]
    for call in calls:
        if call.op.startswith("conv") and len(call.inputs) > 1:
            weight, out = call.inputs[1], call.outputs[0]
            positions = out.elements // max(1, out.shape[0] * out.shape[1]) if len(out.shape) > 1 else 1
            inside.append(positions * weight.elements // max(1, weight.shape[0]) * out.dtype.itemsize)
    return max(inside, default=0)
