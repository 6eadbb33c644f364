"""The fastest mesh for a model of repeated blocks: all ways to divide the devices, bounded, then priced stage by stage.

For each mesh the blocks go to groups so that the longest stage is as short as memory allows: each takes as many as it
can within some seconds, and the seconds are bisected. That is also what bounds the mesh: no spread over its groups has
a shorter longest stage, and every micro-batch passes through that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from parplan.cluster import Cluster
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import CaptureError, InfeasiblePlan, PlanError
from parplan.fields import counted
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.resized import at_batch
from parplan.plan import SCHEDULES, STATES, Strategy
from parplan.planner.mesh.parts import Parts, between, group_strategies, parts
from parplan.planner.mesh.step import Links, Mesh, ParameterBytes, Stage, Step, stage_of, step_of
from parplan.planner.search_space.rules import divisors

__all__ = ["Chosen", "Model", "bound_s", "fastest", "meshes", "priced_mesh"]

ROUNDS = (1, 2, 4, 8)
"""Stages per group that are compared."""

EXACT = 1e-4
"""Part of a stage's seconds up to which the shortest longest stage is looked for."""

MOST_SAMPLES = 8
"""Samples of a micro-batch on a tensor group up to which they are compared: more compute no faster and save more."""


@dataclass(frozen=True, eq=False)
class Model:
    """A captured model with so many equal blocks; its parts are priced once per tensor group.

    Args:
        graph: captured with a few of the blocks.
        blocks: how many there are.
        held: bytes per parameter.
    """

    graph: LayerGraph
    blocks: int
    held: ParameterBytes
    precision: str = "bf16"
    _costs: dict[Hashable, RooflineCosts] = field(default_factory=dict)
    _layouts: dict[Hashable, Mapping[str, Strategy]] = field(default_factory=dict)
    _parts: dict[Hashable, Parts] = field(default_factory=dict)

    def parts(self, group: Cluster, samples: int, cut: bool = True, whole: bool = False) -> Parts:
        """Its parts on a tensor group, with the strategies that are fastest for one sample.

        Args:
            group: of one kind of devices.
            cut, whole: as in `group_strategies` and `parts`.

        Raises:
            PlanError: it has no equal blocks, no strategies on so many devices, or is another model for other samples.
        """
        same = group.devices[0].kind, group.links, group.count
        key = *same, cut
        try:
            if key not in self._layouts:
                self._layouts[key] = group_strategies(self._costs_of(group, 1), cut)
            if not cut and self._layouts[key] == self._layouts.get((*same, True)):
                return self.parts(group, samples, True, whole)
            full = *key, samples, whole
            if full not in self._parts and 1 < samples < MOST_SAMPLES:
                # Times and bytes are the largest of some that are linear in the samples: no more than between the ends.
                least, most = self.parts(group, 1, cut, whole), self.parts(group, MOST_SAMPLES, cut, whole)
                self._parts[full] = between(least, most, (samples - 1) / (MOST_SAMPLES - 1))
            elif full not in self._parts:
                self._parts[full] = parts(self._costs_of(group, samples), self._layouts[key], whole)
        except CaptureError as error:
            raise PlanError(str(error)) from error
        return self._parts[full]

    def _costs_of(self, group: Cluster, samples: int) -> RooflineCosts:
        """Costs on a tensor group; all groups have one graph, with which its blocks and units are kept."""
        key = group.devices[0].kind, group.links, group.count, samples
        if key not in self._costs:
            graph = next((own.graph for own in self._costs.values() if own.graph.batch == samples), None)
            self._costs[key] = RooflineCosts(graph or at_batch(self.graph, samples), group, self.precision)
        return self._costs[key]

    def without_replays(self) -> Model:
        """The same model, of which nothing is replayed."""
        parts = {key: replace(own, block=replace(own.block, units=())) for key, own in self._parts.items()}
        return replace(self, _parts=parts)


@dataclass(frozen=True)
class Chosen:
    """The fastest mesh that fits, and what is known of all others.

    Args:
        bound_s: seconds that no mesh of those compared takes less than.
        compared, solved: meshes, and those of which a bound was not enough.
    """

    step: Step
    parts: Parts
    bound_s: float
    compared: int
    solved: int

    @property
    def gap(self) -> float:
        """How much faster another mesh could be at most, as a share."""
        return max(0.0, 1 - self.bound_s / self.step.seconds)

    def describe(self) -> str:
        """Words for a report: the mesh, and what is replayed in it."""
        replays = [sum(own) for own in zip(*(stage.replays for stage in self.step.stages), strict=True)]
        some = f", replayed by unit {replays}" if any(replays) else ""
        return f"{self.step.mesh.describe()}{', all replayed' if self.parts.again else some}"


