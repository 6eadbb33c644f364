"""Liveness of the tensors of a training step: the op that makes each, and the last one that needs it.

Lifetimes follow from the ops and from where they read; sizes from the strategy of the layer that has the tensor. So the
lifetimes of a whole graph on one device are worked out once, and serve every strategy of every layer; those of a plan
follow its compute steps, and the transfers between them, by the same rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from parplan.cost_models.costs import Moments
from parplan.cost_models.ops.op_calls import SLICES, OpCall, Operand, op_calls
from parplan.cost_models.ops.saved import saved_by
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer
from parplan.graph.repeated import unit_of
from parplan.plan import Strategy

__all__ = ["Lifetime", "Lifetimes", "Ops", "Segmentation", "Term", "Time"]

# Ops whose backward hands on the gradient it gets, or a view of it, instead of making a new one.
_HANDS_ON = frozenset(["add", "sub", "clone", "contiguous", "to", "to_copy", "cat", "stack", "sum"])
# Views whose backward makes a gradient of its own.
_OWN_GRADIENT = SLICES | {"expand", "expand_as"}

# Ops whose backward makes a transposed view of a weight's gradient, to which autograd adds no other in place.
_TRANSPOSED = frozenset(["linear"])

Time = tuple[int, int]
"""A point of the step (cost_models/costs.py: Moments), and the op within its task."""


class Lifetime(NamedTuple):
    """A tensor from one time to another, both included, of the size that `value` has in `layer`; without a layer, of a
    program's slot of that name."""

    layer: str | None
    value: str
    start: Time
    stop: Time


@dataclass(frozen=True)
class Term:
    """A layer's op adds to a parameter's gradient, or begins it; `tensors`: how many it takes to add."""

    parameter: str
    time: Time
    tensors: int


@dataclass(frozen=True)
class Segmentation:
    """Layers that run as one, and what moves between them.

    Args:
        first: by layer index, the first layer of its segment.
        leaving: values that a segment hands on, and until when each is held at least.
        outputs: slots whose gradients the loss gives.
        slots: where a layer reads a value that was moved to it, by layer and value.
        sent_back: by layer index, (source, target) of the transfers whose gradient leaves when that layer has gone
            back; the number of layers stands for the loss.
        known: whether segments are those of a program. Else gradients of what layers hand on are held until they have
            gone back themselves, however long the segment is that they may be in.
    """

    first: Mapping[int, int]
    leaving: Mapping[str, Time]
    outputs: Sequence[str]
    slots: Mapping[tuple[str, str], str] = field(default_factory=dict)
    sent_back: Mapping[int, Sequence[tuple[str, str]]] = field(default_factory=dict)
    known: bool = True


class Ops:
    """The ops of a graph in order, at whole size, with what holds wherever they run.

    Attributes:
        calls: every op.
        order, index: the layers, and the place of each.
        moments: of the step.
        layers: the layer of every op.
        places: positions of every layer's ops.
        makers: position of the op that makes a value.
        saved: the values that autograd keeps for the backward of every op.
        forward, back: when every op runs forward, and backward.
    """

    def __init__(self, graph: LayerGraph, on_cpu: bool) -> None:
        self.graph, self._on_cpu = graph, on_cpu
        self.calls: list[OpCall] = []
        self.layers: list[str] = []
        self.places: dict[str, range] = {}
        for name, layer in graph.layers.items():
            own = op_calls(graph, LocalLayer(layer, Strategy(), 0, graph.batch or 1))
            self.places[name] = range(len(self.calls), len(self.calls) + len(own))
            self.calls += own
            self.layers += [name] * len(own)
        self.makers = {out.name: p for p, call in enumerate(self.calls) for out in call.outputs}
        self.saved = [sorted(saved_by(call, on_cpu).values) for call in self.calls]
        self.order = list(graph.layers)
        self.index = {name: index for index, name in enumerate(self.order)}
        self.moments = Moments(len(self.order))
        at, end = [self.index[layer] for layer in self.layers], 2 * len(self.calls)
        self.forward = [(self.moments.forward(index), position) for position, index in enumerate(at)]
        self.back = [(self.moments.backward(index), end - position) for position, index in enumerate(at)]

    @cached_property
    def run_again(self) -> frozenset[str]:
        """Layers that run forward again where their unit is replayed: as far as something is there to be kept.

        The last op that keeps values need not run where it keeps its inputs alone.
        """
        found, last = set[str](), dict[int, int]()
        unit = unit_of(self.graph)
        for position, (layer, call) in enumerate(zip(self.layers, self.calls, strict=True)):
            saved = saved_by(call, self._on_cpu)
            if layer in unit and (saved.values or saved.inner_bytes):
                own = bool(saved.inner_bytes) or any(out.name in saved.values for out in call.outputs)
                last[unit[layer]] = position + own
        for position, layer in enumerate(self.layers):
            if layer in unit and position < last.get(unit[layer], 0):
                found.add(layer)
        return frozenset(found)

    def gone_back(self, index: int) -> Time:
        """When a layer has gone back."""
        return self.back[self.places[self.order[index]].start]

    def whole(self) -> Segmentation:
        """All layers on one device, with nothing to move."""
        outputs = {name for name in self.graph.results if name in self.makers}
        trained = [name for name in sorted(outputs) if self.graph.values[name].requires_grad]
        return Segmentation(dict.fromkeys(range(len(self.order)), 0), {}, trained, known=False)


