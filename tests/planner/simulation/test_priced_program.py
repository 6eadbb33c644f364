"""Simulated tasks against the program's entries: the same layers, passes and devices, the same senders and bytes."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice

import pytest

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.program import Code, Compute, Transfer
from parplan.plan import Plan, Scheme
from parplan.planner.simulation.priced_program import lowered, priced
from parplan.planner.simulation.timeline import Kind, simulate
from tests.planner.random_plans import case, random_plans

SEEDS = range(60)
EACH = 3


def plans(seed: int) -> Iterator[tuple[LayerGraph, Cluster, CostModel, Plan]]:
    """Random plans of all schemes, on any blocks in one pass."""
    graph, cluster, costs = case(seed)
    for scheme in Scheme:
        drawn = random_plans(graph, cluster, random.Random(seed), scheme, everywhere=scheme is Scheme.GATHER)
        for plan in islice(drawn, EACH):
            yield graph, cluster, costs, plan


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_task_is_an_entry_of_the_program_and_the_reverse(seed: int) -> None:
    for graph, cluster, costs, plan in plans(seed):
        program = lowered(graph, plan, cluster)
        found, simulated = priced(graph, program, costs), simulate(graph, cluster, costs, plan)
        for kind, without in ((Kind.FORWARD, Code.STATISTICS), (Kind.BACKWARD, Code.NORMALISE)):
            steps = program.forward if kind is Kind.FORWARD else program.backward
            compute = [step for step in steps if isinstance(step, Compute) and step.code is not without]
            entries = Counter((n, s.pass_number, d) for s in compute for n in s.layers for d in s.grid.devices)
            tasks = Counter((p.what, p.number, d) for p in simulated.parts if p.kind is kind for d in p.devices)
            assert tasks == entries
        moved: dict[tuple[str, int | None], float] = defaultdict(float)
        for part in (part for part in simulated.parts if part.kind is Kind.TRANSFER):
            moved[part.what, part.number] += part.seconds
        entered: dict[tuple[str, int | None], float] = defaultdict(float)
        for step in (step for step in program.forward if isinstance(step, Transfer)):
            move = found.moves.get(step.target)
            if move is not None and move.forward_s + move.backward_s > 0:
                entered[move.value, step.wanted.pass_number] += move.forward_s + move.backward_s
        assert moved == pytest.approx(entered)
        summed = {name for name, layer in graph.layers.items() for bucket in program.buckets
                  if not set(bucket.parameters).isdisjoint(layer.parameters)}  # fmt: skip
        assert {part.what for part in simulated.parts if part.kind is Kind.REDUCTION} <= summed


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_transfer_keeps_the_lanes_busy_in_proportion_to_what_the_program_sends(seed: int) -> None:
    """But for the terms of a sum, which are one collective, and transfers that nothing but local copies make."""
    for graph, cluster, costs, plan in plans(seed):
        if plan.scheme is not Scheme.GATHER:
            continue
        program = lowered(graph, plan, cluster)
        found = priced(graph, program, costs).moves
        for step in program.transfers:
            sent, received = Counter[int](), Counter[int]()
            for piece in step.exchange.pieces:
                if piece.source != piece.target:
                    sent[piece.source] += piece.elements
                    received[piece.target] += piece.elements
            if step.target not in found or found[step.target].given.layout.partial:
                continue
            move, most = found[step.target], max([*sent.values(), *received.values()], default=0)
            assert (move.forward_s > 0) is (most > 0)
            for own, real in ((move.sent, sent), (move.received, received)):
                assert {d: part * most for d, part in own} == pytest.approx(dict(real))
