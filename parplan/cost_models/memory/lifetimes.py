"""When each tensor of a training step comes and goes: the op that makes it, and the last one that needs it.

Op p of P runs forward at time p, the loss at P, and op p's backward at 2P - p. Lifetimes follow from the graph alone,
sizes from the strategy of the layer that owns the tensor; so they are worked out once for all strategies.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from parplan.cost_models.ops.op_calls import SLICES, OpCall, Operand, op_calls
from parplan.cost_models.ops.saved import saved_by
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer
from parplan.plan import Strategy

__all__ = ["Lifetime", "Lifetimes"]

# Ops whose backward hands on the gradient it gets, or a view of it, instead of making a new one.
_HANDS_ON = frozenset(["add", "sub", "clone", "contiguous", "to", "to_copy", "cat", "stack", "sum"])
# Views whose backward makes a gradient of its own.
_OWN_GRADIENT = SLICES | {"expand", "expand_as"}

# Ops whose backward makes a transposed view of a weight's gradient, to which autograd adds no other in place.
_TRANSPOSED = frozenset(["linear"])


@dataclass(frozen=True)
class Lifetime:
    """A tensor from time `start` to `stop`, both included, of the size that `value` has in the layer that owns it;
    `stop` beyond the backward: to the end."""

    layer: str
    value: str
    start: int
    stop: int


@dataclass
class _Gradient:
    """A gradient's memory while the backward is followed; `values` still have it for theirs."""

    layer: str
    value: str
    start: int
    stop: int
    values: set[str] = field(default_factory=set)


