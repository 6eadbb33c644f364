"""Pipeline stages in the search: cuts against every cut, what is taken against what is simulated, refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.api import analyze
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import InfeasiblePlan, PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.resized import at_batch
from parplan.plan import Strategy
from parplan.planner.request import PlanRequest
from parplan.planner.search.baselines import gpipe
from parplan.planner.search.context import Case, pipeline_peaks
from parplan.planner.search.formulations import Formulations
from parplan.planner.search.stages import Staged, _Load, _one_stage, fastest_in_stages
from parplan.planner.simulation.timeline import simulate
from parplan.planner.solver.problem import FloatArray
from parplan.report.analysis import Analysis

WIDTH, BATCH = 256, 64
WIDTHS = tuple(WIDTH * each for each in (1, 2, 1, 4, 1, 1, 3, 1))
NARROW = (WIDTH, 2048, 2048, 2048, 8, 2048, WIDTH)
"""Where layers take about equally long, a cut in the middle sends many times as much as one between the narrow ones."""

SLOW: dict[str, Any] = {"gpus": "2x1", "gpu": "v100", "link": "10gbe", "time_limit_s": 1000.0}


class Chain(nn.Module):
    """Layers of different widths, and their loss."""

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.layers(x), y)


def planned(net: nn.Module | None = None, **options: Any) -> Analysis:
    batch = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    return analyze(net or Chain(), batch, **{**SLOW, **options})


@pytest.mark.parametrize("widths", [WIDTHS, NARROW])
def test_the_cut_is_about_as_fast_as_the_best_of_all(widths: Sequence[int]) -> None:
    found = planned(Chain(widths), stages=2, micro_batches=4)
    graph = at_batch(capture(Chain(widths), (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))), BATCH // 4)
    cluster = found.cluster
    costs, names = RooflineCosts(graph, cluster, micro_batches=4), list(graph.layers)
    plan = found.plan
    assert found.prediction.step_s == pytest.approx(simulate(graph, cluster, costs, plan).step_s, rel=1e-9)
    assert found.prediction.memory_bytes == pipeline_peaks(plan, graph, costs)
    steps = {}
    for end in range(1, len(names)):
        for schedule in ("gpipe", "1f1b"):
            layers = {
                name: replace(own, devices=(int(place >= end),))
                for place, (name, own) in enumerate(plan.layers.items())
            }
            other = replace(plan, layers=layers, schedule=schedule)
            steps[end, schedule] = simulate(graph, cluster, costs, other).step_s
    assert found.prediction.step_s <= 1.03 * min(steps.values())


@pytest.mark.parametrize(("batch", "micro_batches"), [(64, 8), (12, 12), (4, 4)])
def test_gpipe_by_hand_is_cut_where_its_longest_stage_is_shortest(batch: int, micro_batches: int) -> None:
    """In four micro-batches for each stage, or in as many as there are samples."""
    whole, cluster = capture(Chain(), (torch.randn(batch, WIDTH), torch.randn(batch, WIDTH))), cluster_preset("v100", 2)

    def sized(count: int) -> Case:
        graph = at_batch(whole, batch // count)
        return Case.of(graph, cluster, RooflineCosts(graph, cluster, micro_batches=count), PlanRequest())

    (found,) = gpipe(sized)
    plan = found.plan
    assert plan is not None
    assert (plan.schedule, plan.micro_batches, found.micro_batches) == ("gpipe", micro_batches, micro_batches)
    case, names = sized(found.micro_batches), list(plan.layers)
    steps = []
    for end in range(1, len(names)):
        layers = {name: Strategy(devices=(int(place >= end),)) for place, name in enumerate(names)}
        steps.append(simulate(case.graph, cluster, case.costs, replace(plan, layers=layers)).step_s)
    assert found.step_s is not None
    assert min(steps) <= found.step_s <= 1.03 * min(steps)
    assert found.memory_bytes == max(pipeline_peaks(plan, case.graph, case.costs))
    assert found.fits
    cluster = cluster.with_memory(found.memory_bytes - 1)
    assert not gpipe(sized)[0].fits


@pytest.mark.full
def test_taken_where_memory_is_short_and_links_are_slow() -> None:
    net, small = Chain([1024] * 5), 50 << 20
    batch = torch.randn(512, 1024), torch.randn(512, 1024)
    without, found = (analyze(net, batch, **SLOW, memory_bytes=small, stages=stages) for stages in (1, None))
    assert without.plan.schedule == "serial"
    assert found.plan.schedule in ("gpipe", "1f1b")
    assert found.prediction.step_s < without.prediction.step_s
    assert max(found.prediction.memory_bytes) <= small
    assert found.proof.bound <= found.prediction.step_s
    text = str(found)
    assert "through pipeline stages" in " ".join(text.split())
    assert "on device 0, stage 1" in text
    assert ", stages" in text


@pytest.mark.full
@pytest.mark.parametrize("machine", [("4x1", "10gbe"), ("2x2", "pcie3"), ("4", "nvlink2")])
def test_stages_that_wait_too_long_are_not_solved(machine: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is that of all numbers of groups and micro-batches, of which fewer are solved."""
    solved = list[int]()

    def one_stage(search: Formulations, groups: int, below_s: float) -> Mapping[str, Strategy] | None:
        solved.append(groups)
        return _one_stage(search, groups, below_s)

    def all_of_them(search: Formulations, below_s: float, least_s: float, groups: int | None) -> Staged | None:
        return fastest_in_stages(search, below_s, 0.0, groups)

    monkeypatch.setattr("parplan.planner.search.stages._one_stage", one_stage)
    monkeypatch.setattr("parplan.planner.search.micro_batches.IDLE", 0.0)
    found, few = planned(gpus=machine[0], link=machine[1]), len(solved)
    monkeypatch.setattr("parplan.planner.search.micro_batches.fastest_in_stages", all_of_them)
    every = planned(gpus=machine[0], link=machine[1])
    assert found.prediction.step_s == pytest.approx(every.prediction.step_s, rel=1e-9)
    assert few < len(solved) - few


