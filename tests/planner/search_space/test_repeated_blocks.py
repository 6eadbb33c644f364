"""Repeated blocks planned alike: T, memory and prediction are those of the same plan with every layer for itself."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import count
from math import inf, isfinite
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import InfeasiblePlan, PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import Fold, fold
from parplan.lowering.stages import stages
from parplan.pins import Pin
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.decide import decide, predict
from parplan.planner.decision import BRANCHES, SOME_BRANCHES, Decision
from parplan.planner.request import PlanRequest
from parplan.planner.search import context, select
from parplan.planner.search.branches import averaged, foldable, sections
from parplan.planner.search.context import shape_of
from parplan.planner.search_space.formulation import Formulation, formulate
from parplan.planner.search_space.shape import Shape
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.planner.search_space.verifier import check
from parplan.planner.solver.problem import Problem, Solution, Status, objective
from parplan.planner.solver.reductions.presolve import presolve
from parplan.planner.solver.solve import solve
from tests.planner.random_plans import FAR_S, case, plan_of

WIDTHS = (16, 64)


class Block(nn.Module):
    """Two rows of layers side by side on one value, or layers one after another, and a residual sum.

    Of some, the second row is on a value that all blocks read.
    """

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.rows, self.common = draw.random() < 0.5, draw.random() < 0.3
        hidden = draw.choice(WIDTHS)
        self.a, self.b = nn.Linear(width, hidden), nn.Linear(width if self.rows else hidden, hidden)
        self.norm = nn.LayerNorm(width) if draw.random() < 0.5 else nn.Identity()
        self.last = nn.Linear(hidden, width)

    def forward(self, x: Tensor, common: Tensor) -> Tensor:
        """Both (N, width), to the same."""
        y = self.norm(x)
        beside = common if self.common else y
        y = torch.relu(self.a(y)) * self.b(beside) if self.rows else self.b(torch.relu(self.a(y)))
        result: Tensor = x + self.last(y)
        return result


class Deep(nn.Module):
    """Layers, equal blocks, layers."""

    def __init__(self, seed: int, copies: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.width = draw.choice(WIDTHS)
        state = draw.getstate()
        self.stem = nn.Linear(self.width, self.width)
        blocks = []
        for _ in range(copies):
            draw.setstate(state)
            blocks.append(Block(draw, self.width))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Sequential(nn.Linear(self.width, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        """(N, width) to (N, 8)."""
        x = common = self.stem(x)
        for block in self.blocks:
            x = block(x, common)
        result: Tensor = self.head(x)
        return result


@cache
def deep(seed: int) -> tuple[LayerGraph, Cluster, CostModel, Fold]:
    """A model of five to nine equal blocks on devices and links of any speed."""
    draw = random.Random(seed)
    net = Deep(seed, draw.randint(5, 9))
    graph = capture(net, (torch.zeros(draw.choice((4, 8, 12)), net.width),))
    _, cluster, _ = case(seed)
    found = fold(graph, 1)
    assert found is not None
    costs = RooflineCosts(graph, cluster, optimizer=draw.choice(("sgd", "momentum", "adam")))
    return graph, cluster, costs, found


def random_plan(seed: int, draw: random.Random, scheme: Scheme, everywhere: bool) -> Plan | None:
    """A plan in which equal blocks are split alike; None where what was drawn breaks a rule."""
    graph, cluster, _, found = deep(seed)
    blocks = cluster_blocks(cluster, everywhere)
    first = {name: group[0] for group in found.alike for name in group}
    drawn: dict[str, Strategy] = {}
    for name, layer in graph.layers.items():
        leader = first.get(found.kept[name], name)
        if leader not in drawn:
            drawn[leader] = draw.choice(list(strategies(layer, graph.batch or 1, blocks)))
    layers = {name: drawn[first.get(kept, name)] for name, kept in found.kept.items()}
    plan = plan_of(graph, cluster, layers, scheme)
    try:
        check(plan, graph)
    except PlanError:
        return None
    return plan


def both(seed: int, plan: Plan) -> list[tuple[Formulation, tuple[int, ...]]]:
    """The problem of a plan with every layer for itself, and with blocks alike."""
    graph, cluster, costs, found = deep(seed)
    alone = {name: (own,) for name, own in plan.layers.items()}
    pairs = []
    for blocks in (None, found):
        one = formulate(graph, cluster, costs, alone, shape=shape_of(plan, graph, cluster), far_s=FAR_S, fold=blocks)
        pairs.append((one, one.choice(plan.layers, stages(graph, plan.layers, plan.scheme).of)))
    return pairs


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", [Scheme.GATHER, Scheme.INTERLEAVE])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_t_and_memory_are_those_of_all_layers(seed: int, everywhere: bool, scheme: Scheme) -> None:
    draw, seen = random.Random(seed), 0
    _, cluster, _, _ = deep(seed)
    for _ in range(60):
        plan = random_plan(seed, draw, scheme, everywhere)
        if plan is None:
            continue
        if seen == 6:
            break
        seen += 1
        (whole, choice), (folded, small) = both(seed, plan)
        assert len(folded.problem.nodes) < len(whole.problem.nodes)
        assert objective(folded.problem, small) == pytest.approx(objective(whole.problem, choice), rel=1e-9)
        assert folded.strategies(small) == whole.strategies(choice) == plan.layers
        assert folded.device_peaks(small, cluster.count) == whole.device_peaks(choice, cluster.count)
        assert layout_changes(folded, small) == layout_changes(whole, choice)
    assert seen or scheme is Scheme.INTERLEAVE


def layout_changes(formulation: Formulation, choice: tuple[int, ...]) -> float:
    return sum(float(one.cost_s[choice[one.source], choice[one.target]]) for one in formulation.layout_changes)


@pytest.mark.full
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_transfers_that_blocks_alike_reuse_are_one_decision(seed: int, everywhere: bool) -> None:
    """Nothing is lost by it: what follows from layers that have one strategy is the same. Reductions join it."""
    graph, cluster, costs, found = deep(seed)
    blocks, draw = cluster_blocks(cluster, everywhere), random.Random(seed)
    known = {name: strategies(graph.layers[name], graph.batch or 1, blocks) for name in {*found.kept.values()}}
    shape = Shape(lanes=tuple(range(cluster.count)), anywhere=everywhere)
    problem = (one := formulate(graph, cluster, costs, known, shape=shape, far_s=FAR_S, fold=found)).problem
    for _ in range(20):
        plan = random_plan(seed, draw, Scheme.GATHER, everywhere)
        assert plan is None or isfinite(objective(problem, one.choice(plan.layers)))
    joined = presolve(problem, brief=True)
    assert joined is not None
    between = {one.names.index(middle) for middle in found.first_block.values()}
    reused = sum(between.issuperset((r.reader, *r.earlier)) for r in one.reused)
    assert len(joined.problem.nodes) <= len(problem.nodes) - 2 * (len(found.alike) + reused)


def branches_at_once(seed: int, draw: random.Random) -> Plan | None:
    """A plan in which the rows of every block are on two disjoint parts of the devices; None where they cannot be."""
    graph, cluster, _, _ = deep(seed)
    plan, blocks = random_plan(seed, draw, Scheme.GATHER, True), cluster_blocks(cluster, True)
    pairs = [(one, other) for one in blocks for other in blocks if not set(one) & set(other)]
    if plan is None or not pairs:
        return None
    layers, pair, drawn = dict(plan.layers), draw.choice(pairs), dict[tuple[int, int], Strategy]()
    for phase in (phase for section in sections(graph) for phase in section.phases if len(phase) == 2):
        for row, (branch, block) in enumerate(zip(phase, pair, strict=True)):
            for number, name in enumerate(branch):
                known = list(strategies(graph.layers[name], graph.batch or 1, [block]))
                if not known:
                    return None
                layers[name] = drawn.setdefault((row, number), draw.choice(known))
    return replace(plan, layers=layers)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_no_plan_with_blocks_alike_takes_less_than_the_bound_over_any_blocks(seed: int) -> None:
    draw = random.Random(seed)
    graph, cluster, costs, found = deep(seed)
    every = [phase for section in sections(graph) for phase in section.phases if len(phase) > 1]
    phases = foldable(every, found.kept)
    for _ in range(5):
        for plan in (random_plan(seed, draw, Scheme.GATHER, True), branches_at_once(seed, draw)):
            if plan is None:
                continue
            alone = {name: (own,) for name, own in plan.layers.items()}
            (whole, choice), _ = both(seed, plan)
            step_s = objective(whole.problem, choice)
            at_once = bool(shape_of(plan, graph, cluster).homes)
            for shape in [averaged(phases), *([] if at_once else [averaged(())])]:
                bounding = formulate(graph, cluster, costs, alone, shape=shape, far_s=FAR_S, fold=found)
                assert solve(bounding.problem, 10.0).bound <= step_s * (1 + 1e-9)


def planned(seed: int, patch: pytest.MonkeyPatch, alike: bool, plan: Plan | None = None) -> Decision:
    """The decision on a model, with blocks alike or every layer for itself."""
    graph, cluster, costs, found = deep(seed)
    patch.setattr(context, "fold", lambda graph: found if alike else None)
    return decide(graph, cluster, costs, PlanRequest(tolerance=0.0, started_ranks=True, plan=plan, time_limit_s=8.0))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_the_report_of_a_plan_is_that_of_all_layers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(seed, monkeypatch, True)
    assert " equal blocks of " in found.proof.alike
    alone = planned(seed, monkeypatch, False, found.plan)
    assert alone.prediction.step_s == pytest.approx(found.prediction.step_s, rel=1e-9)
    assert alone.prediction.memory_bytes == found.prediction.memory_bytes
    assert alone.prediction.transfer_s == pytest.approx(found.prediction.transfer_s, rel=1e-9)
    for one, other in zip(alone.layers, found.layers, strict=True):
        assert (one.name, one.strategy, one.forward_s, one.memory_bytes) == (
            other.name, other.strategy, other.forward_s, other.memory_bytes,
        )  # fmt: skip
        assert one.transfer_s == pytest.approx(other.transfer_s, rel=1e-6, abs=1e-15)


@pytest.mark.full
@pytest.mark.parametrize(("seed", "claimed"), [(6, False), (2, True)])
def test_branches_that_all_blocks_have_in_one_phase_are_not_claimed(
    seed: int, claimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one the second rows of all blocks read the stem's result: all could run at the same time, each elsewhere."""
    graph, _, _, found = deep(seed)
    every = [phase for section in sections(graph) for phase in section.phases if len(phase) > 1]
    assert every
    assert foldable(every, found.kept) == (every if claimed else [])
    proof = planned(seed, monkeypatch, True).proof
    assert (BRANCHES in proof.covered or SOME_BRANCHES in proof.covered) == claimed