class Lifetimes:
    """The lifetimes in one graph.

    Attributes:
        calls: every op, at whole size, in order.
        first: position of every layer's first op.
        values: tensors made by ops.
        gradients: gradients of those.
        state_gradients: of parameters, from when the backward first makes one, by placeholder; the layer owns it.
        added_apart: parameters whose gradient has a term that autograd adds no other to in place.
        inputs: the first layer that takes a user input, by name.
        kept: the values that autograd keeps, views as what they show, by the layer that makes them, or first takes
            them from the user.
    """

    def __init__(self, graph: LayerGraph, on_cpu: bool = False) -> None:
        self._graph = graph
        self._on_cpu = on_cpu
        self.calls: tuple[OpCall, ...] = ()
        self.first: dict[str, int] = {}
        for name, layer in graph.layers.items():
            self.first[name] = len(self.calls)
            self.calls += op_calls(graph, LocalLayer(layer, Strategy(), 0, graph.batch or 1))
        # The layer of every op.
        self._layers = [name for name, layer in graph.layers.items() for _ in layer.nodes]
        # Of every view: the value whose memory it shows, and the value whose gradient its own is a view of.
        self._storage: dict[str, str] = {}
        self._passed: dict[str, str] = {}
        for call in self.calls:
            for out in call.outputs if call.is_view and call.inputs else ():
                shown = call.inputs[0].name
                self._storage[out.name] = self._root(shown)
                if call.op not in _OWN_GRADIENT:
                    self._passed[out.name] = self._passed_root(shown)
        self._outputs = [name for name in dict.fromkeys(graph.user_outputs) if isinstance(name, str)]
        self._makers = {out.name: p for p, call in enumerate(self.calls) for out in call.outputs}
        self.inputs: dict[str, str] = {}
        self.kept: dict[str | None, list[str]] = defaultdict(list)
        self.values = self._find_values()
        self._stops = {one.value: one.stop for one in self.values}
        self.state_gradients: dict[str, Lifetime] = {}
        self.gradients = self._find_gradients()

    @property
    def ops(self) -> int:
        """How many ops there are."""
        return len(self.calls)

    def back(self, position: int) -> int:
        """The time of an op's backward."""
        return 2 * self.ops - position

    def last_held(self, value: str) -> int:
        """The last time at which a value, or what it is a view of, is there."""
        return self._stops.get(self._root(value), 0)

    def keeps(self, layer: str, value: str) -> bool:
        """Whether ops of `layer` keep `value`, or a view of it."""
        first = self.first[layer]
        calls = self.calls[first : first + len(self._graph.layers[layer].nodes)]
        return any(self._root(n) == self._root(value) for call in calls for n in saved_by(call, self._on_cpu).values)

    def _find_values(self) -> list[Lifetime]:
        last: dict[str, int] = {}
        keeper: dict[str, int] = {}
        for position, call in enumerate(self.calls):
            for operand in call.inputs:
                if operand.name not in self._makers and not operand.state:
                    self.inputs.setdefault(operand.name, self._layers[position])
                last[self._root(operand.name)] = position
            for name in sorted(saved_by(call, self._on_cpu).values):
                keeper.setdefault(self._root(name), position)
        for name in keeper:
            maker = self._layers[self._makers[name]] if name in self._makers else self.inputs.get(name)
            self.kept[maker].append(name)
        # The runtime holds a call's results until it has gone back through all that was computed with them.
        kept_outputs = {self._root(name) for name in self._outputs}
        found = []
        for name, position in self._makers.items():
            if name in self._storage:
                continue
            stop = self.back(keeper[name]) if name in keeper else last.get(name, position)
            stop = self.back(0) if name in kept_outputs else max(stop, last.get(name, position))
            found.append(Lifetime(self._layers[position], name, position, stop))
        return found

    def _root(self, name: str) -> str:
        """The value that a value is a view of; itself if it is none."""
        return self._storage.get(name, name)

    # -- gradients --

    def _find_gradients(self) -> list[Lifetime]:
        """Follow the backward: which op makes which gradient, and when the maker of the value has used it."""
        self._held: dict[str, _Gradient] = {}
        self._all: list[_Gradient] = []
        self._brief: list[Lifetime] = []
        self.added_apart: set[str] = set()
        values = self._graph.values
        for name in self._outputs:
            if name in self._makers and values[name].requires_grad:
                self._make(name, self._layers[self._makers[name]], name, self.ops).stop = self.back(0)
        for position in reversed(range(self.ops)):
            call = self.calls[position]
            if not call.differentiated or (call.is_view and call.op not in _OWN_GRADIENT):
                continue
            results = [self._passed_root(out.name) for out in call.outputs]
            taken = next((self._held[root] for root in results if root in self._held), None)
            for operand in call.inputs:
                if operand.requires_grad:
                    self._give(call, operand, position, taken)
            for root in results:
                gradient = self._held.pop(root, None)
                if gradient is not None:
                    gradient.stop = max(gradient.stop, self.back(position))
                    gradient.values.discard(root)
        # While the layer that makes a gradient runs it has that layer's size, then that of the value's own layer.
        found: list[Lifetime] = []
        for one in self._all:
            ends = self.back(self.first[one.layer])
            found.append(Lifetime(one.layer, one.value, one.start, min(one.stop, ends)))
            if one.stop > ends:
                owner = self._layers[self._makers[one.value]] if one.value in self._makers else one.layer
                found.append(Lifetime(owner, one.value, ends + 1, one.stop))
        return found + self._brief

    def _give(self, call: OpCall, operand: Operand, position: int, taken: _Gradient | None) -> None:
        """The gradient of one operand: made, handed on, or added to one that is there."""
        layer, time = self._layers[position], self.back(position)
        if operand.state:
            if operand.name in self.state_gradients:
                # The new term; and the sum, where autograd cannot add to one of the two.
                terms = 2 if call.op in _TRANSPOSED or operand.name in self.added_apart else 1
                self._brief += [Lifetime(layer, operand.name, time, time)] * terms
            self.added_apart |= {operand.name} if call.op in _TRANSPOSED else set()
            self.state_gradients.setdefault(operand.name, Lifetime(layer, operand.name, time, self.back(0) + 1))
            return
        root = self._passed_root(operand.name)
        known = self._held.get(root)
        same = call.op in _HANDS_ON and operand.shape == call.outputs[0].shape
        same = same and not (call.op == "sub" and call.inputs[0] != operand)
        handed = taken if same or call.op in ("cat", "stack", "sum") else None
        if known is None and handed is not None:
            handed.values.add(root)
            self._held[root] = handed
        elif known is None:
            self._make(root, layer, operand.name, time)
        else:
            if handed is None:
                self._brief.append(Lifetime(layer, operand.name, time, time))
            if len(known.values) > 1:  # others still need it as it is
                known.stop = max(known.stop, time)
                known.values.discard(root)
                self._make(root, layer, operand.name, time)

    def _make(self, root: str, layer: str, value: str, time: int) -> _Gradient:
        gradient = _Gradient(layer, value, time, time, {root})
        self._held[root] = gradient
        self._all.append(gradient)
        return gradient

    def _passed_root(self, name: str) -> str:
        return self._passed.get(name, name)