@pytest.mark.full
def test_stages_that_are_asked_for_are_kept() -> None:
    """Where one device alone is the fastest plan, stages that were asked for are kept."""
    batch = torch.randn(256, 1024), torch.randn(256, 1024)
    found = analyze(Chain([1024] * 9), batch, **{**SLOW, "gpus": "2x2"}, stages=2)
    assert {own.devices[0] // 2 for own in found.plan.layers.values()} == {0, 1}
    again = analyze(Chain([1024] * 9), batch, **{**SLOW, "gpus": "2x2"}, plan=found.plan)
    assert again.prediction.step_s == pytest.approx(found.prediction.step_s)
    assert again.prediction.memory_bytes == found.prediction.memory_bytes
    assert again.proof.bound < again.prediction.step_s
    by_hand = {one.plan.schedule: one.name for one in found.baselines if one.plan is not None}
    assert by_hand.keys() <= {"serial", "gpipe"}
    assert by_hand.get("gpipe") == "GPipe of equal parts"


@pytest.mark.parametrize("seed", range(20))
def test_ends_of_stages_against_every_cut(seed: int) -> None:
    random, moments, loss = Random(seed), 6, 3
    count, stages, rounds = random.randint(4, 9), random.randint(2, 4), random.choice((1, 2))
    seconds = np.array([random.uniform(0, 9) for _ in range(count)])
    held = np.array([[random.uniform(0, 9) for _ in range(moments)] for _ in range(count)])
    held[:, loss] += held[:, 0]
    flying = [float(random.randint(1, 4)) for _ in range(stages)]
    limit = rounds * random.uniform(20, 90)
    load = _Load(summed(seconds), np.zeros(count + 1), summed(held), loss)  # cut anywhere
    best = inf
    for cut in combinations(range(1, count), stages - 1):
        parts = [slice(*part) for part in pairwise((0, *cut, count))]
        nbytes = [
            rounds * (held[part, 0] + many * (held[part, loss] - held[part, 0])).sum()
            + held[part].sum(axis=0).max() - held[part, loss].sum()
            for part, many in zip(parts, flying, strict=True)
        ]  # fmt: skip
        if max(nbytes) <= limit:
            best = min(best, max(seconds[part].sum() for part in parts))
    ends = load.ends(flying, limit, 4, rounds)
    assert (ends is None) == (best == inf)
    if ends is not None:
        assert max(load.times(ends)) == pytest.approx(best)


def summed(values: FloatArray) -> FloatArray:
    """Sums up to every place."""
    return np.concatenate([np.zeros_like(values[:1]), values.cumsum(axis=0)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stages": 3}, "2 devices are no 3 equal groups"),
        ({"stages": 2, "micro_batches": 1}, "one micro-batch is no pipeline"),
        ({"stages": 2, "rules": "strict"}, "not compared beside"),
        ({"stages": 2, "pins": ["layers.0=replicas:2"]}, "not compared beside"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        planned(**options)


def test_a_loss_outside_has_no_stages() -> None:
    with pytest.raises(PlanError, match="no loss inside"):
        analyze(nn.Linear(8, 8), torch.randn(8, 8), gpus=2, gpu="v100", stages=2)


@pytest.mark.full
def test_too_little_memory_for_any_stages() -> None:
    with pytest.raises(InfeasiblePlan, match="no plan in 2 stages"):
        planned(stages=2, memory_bytes=1 << 20)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_schedule_that_was_asked_for(schedule: str) -> None:
    assert planned(stages=2, micro_batches=4, schedule=schedule).plan.schedule == schedule


@pytest.mark.parametrize("stages", [None, 1])
def test_a_schedule_without_stages_is_refused(stages: int | None) -> None:
    with pytest.raises(PlanError, match="schedule gpipe is of pipeline stages; say how many with --stages S"):
        planned(stages=stages, schedule="gpipe")
