"""Looks back at a plan that has run: what was predicted beside what was measured, and what follows from it.

The one place that knows both sides. The runtime measures and prints plain figures it was given; here those figures are
made, what was measured becomes entries of a profile, and the planner is asked again with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from statistics import median

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.measurement.runnable_parts import part_entry
from parplan.cost_models.profile.records import PartEntry, Profile
from parplan.cost_models.roofline import part_of
from parplan.cost_models.sampling import Measurement
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.stages import Stage, stages
from parplan.plan import Plan, Strategy
from parplan.planner.decide import Request, decide, predict
from parplan.planner.decision import LayerFacts, Prediction
from parplan.planner.search_space.formulation import Option, formulate
from parplan.planner.simulation.step_work import LayerWork, Work, work_of
from parplan.report import units
from parplan.runtime.measurement.measured_step import ComparedLine, MeasuredStep
from parplan.runtime.measurement.predicted import INPUTS, RESULTS, BothTimes, Expected, ExpectedLayer

__all__ = ["Foreseen", "Learned", "LookBack", "Replan", "devices_at_work", "foresee", "learn", "replan"]

# A plan that is faster by less than this is the same plan to a person.
SAME = 1e-6


@dataclass(frozen=True)
class Foreseen:
    """A plan as a cost model prices it: per layer, and as plain figures for the runtime to print."""

    facts: tuple[LayerFacts, ...]
    prediction: Prediction
    expected: Expected


@dataclass(frozen=True)
class LookBack:
    """A plan that has run.

    Args:
        plan: what ran.
        foreseen: what was predicted.
        measured: what was measured.
        reference_s: what the reference kernel took in the same seconds; 0 where it was not run.
        notes: what the reader must know first.
    """

    plan: Plan
    foreseen: Foreseen
    measured: MeasuredStep
    reference_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def facts(self) -> tuple[LayerFacts, ...]:
        """What was predicted per layer."""
        return self.foreseen.facts

    @property
    def lines(self) -> tuple[ComparedLine, ...]:
        """Predicted beside measured: layers, transfers, the rest, and the step."""
        return replace(self.measured, expected=self.foreseen.expected).lines

    def __str__(self) -> str:
        return str(replace(self.measured, expected=self.foreseen.expected))


@dataclass(frozen=True)
class Learned:
    """What was put into a profile: distinct parts of layers, and how many of them were known before."""

    parts: int
    known: int

    def describe(self) -> str:
        """Words for a report."""
        return f"{self.parts} measured parts of layers kept, {self.known} of them in place of older figures"


@dataclass(frozen=True)
class Replan:
    """What the planner says with what was learned.

    Args:
        plan: what it would choose now.
        changed: layers that it would place otherwise, in forward order.
        predicted_s: the step that was predicted when the plan was chosen.
        now_s: what is predicted for the same plan now.
        best_s: what is predicted for `plan`.
    """

    plan: Plan
    changed: tuple[str, ...]
    predicted_s: float
    now_s: float
    best_s: float

    @property
    def changes(self) -> bool:
        """Whether another plan is faster now."""
        return bool(self.changed) and self.best_s < self.now_s * (1 - SAME)

    def sentence(self, old: Plan) -> str:
        """Whether the choice would change, which layers, and the predicted step before and after."""
        figures = f"predicted step {_time(self.predicted_s)} before, {_time(self.now_s)} with what was measured"
        if not self.changes:
            return f"Planned again, the choice stays ({figures})."
        moves = [
            f"{name} ({old.layers[name].describe()} to {self.plan.layers[name].describe()})" for name in self.changed
        ]
        shown = moves if len(moves) <= _SHOWN else [*moves[: _SHOWN - 1], f"{len(moves) - _SHOWN + 1} more"]
        return f"Planned again, the choice would change: {_joined(shown)}; {_time(self.best_s)} instead ({figures})."


_SHOWN = 4


def foresee(graph: LayerGraph, plan: Plan, cluster: Cluster, costs: CostModel) -> Foreseen:
    """What one step of `plan` takes by `costs`, per layer, per value that moves, and as a whole.

    Raises:
        PlanError: the plan is for another model or number of devices, or breaks a rule.
    """
    prediction = predict(graph, cluster, costs, plan)
    strategies = {name: _without_period(strategy) for name, strategy in plan.layers.items()}
    formulation = formulate(graph, cluster, costs, {name: (strategy,) for name, strategy in strategies.items()})
    options = {name: own[0] for name, own in zip(formulation.names, formulation.options, strict=False)}
    work = work_of(graph, cluster.count, costs, plan)
    statistics = {name: option.batch_norm_sync_s for name, option in options.items() if option.batch_norm_sync_s > 0}
    expected = Expected(
        layers={name: _expected_layer(work.layers[name], work.times(name), own) for name, own in options.items()},
        transfers={**_transfers(work), **{f"{name}.statistics": BothTimes(s, s) for name, s in statistics.items()}},
        labels=_labels(work),
        reduce_s=prediction.exposed_reduce_s,
        update_s=prediction.update_s,
        overhead_s=prediction.overhead_s,
        step_s=prediction.step_s,
        low_s=prediction.low_s,
        high_s=prediction.high_s,
    )
    facts = tuple(_facts(graph, plan, name, option, expected) for name, option in options.items())
    return Foreseen(facts, prediction, expected)


def _without_period(strategy: Strategy) -> Strategy:
    return Strategy(strategy.replicas, strategy.shards, strategy.axis, strategy.devices)


def _expected_layer(layer: LayerWork, times: int, option: Option) -> ExpectedLayer:
    """A layer in all its passes."""
    return ExpectedLayer(BothTimes(times * layer.forward_s, times * layer.backward_s), option.cost.source.value)


def _transfers(work: Work) -> dict[str, BothTimes]:
    """Per value what its moves to all who read it were priced at."""
    found: dict[str, BothTimes] = defaultdict(BothTimes)
    for move in work.moves:
        legs = [leg for part in move.legs for leg in part]
        found[move.value] += BothTimes(sum(leg.forward_s for leg in legs), sum(leg.backward_s for leg in legs))
    return dict(found)


def _labels(work: Work) -> dict[str, str]:
    """Where each value comes from and who reads it elsewhere."""
    readers: dict[str, list[str]] = defaultdict(list)
    for move in work.moves:
        if any(move.legs):
            readers[move.value] += (name or RESULTS for name in move.targets)
    sources = {move.value: move.source or INPUTS for move in work.moves}
    return {value: f"{sources[value]} -> {', '.join(own)}" for value, own in readers.items()}


def _facts(graph: LayerGraph, plan: Plan, name: str, option: Option, expected: Expected) -> LayerFacts:
    moved = [expected.transfers[value] for value in graph.layers[name].inputs if value in expected.transfers]
    return LayerFacts(
        name=name,
        kind=graph.layers[name].kind,
        strategy=plan.layers[name],
        forward_s=expected.layers[name].times.forward_s,
        backward_s=expected.layers[name].times.backward_s,
        transfer_s=sum(both.forward_s + both.backward_s for both in moved) + 2 * option.batch_norm_sync_s,
        reduce_s=option.reduce_s,
        memory_bytes=option.memory_bytes,
        source=option.cost.source,
        why="",
    )


# -- learning --


def learn(look_back: LookBack, graph: LayerGraph, profile: Profile) -> Learned:
    """Put what the layers took into `profile`, which is for as many devices as worked at once.

    A part that several layers have in common gets the median of them.
    """
    entries = list(_entries(look_back, graph))
    known = sum(profile.get(entry.signature) is not None for entry in entries)
    for entry in entries:
        profile.put(entry)
    return Learned(len(entries), known)


def devices_at_work(measured: MeasuredStep) -> int:
    """How many devices worked at once: one where they took turns."""
    return 1 if measured.turns else measured.devices


def _entries(look_back: LookBack, graph: LayerGraph) -> Iterable[PartEntry]:
    measured = {layer.name: layer for layer in look_back.measured.layers}
    moment = datetime.now(timezone.utc).isoformat(timespec="seconds")
    when = stages(graph, look_back.plan.layers, look_back.plan.scheme)
    alike: dict[str, list[PartEntry]] = defaultdict(list)
    for name, layer in measured.items():
        if layer.forward.seconds <= 0:
            continue
        spread = max(layer.forward.spread, layer.backward.spread)
        taken = Measurement(
            forward_s=layer.forward.seconds,
            backward_s=layer.backward.seconds,
            spread=spread,
            runs=look_back.measured.steps,
            reference_s=look_back.reference_s,
            when=moment,
        )
        passes = when.passes if when.of[name] is Stage.PASSES else 1
        taken = replace(taken, forward_s=taken.forward_s / passes, backward_s=taken.backward_s / passes)
        part = part_of(graph, graph.layers[name], _without_period(look_back.plan.layers[name]), passes)
        entry = part_entry(graph, part, taken)
        alike[entry.signature].append(entry)
    return [_middle(entries) for entries in alike.values()]


def _middle(entries: Sequence[PartEntry]) -> PartEntry:
    """One entry for equal parts."""
    taken = [entry.measurement for entry in entries]
    middle = replace(
        taken[0],
        forward_s=median(m.forward_s for m in taken),
        backward_s=median(m.backward_s for m in taken),
        spread=median(m.spread for m in taken),
        runs=sum(m.runs for m in taken),
    )
    return replace(entries[0], measurement=middle)


def replan(
    look_back: LookBack,
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    request: Request | None = None,
) -> Replan:
    """Ask the planner again, with costs that know what was learned.

    Args:
        costs: prices with what was learned.
        request: as the plan was asked for; a plan in it is ignored.
    """
    old = look_back.plan
    best = decide(graph, cluster, costs, replace(request or Request(), plan=None)).plan
    now_s = predict(graph, cluster, costs, old).step_s
    best_s = predict(graph, cluster, costs, best).step_s
    changed = [name for name, strategy in best.layers.items() if strategy != _without_period(old.layers[name])]
    return Replan(best, tuple(changed), look_back.foreseen.prediction.step_s, now_s, best_s)


def _time(seconds: float) -> str:
    return units.time(seconds).text(seconds)


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
