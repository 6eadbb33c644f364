"""Plans of models of equal blocks as meshes: stages x data-parallel copies x tensor groups, counted, then laid out.

Counted blocks are priced in a second where a search over all layers takes minutes (planner/mesh), and each of them may
be cut, copied, staged and replayed at once. The mesh is a guess: its plan has to fit by its own peak, transfers
included, and what is said of its step is simulated like that of any plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf

from parplan.cost_models.optimizers import optimizer_memory
from parplan.errors import CaptureError, InfeasiblePlan, PlanError
from parplan.fields import size_text
from parplan.graph.resized import with_fewer_blocks
from parplan.plan import SAVED, SCHEDULES, STATES, Plan
from parplan.planner.decision import Without
from parplan.planner.mesh.parts import Parts, blocks_of
from parplan.planner.mesh.plan import plan_of
from parplan.planner.mesh.search import Model, fastest, priced_mesh
from parplan.planner.mesh.step import Links, Mesh, ParameterBytes, Step
from parplan.planner.search.context import Case, fits, pipeline_peaks
from parplan.planner.search.stages import Staged, has_loss, why_one_group
from parplan.planner.search_space.strategies import data_parallel
from parplan.planner.search_space.verifier import is_legal

__all__ = ["Meshed", "fastest_mesh"]

COPIES = 5
"""Blocks that stand for all: of five and more the solver plans those in the middle alike."""

TRIES = 6
"""Meshes that are laid out, each with less memory than the one before by what that one's plan lacked."""

MOST_MESHED = 512
"""Devices up to which meshes are laid out: 405 B parameters take about a minute there, and 1.2 GiB."""

MOST_TASKS, MOST_JOINED = 100_000, 600_000
"""Tasks of a simulated step, counted as layers x micro-batches, up to which meshes in stages are compared: about twelve
seconds. More where all state is whole: layers of a stage with no gathers between them are few tasks. The devices of a
stage do the same, and one of them is simulated."""


@dataclass(frozen=True)
class Meshed:
    """A plan of a mesh.

    Args:
        whole_s: about what the fastest plan takes that is of one group, and of no more micro-batches than were asked
            for; inf where none fits, or stages were asked for.
        without: gives the fastest meshes that lack something of it.
    """

    staged: Staged
    whole_s: float
    without: Callable[[], tuple[Without, ...]]


_LACKING: Mapping[str, Callable[[Mesh], bool]] = {
    "stages": lambda mesh: mesh.groups == 1,
    "tensor shards": lambda mesh: mesh.tensor == 1,
    "state in slices": lambda mesh: mesh.state == STATES[0],
}
"""Meshes that lack something, by its name."""


