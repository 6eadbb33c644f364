"""Strategies are exactly what the rules allow, for any number of devices."""

from __future__ import annotations

import pytest

from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.planner.search_space.strategies import device_blocks, strategies
from parplan.planner.search_space.verifier import check
from tests.planner.graphs import classifier, perceptron


def plan_with(graph: LayerGraph, layers: dict[str, Strategy], devices: int) -> Plan:
    everywhere = {name: layers.get(name, Strategy()) for name in graph.layers}
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, devices, everywhere)


def described(graph: LayerGraph, layer: str, devices: int) -> set[str]:
    found = strategies(graph.layers[layer], graph.batch or 1, devices)
    return {f"{s.replicas}x{s.shards} {s.axis or '-'} on {len(s.devices)}" for s in found}


def test_a_linear_layer_on_four_devices() -> None:
    assert described(perceptron(), "0", 4) == {
        "1x1 - on 1", "2x1 - on 2", "3x1 - on 3", "4x1 - on 4",
        "1x2 in-features on 2", "1x2 out-features on 2", "1x3 in-features on 3", "1x3 out-features on 3",
        "1x4 in-features on 4", "1x4 out-features on 4", "2x2 in-features on 4", "2x2 out-features on 4",
    }  # fmt: skip


def test_a_loss_is_cut_by_samples_and_vocabulary_and_its_mean_stays_on_one_device() -> None:
    assert described(classifier(), "loss", 4) == {
        "1x1 - on 1", "2x1 - on 2", "3x1 - on 3", "4x1 - on 4", "1x2 vocabulary on 2", "1x4 vocabulary on 4",
        "2x2 vocabulary on 4",
    }  # fmt: skip
    assert described(classifier(), "loss.row_losses", 2) == {"1x1 - on 1", "2x1 - on 2"}
    assert described(classifier(), "loss.batch_mean", 8) == {"1x1 - on 1"}


@pytest.mark.parametrize("devices", range(1, 9))
def test_every_strategy_passes_the_verifier_and_replicas_divide_the_batch(devices: int) -> None:
    graph = classifier()
    for name, layer in graph.layers.items():
        found = strategies(layer, 12, device_blocks(devices, everywhere=True))
        assert len(set(found)) == len(found)
        for strategy in found:
            assert 12 % strategy.replicas == 0
            check(plan_with(graph, {name: strategy}, devices), graph)


def test_blocks_cover_every_device_alone_and_all_together() -> None:
    blocks = set(device_blocks(6, everywhere=True))
    assert {(device,) for device in range(6)} <= blocks
    assert {tuple(range(6)), (0, 1), (2, 3), (4, 5), (0, 1, 2), (3, 4, 5)} <= blocks
    assert list(device_blocks(3)) == [(0,), (0, 1), (0, 1, 2)]
