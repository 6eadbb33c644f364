"""Bytes each device holds for a layer, and when: one model for every strategy and every cost model.

Every tensor is counted by one layer: a value by the layer that makes it, however many layers keep it or view it; a user
input by the first layer that takes it, and so is a parameter that several layers share. An input that every shard
needs whole is gathered, so the layer that takes it counts its own copy too (an upper bound: the producer may already
have it whole). What a layer's ops hold inside at the same time is followed op by op.

Assumed is the usual step: gradients are set to None before the forward, so they live from their layer's backward to the
update; the caller holds the results until the backward has passed; and a loss outside the model holds two tensors of
their size, as cross entropy does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from math import prod
from sys import maxsize
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from parplan.cost_models.costs import Held, LayerMemory
from parplan.cost_models.memory.lifetimes import Lifetimes, Ops, Time
from parplan.cost_models.ops.op_calls import OpCall, op_calls, total_bytes
from parplan.cost_models.ops.saved import Saved, saved_by
from parplan.cost_models.optimizers import optimizer_memory
from parplan.graph.layer_graph import Layer, LayerGraph, cast_name
from parplan.graph.local import LocalLayer, local_shape
from parplan.graph.repeated import gather_groups, group_of, unit_of, units
from parplan.layout import IntArray
from parplan.lowering.holdings import ALONE_BYTES, makes_large_result, slices
from parplan.plan import STATES

__all__ = ["MemoryModel", "training_state_bytes"]

# What torch's caching allocator rounds every tensor up to (kMinBlockSize in c10/cuda/CUDACachingAllocator). On the CPU
# torch counts what was asked for.
_CUDA_BLOCK_BYTES = 512


Bytes = TypeVar("Bytes", int, IntArray)


class _Span(NamedTuple):
    """Bytes from one time to another, both included."""

    start: Time
    stop: Time
    nbytes: int


class MemoryModel:
    """Memory of the layers of one graph.

    Args:
        graph: the captured model.
        optimizer: whose state is counted: a name in optimizers.py, or how many tensors it keeps per parameter.
        on_cpu: where kernels and optimizers differ, take the CPU's; else CUDA's.
        micro_batches: of a step, if the graph is at the size of one of them: the gradients of the ones before are there
            from the start, and so are the user's inputs of all.

    Attributes:
        graph, on_cpu, micro_batches: as given.
        optimizer: what it keeps beside every parameter, and needs to update one.
        ops: of the graph, with when each runs.
        moments: the points at which memory is counted.
    """

    def __init__(self, graph: LayerGraph, optimizer: str, on_cpu: bool = False, micro_batches: int = 1) -> None:
        self.graph = graph
        self.micro_batches = micro_batches
        self.optimizer = optimizer_memory(optimizer)
        self.on_cpu = on_cpu
        self.ops = Ops(graph, on_cpu)
        self.moments = self.ops.moments
        self._whole = Lifetimes(self.ops, self.ops.whole())
        self._index = self.ops.index

    @cached_property
    def _replayed(self) -> Lifetimes:
        """With all units replayed: a layer does not know of others, and what units hand on is kept either way."""
        return Lifetimes(self.ops, self.ops.whole(), unit_of(self.graph))

    @cached_property
    def _handed_on(self) -> frozenset[str]:
        """Results that a segment makes beside other values, and what those in segments of their own are made from."""
        alone = [layer for layer in self.graph.layers.values() if makes_large_result(self.graph, layer)]
        return self._results.difference(*(layer.outputs for layer in alone)).union(*(one.inputs for one in alone))

    @cached_property
    def _leaving_units(self) -> frozenset[str]:
        """Results, and values that a layer reads which is not of their maker's unit."""
        unit, maker = unit_of(self.graph), self.graph.producer
        return self._results | {
            value
            for name, layer in self.graph.layers.items()
            for value in layer.inputs
            if value in maker and unit.get(maker[value]) != unit.get(name)
        }

    @cached_property
    def _results(self) -> frozenset[str]:
        return frozenset(self.graph.results)

    def _lifetimes(self, local: LocalLayer) -> Lifetimes:
        return self._replayed if local.strategy.saved == "replay" else self._whole

    def layer_memory(self, local: LocalLayer) -> LayerMemory:
        """Bytes on the device that has `local`."""
        layer, calls, trained_bytes = local.layer, op_calls(self.graph, local), sum(self.trained_bytes(local))
        moved_bytes = self._nbytes(local, (*layer.inputs, *layer.outputs))
        held: dict[tuple[int, int, bool], int] = defaultdict(int)
        for estimated, parts in ((False, self._alone(local, calls)), (True, self._around(local))):
            for one in parts:
                held[one.start, one.end, estimated] += one.nbytes
        stored_bytes = sum(self._kept_bytes(local, name) for name in self._own_parameters(local))
        return LayerMemory(
            weights_bytes=stored_bytes + self._nbytes(local, layer.buffers),
            gradients_bytes=trained_bytes,
            optimizer_bytes=self.optimizer.states * trained_bytes,
            saved_bytes=self._saved_bytes(local, calls),
            transient_bytes=moved_bytes + _workspace_bytes(calls, layer.outputs),
            held=tuple(
                Held(start, end, nbytes, estimated)
                for (start, end, estimated), nbytes in sorted(held.items())
                if nbytes
            ),
        )

    def trained_bytes(self, local: LocalLayer) -> list[int]:
        """Bytes of each trained parameter that the device keeps, counted by the first layer that uses it."""
        return [self._kept_bytes(local, name) for name in self._trained(local)]

    def _kept_bytes(self, local: LocalLayer, parameter: str) -> int:
        """Bytes of what the device keeps of a parameter between steps: its part, or a slice of that."""
        own, nbytes = slices(self.graph, local.layer, local.strategy).get(parameter), self._size(local, parameter)
        if own is None:
            return nbytes
        return nbytes // self.graph.values[parameter].shape[own.layout.batch_dim or 0] * max(own.rows)

    def residents(self, first: int, sizes: Mapping[str, int | IntArray]) -> list[tuple[int, int, IntArray]]:
        """What the parameters that layer `first` is the first to use take with the optimizer's state, and to update
        them: from point to point, on one device or on each, as their `sizes` are."""
        stored = np.array(list(sizes.values()), dtype=np.int64)
        trained = stored[[self.graph.values[name].requires_grad for name in sizes]]
        # The optimizer's temporaries: of the largest parameter, or of all.
        if self.on_cpu:
            update, temporary = self.moments.update(first), self.optimizer.one_by_one * trained.max(axis=0, initial=0)
        else:
            update, temporary = self.moments.update(), self.optimizer.together * trained.sum(axis=0)
        kept = self.optimizer.states + (self.micro_batches > 1)  # gradients that are added to
        always = stored.sum(axis=0) + kept * trained.sum(axis=0)
        return [(0, self.moments.end, always), (update, update + 1, temporary)]

    def by_ops(
        self,
        local: LocalLayer,
        calls: Sequence[OpCall],
        lifetimes: Lifetimes,
        begun: Mapping[str, int],
        recorded: bool,
    ) -> list[Held]:
        """What the layer's ops hold: an interval may come more than once.

        Args:
            begun: the parameters of whose gradients the device has nothing yet, with the last point of what begins.
            recorded: the caller's autograd records all steps, and adds up in place what they give.
        """
        name, ops, times = local.layer.name, self.ops, lifetimes
        gathered = {p: self.as_read(p) for p in slices(self.graph, local.layer, local.strategy)}  # and not cast here
        owned = [one for one in times.owned[name] if one.value not in gathered.values()]
        spans = [_Span(one.start, one.stop, self.taken(local, [one.value])) for one in owned]
        begins = dict(begun)
        for term in times.terms[name]:
            nbytes = self.taken(local, [gathered.get(term.parameter, term.parameter)])
            last = begins.pop(term.parameter, None)
            if last is None:
                spans.append(_Span(term.time, term.time, term.tensors * nbytes))
            else:
                spans.append(_Span(term.time, (last, maxsize), nbytes))
        for position, call in enumerate(calls, ops.places[name].start):
            saved = self._saved(local, call, times.shared, recorded)
            forward, back = ops.forward[position], ops.back[position]
            intervals = (times.kept_from(name, forward), back), (forward, forward), (back, back)
            amounts = saved.inner_bytes, saved.forward_bytes, saved.backward_bytes
            spans += [_Span(*pair, nbytes) for pair, nbytes in zip(intervals, amounts, strict=True) if nbytes]
        return _by_points(spans)

    def _alone(self, local: LocalLayer, calls: Sequence[OpCall]) -> Iterator[Held]:
        """What the layer's own tensors take, whatever runs around it."""
        layer = local.layer
        sizes = {name: self.allocated(self._kept_bytes(local, name)) for name in self._own_parameters(local)}
        for start, end, nbytes in self.residents(self._index[layer.name], sizes):
            yield Held(start, end, int(nbytes))
        yield Held(0, self.moments.end, self.taken(local, layer.buffers))
        forward, back = (at(self._index[layer.name]) for at in (self.moments.forward, self.moments.backward))
        until = dict.fromkeys(self._begun(layer), back if self.micro_batches > 1 else self.begun_until())
        again, times = local.strategy.state == "gathered", self._lifetimes(local)
        begin, _ = times.kept_from(layer.name, (back, 0))
        for name in slices(self.graph, layer, local.strategy):
            for start, end in ((forward, forward + 1), (begin, back + 1)) if again else ((forward, back + 1),):
                yield Held(start, end, self.taken(local, [self.as_read(name)]))  # gathered
            if name in until:
                until[name] = back
                arrive = self.moments.in_slices(back)
                yield Held(arrive, self.moments.end if self.micro_batches == 1 else arrive + 1, sizes[name])
        yield from self.by_ops(local, calls, times, until, recorded=True)  # at least: other plans hold more

    def _begun(self, layer: Layer) -> list[str]:
        """The parameters of whose gradients a layer makes the first term."""
        adding = self._whole.adding
        return [name for name in layer.parameters if name in adding and next(iter(adding[name])) == layer.name]

    def _around(self, local: LocalLayer) -> Iterator[Held]:
        """Facts of two layers, as one layer can know them: all in which a sum over layers differs from a plan's.

        Whether an input has to be moved (that it is gathered, where shards need it whole), where the user's inputs
        lie, which gradients are summed in one message, which layers run as one, and who records them.
        """
        layer, moments = local.layer, self.moments
        forward, back = (at(self._index[layer.name]) for at in (moments.forward, moments.backward))
        inputs = [value for value, taker in self._whole.inputs.items() if taker == layer.name]
        # Copies of the gradients that several devices sum, as one process per device makes them.
        cut = local.axis.dims.keys() if local.axis is not None else set(layer.parameters)
        shards, axis = local.strategy.shards, local.axis
        shared = {n for n in cut if axis is not None and axis.sharers(n, shards) > 1}
        sliced, trained = slices(self.graph, layer, local.strategy), self._trained(local)
        copied = [n for n in trained if local.strategy.replicas > 1 or n not in cut or n in shared]
        summed = [name for name in copied if name not in sliced]
        messages_bytes = sum(nbytes for name in summed if (nbytes := self.taken(local, [name])) < ALONE_BYTES)
        for name in sliced:  # what comes from others
            before, behind = self._groups_beside(layer.name)
            whole, own = self.taken(local, [name]), self.allocated(self._kept_bytes(local, name))
            sent, coming = self.taken(local, [self.as_read(name)]), whole - own
            arriving, cast = sent * coming // whole, sent * own // whole if sent != whole else 0  # as they are sent
            yield Held(moments.forward(before), forward, arriving)
            yield Held(moments.forward(before), moments.delivery, cast)
            if local.strategy.state == "gathered":
                begin, _ = self._lifetimes(local).kept_from(layer.name, (back, 0))
                yield Held(moments.backward(behind), begin, arriving + cast)
            if name not in trained:
                continue
            # Gradients on their way to slices: as they lie, and what comes of them from others.
            yield Held(back + 1, moments.in_slices(back), whole + coming)
        if self.micro_batches > 1:  # gradients are added to those before when the run of layers has gone back
            yield Held(back + 1, self.begun_until() + 1, self.taken(local, set(self._begun(layer)) - set(sliced)))
        yield Held(0, moments.end, self.micro_batches * self.taken(local, inputs))
        results = [value for value in layer.outputs if value in self.put_together]
        yield Held(0, moments.end, self.micro_batches * self.taken(local, results))
        yield Held(forward, back + 1, self.taken(local, self._gathered(local)))
        # The CPU's are kept from step to step.
        yield Held(0 if self.on_cpu else back, moments.end if self.on_cpu else moments.passed, messages_bytes)
        lost_bytes = sum(self.loss_tensors(v) * self.taken(local, [v]) for v in self.delivered(layer.outputs))
        yield Held(moments.loss, moments.loss + 1, lost_bytes)
        # The gradient of what is handed on, until the segment has gone back: all layers before, or the unit.
        end, handed_on = moments.passed, self._handed_on
        if local.strategy.saved == "replay":
            unit = units(self.graph)[unit_of(self.graph)[layer.name]]
            end, handed_on = moments.backward(self._index[unit[0]]) + 1, self._leaving_units
        yield Held(back + 1, end, self.taken(local, handed_on.intersection(layer.outputs)))
        for value in layer.inputs if local.shares_statistics else ():  # `_saved`, where it is not autograd that adds up
            nbytes, narrow = self.taken(local, [value]), self.graph.values[value].dtype.itemsize < 4
            yield Held(forward if narrow else back, back + 1, nbytes)
        # Results are the caller's; what a layer makes that runs by itself is held by the segment that reads it.
        until = dict.fromkeys(layer.outputs if local.shares_statistics else (), back)
        until |= {self._whole.root(value): self.callers_until(value) + 1 for value in self._results}
        for one in self._whole.owned[layer.name]:
            if one.start[0] == forward and one.stop[0] + 1 < until.get(one.value, 0):
                yield Held(one.stop[0] + 1, until[one.value], self.taken(local, [one.value]))

    def _groups_beside(self, name: str) -> tuple[int, int]:
        """The first layer of the gather group before a layer's, and the last of the one behind; of its own where there
        is none."""
        groups = gather_groups(self.graph)
        place = group_of(self.graph)[name]
        before, behind = groups[max(0, place - 1)], groups[min(len(groups) - 1, place + 1)]
        return self._index[before[0]], self._index[behind[-1]]

    def callers_until(self, result: str) -> int:
        """Until when the caller holds a result beside those that are put together."""
        return self.moments.delivery if result in self.put_together else self.moments.passed

    def allocated(self, nbytes: Bytes) -> Bytes:
        """Bytes the allocator counts for a tensor of so many, or for each of an array of them."""
        return nbytes if self.on_cpu else -(-nbytes // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES

    def delivered(self, values: Iterable[str]) -> list[str]:
        """Those of `values` that a loss outside the model is taken to read: results that are no single number."""
        specs = self.graph.values
        outputs = [value for value in values if value in self.graph.user_outputs]
        return [value for value in outputs if specs[value].requires_grad and specs[value].elements > 1]

    def loss_tensors(self, result: str) -> int:
        """How many tensors of a result's size a loss outside holds beside the gradient that it gives: two. Autocast
        makes all three in float32."""
        itemsize = self.graph.values[result].dtype.itemsize
        return 3 * max(1, torch.float32.itemsize // itemsize) - 1 if self.graph.autocast is not None else 2

    def begun_until(self, first: int = 0) -> int:
        """The last point of what the first term of a gradient begins: of several micro-batches, when the run of layers
        that begins with layer `first` has gone back, whose gradients are added all at once."""
        return self.moments.end - 1 if self.micro_batches == 1 else self.moments.backward(first)

    @cached_property
    def put_together(self) -> list[str]:
        """Results that are put together from all micro-batches: with a loss inside; else the loss takes each one's."""
        if self.micro_batches == 1 or not self.graph.losses:
            return []
        return [v for v in dict.fromkeys(self.graph.results) if v in self.graph.batch_dims]

    def as_read(self, parameter: str) -> str:
        """The value that a parameter is gathered as: that of its cast, where autocast reads it in another type."""
        dtype = self.graph.read_as.get(parameter)
        return parameter if dtype is None else cast_name(parameter, dtype)

    def _trained(self, local: LocalLayer) -> list[str]:
        return [name for name in self._own_parameters(local) if self.graph.values[name].requires_grad]

    def _own_parameters(self, local: LocalLayer) -> list[str]:
        return [name for name in local.layer.parameters if self.graph.users[name][0] == local.layer.name]

    # -- whole amounts --

    def _saved(self, local: LocalLayer, call: OpCall, shared: Set[str], recorded: bool) -> Saved:
        """What an op keeps, with what the runtime's own forms of it need."""
        saved = saved_by(call, self.on_cpu)
        if local.shares_statistics and "batch_norm" in call.op:
            # graph/batch_norm.py: both halves give a gradient of the size of its input, and their sum is new memory but
            # where autograd adds up in place; half of it runs behind its gradient's use. All is computed in float32 at
            # least: of narrower inputs both halves keep a copy, autograd not the input itself.
            tensors, narrow = 2 - recorded + (call.outputs[0].name in shared), call.inputs[0].dtype.itemsize < 4
            wide_bytes = max(call.inputs[0].nbytes, torch.float32.itemsize * call.inputs[0].elements)
            return replace(
                saved,
                inner_bytes=saved.inner_bytes + narrow * (2 * wide_bytes - recorded * call.inputs[0].nbytes),
                forward_bytes=saved.forward_bytes + narrow * wide_bytes,
                backward_bytes=saved.backward_bytes + tensors * wide_bytes,
            )
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
        replayed = local.strategy.saved == "replay"
        inner = 0 if replayed else sum(saved_by(call, self.on_cpu).inner_bytes for call in calls)
        gathered = [name for name in self._gathered(local) if self._whole.keeps(local.layer.name, name)]
        return self._nbytes(local, (*self._lifetimes(local).kept[local.layer.name], *gathered)) + inner

    def _gathered(self, local: LocalLayer) -> list[str]:
        """Inputs that this layer's shards need whole."""
        if local.axis is None:
            return []
        return [n for n in local.layer.inputs if n not in local.axis.dims and n in self.graph.producer]

    def taken(self, local: LocalLayer, names: Iterable[str]) -> int:
        """Bytes that the allocator counts for tensors of these names on the device."""
        return sum(self.allocated(self._size(local, name)) for name in names)

    def _nbytes(self, local: LocalLayer, names: Iterable[str]) -> int:
        return sum(self._size(local, name) for name in names)

    def _size(self, local: LocalLayer, name: str) -> int:
        value, dtype = self.graph.cast_of(name)
        return 0 if dtype is None else prod(local_shape(self.graph, local, value)) * dtype.itemsize


def training_state_bytes(graph: LayerGraph, optimizer: str, state: str = STATES[0], replicas: int = 1) -> float:
    """Bytes of all weights with their gradients and the optimizer's state that each of so many replicas keeps."""
    weights = sum(graph.values[name].nbytes for name in graph.parameters)
    trained = sum(graph.values[name].nbytes for name in graph.parameters if graph.values[name].requires_grad)
    more = (1 + optimizer_memory(optimizer).states) * trained
    return weights / (replicas if state == STATES[2] else 1) + more / (replicas if state != STATES[0] else 1)


def _by_points(spans: Iterable[_Span]) -> list[Held]:
    """What outlives its task as it is; of the rest of a task the most at once."""
    found: list[Held] = []
    within: dict[int, list[_Span]] = defaultdict(list)
    crossing: dict[int, int] = defaultdict(int)
    brief = set[int]()  # tasks in which something comes and goes
    for span in spans:
        (start, _), (stop, _), nbytes = span
        within[start].append(span)
        if start == stop:
            brief.add(start)
        else:
            found.append(Held(start, stop + 1, nbytes))
            within[stop].append(span)
            crossing[start] += nbytes
            crossing[stop] += nbytes
    for point in brief:
        here = within[point]
        ticks = {time for s in here for time in (s.start, s.stop) if time[0] == point}
        most = max(sum(s.nbytes for s in here if s.start <= tick <= s.stop) for tick in ticks)
        found.append(Held(point, point + 1, max(0, most - crossing[point])))
    return found


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
