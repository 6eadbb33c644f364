"""Pipeline stages played through: the longest path through the table of their order, and what is in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor, nn

from parplan.cluster import Cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.resized import at_batch
from parplan.lowering.pipeline.orders import Action, merged, orders
from parplan.lowering.pipeline.stages import pipeline
from parplan.planner.decide import predict
from parplan.planner.search.context import pipeline_peaks
from parplan.planner.simulation.list_schedule import schedule as scheduled
from parplan.planner.simulation.pipeline_tasks import pipeline_parts
from parplan.planner.simulation.priced_program import PricedProgram, lowered, priced
from tests.runtime.pipeline_cases import Staging

WIDTH, BATCH, DEVICES = 64, 48, 4


class Chain(nn.Module):
    """Layers one after another, and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(11)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = (self.layers(x) - y).square().mean()
        return result


@cache
def chain(micro_batches: int) -> tuple[LayerGraph, Cluster, RooflineCosts]:
    whole, cluster = capture(Chain(), (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))), cluster_preset("v100", 4)
    graph = at_batch(whole, BATCH // micro_batches)
    return graph, cluster, RooflineCosts(graph, cluster, micro_batches=micro_batches)


def longest_path(
    own: Sequence[Sequence[Action]],
    seconds: Mapping[tuple[int, bool], float],
    messages: Mapping[tuple[int, bool], float],
) -> list[float]:
    """When each group is done: every action after the one before on its group, and after what the next stage sends.

    Args:
        seconds: of a stage forward (True) and backward.
        messages: to a stage from the one before (True) or behind.
    """
    end_s = dict[Action, float]()

    def end(action: Action) -> float:
        if action not in end_s:
            place = next(actions for actions in own if action in actions)
            number = place.index(action)
            begin = end(place[number - 1]) if number else 0.0
            sender = Action(action.stage + (-1 if action.forward else 1), action.micro_batch, action.forward)
            if (sender.stage, True) in seconds:
                begin = max(begin, end(sender) + messages[action.stage, action.forward])
            end_s[action] = begin + seconds[action.stage, action.forward]
        return end_s[action]

    for action in merged(own):
        end(action)
    return [end(actions[-1]) for actions in own]


def drawn(work: PricedProgram, seed: int) -> PricedProgram:
    """Seconds drawn for every layer and message, which are shorter than stages and take nothing from compute."""
    random = Random(seed)
    layers = {
        name: replace(
            layer,
            cost=replace(
                layer.cost,
                forward_s=random.uniform(1, 9),
                backward_s=random.uniform(1, 20),
                update_s=random.uniform(0, 5),
            ),
        )
        for name, layer in work.layers.items()
    }
    moves = {
        slot: replace(move, forward_s=random.uniform(0.1, 0.9), backward_s=random.uniform(0.1, 0.9))
        for slot, move in work.moves.items()
        if move.given.value.startswith("linear")  # inputs and results take no time here
    }
    return replace(work, layers=layers, moves=moves, overhead_s=0.0, hidden=1.0)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_step_is_the_longest_path_through_the_table(schedule: str, seed: int) -> None:
    """Also where layers that follow each other count as one task, as nothing in a stage shares links with messages."""
    count, rounds = ((2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 3))[seed % 6]
    graph, cluster, costs = chain(count)
    plan = Staging(DEVICES, DEVICES, count, schedule, rounds).plan(graph)
    program = lowered(graph, plan, cluster)
    work, stages = drawn(priced(graph, program, costs), seed), pipeline(graph, program)
    numbers = stages.numbers
    own = orders(schedule, DEVICES, numbers.count, count)
    before = replace(work, layers={n: replace(one, cost=one.cost.before_last) for n, one in work.layers.items()})
    parts = pipeline_parts(work, stages, merged(own), before)
    joined = pipeline_parts(work, stages, merged(own), before, joined=True)
    assert len(joined) < len(parts)
    costs_of = [[work.layers[n].cost for n in graph.layers if numbers.of[n] == k] for k in range(numbers.count)]
    seconds = {(k, True): sum(cost.forward_s for cost in known) for k, known in enumerate(costs_of)}
    seconds |= {(k, False): sum(cost.backward_s for cost in known) for k, known in enumerate(costs_of)}
    messages = dict[tuple[int, bool], float]()
    for move in work.moves.values():
        (reader,) = (numbers.of[name] for name in move.readers if name is not None)
        messages |= {(reader, True): move.forward_s, (reader - 1, False): move.backward_s}
    updates = [sum(c.update_s for k in range(g, numbers.count, DEVICES) for c in costs_of[k]) for g in range(DEVICES)]
    done = longest_path(own, seconds, messages)
    expected = max(end + update for end, update in zip(done, updates, strict=True))
    for tasks in (parts, joined):
        assert max(span.end_s for span in scheduled(tasks)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("hidden", [0.999999, 0.5])
def test_what_messages_take_from_compute_holds_up_either_side_and_no_more(hidden: float) -> None:
    for seed, rounds in ((0, 1), (1, 2)):
        graph, cluster, costs = chain(8)
        plan = Staging(DEVICES, DEVICES, 8, "1f1b", rounds).plan(graph)
        program = lowered(graph, plan, cluster)
        work, stages = replace(drawn(priced(graph, program, costs), seed), hidden=hidden), pipeline(graph, program)
        own = orders("1f1b", DEVICES, stages.numbers.count, 8)
        before = replace(work, layers={n: replace(one, cost=one.cost.before_last) for n, one in work.layers.items()})
        spans = scheduled(pipeline_parts(work, stages, merged(own), before))
        alone = scheduled(pipeline_parts(replace(work, hidden=1.0), stages, merged(own), replace(before, hidden=1.0)))
        step_s, free_s = (max(span.end_s for span in one) for one in (spans, alone))
        # A group sends and receives at most so often; all of it at once would hold the step up by that.
        most_s = max(move.forward_s + move.backward_s for move in work.moves.values())
        assert free_s - 1e-9 <= step_s <= free_s + 2 * (1 - hidden) * 8 * rounds * most_s * 2


def test_more_micro_batches_idle_less_and_1f1b_holds_fewer() -> None:
    steps, peaks = {}, {}
    for schedule in ("1f1b", "gpipe"):
        for count in (4, 12):
            graph, cluster, costs = chain(count)
            plan = replace(Staging(DEVICES, DEVICES, count, schedule).plan(graph), batch=BATCH)
            found = predict(graph, cluster, costs, plan)
            alone = costs.peaks(plan.layers)
            assert found.memory_bytes == pipeline_peaks(plan, graph, costs)
            assert all(peak >= one for peak, one in zip(found.memory_bytes, alone, strict=True))
            steps[schedule, count], peaks[schedule, count] = found.step_s, found.memory_bytes
            serial = predict(graph, cluster, costs, replace(plan, schedule="serial"))
            assert found.step_s < serial.step_s
    assert all(one < other for one, other in zip(peaks["1f1b", 12][1:], peaks["gpipe", 12][1:], strict=True))