@pytest.mark.full
@pytest.mark.parametrize("seed", [6, 16, 2])
def test_a_plan_with_such_branches_at_the_same_time_is_priced_layer_by_layer(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, cluster, costs, found = deep(seed)
    monkeypatch.setattr(context, "fold", lambda graph: found)
    drawn = (random_plan(seed, random.Random(number), Scheme.GATHER, True) for number in count())
    plan = next(plan for plan in drawn if plan is not None)
    layers = dict(plan.layers)
    for name, layer in graph.layers.items():
        row = name.removeprefix("blocks.").partition(".")[2]
        if row in ("norm", "a", "relu", "b"):
            block = (cluster.count - 1,) if row == "b" else (0,)
            layers[name] = strategies(layer, graph.batch or 1, [block])[0]
    plan = replace(plan, layers=layers)
    assert shape_of(plan, graph, cluster).homes
    (whole, choice), _ = both(seed, plan)
    step_s = objective(whole.problem, choice)
    folded, folded_choice = context.formulated(plan, graph, cluster, costs)
    assert objective(folded.problem, folded_choice) == pytest.approx(step_s, rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_with_blocks_alike_is_faster(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against plans of every layer for itself: at least as fast, and the same where those have blocks alike."""
    found, free = planned(seed, monkeypatch, True), planned(seed, monkeypatch, False)
    assert free.proof.bound <= found.proof.objective * (1 + 1e-9)
    layers, blocks = free.plan.layers, deep(seed)[3]
    if blocks.treated_alike(layers) and found.proof.status == "OPTIMAL":
        assert found.proof.objective <= free.proof.objective * (1 + 1e-6)


@pytest.mark.full
def test_where_no_plan_with_blocks_alike_fits_every_layer_is_planned_for_itself() -> None:
    """One sample and layers of 67 features, so that each runs whole on one of two devices that hold two thirds each."""
    graph, cluster = whole_layers_on_two_thirds()
    assert fold(graph) is not None
    found = decide(graph, cluster, RooflineCosts(graph, cluster, optimizer="adam"), PlanRequest())
    assert not found.proof.alike
    assert {own.devices for own in found.plan.layers.values()} >= {(0,), (1,)}


@pytest.mark.full
def test_a_search_that_the_time_limit_ends_does_not_claim_that_no_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(problem: Problem, *args: Any, **options: Any) -> Solution:
        if len(problem.limits) == 1:
            return solve(problem, *args, **options)
        return Solution(Status.UNKNOWN, None, inf, 0.0, inf, 1.0, limited=True)

    graph, cluster = whole_layers_on_two_thirds()
    monkeypatch.setattr(select, "solve", cut_off)
    with pytest.raises(
        InfeasiblePlan, match=r"no plan was found in .* s, and none was excluded; give more --time-limit"
    ):
        decide(graph, cluster, RooflineCosts(graph, cluster, optimizer="adam"), PlanRequest())


def whole_layers_on_two_thirds() -> tuple[LayerGraph, Cluster]:
    """36 layers that fit on no single device and lie whole on one."""
    body = [layer for _ in range(36) for layer in (nn.Linear(67, 67), nn.ReLU())]
    graph = capture(nn.Sequential(*body), (torch.zeros(1, 67),))
    cluster = cluster_preset("k20", 2)
    costs = RooflineCosts(graph, cluster, optimizer="adam")
    whole = plan_of(graph, cluster, dict.fromkeys(graph.layers, Strategy(1, 1, None, (0,))))
    limit = int(0.67 * predict(graph, cluster, costs, whole).memory_bytes[0])
    return graph, replace(cluster, devices=tuple(replace(own, memory_bytes=limit) for own in cluster.devices))


@pytest.mark.full
def test_memory_that_is_missing_is_told_of_all_blocks() -> None:
    body = [layer for _ in range(40) for layer in (nn.Linear(64, 64), nn.ReLU())]
    graph = capture(nn.Sequential(*body), (torch.zeros(4, 64),))
    cluster = cluster_preset("k20", 2)
    cluster = replace(cluster, devices=tuple(replace(one, memory_bytes=100_000) for one in cluster.devices))
    with pytest.raises(InfeasiblePlan, match=r"where the most is held by \d+ and 36 like it 1.52 MiB"):
        decide(graph, cluster, RooflineCosts(graph, cluster, optimizer="adam"), PlanRequest())


@pytest.mark.full
@pytest.mark.parametrize(("pattern", "alike"), [("*", True), ("40", False)])
def test_pins_that_treat_blocks_alike_leave_them_alike(pattern: str, alike: bool) -> None:
    body = [layer for _ in range(40) for layer in (nn.Linear(64, 64), nn.ReLU())]
    graph = capture(nn.Sequential(*body), (torch.zeros(4, 64),))
    cluster = cluster_preset("k20", 2)
    pins = (Pin(pattern, replicas=2),)
    found = decide(
        graph, cluster, RooflineCosts(graph, cluster), PlanRequest(pins=pins, price_pins=False, time_limit_s=4.0)
    )
    assert bool(found.proof.alike) is alike
    assert found.plan.layers["40"].replicas == 2
