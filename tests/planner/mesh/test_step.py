"""Steps of counted blocks: replays by brute force, the schedule's longest path, bytes per parameter as published."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from parplan.cluster import Cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.lowering.pipeline.orders import Action, merged, orders
from parplan.planner.mesh.parts import Part, Parts, Unit
from parplan.planner.mesh.search import Model, bound_s, priced_mesh
from parplan.planner.mesh.step import MIXED, PLAIN, Links, Mesh, Stage, Step, split, stage_of, step_of

NO_MEMORY = float("inf")


def machine(count: int) -> Links:
    """GPUs whose messages take nothing from compute."""
    return Links(cluster_preset("v100", count))


def drawn(seed: int, units: int = 2) -> Parts:
    """Parts with seconds, bytes and units drawn at random."""
    random = Random(seed)

    def part(units: int, factor: float) -> Part:
        saved = random.uniform(1, 4)
        shares = [random.uniform(0.2, 0.9) / max(units, 1) for _ in range(units)]
        own = tuple(Unit(random.uniform(0.1, 1), share * saved, random.uniform(0.5, 4)) for share in shares)
        seconds = factor * random.uniform(1, 2), factor * random.uniform(2, 4)
        return Part(*seconds, {1: random.uniform(0.1, 1)}, saved, random.uniform(0.5, 2), own)

    return Parts(part(0, 0.2), part(units, 1.0), part(0, random.uniform(0.5, 2)), 0.1, {})


def bytes_with(parts: Parts, mesh: Mesh, blocks: int, replays: tuple[int, ...]) -> Stage:
    stage = stage_of(parts, mesh, machine(mesh.devices), 0, blocks, NO_MEMORY, PLAIN, replays)
    assert stage is not None
    return stage


@pytest.mark.parametrize("seed", range(20))
def test_fewest_seconds_are_replayed_of_all_ways_that_fit(seed: int) -> None:
    random = Random(seed)
    units, blocks, mesh = 1 + seed % 3, random.randint(1, 4), Mesh(groups=2, micro_batches=4)
    parts = drawn(seed, units)
    ways = [bytes_with(parts, mesh, blocks, own) for own in product(range(blocks + 1), repeat=units)]
    limit = random.choice([way.nbytes for way in ways]) * random.uniform(0.99, 1.2)
    found = stage_of(parts, mesh, machine(2), 0, blocks, limit, PLAIN)
    fitting = [way.seconds for way in ways if way.nbytes <= limit]
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert found.nbytes <= limit * (1 + 1e-9)
    assert found.seconds == pytest.approx(min(fitting))


@pytest.mark.parametrize("seed", range(12))
def test_the_step_is_the_longest_path_of_its_schedule(seed: int) -> None:
    random = Random(seed)
    groups, rounds, count = ((2, 1, 5), (4, 1, 4), (3, 1, 9), (2, 2, 4), (4, 2, 8), (3, 4, 6))[seed % 6]
    parts, mesh = drawn(seed), Mesh(groups=groups, rounds=rounds, micro_batches=count)
    links, blocks = machine(groups), [random.randint(rounds, 9) for _ in range(groups)]
    found = [stage_of(parts, mesh, links, group, own, NO_MEMORY, PLAIN) for group, own in enumerate(blocks)]
    stages = [stage for stage in found if stage is not None]
    message_s, last = links.message_s(mesh, parts.boundary), groups * rounds - 1
    assert message_s > 0

    def seconds(action: Action) -> float:
        turn, group = divmod(action.stage, groups)
        first, end = split(blocks[group], rounds, turn)
        own = [parts.block] * (end - first)
        own += [parts.prologue] * (action.stage == 0) + [parts.epilogue] * (action.stage == last)
        return sum(part.forward_s if action.forward else part.backward_s for part in own)

    done = dict[Action, float]()
    own = orders("1f1b", groups, groups * rounds, count)
    free = [0.0] * groups
    for action in merged(own):
        group = action.stage % groups
        sender = Action(action.stage + (-1 if action.forward else 1), action.micro_batch, action.forward)
        arrives = done[sender] + message_s if 0 <= sender.stage <= last else 0.0
        free[group] = done[action] = max(free[group], arrives) + seconds(action)
    expected = max(end + stage.last_s + stage.update_s for end, stage in zip(free, stages, strict=True))
    assert step_of(parts, mesh, links, stages).seconds == pytest.approx(expected)


def test_messages_between_hosts_take_longest() -> None:
    cluster = cluster_preset("h100", 16)  # two hosts of eight
    inside, across = (Links(cluster).message_s(Mesh(groups=groups), 1e9) for groups in (8, 16))
    network = cluster.links[-1]
    assert across == pytest.approx(network.latency_s + 1e9 / (network.bandwidth_bytes_per_s * network.contention))
    assert inside < across
    assert Links(cluster).message_s(Mesh(tensor=8), 1e9) == 0


@pytest.mark.parametrize("data", [2, 8])
def test_bytes_per_parameter_are_those_that_megatron_publishes(data: int) -> None:
    """16-bit weights with 32-bit gradients: 18 bytes, and 6 + 12 / d with the distributed optimizer over d replicas."""
    part = Part(1.0, 2.0, {1: 1e6})
    parts, links = Parts(Part(), part, Part(), 0.0, {}), machine(data)
    for state, each in (("replicated", 18.0), ("sharded", 6 + 12 / data), ("gathered", 18 / data)):
        stage = stage_of(parts, Mesh(data=data, state=state), links, 0, 4, NO_MEMORY, MIXED)
        assert stage is not None
        shown = (2 * MIXED.weights + MIXED.gradients) * 1e6 if state == "gathered" else 0
        assert stage.nbytes == pytest.approx(4e6 * each + shown)


def best_of_all(model: Model, parts: Parts, mesh: Mesh, links: Links, limit: float) -> tuple[list[Step], float]:
    """Steps of all spreads that fit, and the shortest longest stage."""
    steps, least = list[Step](), NO_MEMORY
    for counts in product(range(model.blocks + 1), repeat=mesh.groups):
        if sum(counts) == model.blocks:
            found = [stage_of(parts, mesh, links, group, n, limit, model.held) for group, n in enumerate(counts)]
            stages = [stage for stage in found if stage is not None]
            if len(stages) == mesh.groups:
                steps.append(step_of(parts, mesh, links, stages))
                least = min(least, max(stage.seconds for stage in stages))
    return steps, least


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_blocks_are_spread_so_that_the_longest_stage_is_shortest(seed: int, by_hand: bool) -> None:
    random = Random(seed)
    data, state = random.choice([(1, "replicated"), (2, "replicated"), (2, "sharded"), (2, "gathered")])
    mesh = Mesh(1, data, random.choice([1, 2, 3]), 1, random.choice([2, 6]), 1, state=state)
    parts, links = drawn(seed), Links(cluster(mesh.devices), by_hand)
    model = Model(None, 6, PLAIN)  # type: ignore[arg-type]
    whole = best_of_all(model, parts, mesh, links, NO_MEMORY)[0]
    limit = random.choice([step.nbytes for step in whole]) * random.uniform(0.9, 1.0)
    steps, least = best_of_all(model, parts, mesh, links, limit)
    found = priced_mesh(model, parts, mesh, links, limit)
    if not steps:
        assert found is None
        return
    assert found is not None
    assert found.nbytes <= limit * (1 + 1e-9)
    assert sum(stage.blocks for stage in found.stages) == 6
    assert max(stage.seconds for stage in found.stages) == pytest.approx(least, rel=2e-4)
    fastest = min(step.seconds for step in steps)
    assert max(found.bound_s, bound_s(model, parts, mesh, links)) <= fastest * (1 + 1e-9)
    assert found.seconds <= 1.25 * fastest  # of these; the bound says how far a step may be from the fastest


def cluster(count: int) -> Cluster:
    """GPUs whose sums hold up compute."""
    return cluster_preset("h100", count)
