"""Priced layers in their stages, and priced moves of values between them: the work of one step of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache

from parplan.cost_models.communication.schemes import Hop, hops
from parplan.cost_models.communication.traffic import traffic
from parplan.cost_models.costs import CostModel
from parplan.graph.layer_graph import LayerGraph, TensorSpec
from parplan.layout import Layout
from parplan.lowering.stages import Stage, Stages, stages
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.search_space.edges import delivery_layout
from parplan.planner.search_space.options import arrival_layout, batch_norm_sync_s, like_readers

__all__ = ["RUNTIME_POLICY", "Busy", "LayerWork", "Leg", "Move", "PassPolicy", "Work", "work_of"]


@dataclass(frozen=True)
class PassPolicy:
    """How passes are run and fed; other programs than the runtime do it otherwise.

    Args:
        one_f_one_b: whether each pass goes back before the next one begins; None: where some layer's weights are
            updated between passes (`update_period`).
        prefetch: whether samples travel between passes while others are computed.
        scatter_allgather: whether a broadcast to many is dealt out first (cost_models/communication/schemes.py).
    """

    one_f_one_b: bool | None = None
    prefetch: bool = True
    scatter_allgather: bool = True


RUNTIME_POLICY = PassPolicy()


@dataclass(frozen=True)
class LayerWork:
    """Seconds of a layer's parts on each of its devices, in each of its passes.

    Args:
        compute_interference_s: time that its gradient sum takes from the backward beside it, once.
        overlappable_s: time of the sum that the backward may hide, once.
        post_update_s: time of the sum after the update, once.
        update_s: one update of its weights.
        period: passes between updates.
    """

    name: str
    stage: Stage
    devices: tuple[int, ...]
    forward_s: float
    backward_s: float
    batch_norm_sync_s: float
    compute_interference_s: float
    overlappable_s: float
    post_update_s: float
    update_s: float
    period: int


Busy = tuple[tuple[int, float], ...]
"""Devices, each with a part from 0 to 1."""


class Crossing(Enum):
    """Relation of a move to the passes."""

    ONCE = "between layers that run once, or of what has no samples"
    WITHIN = "between layers that run once per pass"
    INWARDS = "into the passes, a part for each"
    OUTWARDS = "out of the passes, a part of each"


@dataclass(frozen=True)
class Leg:
    """One transfer: seconds there and back, who sends and receives, and who holds the value before or after.

    `sent` and `received` say how busy each lane is, against the busiest one.
    """

    forward_s: float
    backward_s: float
    sent: Busy
    received: Busy
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """A value on its way from the layer that makes it to like readers in one layout, or to one; None: the user.

    `index` is its place among the moves, `legs[number]` what its part in one pass takes: empty where all have it.
    """

    index: int
    value: str
    source: str | None
    targets: tuple[str | None, ...]
    crossing: Crossing
    legs: tuple[tuple[Leg, ...], ...]

    def number(self, number: int) -> int:
        """Its part that a layer in pass `number` reads or makes."""
        return 0 if self.crossing is Crossing.ONCE else number

    @property
    def beside(self) -> bool:
        """Whether devices compute meanwhile."""
        return self.crossing in (Crossing.INWARDS, Crossing.OUTWARDS)


@dataclass(frozen=True, eq=False)
class Work:
    """Layers by name in forward order, and moves.

    `hidden` is the share of what goes on beside compute that takes nothing from it (StepCost.overlap).
    """

    stages: Stages
    layers: Mapping[str, LayerWork]
    moves: tuple[Move, ...]
    devices: int
    overhead_s: float
    hidden: float = 1.0
    policy: PassPolicy = RUNTIME_POLICY

    def times(self, name: str) -> int:
        """How often a layer runs in a step."""
        return self.stages.passes if self.layers[name].stage is Stage.PASSES else 1

    @cached_property
    def into(self) -> Mapping[str | None, tuple[Move, ...]]:
        """Moves by the layer that reads."""
        return _grouped((target, move) for move in self.moves for target in move.targets)

    @cached_property
    def out_of(self) -> Mapping[str | None, tuple[Move, ...]]:
        """Moves by the layer that makes the value."""
        return _grouped((move.source, move) for move in self.moves)


def _grouped(pairs: Iterable[tuple[str | None, Move]]) -> Mapping[str | None, tuple[Move, ...]]:
    found: dict[str | None, list[Move]] = {}
    for name, move in pairs:
        found.setdefault(name, []).append(move)
    return {name: tuple(own) for name, own in found.items()}


def work_of(graph: LayerGraph, devices: int, costs: CostModel, plan: Plan, policy: PassPolicy = RUNTIME_POLICY) -> Work:
    """The work of one step of `plan`.

    Raises:
        PlanError: the plan's scheme asks for passes that cannot be.
    """
    strategies = {name: replace(strategy, update_period=None) for name, strategy in plan.layers.items()}
    when = stages(graph, strategies, plan.scheme)
    pricing = _Pricing(graph, devices, costs, strategies, when, plan.scheme, policy.scatter_allgather)
    layers = {name: pricing.layer(name, plan.layers[name].update_period) for name in graph.layers}
    moved = tuple(replace(move, index=index) for index, move in enumerate(pricing.moves()))
    hidden = min(1.0, max(0.0, costs.step.overlap)) if policy.prefetch else 0.0
    return Work(when, layers, moved, devices, costs.step.overhead_s, hidden, policy)


@dataclass(frozen=True)
class _Arrival:
    """A value in the layout in which like readers want it; `first` is the first of all that are alike."""

    value: str
    wanted: Layout
    crossing: Crossing
    first: str | None = None


@dataclass(frozen=True, eq=False)
class _Pricing:
    graph: LayerGraph
    devices: int
    costs: CostModel
    strategies: Mapping[str, Strategy]
    stages: Stages
    scheme: Scheme
    scatter_allgather: bool

    def layer(self, name: str, period: int | None) -> LayerWork:
        layer, strategy, stage = self.graph.layers[name], self.strategies[name], self.stages.of[name]
        passes = self.stages.passes if stage is Stage.PASSES else 1
        cost = self.costs.layer(layer, strategy, passes)
        reduce_s = self.costs.reduction(layer, strategy)
        post_update_s = self.costs.step.late * reduce_s
        compute_interference_s = (1 - self.costs.step.overlap) * (reduce_s - post_update_s)
        return LayerWork(
            name=name,
            stage=stage,
            devices=strategy.devices,
            forward_s=cost.forward_s,
            backward_s=cost.backward_s,
            batch_norm_sync_s=batch_norm_sync_s(layer, strategy, self.costs, self.graph),
            compute_interference_s=compute_interference_s,
            overlappable_s=max(0.0, reduce_s - post_update_s - compute_interference_s),
            post_update_s=post_update_s,
            update_s=cost.update_s,
            period=period or passes,
        )

    def moves(self) -> Iterable[Move]:
        """Inputs that arrive, what layers read of each other, and results that are delivered.

        Like readers share a value in the layout that they want it in (search_space/formulation.py).
        """
        graph, like = self.graph, like_readers(self.graph)
        readers: dict[_Arrival, list[str | None]] = {}
        for name, layer in graph.layers.items():
            for value in layer.inputs:
                if value in graph.producer or value in graph.user_inputs:
                    crossing = self._crossing(value, graph.producer.get(value), name)
                    first = like.get(value, {}).get(name, name)
                    arrival = _Arrival(value, layer.layout(value, self.strategies[name]), crossing, first)
                    readers.setdefault(arrival, []).append(name)
        for value in dict.fromkeys(out for out in graph.user_outputs if isinstance(out, str)):
            if value in graph.producer:
                crossing = self._crossing(value, graph.producer[value], None)
                readers[_Arrival(value, delivery_layout(graph, self.devices, value), crossing)] = [None]
        return (self._move(arrival, tuple(names)) for arrival, names in readers.items())

    def _move(self, arrival: _Arrival, targets: tuple[str | None, ...]) -> Move:
        graph, value, wanted, crossing = self.graph, arrival.value, arrival.wanted, arrival.crossing
        maker = graph.producer.get(value)
        if maker is None:
            given = arrival_layout(graph, self.devices, value)
        else:
            given = graph.layers[maker].layout(value, self.strategies[maker])
        if crossing is Crossing.ONCE:
            return Move(0, value, maker, targets, crossing, (self._legs(graph.values[value], (Hop(given, wanted),)),))
        spec, dim = graph.values[value], graph.batch_dims.get(value)
        if dim is not None:  # one pass's part of it
            size = -(-spec.shape[dim] // self.stages.passes)
            spec = replace(spec, shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]))
        scheme = Scheme.INTERLEAVE if crossing is Crossing.WITHIN else self.scheme
        legs = [
            self._legs(spec, hops(scheme, self.stages, given, wanted, number, dim if self.scatter_allgather else None))
            for number in range(self.stages.passes)
        ]
        return Move(0, value, maker, targets, crossing, tuple(legs))

    def _crossing(self, value: str, source: str | None, target: str | None) -> Crossing:
        inside = [name is not None and self.stages.of[name] is Stage.PASSES for name in (source, target)]
        if inside == [False, False] or (inside == [False, True] and value not in self.graph.batch_dims):
            return Crossing.ONCE
        if all(inside):
            return Crossing.WITHIN
        return Crossing.INWARDS if inside[1] else Crossing.OUTWARDS

    def _legs(self, spec: TensorSpec, path: Iterable[Hop]) -> tuple[Leg, ...]:
        found = []
        for hop in path:
            cost = self.costs.transfer(spec, hop.source, hop.target)
            if cost.forward_s > 0 or cost.backward_s > 0:
                found.append(replace(_lanes(hop), forward_s=cost.forward_s, backward_s=cost.backward_s))
        return tuple(found)


@lru_cache(maxsize=10_000)
def _lanes(hop: Hop) -> Leg:
    """Senders and receivers of a transfer; no times."""
    moved = traffic(hop.source, hop.target)
    gives, takes = moved.foreign.sent, moved.foreign.received
    most = max(gives.max(), takes.max())
    sent = tuple((d, float(amount / most)) for d, amount in zip(moved.senders, gives, strict=True) if amount)
    received = tuple((d, float(amount / most)) for d, amount in zip(moved.receivers, takes, strict=True) if amount)
    devices = tuple(sorted({*moved.senders, *moved.receivers}))
    return Leg(0.0, 0.0, sent, received, devices)
