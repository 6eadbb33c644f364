"""Meshes of equal blocks in the search: plans that fit and run, beside what a search over all layers finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.decoder import Decoder, DecoderSize
from parplan.api import analyze, verify
from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import InfeasiblePlan, PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.resized import at_batch
from parplan.lowering.lower import lower
from parplan.lowering.pipeline.stages import stage_numbers
from parplan.lowering.program import Program
from parplan.plan import Plan, Strategy
from parplan.planner.decide import PlanRequest, decide, predict
from parplan.planner.decision import MESHES, WIDEST
from parplan.planner.search.context import Case, pipeline_peaks
from parplan.planner.search.meshes import Meshed, fastest_mesh
from parplan.planner.search_space.formulation import Formulation, formulate
from parplan.planner.search_space.verifier import check
from parplan.planner.simulation.timeline import Timeline, simulate
from parplan.report.analysis import Analysis

BLOCKS, WIDTH, BATCH, LENGTH = 14, 512, 8, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return result


class Deep(nn.Module):
    """Equal blocks between two layers, with its loss or without."""

    def __init__(self, counted: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.counted = counted

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made: Tensor = self.last(self.blocks(self.first(x)))
        return functional.mse_loss(made, y) if self.counted else made + y


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, LENGTH, 32), torch.randn(BATCH, LENGTH, 32)


# 28 M parameters: weights, gradients and adam's state take 448 MiB, whole.
SMALL: dict[str, Any] = {
    "gpus": "4x1",
    "gpu": "v100",
    "link": "10gbe",
    "memory_bytes": 200 << 20,
    "time_limit_s": 1000.0,
}


@dataclass
class Watched:
    """A search, and what it did on the way."""

    found: Analysis
    simulated: list[tuple[object, ...]]
    lowered: list[tuple[object, ...]]
    options: list[int]  # of each formulation, over all layers
    used_s: list[tuple[float, float]]  # since meshes were asked for: of the limit, and by the clock


@cache
def watched() -> Watched:
    """The search that most tests ask for, with meshes that take half a second longer."""
    simulated, lowered, options = list[tuple[object, ...]](), list[tuple[object, ...]](), list[int]()
    meshed = list[tuple[Case, float, float]]()

    def simulating(graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan) -> Timeline:
        simulated.append((plan.micro_batches, plan.schedule, *plan.layers.values()))
        return simulate(graph, cluster, costs, plan)

    def lowering(graph: LayerGraph, strategies: Mapping[str, Strategy], *setting: Any) -> Program:
        lowered.append((graph.batch, *strategies.values()))
        return lower(graph, strategies, *setting)

    def formulating(*given: Any, **more: Any) -> Formulation:
        made = formulate(*given, **more)
        options.append(sum(map(len, made.options)))
        return made

    def slow(case: Case, sized: Callable[[int], Case | None]) -> Meshed | None:
        meshed.append((case, case.deadline.left_s(), time.monotonic()))
        time.sleep(0.5)
        return fastest_mesh(case, sized)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parplan.planner.search.context.simulate", simulating)
        patch.setattr("parplan.cost_models.roofline.lower", lowering)
        for module in ("context", "formulations"):
            patch.setattr(f"parplan.planner.search.{module}.formulate", formulating)
        patch.setattr("parplan.planner.search.micro_batches.fastest_mesh", slow)
        found = analyze(Deep(), inputs(), **SMALL)
    used_s = [(left_s - case.deadline.left_s(), time.monotonic() - begin) for case, left_s, begin in meshed]
    return Watched(found, simulated, lowered, options, used_s)


@cache
def planned(counted: bool = True, **more: Any) -> Analysis:
    if counted and not more:
        return watched().found
    return analyze(Deep(counted), inputs(), **{**SMALL, **more})


@cache
def graph_of_all() -> LayerGraph:
    return capture(Deep(), inputs())


def test_the_plan_of_a_mesh_fits_and_is_what_is_simulated() -> None:
    found = planned()
    plan, step = found.plan, found.prediction
    assert MESHES in found.proof.covered
    assert plan.schedule == "1f1b"  # on slow links
    graph = at_batch(graph_of_all(), BATCH // plan.micro_batches)
    costs = RooflineCosts(graph, found.cluster, micro_batches=plan.micro_batches)
    check(plan, graph)
    assert step.step_s == pytest.approx(simulate(graph, found.cluster, costs, plan).step_s, rel=1e-9)
    assert step.memory_bytes == pipeline_peaks(plan, graph, costs)
    assert max(step.memory_bytes) <= SMALL["memory_bytes"]
    assert 0 < found.proof.bound <= step.step_s
    text = " ".join(str(found).split())
    assert "tensor groups of equal blocks were counted" in text
    assert "on device 0, stage 1" in text
    assert "time-limit" not in text


@pytest.mark.full
def test_no_slower_than_a_search_over_all_layers() -> None:
    found, without = planned(), planned(stages=1)
    assert MESHES not in without.proof.covered
    assert max(without.prediction.memory_bytes) <= SMALL["memory_bytes"]
    assert found.prediction.step_s < without.prediction.step_s


@pytest.mark.full
def test_beside_a_mesh_layers_lie_on_one_device_or_as_many_as_can_share_them() -> None:
    """Where the whole batch is faster, on fast links: the bound is of such plans, as those by hand are."""
    found = planned(gpus=4, link="nvlink3")
    assert WIDEST in found.proof.covered
    assert found.plan.micro_batches == 1
    assert {len(one.devices) for one in found.plan.layers.values()} <= {1, 4}
    by_hand = {one.name: one.step_s or 0.0 for one in found.baselines if one.fits}
    assert {"pure model parallel", "fully sharded, recomputation"} <= {*by_hand}
    assert found.proof.bound <= found.prediction.step_s <= min(by_hand.values()) * (1 + 1e-6)
    assert "on one of them, or on as many as can share it" in " ".join(str(found).split())
    assert all(one.memory_bytes is not None for one in found.without)  # none is a mesh


def test_plans_by_hand_are_given_plans_in_micro_batches_of_their_own() -> None:
    """Each has the step and the peak of its plan priced alone; in fewer micro-batches it does not fit."""
    found, graph = planned(), graph_of_all()
    limit, others = SMALL["memory_bytes"], set[int | str]()
    for one in found.baselines:
        if one.name == "one device":
            continue
        assert one.plan is not None
        if one.plan.schedule == "gpipe":
            small = at_batch(graph, BATCH // one.micro_batches)
            costs = RooflineCosts(small, found.cluster, optimizer="adam", micro_batches=one.micro_batches)
            assert one.step_s == pytest.approx(predict(small, found.cluster, costs, one.plan).step_s, rel=1e-9)
            assert one.memory_bytes == max(pipeline_peaks(one.plan, small, costs))
            others.add(one.plan.schedule)
            continue
        parts = [count for count in (1, 2) if count <= one.micro_batches]
        for count in parts:
            small = at_batch(graph, BATCH // count)
            costs = RooflineCosts(small, found.cluster, optimizer="adam", micro_batches=count)
            peak = max(costs.peaks(one.plan.layers))
            assert (count == one.micro_batches and one.fits) == (peak <= limit), one.name
        given = predict(small, found.cluster, costs, one.plan)
        assert one.step_s == pytest.approx(given.step_s, rel=1e-9)
        assert one.memory_bytes == peak
        others.add(one.micro_batches)
    assert found.plan.micro_batches not in others
    assert "gpipe" in others
    assert {one.name: one.fits for one in found.baselines}["fully sharded, recomputation"]


@pytest.mark.full
def test_meshes_that_lack_what_the_plan_has_are_counted() -> None:
    (stages,) = planned().without
    assert stages.name == "stages"
    slower = planned(stages=1).prediction.step_s / planned().prediction.step_s
    assert stages.ratio == pytest.approx(slower, rel=0.2)
    little = planned(memory_bytes=150 << 20)
    ratios = {one.name: one.ratio for one in little.without}
    assert ratios["tensor shards"] is None
    assert (ratios["recomputation"] or 0) > 1
    assert "without tensor shards none fits" in " ".join(str(little).split())


@pytest.mark.full
def test_without_a_loss_inside_there_are_no_stages() -> None:
    found = planned(counted=False)
    assert found.plan.schedule == "serial"
    assert max(found.prediction.memory_bytes) <= SMALL["memory_bytes"]
    assert str(found).count("chosen\n") <= 1


@pytest.mark.full
def test_fewer_samples_than_devices_leave_stages_alone() -> None:
    few = torch.randn(2, LENGTH, 32), torch.randn(2, LENGTH, 32)
    found = analyze(Deep(), few, **SMALL)
    assert MESHES in found.proof.covered
    assert found.plan.schedule == "1f1b"
    assert found.plan.micro_batches == 2


@pytest.mark.full
def test_the_number_of_micro_batches_asked_for_is_kept() -> None:
    assert planned(micro_batches=4).plan.micro_batches == 4


@pytest.mark.full
def test_on_more_devices_than_plans_are_laid_out_for_the_fastest_mesh_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned()
    monkeypatch.setattr("parplan.planner.search.meshes.MOST_MESHED", 3)
    with pytest.raises(PlanError, match="laid out on at most 3 devices, and these are 4; say --gpus 3") as refused:
        analyze(Deep(), inputs(), **SMALL)
    text = str(refused.value)
    assert f"{found.plan.micro_batches} micro-batches of" in text
    seconds = float(text.partition("about ")[2].partition(" s a step")[0])
    assert seconds == pytest.approx(found.prediction.step_s, rel=0.2)
    with pytest.raises(InfeasiblePlan, match="no mesh of 4 devices"):
        analyze(Deep(), inputs(), **{**SMALL, "memory_bytes": 10 << 20})


@pytest.mark.full
def test_a_mesh_trains_as_the_plain_model() -> None:
    assert verify(Deep(), inputs(), plan=planned().plan).passed


@pytest.mark.full
def test_a_graph_in_evaluation_has_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: object) -> None:
        pytest.fail("meshes are priced as training steps")

    graph, cluster = capture(Deep(), inputs(), training=False), planned().cluster
    monkeypatch.setattr("parplan.planner.search.micro_batches.fastest_mesh", asked)
    found = decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest(time_limit_s=1000.0))
    assert not found.plan.replayed
    assert found.plan.micro_batches == 1


@pytest.mark.full
@pytest.mark.parametrize("groups", [2, 4])
def test_a_mesh_has_the_stages_that_were_asked_for(groups: int) -> None:
    found = planned(stages=groups)
    assert MESHES in found.proof.covered
    assert len(stage_numbers(graph_of_all(), found.plan.layers).groups) == groups
    assert found.prediction.step_s >= planned().prediction.step_s


@pytest.mark.full
def test_a_mesh_that_a_plan_by_hand_beats_is_not_taken() -> None:
    """Of layers this small the count says too much: fully sharded with recomputation took 15 % less than the mesh."""
    with torch.device("meta"):
        model = Decoder(DecoderSize(8, 512, 1536, 8, 8, 4096, False, 256))
        tokens = torch.zeros(32, 256, dtype=torch.long)
    given: dict[str, Any] = {"gpus": 4, "gpu": "h100-sxm", "memory_bytes": 307 << 20, "time_limit_s": 1000.0}
    found = analyze(model, (tokens, tokens), **given)
    assert found.proof.objective <= 1.03 * min(one.step_s for one in found.baselines if one.fits and one.step_s)


@pytest.mark.full
def test_a_schedule_that_meshes_lack_is_searched_over_all_layers() -> None:
    found = planned(stages=4, schedule="gpipe")
    assert found.plan.schedule == "gpipe"
    assert MESHES not in found.proof.covered


def test_no_step_is_simulated_twice() -> None:
    assert planned().plan.schedule == "1f1b"
    seen = watched().simulated
    assert len(seen) == len(set(seen)) > 0


def test_the_time_that_meshes_take_is_not_that_of_searches() -> None:
    assert MESHES in planned().proof.covered
    ((of_the_limit, by_the_clock),) = watched().used_s
    assert of_the_limit < by_the_clock - 0.5


def test_a_mesh_that_fits_is_lowered_and_formulated_once() -> None:
    assert planned().plan.schedule == "1f1b"
    lowered = watched().lowered
    assert len(set(lowered)) == len(lowered) > 0
    # Of the plan, and of each plan by hand (with equal blocks once); of no problem with several strategies of a layer.
    assert max(watched().options) == len(graph_of_all().layers)
