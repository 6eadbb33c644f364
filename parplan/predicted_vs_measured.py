"""Prediction and measurement of a plan that has run, side by side, and what follows from them.

The one place that knows both sides. The runtime measures, and prints plain figures that it is given; here these figures
are made, measurements become entries of a profile, and the planner is asked again with them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from statistics import median

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.measurement.runnable_parts import part_entry
from parplan.cost_models.profile.records import PartEntry, SessionProfile
from parplan.cost_models.roofline import part_of
from parplan.cost_models.sampling import Measurement
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.holdings import slices
from parplan.lowering.stages import Stage, stages
from parplan.plan import Plan
from parplan.planner.decide import decide, predict
from parplan.planner.decision import LayerReport, Prediction
from parplan.planner.explain.layer_report import layer_reports
from parplan.planner.request import PlanRequest
from parplan.planner.search.context import SIMULATED, plain
from parplan.planner.search_space.formulation import formulate
from parplan.planner.simulation.equal_lanes import EqualLanes
from parplan.planner.simulation.list_schedule import schedule
from parplan.planner.simulation.priced_program import PricedProgram, lowered, priced
from parplan.planner.simulation.step_tasks import step_parts
from parplan.planner.simulation.timeline import Timeline
from parplan.report import units
from parplan.report.pictures.lanes import device_lanes
from parplan.report.pictures.trace import predicted_spans
from parplan.runtime.measurement.measured_step import MeasuredStep
from parplan.runtime.measurement.predicted import INPUTS, RESULTS, SLICES, BothTimes, Expected, ExpectedLayer
from parplan.runtime.measurement.trace_events import TraceSpan

__all__ = [
    "Learned",
    "PlanPrediction",
    "PredictedVsMeasured",
    "Replan",
    "devices_at_work",
    "learn",
    "predict_plan",
    "replan",
]

# A plan that is faster by less than this is the same plan to a person.
SAME = 1e-6
# Layers named in a sentence on a changed plan.
SHOWN = 4


@dataclass(frozen=True)
class PlanPrediction:
    """A plan as a cost model prices it: per layer, as a step, and as plain figures for the runtime to print."""

    layers: tuple[LayerReport, ...]
    step: Prediction
    expected: Expected


@dataclass(frozen=True)
class PredictedVsMeasured:
    """A plan that has run, its prediction and its measurement.

    Args:
        measured: with the predicted figures beside it, `predicted.expected`.
        reference_s: seconds of the reference kernel at the time of the measurement; 0 where it was not run.
    """

    plan: Plan
    predicted: PlanPrediction
    measured: MeasuredStep
    reference_s: float = 0.0


@dataclass(frozen=True)
class Learned:
    """Counts of the distinct parts of layers that were put into a profile, and of those known before."""

    parts: int
    known: int

    def describe(self) -> str:
        """Words for a report."""
        return f"{self.parts} measured parts of layers kept, {self.known} of them in place of older figures"


@dataclass(frozen=True)
class Replan:
    """The planner's choice with costs that include what was learned.

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
        *shown, last = moves if len(moves) <= SHOWN else [*moves[: SHOWN - 1], f"{len(moves) - SHOWN + 1} more"]
        listed = f"{', '.join(shown)} and {last}" if shown else last
        return f"Planned again, the choice would change: {listed}; {_time(self.best_s)} instead ({figures})."


