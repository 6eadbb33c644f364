"""Predicted steps against a clock that is run by hand, part by part, and the solver against every combination."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.cluster import Cluster
from parplan.cost_models.costs import StepCost
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import STATES, Scheme, Strategy
from parplan.planner.decide import PlanRequest, decide, predict
from parplan.planner.decision import Prediction
from parplan.planner.search.context import followed
from parplan.planner.search_space.formulation import Formulation, formulate
from parplan.planner.search_space.shape import Shape
from parplan.planner.search_space.strategies import strategies
from parplan.planner.simulation.timeline import simulate
from parplan.planner.solver.problem import evaluate
from tests.cost_models.made_up import made_up_costs
from tests.planner.graphs import classifier, perceptron
from tests.planner.oracle import brute_force
from tests.plans import PLANS, plan_by

STEP = StepCost(overhead_s=4e-3, overlap=0.6, spread=0.2)


class Said(RooflineCosts):
    """A roofline that says other things of whole steps."""

    def __init__(self, graph: LayerGraph, cluster: Cluster, said: StepCost) -> None:
        super().__init__(graph, cluster)
        self.step = said


def formulated(costs: Said) -> Formulation:
    graph, cluster = costs.graph, costs.cluster
    candidates = {name: strategies(layer, graph.batch or 1, cluster.count) for name, layer in graph.layers.items()}
    return formulate(graph, cluster, costs, candidates)


def run_by_hand(formulation: Formulation, choice: list[int], said: StepCost) -> float:
    """When the last of the devices and links is done: an event after the other, as a step runs."""
    layers = [options[k] for options, k in zip(formulation.options, choice, strict=False)]
    arriving = dict.fromkeys(range(len(choice)), 0.0)
    now_s = link_s = 0.0
    for edge in formulation.parts.edges:
        pair = choice[edge.source], choice[edge.target]
        forward, backward = edge.once
        now_s += float(forward[pair])
        arriving[edge.counted_at] += float(backward[pair])
    now_s += sum(float(formulation.parts.nodes[own.node].arrival_s[choice[own.node]]) for own in formulation.reused)
    now_s += sum(option.arrival_s + option.cost.forward_s + option.batch_norm_sync_s for option in layers)
    now_s += arriving[len(layers)]  # the delivery's gradients
    for index in reversed(range(len(layers))):
        option = layers[index]
        early_s = (1 - said.late) * option.cost.reduce_s
        now_s += option.cost.backward_s + option.batch_norm_sync_s + (1 - said.overlap) * early_s
        link_s = max(link_s, now_s) + said.overlap * early_s
        now_s += arriving[index]
    # New weights come after the update.
    last_s = sum(option.cost.update_s + said.late * option.cost.reduce_s for option in layers)
    return max(now_s, link_s) + last_s + said.overhead_s


SHARE = st.floats(0, 1)


@pytest.mark.full
@given(SHARE, SHARE, st.floats(0, 1e-2), st.sampled_from([2, 3, 4]), st.booleans(), st.integers(0, 10**6))
def test_the_objective_is_what_a_clock_shows(
    overlap: float, late: float, overhead_s: float, devices: int, slow: bool, seed: int
) -> None:
    said = StepCost(overhead_s, overlap, 0.1, late=late)
    graph = classifier() if seed % 2 else perceptron()
    costs = Said(graph, cluster_preset("k20", devices, "10gbe" if slow else None), said)
    formulation = formulated(costs)
    generator = np.random.default_rng(seed)
    choice = formulation.followed([int(generator.integers(size)) for size in formulation.problem.sizes])
    found = evaluate(formulation.problem, choice).objective
    assert found == pytest.approx(run_by_hand(formulation, choice, said), rel=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("overlap", "late"), [(0.0, 0.0), (0.3, 0.0), (0.8, 0.0), (1.0, 0.5), (0.8, 0.5)])
@pytest.mark.parametrize("link", ["10gbe", None])
def test_the_solver_finds_the_best_where_reductions_cannot_hide(overlap: float, late: float, link: str | None) -> None:
    costs = Said(perceptron(), cluster_preset("k20", 2, link), replace(STEP, overlap=overlap, late=late))
    best = brute_force(formulated(costs).problem)
    decision = decide(costs.graph, costs.cluster, costs, PlanRequest(tolerance=0.0, started_ranks=True))
    assert decision.proof.status == "OPTIMAL"
    assert decision.proof.objective <= best.objective * (1 + 1e-6)
    if decision.plan.scheme is Scheme.GATHER and all(0 in own.devices for own in decision.plan.layers.values()):
        assert decision.proof.objective == pytest.approx(best.objective, rel=1e-6)


def check_sums(found: Prediction, said: StepCost) -> None:
    parts = (found.forward_s, found.backward_s, found.transfer_s, found.exposed_reduce_s, found.update_s)
    assert found.step_s == pytest.approx(sum(parts) + found.overhead_s, rel=1e-9)
    assert found.overhead_s == pytest.approx(said.overhead_s, rel=1e-12)
    assert min(parts) >= 0
    assert found.most_hidden == pytest.approx(said.overlap * (1 - said.late))
    assert found.exposed_reduce_s >= (1 - found.most_hidden) * found.reduce_s * (1 - 1e-9)
    assert found.exposed_reduce_s <= found.reduce_s * (1 + 1e-9)
    assert 0 <= found.low_s <= found.step_s <= found.high_s


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", PLANS)
def test_parts_add_up_to_the_step_and_the_range_has_it(name: str, devices: int) -> None:
    for graph in (perceptron(), classifier()):
        cluster, plan = cluster_preset("cpu", devices), plan_by(name, devices, graph)
        for said in (STEP, StepCost(), replace(STEP, overlap=0.0), replace(STEP, late=0.5)):
            found = predict(graph, cluster, made_up_costs(graph, cluster, said), plan)
            check_sums(found, said)
            assert found.low_s < found.step_s < found.high_s  # made-up figures are not certain
            check_sums(predict(graph, cluster, Said(graph, cluster, said), plan), said)


@pytest.mark.full
def test_an_overhead_is_paid_by_every_plan_and_changes_no_choice() -> None:
    """Of plans that take equally long on other devices either may be chosen."""
    graph, cluster = classifier(), cluster_preset("k20", 4)
    plain, loaded = (
        decide(graph, cluster, Said(graph, cluster, said), PlanRequest(tolerance=0.0, started_ranks=True))
        for said in (StepCost(), StepCost(5e-3))
    )
    same = predict(graph, cluster, Said(graph, cluster, StepCost()), loaded.plan)
    assert same.step_s == pytest.approx(plain.prediction.step_s, rel=1e-9)
    assert loaded.prediction.step_s == pytest.approx(plain.prediction.step_s + 5e-3)
    for one, other in zip(plain.baselines, loaded.baselines, strict=True):
        assert (one.step_s is None) == (other.step_s is None)
        if one.step_s is not None and other.step_s is not None:
            assert other.step_s == pytest.approx(one.step_s + 5e-3)


def test_a_batch_norm_over_replicas_takes_longer_in_every_account_of_a_step() -> None:
    """In the step, its simulation and its parts; not in a baseline whose batch norms are of each device's samples."""
    graph, cluster, plan = classifier(), cluster_preset("cpu", 2), plan_by("data parallel", 2, classifier())
    norms = sum(layer.mixes_batch for layer in graph.layers.values())
    before, after = (made_up_costs(graph, cluster, StepCost(batch_norm_s=more_s)) for more_s in (0.0, 0.5))
    more_s = 0.5 * norms
    assert more_s > 0
    plain, found = (predict(graph, cluster, costs, plan) for costs in (before, after))
    assert found.step_s == pytest.approx(plain.step_s + more_s)
    assert found.transfer_s == pytest.approx(plain.transfer_s + more_s)
    assert found.batch_norm_s == pytest.approx(plain.batch_norm_s + more_s)
    steps = [simulate(graph, cluster, costs, plan).step_s for costs in (before, after)]
    assert steps[1] == pytest.approx(steps[0] + more_s)
    local = [decide(graph, cluster, costs, PlanRequest(plan=plan)).baselines for costs in (before, after)]
    named = [{one.name: one.step_s for one in own} for own in local]
    assert named[0]["pure data parallel"] == pytest.approx(named[1]["pure data parallel"])