def meshes(devices: int, batch: int, blocks: int, most_tensor: int) -> Iterator[Mesh]:
    """All ways to divide so many devices and samples."""
    for tensor in divisors(min(devices, most_tensor)):
        if devices % tensor:
            continue
        for groups in divisors(devices // tensor):
            data = devices // tensor // groups
            if groups > blocks or batch % data:
                continue
            own = batch // data
            for samples in (n for n in divisors(own) if n <= MOST_SAMPLES):
                count = own // samples
                for rounds in ROUNDS if groups > 1 else ROUNDS[:1]:
                    if groups > 1 and (count < 2 or (rounds > 1 and (count % groups or rounds * groups > blocks))):
                        continue
                    for state in STATES if data > 1 else STATES[:1]:
                        yield Mesh(tensor, data, groups, rounds, count, samples, SCHEDULES[-1], state)


def bound_s(model: Model, own: Parts, mesh: Mesh, links: Links) -> float:
    """Seconds that a mesh takes at least, however its blocks are spread and whatever fits.

    All groups together do the work of all micro-batches, and update. Where each has one stage, a group holds no more
    micro-batches than there are groups from its own on, so that each waits for the first to come back.
    """
    alone = replace(mesh, groups=1, rounds=1)
    whole = stage_of(own, alone, links, 0, model.blocks, inf, model.held)
    assert whole is not None
    idle_s = (1 - 1 / mesh.groups) * (own.block.backward_s * model.blocks) if mesh.rounds == 1 else 0.0
    last_s = whole.last_s if mesh.groups == 1 else 0.0
    return (mesh.micro_batches * whole.seconds + whole.update_s) / mesh.groups + idle_s + last_s


def priced_mesh(model: Model, own: Parts, mesh: Mesh, links: Links, limit: float, cutoff_s: float = inf) -> Step | None:
    """A mesh with its blocks spread so that the longest stage is shortest; None where it does not fit, or takes no less
    than `cutoff_s`."""
    known: dict[tuple[int, int], Stage | None] = {}

    def stage(group: int, blocks: int) -> Stage | None:
        if (group, blocks) not in known:
            known[group, blocks] = stage_of(own, mesh, links, group, blocks, limit, model.held)
        return known[group, blocks]

    def most(group: int, seconds: float) -> int:
        """Blocks that a group takes within so many seconds; -1 where not even its ends fit."""
        low, high = -1, model.blocks + 1
        while high - low > 1:
            middle = (low + high) // 2
            found = stage(group, middle)
            low, high = (middle, high) if found is not None and found.seconds <= seconds else (low, middle)
        return low

    def spread(seconds: float) -> list[int] | None:
        counts = [most(group, seconds) for group in range(mesh.groups)]
        return counts if min(counts) >= 0 and sum(counts) >= model.blocks else None

    if spread(cutoff_s / mesh.micro_batches) is None:
        return None
    shared_s = bound_s(model, own, mesh, links)
    low = high = shared_s / mesh.micro_batches / 2
    while spread(high) is None:
        low, high = high, 2 * high
    while high - low > EXACT * high:
        middle = (low + high) / 2
        low, high = (low, middle) if spread(middle) is not None else (middle, high)
    least_s = max(mesh.micro_batches * low, shared_s)
    if least_s >= cutoff_s:
        return None
    counts = spread(high) or []
    while sum(counts) > model.blocks:  # the longest stages first, of equal ones those that hold most in flight
        times = [found.seconds if (found := stage(group, n)) else 0.0 for group, n in enumerate(counts)]
        counts[max((g for g, n in enumerate(counts) if n), key=lambda g: (times[g], -g))] -= 1
    stages = [found for group, n in enumerate(counts) if (found := stage(group, n))]
    return step_of(own, mesh, links, stages, least_s)


def fastest(
    model: Model, batch: int, links: Links, allowed: Callable[[Mesh], bool] = lambda mesh: True,
    limit: float | None = None,
) -> Chosen:  # fmt: skip
    """The fastest mesh of a machine for so many samples a step.

    Args:
        links: of the machine.
        allowed: which meshes are compared.
        limit: bytes of each device; None: as much as each has.

    Raises:
        InfeasiblePlan: none fits.
        PlanError: no mesh shares so many samples.
    """
    cluster = links.cluster
    limit = min(device.memory_bytes for device in cluster.devices) if limit is None else limit
    host = cluster.links[0].size if cluster.links else 1
    bounded = list[tuple[float, Mesh, Parts]]()
    for mesh in filter(allowed, meshes(cluster.count, batch, model.blocks, host)):
        group = cluster.first(mesh.tensor)
        every = [model.parts(group, mesh.samples)]
        if mesh.tensor > 1 and (other := model.parts(group, mesh.samples, cut=False)) is not every[0]:
            every.append(other)
        every += [own.replayed for own in every] if links.by_hand else []
        bounded += [(bound_s(model, own, mesh, links), mesh, own) for own in every]
    if not bounded:
        raise PlanError(f"{batch} samples cannot be shared by {counted(cluster.count, 'device')} in any mesh")
    best: tuple[Step, Parts] | None = None
    below_s = least_s = inf
    solved = 0
    for bound, mesh, own in sorted(bounded, key=lambda one: one[0]):
        if bound >= below_s:
            break
        solved += 1
        step = priced_mesh(model, own, mesh, links, limit, below_s)
        if step is not None:
            least_s = min(least_s, step.bound_s)
            if step.seconds < below_s:
                below_s, best = step.seconds, (step, own)
    if best is None:
        raise InfeasiblePlan(
            f"no mesh of {counted(cluster.count, 'device')} with {limit / 2**30:.1f} GiB each fits {batch} samples a "
            "step; take more devices, or fewer samples"
        )
    return Chosen(*best, min(least_s, below_s), len(bounded), solved)
