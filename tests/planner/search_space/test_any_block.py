"""The bound of plans on any blocks of devices: none takes less, with branches at the same time or one after another."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch
from torch import nn

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Scheme
from parplan.planner.search.branches import Branch, averaged, sections
from parplan.planner.search.context import shape_of
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.shape import Shape
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.planner.solver.solve import solve
from tests.planner.branches import drawn
from tests.planner.oracle import brute_force
from tests.planner.random_plans import FAR_S, EveryPlan, case, plan_of, random_plans, step_time_s

EACH = 12


def plans_on_any_blocks(
    seed: int, branchy: bool
) -> tuple[tuple[LayerGraph, Cluster, CostModel], list[Plan], list[tuple[Branch, ...]]]:
    """A random case, some of its plans, with branches at the same time too, and its phases of branches."""
    graph, cluster, costs = case(seed)
    draw = random.Random(seed)
    if branchy:
        graph = drawn(seed)
        costs = RooflineCosts(graph, cluster, optimizer=draw.choice(("sgd", "momentum", "adam")))
    phases = [phase for section in sections(graph) for phase in section.phases if len(phase) > 1]
    plans = list(islice(random_plans(graph, cluster, draw, Scheme.GATHER, everywhere=True), EACH))
    every = EveryPlan(graph, cluster, costs)
    for homes in every.homes:
        for plan in plans[: EACH // 2]:  # branches at the same time, on disjoint blocks
            blocks = {name: block for branch, block in draw.choice(homes) for name in branch}
            on = {name: [one for one in every.known[name] if one.devices == block] for name, block in blocks.items()}
            if all(on.values()):
                moved = {name: draw.choice(own) for name, own in on.items()}
                plans.append(plan_of(graph, cluster, {**plan.layers, **moved}))
    return (graph, cluster, costs), plans, phases


@pytest.mark.sampled(1)
@pytest.mark.parametrize("branchy", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_no_plan_on_any_blocks_takes_less(seed: int, branchy: bool) -> None:
    (graph, cluster, costs), plans, phases = plans_on_any_blocks(seed, branchy)
    for plan in plans:
        alone = {name: (strategy,) for name, strategy in plan.layers.items()}
        step_s = step_time_s(graph, cluster, costs, plan)
        at_once = bool(shape_of(plan, graph, cluster).homes)
        for shape in [averaged(phases), *([] if at_once else [averaged(())])]:
            bound = solve(formulate(graph, cluster, costs, alone, shape=shape, far_s=FAR_S).problem, 10.0).bound
            assert bound <= step_s * (1 + 1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("branchy", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_arrangements_of_faster_plans_are_possible(seed: int, branchy: bool) -> None:
    """All that a plan just below the cutoff uses."""
    (graph, cluster, costs), plans, phases = plans_on_any_blocks(seed, branchy)
    known = EveryPlan(graph, cluster, costs).strategies(Shape(anywhere=True))
    for shape in {averaged(phases), averaged(())}:
        formulation = formulate(graph, cluster, costs, known, shape=shape, far_s=FAR_S)
        for plan in plans:
            cutoff = step_time_s(graph, cluster, costs, plan) * (1 + 1e-6)
            possible = solve(formulation.problem, cutoff=cutoff, refute=True).possible
            if possible is not None and (shape.homes or not shape_of(plan, graph, cluster).homes):
                within = formulation.keys(possible)
                assert all(own.key in within[name] for name, own in plan.layers.items())


def test_a_bound_leaves_out_arrangements() -> None:
    """A wide layer between narrow ones: the fastest plan shards it, and close to that every plan does."""
    graph = capture(nn.Sequential(nn.Linear(64, 8192), nn.Linear(8192, 64)), (torch.zeros(8, 64),))
    cluster = cluster_preset("v100", 4)
    costs = RooflineCosts(graph, cluster)
    known = {name: strategies(layer, 8, cluster_blocks(cluster, True)) for name, layer in graph.layers.items()}
    formulation = formulate(graph, cluster, costs, known, shape=averaged(()), far_s=FAR_S)
    truth = brute_force(formulation.problem)
    assert truth.choice is not None
    found = solve(formulation.problem, cutoff=1.001 * truth.objective, refute=True)
    assert found.possible is not None
    assert all(k in own for own, k in zip(found.possible, truth.choice, strict=True))
    assert sum(map(len, found.possible)) < sum(formulation.problem.sizes) / 2


@pytest.mark.full
@pytest.mark.parametrize("seed", [5, 17, 35, 44])
def test_what_is_below_a_cutoff_is_found(seed: int) -> None:
    """A faster plan on other blocks than the first: presolve of CP-SAT once took such a model for an infeasible one."""
    graph, (_, cluster, _) = drawn(seed), case(seed)
    costs = RooflineCosts(graph, cluster, optimizer=random.Random(seed).choice(("sgd", "momentum", "adam")))
    every = EveryPlan(graph, cluster, costs)
    lanes = tuple(range(cluster.count))
    first, anywhere = Shape(lanes=lanes), Shape(lanes=lanes, anywhere=True)
    known = {name: [one for one in own if min(one.devices) == 0] for name, own in every.known.items()}
    step_s = solve(formulate(graph, cluster, costs, known, shape=first, far_s=FAR_S).problem).objective
    problem = formulate(graph, cluster, costs, every.strategies(anywhere), shape=anywhere, far_s=step_s).problem
    truth = brute_force(problem).objective
    assert truth < 0.999 * step_s
    assert solve(problem, cutoff=step_s).objective == pytest.approx(truth, rel=1e-9)