def fastest_mesh(case: Case, sized: Callable[[int], Case | None]) -> Meshed | None:
    """The plan of the fastest mesh that fits; None where none was found.

    Args:
        case: of the whole batch, or of the micro-batches that were asked for.
        sized: the case at the size of so many micro-batches, counted in those of `case`; None where there is none.

    Raises:
        PlanError: there are more devices than meshes are laid out on; the text names the fastest mesh.
        InfeasiblePlan: so it is, and none fits.
    """
    graph, cluster, asked = case.graph, case.cluster, case.costs.step.micro_batches
    if not _counted(case):
        return None
    if why := _too_many_devices(case):
        raise PlanError(why)
    refused, batch = set[int](), asked * (graph.batch or 1)
    most = MOST_TASKS // len(graph.layers), MOST_JOINED // len(graph.layers)

    def allowed(mesh: Mesh) -> bool:
        if mesh.micro_batches in refused or not _as_asked(case, mesh):
            return False
        return mesh.groups == 1 or mesh.micro_batches <= most[mesh.state == STATES[0]]

    try:
        model, links, known = _model(case), Links(cluster, by_hand=False), None
        memory_bytes = limit = min(cluster.memory_bytes)
        for _ in range(TRIES):
            known = _within(model, links, known, limit)
            if known is None:
                chosen = fastest(model, batch, links, allowed, limit)
                known = chosen.step, chosen.parts
            step, parts = known
            own = sized(step.mesh.micro_batches // asked)
            if own is None:
                refused.add(step.mesh.micro_batches)
                known = None
                continue
            plan = plan_of(own.graph, parts, step)
            serial = plan.schedule == SCHEDULES[0]
            peaks = own.costs.peaks(plan.layers) if serial else pipeline_peaks(plan, own.graph, own.costs)
            if peaks is None:
                return None
            if max(peaks) <= memory_bytes:
                step_s, whole_s = own.step_s(plan), inf
                if not case.request.stages:
                    # A mesh that is beaten by what people write by hand was counted wrong.
                    whole_s, by_hand_s = _whole_s(model, batch, links, asked), _by_hand_s(sized(1))
                    whole_s = by_hand_s if by_hand_s < step_s else whole_s
                without = partial(_without, model, batch, links, allowed, step, int(limit))
                return Meshed(Staged(plan, step_s, peaks), whole_s, without)
            limit = int(step.nbytes) - (max(peaks) - memory_bytes)
    except (CaptureError, InfeasiblePlan, PlanError):
        pass  # no blocks, no other batch, nothing that fits: the search over all layers says why
    return None


def _too_many_devices(case: Case) -> str:
    """The reason for which no mesh is laid out on so many devices, with the fastest one by count; empty where meshes
    are, or none can be counted.

    Raises:
        InfeasiblePlan: no mesh fits.
    """
    count = case.cluster.count
    if count <= MOST_MESHED:
        return ""
    batch = case.costs.step.micro_batches * (case.graph.batch or 1)
    try:
        links = Links(case.cluster, by_hand=False)
        step = fastest(_model(case), batch, links, lambda mesh: _as_asked(case, mesh)).step
    except (CaptureError, PlanError):
        return ""
    return (
        f"{case.graph.model}: plans of models that no single device holds are laid out on at most {MOST_MESHED} "
        f"devices, and these are {count}; say --gpus {MOST_MESHED}, or fewer\n  by count alone, about "
        f"{step.seconds:.3g} s a step and {size_text(step.nbytes)} on the fullest device: {step.mesh.describe()}"
    )


def _counted(case: Case) -> bool:
    """Whether meshes of equal blocks may be plans of a case."""
    graph = case.graph
    nothing_else = not why_one_group(case, case.cluster.count)
    return nothing_else and case.fold is not None and graph.batch is not None and not graph.profiled


def _as_asked(case: Case, mesh: Mesh) -> bool:
    """Whether a mesh has the stages, the schedule and the micro-batches that are asked for, and can have stages."""
    request = case.request
    if request.stages not in (None, mesh.groups) or request.schedule not in (None, mesh.schedule):
        return False
    return mesh.micro_batches % case.costs.step.micro_batches == 0 and (mesh.groups == 1 or has_loss(case.graph))


def _model(case: Case) -> Model:
    """The model of a case with few of its equal blocks, to be counted.

    Raises:
        CaptureError, PlanError: it has no equal blocks.
    """
    blocks = blocks_of(case.graph)
    return Model(with_fewer_blocks(case.graph, blocks, COPIES), blocks.copies, _held(case), case.request.precision)


def _within(model: Model, links: Links, known: tuple[Step, Parts] | None, limit: float) -> tuple[Step, Parts] | None:
    """The same mesh within less memory; None where it does not fit, or there is none yet."""
    if known is None:
        return None
    step = priced_mesh(model, known[1], known[0].mesh, links, limit)
    return None if step is None else (step, known[1])


def _whole_s(model: Model, batch: int, links: Links, micro_batches: int) -> float:
    """Seconds of the fastest mesh of one group in so many micro-batches; inf where none fits."""
    try:
        alone = fastest(model, batch, links, lambda mesh: mesh.micro_batches == micro_batches and mesh.groups == 1)
    except (InfeasiblePlan, PlanError):
        return inf
    return alone.step.seconds


def _by_hand_s(case: Case | None) -> float:
    """Seconds of fully sharded data parallel with recomputation; inf where it does not fit, or is not legal."""
    if case is None:
        return inf
    graph, devices = case.graph, tuple(range(case.cluster.count))
    layers = data_parallel(graph, devices, STATES[-1], SAVED[-1])
    several = case.costs.step.micro_batches
    batch = several * (graph.batch or 1)
    plan = Plan(graph.model, graph.fingerprint, batch, len(devices), layers, micro_batches=several)
    legal = is_legal(plan, graph) and fits(graph, case.cluster, case.costs, layers)
    return case.step_s(plan) if legal else inf


def _without(
    model: Model, batch: int, links: Links, allowed: Callable[[Mesh], bool], step: Step, limit: int
) -> tuple[Without, ...]:
    """What the fastest meshes take that lack something which the mesh of a step has."""

    def least_s(model: Model, lacks: Callable[[Mesh], bool]) -> float | None:
        try:
            return fastest(model, batch, links, lambda mesh: allowed(mesh) and lacks(mesh), limit).step.seconds
        except (InfeasiblePlan, PlanError):
            return None

    found = [(name, least_s(model, lacks)) for name, lacks in _LACKING.items() if not lacks(step.mesh)]
    if any(sum(stage.replays) for stage in step.stages):
        found.append(("recomputation", least_s(model.without_replays(), lambda mesh: True)))
    return tuple(Without(name, None if least is None else least / step.seconds) for name, least in found)


def _held(case: Case) -> ParameterBytes:
    """Bytes of a trained number, of the type that the most have."""
    graph, by_type = case.graph, dict[int, int]()
    for name in graph.parameters:
        size = graph.values[name].dtype.itemsize
        by_type[size] = by_type.get(size, 0) + graph.values[name].elements
    each = max(by_type, key=lambda size: by_type[size])
    return ParameterBytes(each, each, each * optimizer_memory(case.request.optimizer).states)