@dataclass
class _Gradient:
    """The memory of a slot's gradient while the backward is followed; `values` still have it for theirs, and the
    transfers that fill the slots in `sent` send it back. It was made in `segment`: others hold it until they are done.
    """

    slot: str
    layer: str | None
    value: str
    segment: int | None
    start: Time
    stop: Time
    values: set[str]
    sent: list[str] = field(default_factory=list)

    def end(self, value: str, time: Time) -> None:
        """`value` needs it no longer than this."""
        self.stop = max(self.stop, time)
        self.values.discard(value)


class Lifetimes:
    """The lifetimes in one graph under one segmentation.

    Args:
        replayed: layers that run forward again: what they make, and others of their unit need, is dropped behind the
            forward and made again before the unit goes back; what they read of others is kept.

    Attributes:
        owned: values that ops make, and gradients of values, by the layer that has them; None: by slot.
        stops: until when every value is held, of those that are no views.
        terms: of the gradients of parameters, by layer, in the order of the backward.
        adding: the layers that have terms of a parameter's gradient, in the order of the backward.
        shared: values whose makers go back with a gradient that others need behind them.
        sent: of gradients that transfers send back: the slots that these fill, and when it is needed no more otherwise.
        inputs: the first layer that takes a user input, by name.
        kept: the values that autograd keeps, views as what they show, by the layer that makes them, or first takes
            them from the user.
    """

    def __init__(self, ops: Ops, segmentation: Segmentation, replayed: Collection[str] = ()) -> None:
        self._ops = ops
        self._segments = segmentation
        # Replayed together: of one unit in one segment, as what a segment reads is kept.
        known = unit_of(ops.graph)
        self._run = {
            name: (known[name], self._segment(name)) for name in ops.order if name in known and name in replayed
        }
        self._runs: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name, run in self._run.items():
            self._runs[run].append(name)
        # Of every view: the value whose memory it shows, and the value whose gradient its own is a view of.
        self._storage: dict[str, str] = {}
        self._passed: dict[str, str] = {}
        for layer, call in zip(ops.layers, ops.calls, strict=True):
            for out in call.outputs if call.is_view and call.inputs else ():
                shown = self._slot(layer, call.inputs[0].name)
                self._storage[out.name] = self.root(shown)
                if call.op not in _OWN_GRADIENT:
                    self._passed[out.name] = self._passed_root(shown)
        self.owned: dict[str | None, list[Lifetime]] = defaultdict(list)
        self.stops: dict[str, Time] = {}
        self.inputs: dict[str, str] = {}
        self.kept: dict[str | None, list[str]] = defaultdict(list)
        self._find_values()
        self.terms: dict[str, list[Term]] = defaultdict(list)
        self.adding: dict[str, dict[str, None]] = defaultdict(dict)
        self.shared = set[str]()
        self.sent: list[tuple[list[str], Time]] = []
        self._find_gradients()

    def keeps(self, layer: str, value: str) -> bool:
        """Whether ops of `layer` keep `value`, or a view of it."""
        saved = (name for position in self._ops.places[layer] for name in self._ops.saved[position])
        return any(self.root(name) == self.root(value) for name in saved)

    def kept_from(self, layer: str, forward: Time) -> Time:
        """When what a layer keeps inside begins: with its forward, or when it is replayed."""
        if layer not in self._run:
            return forward
        return self._ops.moments.backward(self._ops.index[self._runs[self._run[layer]][-1]]), 0

    def _remade(self, root: str, layer: str) -> bool:
        """Whether a layer reads a value that is replayed before it goes back."""
        maker = self._maker(root)
        return maker in self._run and layer in self._run and self._run[maker] == self._run[layer]

    def _slot(self, layer: str, value: str) -> str:
        return self._segments.slots.get((layer, value), value)

    def root(self, name: str) -> str:
        """The value that a value is a view of; itself if it is none."""
        return self._storage.get(name, name)

    def _passed_root(self, name: str) -> str:
        return self._passed.get(name, name)

    def _segment(self, layer: str) -> int:
        return self._segments.first[self._ops.index[layer]]

    def _done(self, layer: str) -> Time:
        """When the segment of a layer has gone back, or the layer where segments are not known."""
        return self._ops.gone_back(self._segment(layer) if self._segments.known else self._ops.index[layer])

    def _find_values(self) -> None:
        ops, last, keeper, again = self._ops, dict[str, Time](), dict[str, Time](), dict[str, Time]()
        for position, (layer, call) in enumerate(zip(ops.layers, ops.calls, strict=True)):
            for operand in call.inputs:
                if operand.name not in ops.makers and not operand.state:
                    self.inputs.setdefault(operand.name, layer)
                root = self.root(self._slot(layer, operand.name))
                last[root] = ops.forward[position]
                if layer in self._run and not operand.state and not self._remade(root, layer):
                    keeper[root] = max(keeper.get(root, (0, 0)), self._done(layer))
            for name in ops.saved[position]:
                root = self.root(self._slot(layer, name))
                found = again if self._remade(root, layer) else keeper
                found[root] = max(found.get(root, (0, 0)), ops.back[position])
        for name in keeper:
            self.kept[ops.layers[ops.makers[name]] if name in ops.makers else self.inputs.get(name)].append(name)
        for name, time in self._segments.leaving.items():
            root = self.root(name)
            last[root] = max(last.get(root, time), time)
        for name, position in ops.makers.items():
            if name not in self._storage:
                layer, start = ops.layers[position], ops.forward[position]
                self.stops[name] = max(start, last.get(name, start), keeper.get(name, start))
                self._add(layer, name, start, self.stops[name])
                if name in again:
                    self._add(layer, name, self.kept_from(layer, start), again[name])

    def _add(self, layer: str | None, value: str, start: Time, stop: Time) -> None:
        self.owned[layer].append(Lifetime(layer, value, start, stop))

    # -- gradients --

    def _find_gradients(self) -> None:
        """Follow the backward: which op makes which gradient, and when the maker of the value has used it."""
        ops, order = self._ops, self._ops.order
        self._held: dict[str, _Gradient] = {}
        self._all: list[_Gradient] = []
        self._transposed: set[str] = set()
        self._coming: dict[int, list[str]] = defaultdict(list)  # by the first layer of the segment that they come to
        for slot in self._segments.outputs:
            maker = self._maker(slot)
            made = self._make(slot, maker, slot, (ops.moments.loss, 0))
            made.stop = self._done(maker) if maker is not None else made.stop
        for index in range(len(order), -1, -1):
            if index < len(order):
                for source in self._coming.pop(self._segments.first[index], ()):
                    self._arrive(source, (ops.moments.backward(index) - 1, 0))
                for position in reversed(ops.places[order[index]]):
                    self._go_back(position)
            for source, target in self._segments.sent_back.get(index, ()):
                self._send_back(source, target, (ops.moments.backward(index) + 1, 0))
        # While the layer that makes a gradient runs it has that layer's size, then that of the value's own layer.
        for one in self._all:
            owner = self._maker(one.slot) or one.layer
            task, tick = self._ops.back[self._ops.places[one.layer].start] if one.layer is not None else one.stop
            self._add(one.layer, one.value, one.start, min(one.stop, (task, tick)))
            if one.stop > (task, tick):
                self._add(owner, one.value, (task + 1, 0), one.stop)
            if one.sent:
                self.sent.append((one.sent, one.stop))

    def _maker(self, slot: str) -> str | None:
        """The layer that makes what is in a slot; None where it was moved there, or comes from the user."""
        return self._ops.layers[self._ops.makers[slot]] if slot in self._ops.makers else None

    def _go_back(self, position: int) -> None:
        call, time = self._ops.calls[position], self._ops.back[position]
        if not call.differentiated or (call.is_view and call.op not in _OWN_GRADIENT):
            return
        layer = self._ops.layers[position]
        segment, results = self._segment(layer), [self._passed_root(out.name) for out in call.outputs]
        taken = next((self._held[root] for root in results if root in self._held), None)
        for operand in call.inputs:
            if operand.requires_grad:
                self._give(call, operand, position, taken)
        for root in results:
            gradient = self._held.pop(root, None)
            if gradient is not None:
                gradient.end(root, time if gradient.segment == segment else self._done(layer))
                self.shared |= {root} if gradient.values else set()

    def _give(self, call: OpCall, operand: Operand, position: int, taken: _Gradient | None) -> None:
        """The gradient of one operand: made, handed on, or added to one that is there."""
        layer, time = self._ops.layers[position], self._ops.back[position]
        segment = self._segment(layer)
        if operand.state:
            # The new term; and the sum, where autograd cannot add to one of the two.
            self.adding[operand.name][layer] = None
            self._transposed |= {operand.name} if call.op in _TRANSPOSED else set()
            self.terms[layer].append(Term(operand.name, time, 2 if operand.name in self._transposed else 1))
            return
        slot = self._slot(layer, operand.name)
        root = self._passed_root(slot)
        known = self._held.get(root)
        out = call.outputs[0]
        same = call.op in _HANDS_ON and operand.shape == out.shape and operand.dtype == out.dtype
        same = same and not (call.op == "sub" and call.inputs[0] != operand)
        handed = taken if same or call.op in ("cat", "stack", "sum") else None
        if known is None and handed is not None:
            handed.values.add(root)
            self._held[root] = handed
        elif known is None:
            self._make(slot, layer, operand.name, time, segment)
        else:
            if handed is None:
                self._add(layer, operand.name, time, time)
            if len(known.values) > 1 or known.segment != segment:  # others still need it as it is
                known.end(root, time if known.segment == segment else self._done(layer))
                self._make(slot, layer, operand.name, time, segment)

    def _send_back(self, source: str, target: str, time: Time) -> None:
        """The gradient of a slot leaves for the slot that it was moved from: from a stop it goes on at once."""
        gradient = self._held.get(target) or self._make(target, None, target, time)
        del self._held[target]
        gradient.end(target, time)
        gradient.sent.append(target)
        maker = self._maker(source)
        if maker is not None:
            self._coming[self._segment(maker)].append(source)
        else:
            self._arrive(source, time)

    def _arrive(self, slot: str, time: Time) -> None:
        """A gradient that was sent back is put together, and added to others of its slot out of place."""
        layer = self._maker(slot)
        if self._passed_root(slot) in self._held:
            self.owned[layer] += [Lifetime(layer, slot, time, time)] * 2
        else:
            self._make(slot, layer, slot, time)

    def _make(self, slot: str, layer: str | None, value: str, time: Time, segment: int | None = None) -> _Gradient:
        root = self._passed_root(slot)
        gradient = self._held[root] = _Gradient(slot, layer, value, segment, time, time, {root})
        self._all.append(gradient)
        return gradient
