"""Meshes of a captured decoder against the same as a plan: its simulated step, its memory, its rules."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch
from torch import Tensor, nn

from benchmarks.decoder import DecoderSize
from parplan.api import verify
from parplan.cluster import Cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import InfeasiblePlan, PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.resized import at_batch
from parplan.plan import Strategy
from parplan.planner.mesh.parts import parts
from parplan.planner.mesh.plan import plan_of
from parplan.planner.mesh.search import Model, fastest, meshes, priced_mesh
from parplan.planner.mesh.step import PLAIN, Links, Mesh, Step
from parplan.planner.search.context import pipeline_peaks
from parplan.planner.search_space.verifier import check
from parplan.planner.simulation.timeline import simulate
from parplan.planner.solver.problem import Problem, Solution
from parplan.planner.solver.solve import solve
from tests.planner.mesh.decoders import DecoderMeshes
from tests.runtime.pipeline_cases import TOKENS, Tower

BLOCKS, DEVICES, BATCH = 6, 8, 16
DECODER = DecoderMeshes(DecoderSize(BLOCKS, 1024, 4096, 16, 8, 16_384, tied=False, sequence=1024), DEVICES)


def as_plan(found: Step, decoder: DecoderMeshes = DECODER) -> tuple[float, int]:
    """Simulated seconds of a mesh written out as a plan, and its largest peak."""
    graph, cluster, costs, plan = decoder.plan(found)
    check(plan, graph)
    peaks = pipeline_peaks(plan, graph, costs) if found.mesh.groups > 1 else costs.peaks(plan.layers)
    assert peaks is not None
    assert plan.batch == BATCH
    return simulate(graph, cluster, costs, plan).step_s, max(peaks)


MESHES = [mesh for mesh in meshes(DEVICES, BATCH, BLOCKS, DEVICES) if mesh.samples < 8]


# Without state in slices, whose gathers the plan's costs price one parameter at a time, with the latency of each.
@pytest.mark.full
@pytest.mark.parametrize("mesh", [one for one in MESHES if one.state == "replicated"][::3], ids=Mesh.describe)
def test_a_mesh_takes_what_its_plan_takes(mesh: Mesh) -> None:
    found = DECODER.step(mesh)
    step_s, peak = as_plan(found)
    assert found.seconds == pytest.approx(step_s, rel=0.07)
    assert 0.95 * peak <= found.nbytes <= 1.25 * peak


# Where compute hides gathers and sums, and over PCIe, where they take longer than it.
@pytest.mark.full
@pytest.mark.parametrize("gpu", ["h100-sxm", "rtx4090"])
@pytest.mark.parametrize(("tensor", "data", "groups"), [(4, 2, 1), (2, 4, 1), (2, 2, 2)])
@pytest.mark.parametrize("state", ["sharded", "gathered"])
def test_state_in_slices_takes_what_its_plan_takes(state: str, tensor: int, data: int, groups: int, gpu: str) -> None:
    decoder = replace(DECODER, gpu=gpu)
    found = decoder.step(Mesh(tensor, data, groups, 1, BATCH // data // 2, 2, state=state))
    step_s, peak = as_plan(found, decoder)
    assert found.seconds == pytest.approx(step_s, rel=0.04)
    assert 0.95 * peak <= found.nbytes <= 1.15 * peak


@pytest.mark.parametrize(("data", "tensor", "axis"), [(16, 1, None), (4, 4, "out-features"), (8, 2, "in-features")])
def test_gathers_over_hosts_take_what_layers_are_charged(data: int, tensor: int, axis: str | None) -> None:
    """Half of an all-reduce over all copies, in rings of all tensor shards at once."""
    graph = capture(nn.Sequential(nn.Linear(1024, 2048, bias=False)), (torch.zeros(16, 1024),))
    cluster, mesh = cluster_preset("h100-sxm", 16), Mesh(tensor, data, state="gathered")
    strategy = Strategy(data, tensor, axis, tuple(range(16)), state="gathered")
    charged_s, _ = RooflineCosts(graph, cluster).gather(graph.layers["0"], strategy)
    nbytes = 4 * 1024 * 2048 / tensor
    assert Links(cluster).all_reduce(mesh, 1).seconds(nbytes) / 2 == pytest.approx(charged_s, rel=1e-9)


def test_slices_that_differ_are_priced_as_they_are_sent() -> None:
    """Straight from each device to every other, which loads the way out of a host more than rings."""
    graph = capture(nn.Sequential(nn.Linear(1024, 4097), nn.Linear(4097, 4096)), (torch.zeros(16, 1024),))
    costs = RooflineCosts(graph, cluster_preset("h100-sxm", 16))
    strategy = Strategy(16, 1, None, tuple(range(16)), state="gathered")
    (uneven_s, _), (even_s, _) = (costs.gather(graph.layers[name], strategy) for name in "01")
    assert uneven_s > even_s  # of a quarter of the bytes


def test_replays_are_those_of_the_plan() -> None:
    mesh = Mesh(1, 2, 4, 1, 8, 1)
    whole = DECODER.step(mesh)
    tight = DECODER.step(mesh, 0.85 * whole.nbytes)
    assert any(any(stage.replays) for stage in tight.stages)
    assert tight.seconds > whole.seconds
    step_s, peak = as_plan(tight)
    assert tight.seconds == pytest.approx(step_s, rel=0.07)
    assert tight.nbytes == pytest.approx(peak, rel=0.1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "mesh", [Mesh(2, 1, 2, 1, 4, 2), Mesh(1, 2, 2, 2, 2, 2, state="gathered"), Mesh(2, 2, 1, 1, 2, 2, state="sharded")],
    ids=Mesh.describe,
)  # fmt: skip
def test_a_mesh_runs_as_its_plan(mesh: Mesh) -> None:
    tower, words = Tower(5), torch.randint(TOKENS, (8, 6))
    graph = capture(tower, (words, words))
    own, links = Model(graph, 5, PLAIN, "fp32"), Links(cluster_preset("h100-sxm", 4), by_hand=False)
    priced = own.parts(links.cluster.first(mesh.tensor), mesh.samples)
    whole = priced_mesh(own, priced, mesh, links, inf)
    assert whole is not None
    found = priced_mesh(own, priced, mesh, links, 0.97 * whole.nbytes) or whole
    plan = plan_of(at_batch(graph, mesh.samples * mesh.data), priced, found)
    assert len(plan.replayed) > 0 or found is whole
    assert verify(tower, (words, words), plan=plan).passed


@pytest.mark.full
def test_the_fastest_of_all_meshes_that_fit() -> None:
    own, links = DECODER.model, DECODER.links
    limit = 1 << 30
    small = Links(links.cluster.with_memory(limit), by_hand=False)
    chosen = fastest(own, BATCH, small)
    every = [
        priced_mesh(own, own.parts(links.cluster.first(mesh.tensor), mesh.samples, cut), mesh, links, limit)
        for mesh in meshes(DEVICES, BATCH, BLOCKS, DEVICES)
        for cut in (True, False)
    ]
    fitting = [found.seconds for found in every if found is not None]
    assert None in every
    assert chosen.step.seconds == min(fitting)
    assert chosen.bound_s <= chosen.step.seconds
    assert 0 <= chosen.gap < 1
    with pytest.raises(InfeasiblePlan, match=r"no mesh of 8 devices with 0\.0 GiB each fits 16 samples"):
        fastest(own, BATCH, Links(links.cluster.with_memory(1 << 20), by_hand=False))


@pytest.mark.full
def test_each_tensor_group_is_priced_and_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    priced, problems = list[RooflineCosts](), list[Problem]()

    def costs(graph: LayerGraph, cluster: Cluster, precision: str) -> RooflineCosts:
        priced.append(RooflineCosts(graph, cluster, precision))
        return priced[-1]

    def solved(problem: Problem, seconds: float) -> Solution:
        problems.append(problem)
        return solve(problem, seconds)

    monkeypatch.setattr("parplan.planner.mesh.search.RooflineCosts", costs)
    monkeypatch.setattr("parplan.planner.mesh.parts.solve", solved)
    own = Model(DECODER.graph, BLOCKS, PLAIN)
    for limit, batch in ((None, BATCH), (1 << 30, BATCH), (None, 4 * BATCH)):
        fastest(own, batch, DECODER.links, limit=limit)
    assert sorted((one.cluster.count, one.graph.batch) for one in priced) == [
        (count, samples) for count in (1, 2, 4, 8) for samples in (1, 8)
    ]
    assert len({id(one.graph) for one in priced}) == 2
    assert len(problems) == 7  # twice, but on one device
    assert {len(problem.limits) for problem in problems} == {1}  # one device has what each has


def test_samples_between_two_numbers_take_no_less_than_they_do() -> None:
    own, links = DECODER.model, DECODER.links
    group = links.cluster.first(4)
    layers = own.parts(group, 1).layers
    taken, exact = own.parts(group, 3).block, parts(RooflineCosts(at_batch(own.graph, 3), group, "bf16"), layers).block
    for one, other in ((taken.seconds, exact.seconds), (taken.saved, exact.saved), (taken.transient, exact.transient)):
        assert other * (1 - 1e-9) <= one <= 1.05 * other


class Chain(nn.Module):
    """No two layers alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 20), nn.Linear(20, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x).mean()
        return result


def test_a_model_without_equal_blocks_is_refused() -> None:
    chain = Model(capture(Chain(), (torch.randn(8, 8),)), 3, PLAIN)
    with pytest.raises(PlanError, match="no run of at least three equal blocks"):
        fastest(chain, 8, Links(cluster_preset("h100-sxm", 2)))