def test_doubt_makes_the_range_and_nothing_else() -> None:
    graph, cluster, plan = perceptron(), cluster_preset("cpu", 2), plan_by("data parallel", 2, perceptron())
    sure, doubtful = (
        predict(graph, cluster, made_up_costs(graph, cluster, StepCost(spread=spread)), plan) for spread in (0, 0.5)
    )
    assert sure.step_s == doubtful.step_s
    added = 0.5 * (doubtful.transfer_s + doubtful.exposed_reduce_s)
    assert doubtful.high_s - sure.high_s == pytest.approx(added)
    assert added > 0


@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", range(24))
def test_one_of_the_devices_with_the_same_layers_is_enough_to_follow(seed: int) -> None:
    graph, draw = (perceptron, classifier)[seed % 2](), Random(seed)
    cluster = cluster_preset("v100", 8, None, 4)
    costs = RooflineCosts(graph, cluster)
    blocks: tuple[tuple[int, ...], ...] = draw.choice(
        (((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1), (2, 3), (4, 5, 6, 7)), ((4, 5, 6, 7), (6, 7), (1,)))
    )
    chosen = {}
    for name, layer in graph.layers.items():
        block = draw.choice(blocks)
        apart = layer.batch is not None or layer.constant
        strategy = Strategy(len(block), 1, None, block) if apart else Strategy(devices=block[:1])
        chosen[name] = (replace(strategy, state=draw.choice(STATES) if layer.parameters else STATES[0]),)
    lanes = followed(cluster, (own.devices for (own,) in chosen.values()))
    peaks = formulate(graph, cluster, costs, chosen).device_peaks([0] * len(graph.layers), 8)
    small = cluster.with_memory(draw.choice((max(peaks) - 1, max(peaks))))
    found = []
    for shape in (Shape(lanes=lanes), Shape(lanes=tuple(range(8)))):
        problem = formulate(graph, small, costs, chosen, shape=shape, far_s=1e3).problem
        found.append(evaluate(problem, [0] * len(problem.nodes)))
    assert len(lanes) <= 1 + len(blocks)
    assert found[0].objective == pytest.approx(found[1].objective, rel=1e-12)
    assert found[0].feasible == found[1].feasible