def predict_plan(graph: LayerGraph, plan: Plan, cluster: Cluster, costs: CostModel) -> PlanPrediction:
    """Price one step of `plan` by `costs`: per layer, per value that moves, and as a whole.

    Raises:
        PlanError: the plan is for another model or number of devices, or breaks a rule.
    """
    step = predict(graph, cluster, costs, plan)
    formulation = formulate(graph, cluster, costs, {name: (own,) for name, own in plain(plan).items()})
    options = {name: own[0] for name, own in zip(formulation.names, formulation.options, strict=False)}
    work = priced(graph, lowered(graph, plan, cluster), costs)
    read = (*(v for layer in graph.layers.values() for v in layer.inputs), *graph.user_outputs)
    # By value, to all its readers; nothing where it lies as they want it.
    transfers = {v: BothTimes() for v in read if isinstance(v, str) and (v in graph.producer or v in graph.user_inputs)}
    readers: dict[str, list[str]] = defaultdict(list)
    for move in work.moves.values():
        moved = transfers.get(move.value, BothTimes())
        transfers[move.value] = moved + BothTimes(move.forward_s, move.backward_s)
        if move.forward_s > 0 and move.value in graph.values:
            readers[move.value] += (name or RESULTS for name in move.readers)
    times, sources = {}, {**graph.producer, **dict.fromkeys(graph.parameters, SLICES)}
    for name, option in options.items():
        layer = work.layers[name]  # in all its passes
        both = BothTimes(layer.passes * layer.cost.forward_s, layer.passes * layer.cost.backward_s)
        times[name] = ExpectedLayer(both, option.cost.source.value)
        gathered = slices(graph, graph.layers[name], option.strategy)
        sizes = {value: graph.values[value].nbytes for value in gathered}
        for value, nbytes in sizes.items():
            transfers[value] = BothTimes(layer.cost.gathers_s * nbytes / sum(sizes.values()))
            readers[value].append(name)
    expected = Expected(
        layers=times,
        transfers=transfers,
        labels={v: f"{sources.get(v, INPUTS)} -> {', '.join(dict.fromkeys(own))}" for v, own in readers.items()},
        reduce_s=step.exposed_reduce_s,
        update_s=step.update_s,
        overhead_s=step.overhead_s,
        step_s=step.step_s,
        spans=_spans(work, cluster, graph),
        memory_bytes=step.memory_bytes,
    )

    layers = []
    for one in layer_reports(graph, formulation, [0] * len(formulation.problem.nodes), plan):
        both, inputs = times[one.name].times, graph.layers[one.name].inputs
        moved_s = sum(transfers[value].total_s for value in inputs if value in transfers)
        moved_s += 2 * options[one.name].batch_norm_sync_s + options[one.name].cost.gathers_s
        layers.append(replace(one, forward_s=both.forward_s, backward_s=both.backward_s, transfer_s=moved_s))
    return PlanPrediction(tuple(layers), step, expected)


def _spans(work: PricedProgram, cluster: Cluster, graph: LayerGraph) -> tuple[TraceSpan, ...]:
    """The simulated step; none where there are too many devices."""
    if cluster.count > SIMULATED:
        return ()
    parts = step_parts(work)
    timeline = Timeline(parts, schedule(parts), EqualLanes.apart(cluster.count))
    # Equal devices are not one track here: each is above what was measured of it.
    return tuple(predicted_spans(timeline, device_lanes(timeline), cluster, graph, work.program.strategies))


def learn(compared: PredictedVsMeasured, graph: LayerGraph, profile: SessionProfile) -> Learned:
    """Put the measured layers into `profile`, which is for as many devices as worked at once.

    A part that several layers have in common gets the median of them.
    """
    moment = datetime.now(timezone.utc).isoformat(timespec="seconds")
    when = stages(graph, compared.plan.layers, compared.plan.scheme)
    strategies = plain(compared.plan)
    alike: dict[str, list[PartEntry]] = defaultdict(list)
    for layer in compared.measured.layers:
        if layer.forward.seconds <= 0:
            continue
        passes = when.passes if when.of[layer.name] is Stage.PASSES else 1
        taken = Measurement(
            forward_s=layer.forward.seconds / passes,
            backward_s=layer.backward.seconds / passes,
            spread=max(layer.forward.spread, layer.backward.spread),
            runs=compared.measured.steps,
            reference_s=compared.reference_s,
            when=moment,
        )
        part = part_of(graph, graph.layers[layer.name], strategies[layer.name], passes)
        entry = part_entry(graph, part, taken)
        alike[entry.signature].append(entry)
    known = sum(profile.get(signature) is not None for signature in alike)
    for first, *others in alike.values():
        each = [entry.measurement for entry in (first, *others)]
        middle = replace(
            first.measurement,
            forward_s=median(one.forward_s for one in each),
            backward_s=median(one.backward_s for one in each),
            spread=median(one.spread for one in each),
            runs=sum(one.runs for one in each),
        )
        profile.put(replace(first, measurement=middle))
    return Learned(len(alike), known)


def devices_at_work(measured: MeasuredStep) -> int:
    """How many devices worked at once: one where they took turns."""
    return 1 if measured.turns else measured.devices


def replan(
    compared: PredictedVsMeasured,
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    request: PlanRequest | None = None,
) -> Replan:
    """Ask the planner again, with costs that know what was learned.

    Args:
        costs: prices with what was learned.
        request: as the plan was asked for; a plan in it is ignored.
    """
    old = compared.plan
    best = decide(graph, cluster, costs, replace(request or PlanRequest(), plan=None)).plan
    now_s = predict(graph, cluster, costs, old).step_s
    best_s = predict(graph, cluster, costs, best).step_s
    kept = plain(old)
    changed = [name for name, strategy in best.layers.items() if strategy != kept[name]]
    return Replan(best, tuple(changed), compared.predicted.step.step_s, now_s, best_s)


def _time(seconds: float) -> str:
    return units.time(seconds).text(seconds)
