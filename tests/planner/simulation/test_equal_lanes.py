"""Steps with the equal lanes of devices as one against the same steps device by device, on meshes and on any plans."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from unittest import mock

import pytest

from benchmarks.decoder import DecoderSize
from parplan.graph.repeated import unit_of
from parplan.plan import Scheme
from parplan.planner.mesh.search import meshes
from parplan.planner.mesh.step import Mesh
from parplan.planner.simulation.equal_lanes import EqualLanes
from parplan.planner.simulation.priced_program import PricedProgram, lowered, priced
from parplan.planner.simulation.step_tasks import step_parts
from parplan.planner.simulation.timeline import Kind, Timeline, simulate
from parplan.report.pictures.lanes import Block, device_lanes
from tests.planner.mesh.decoders import DecoderMeshes, Priced
from tests.planner.random_plans import case, random_plans

BLOCKS, DEVICES, BATCH = 6, 16, 16
DECODER = DecoderMeshes(DecoderSize(BLOCKS, 256, 512, 4, 2, 1024, tied=False, sequence=256), DEVICES)
MESHES = [mesh for mesh in meshes(DEVICES, BATCH, BLOCKS, 4) if mesh.groups > 1 and mesh.samples < 4]


def of_mesh(mesh: Mesh) -> Priced:
    """A mesh as a plan."""
    return DECODER.plan(DECODER.step(mesh))


def one_by_one(of: Priced) -> Timeline:
    """The step with tasks of their own for every device."""
    with mock.patch.object(EqualLanes, "of", lambda work: EqualLanes.apart(work.program.devices)):
        return simulate(*of)


def busy(found: Timeline) -> Mapping[int, tuple[tuple[object, ...], ...]]:
    """What every device does, lane by lane, waits aside."""

    def told(block: Block) -> tuple[object, ...]:
        return block.kind, block.what, block.number, block.start_s, block.end_s

    return {
        one.devices[0]: tuple(
            (lane.lane, *(told(block) for block in lane.blocks if not block.waiting)) for lane in one.lanes
        )
        for one in device_lanes(found)
    }


def assert_same(of: Priced) -> tuple[Timeline, Timeline]:
    found, each = simulate(*of), one_by_one(of)
    assert found.step_s == pytest.approx(each.step_s, rel=1e-9)
    assert found.last == each.last
    assert busy(found) == busy(each)
    for device in range(found.device_count):
        assert found.spent_s(device) == pytest.approx(each.spent_s(device), rel=1e-9)
    return found, each


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES, ids=Mesh.describe)
def test_a_mesh_takes_what_its_devices_take_one_by_one(mesh: Mesh) -> None:
    found, each = assert_same(of_mesh(mesh))
    assert len(found.parts) <= len(each.parts)
    if mesh.data * mesh.tensor > 4:
        assert len(found.parts) < 0.75 * len(each.parts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", MESHES, ids=Mesh.describe)
def test_tasks_that_count_as_one_take_as_long(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of tensor groups share links with messages: by their mean, so not to the last digit."""
    of, found = of_mesh(mesh), simulate(*of_mesh(mesh))
    monkeypatch.setattr("parplan.planner.simulation.timeline.MOST_BY_LAYER", 0)
    joined = simulate(*of)
    assert len(joined.parts) < 0.8 * len(found.parts)
    assert joined.step_s == pytest.approx(found.step_s, rel=0.01)
    busy_s = [dict[Kind | None, float].fromkeys((*Kind, None), 0.0) for _ in (found, joined)]
    for own_s, timeline in zip(busy_s, (found, joined), strict=True):
        for part in timeline.parts:
            for kind, share in part.kinds if part.exclusive else ():
                own_s[kind] += share * part.seconds
        assert sum(timeline.critical_s.values()) == pytest.approx(timeline.step_s, rel=1e-9)
    assert busy_s[0] == pytest.approx(busy_s[1], rel=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_replays_and_either_order(schedule: str) -> None:
    graph, cluster, costs, plan = of_mesh(Mesh(2, 4, 2, 1, 4, 1, state="sharded"))
    units = unit_of(graph)
    layers = {
        name: replace(own, saved="replay") if units.get(name, 0) % 3 == 1 else own for name, own in plan.layers.items()
    }
    assert_same((graph, cluster, costs, replace(plan, layers=layers, schedule=schedule)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(60))
def test_any_plan_takes_what_its_devices_take_one_by_one(seed: int) -> None:
    graph, cluster, costs = case(seed)
    for scheme in Scheme:
        drawn = random_plans(graph, cluster, random.Random(seed), scheme, everywhere=scheme is Scheme.GATHER)
        for plan in islice(drawn, 3):
            assert_same((graph, cluster, costs, plan))


def work_of(mesh: Mesh) -> PricedProgram:
    graph, cluster, costs, plan = of_mesh(mesh)
    return priced(graph, lowered(graph, plan, cluster), costs)


def test_devices_with_other_parts_are_followed_by_themselves() -> None:
    work = work_of(Mesh(1, 8, 2, 1, 2, 1))
    equal = EqualLanes.of(work)
    assert len(set(equal.computing)) < 8
    # One of the receivers in another stage takes less than the others.
    slot, move = next(
        (slot, one)
        for slot, one in work.moves.items()
        if one.forward_s and set(dict(one.sent)).isdisjoint(dict(one.received))
    )
    device, _ = move.received[-1]
    less = replace(move, received=(*move.received[:-1], (device, 0.5)))
    other = EqualLanes.of(replace(work, moves={**work.moves, slot: less}))
    assert other.carrying.count(other.carrying[device]) == 1
    assert other.computing == equal.computing
    # It is no part of a layer that the others compute.
    name, layer = next((name, one) for name, one in work.layers.items() if set(one.devices) == set(move.wanted.devices))
    fewer = replace(layer, devices=tuple(one for one in layer.devices if one != device))
    other = EqualLanes.of(replace(work, layers={**work.layers, name: fewer}))
    assert other.computing.count(other.computing[device]) == 1
    assert len(step_parts(work, EqualLanes.of(work))) < len(step_parts(work))
