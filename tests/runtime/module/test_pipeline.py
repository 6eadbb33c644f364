"""Pipeline stages: training is the plain model's, in float64, in one process and on ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.graph.layer_graph import LayerGraph
from parplan.plan import STATES, Plan, Strategy
from tests.runtime.helpers import planner
from tests.runtime.pipeline_cases import (
    Crossed,
    Staging,
    Tower,
    collectives_of_a_step,
    decoder_in_stages,
    messages_of_a_step,
    on_ranks,
    trained,
)
from tests.runtime.ranks import run_case


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("groups", [2, 3])
def test_stages_on_one_device_each(schedule: str, groups: int) -> None:
    trained(Staging(groups, groups, 4, schedule), 8)


@pytest.mark.full
def test_interleaved_stages() -> None:
    trained(Staging(2, 2, 4, rounds=2), 8)


@pytest.mark.full
@pytest.mark.parametrize("state", STATES)
def test_stages_of_replicas(state: str) -> None:
    trained(Staging(2, 4, 2, state=state), 16)


def test_replays_and_tied_weights() -> None:
    trained(Staging(2, 2, 4, saved="replay"), 8, lambda: Tower(tied=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_any_cut(seed: int) -> None:
    trained(Staging(3, 3, 3, ("1f1b", "gpipe")[seed % 2], seed=seed), 9)


class Crossing(Staging):
    """Layers that read a value on their own device in another order than that of their stages."""

    def plan(self, graph: LayerGraph) -> Plan:
        chosen = {name: Strategy(devices=(int(name in ("a", "c")),)) for name in graph.layers}
        return replace(planner(chosen, 2, micro_batches=self.micro_batches)(graph), schedule=self.schedule)


def test_stages_in_another_order_than_their_layers() -> None:
    trained(Crossing(2, 2, 4, seed=0), 8, Crossed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_any_layer_anywhere(seed: int) -> None:
    schedule = ("1f1b", "gpipe")[seed % 2]
    trained(Staging(2, 2 + 2 * (seed % 3 == 0), 4, schedule, seed=seed, scattered=True), 8, Crossed, steps=2)


def test_uneven_micro_batches() -> None:
    trained(Staging(2, 2, 4), 8, lambda: Tower(counted=False), sizes=(8, 11, 3))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_on_ranks(ranks: int) -> None:
    run_case(on_ranks, ranks)


@pytest.mark.full
def test_collectives_of_a_step() -> None:
    run_case(collectives_of_a_step, 2)


@pytest.mark.full
def test_messages_of_a_step() -> None:
    run_case(messages_of_a_step, 2)


@pytest.mark.full
def test_a_decoder_in_stages() -> None:
    run_case(decoder_in_stages(2), 2)
