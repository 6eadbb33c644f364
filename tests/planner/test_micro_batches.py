"""Plans in micro-batches: T against the simulated step, memory, and the number that a search takes against all."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, compress, islice, pairwise, product
from math import inf

import pytest
import torch
from torch import nn

from benchmarks.proof_cases import KINDS, Problem, drawn, drawn_cluster
from benchmarks.proof_plans import objective_s, simulated_s
from parplan.cluster import Cluster
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import InfeasiblePlan, PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.repeated import units
from parplan.graph.resized import at_batch
from parplan.lowering.holdings import slices
from parplan.lowering.micro_batches import combinations
from parplan.plan import STATES, Plan, Scheme, Strategy
from parplan.planner.decide import decide
from parplan.planner.decision import SHARDED, Decision, PricedGraph
from parplan.planner.request import PlanRequest
from parplan.planner.search.context import fits
from parplan.planner.search_space.rules import divisors
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.planner.simulation.step_tasks import Kind
from parplan.planner.simulation.timeline import simulate
from tests.planner.random_plans import random_plans

SERIAL = ("chain", "lstm")


def in_micro_batches(problem: Problem, count: int) -> Problem:
    """The problem, with its graph as one of so many micro-batches."""
    costs = RooflineCosts(problem.graph, problem.cluster, optimizer=problem.costs.optimizer, micro_batches=count)
    return replace(problem, costs=costs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_t_is_the_simulated_step(kind: str, seed: int, count: int) -> None:
    """Of layers that follow each other; T has what a step of one micro-batch has for branches, so many times."""
    problem = drawn(kind, seed)
    several = in_micro_batches(problem, count)
    for plan in islice(random_plans(problem.graph, problem.cluster, random.Random(seed), Scheme.GATHER), 4):
        own = objective_s(plan, several) / simulated_s(plan, several)
        once = objective_s(plan, problem) / simulated_s(plan, problem)
        assert own == pytest.approx(1.0, rel=1e-9) if kind in SERIAL else abs(own - 1) <= 1.1 * abs(once - 1) + 1e-9


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", SERIAL)
def test_only_the_last_micro_batch_sums_and_updates(kind: str) -> None:
    problem = drawn(kind, 1)
    plan = next(random_plans(problem.graph, problem.cluster, random.Random(0), Scheme.GATHER))
    one, four = (simulate(p.graph, p.cluster, p.costs, plan) for p in (problem, in_micro_batches(problem, 4)))
    spent = {kind: (one.spent_s(0)[kind], four.spent_s(0)[kind]) for kind in Kind}
    assert spent[Kind.FORWARD][1] == pytest.approx(4 * spent[Kind.FORWARD][0])
    assert spent[Kind.UPDATE][1] == pytest.approx(spent[Kind.UPDATE][0])
    for device in range(problem.cluster.count):
        assert sum(four.spent_s(device).values()) == pytest.approx(four.step_s)
    numbers = {part.number for part in four.parts if part.kind is Kind.REDUCTION}
    assert numbers <= {3}


# ---- which number is taken -------------------------------------------------------------------------------------------


def model(draw: random.Random) -> tuple[LayerGraph, Cluster]:
    """Three linear layers, of which activations take most of the memory."""
    widths = [draw.choice((4, 16, 64)) for _ in range(4)]
    net = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))
    graph = capture(net, (torch.zeros(draw.choice((8, 12, 64)), widths[0]),))
    return graph, drawn_cluster(draw, 2)


def priced(graph: LayerGraph, cluster: Cluster, count: int) -> PricedGraph:
    small = at_batch(graph, (graph.batch or 1) // count)
    return PricedGraph(small, RooflineCosts(small, cluster, micro_batches=count))


def decided(graph: LayerGraph, cluster: Cluster) -> Decision:
    costs = RooflineCosts(graph, cluster)
    request = PlanRequest(tolerance=0.0, started_ranks=True)
    return decide(graph, cluster, costs, request, micro_batched=lambda count: priced(graph, cluster, count))


def best_of_all(graph: LayerGraph, cluster: Cluster, less_memory: bool = True) -> float | None:
    """The simulated step of the fastest plan that fits, of all plans in all numbers of micro-batches; and with state in
    slices, and units replayed, in numbers that double, unless told otherwise."""
    best_s, doubled = inf, 1

    def sliced(layer: Layer, strategy: Strategy) -> bool:
        return bool(slices(graph, layer, replace(strategy, state="sharded")))

    for count in divisors(graph.batch or 1):
        own = priced(graph, cluster, count)
        options = [
            strategies(layer, own.graph.batch or 1, cluster_blocks(cluster, True))
            for layer in own.graph.layers.values()
        ]
        less = less_memory and count >= doubled
        if less:
            doubled = 2 * count
            options = [
                (*known, *(replace(one, state=state) for one in known if sliced(layer, one) for state in STATES[1:]))
                for layer, known in zip(own.graph.layers.values(), options, strict=True)
            ]
        known_units = units(own.graph)
        masks = product((0, 1), repeat=len(known_units) if less else 0)
        replayed = [dict.fromkeys(chain(*compress(known_units, mask)), "replay") for mask in masks]
        for chosen, saved in product(product(*options), replayed):
            layers = {
                name: replace(one, saved=saved.get(name, "keep"))
                for name, one in zip(own.graph.layers, chosen, strict=True)
            }
            plan = Plan(graph.model, graph.fingerprint, graph.batch or 1, cluster.count, layers)
            step_s = simulate(own.graph, cluster, own.costs, plan).step_s
            if step_s < best_s and fits(own.graph, cluster, own.costs, layers):
                best_s = step_s
    return best_s if best_s < inf else None


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_no_plan_in_other_micro_batches_is_faster(seed: int) -> None:
    """Whatever the memory: from what one micro-batch of a sample takes to what the whole batch does."""
    draw = random.Random(seed)
    graph, cluster = model(draw)
    least, most = (
        min(RooflineCosts(own.graph, cluster, micro_batches=count).peaks(decided(graph, cluster).plan.layers))
        for count in (graph.batch or 1, 1)
        for own in [priced(graph, cluster, count)]
    )
    memory = int(least + draw.random() * (most - least))
    tight = Cluster.of(replace(cluster.device, memory_bytes=memory), cluster.count, cluster.links)
    fastest_s = best_of_all(graph, tight)
    try:
        found = decided(graph, tight)
    except InfeasiblePlan as reason:
        refused = str(reason)
    else:
        refused = ""
    if refused or fastest_s is None:
        # What transfers take is only estimated: a plan may be missed (of blocks of 512 bytes), never denied.
        assert refused.startswith("no plan was found that fits" if fastest_s is not None else "no plan ")
        return
    if SHARDED not in found.proof.covered:  # where memory asks for nothing they are not searched
        fastest_s = best_of_all(graph, tight, less_memory=False)
    assert fastest_s is not None
    assert min(found.proof.bound, found.proof.objective) <= fastest_s * (1 + 1e-3)
    assert max(found.prediction.memory_bytes) <= memory
    assert found.plan.batch == graph.batch
    own = priced(graph, tight, found.plan.micro_batches)
    assert fits(own.graph, tight, own.costs, found.plan.layers)


@pytest.mark.full
def test_a_plan_that_fits_has_one_micro_batch() -> None:
    graph, cluster = model(random.Random(3))
    found = decided(graph, cluster)
    assert (found.plan.micro_batches, found.micro_batches) == (1, ())


@pytest.mark.full
def test_what_needs_all_samples_is_not_cut() -> None:
    graph = capture(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), (torch.zeros(64, 64),))
    with pytest.raises(PlanError, match="1: takes its statistics of all samples"):
        combinations(graph)
    cluster = drawn_cluster(random.Random(0), 2)
    tight = Cluster.of(replace(cluster.device, memory_bytes=80_000), cluster.count, cluster.links)
    with pytest.raises(InfeasiblePlan, match=r"(?s)no plan .*fits.*cannot be cut into micro-batches: 1: takes its"):
        decided(graph, tight)
