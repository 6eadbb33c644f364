"""The five configurations of cuda-convnet2's multi-GPU guide: each loads, plans, verifies and runs.

At full size they load and plan; verified and run are siblings with fewer filters and units and smaller images, which
have the same layers on the same devices.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.convnet2 import LayerFile, read
from parplan.cost_models.devices.requested import ClusterRequest, find_cluster
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.plan import Strategy
from parplan.planner.decide import PlanRequest, decide
from tests.convnet2.layer_files import NAMES, fixture, sibling

ONE, BOTH, ALL = (0,), (0, 1), (0, 1, 2, 3)
FC = ("fc6", "drop6", "fc7", "drop7")
CONVS = ("conv1", "rnorm1", "pool1", "conv2", "rnorm2", "pool2", "conv3", "conv4", "conv5", "pool5")
END = ("fc8", "probs", "logprob")


def columns(*names: str) -> dict[str, tuple[int, ...]]:
    """Layers a to d, one per GPU."""
    return {f"{name}{letter}": (device,) for name in names for device, letter in enumerate("abcd")}


def towers(*names: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}{letter}": (device,) for name in names for device, letter in enumerate("ab")}


# (file, parameters, devices of every layer, images of the guide's command line)
FIVE = [
    pytest.param("1gpu", 61_100_840, dict.fromkeys((*CONVS, *FC, *END), ONE), 128, id="1gpu"),
    pytest.param("2gpu-data", 61_100_840, dict.fromkeys((*CONVS, *FC, *END), BOTH), 256, id="2gpu-data"),
    pytest.param("2gpu-model", 60_965_224, towers(*CONVS, *FC) | dict.fromkeys(END, ONE), 128, id="2gpu-model"),
    pytest.param("4gpu-data", 61_100_840, dict.fromkeys((*CONVS, *FC, *END), ALL), 512, id="4gpu-data"),
    pytest.param("4gpu-data-model", 61_100_840, dict.fromkeys(CONVS, ALL) | columns(*FC, "all6")
                 | dict.fromkeys(("all7", *END), ONE), 512, id="4gpu-data-model"),
]  # fmt: skip


@cache
def small(folder: Path, name: str) -> LayerFile:
    torch.manual_seed(0)
    return read(sibling(folder, name), shapes={0: (3, 64, 64)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("siblings")


@pytest.mark.parametrize(("name", "parameters", "devices", "batch"), FIVE)
def test_loads(name: str, parameters: int, devices: dict[str, tuple[int, ...]], batch: int) -> None:
    with torch.device("meta"):
        found = fixture(name)
        images, labels = found.example_inputs()
        costs = found.network(images, labels)
    assert sum(parameter.numel() for parameter in found.network.parameters()) == parameters
    assert {pin.pattern: pin.devices for pin in found.pins} == devices
    assert found.gpus == 1 + max(max(own) for own in devices.values())
    assert (images.shape, labels.shape, costs.shape) == ((batch, 3, 224, 224), (batch,), (batch,))
    assert found.classes == 1000


@pytest.mark.full
@pytest.mark.parametrize(("name", "devices"), [pytest.param(p.values[0], p.values[2], id=p.id) for p in FIVE])
def test_plans(name: str, devices: dict[str, tuple[int, ...]]) -> None:
    """At full size: the plan is the file's, and it has a price."""
    found = fixture(name)
    graph = capture(found.network, found.example_inputs(), {})
    cluster = find_cluster(ClusterRequest(found.gpus, "k20", None, None, None, False)).cluster
    decision = decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest(pins=found.pins, price_pins=False))
    plan = decision.plan
    assert decision.prediction.step_s > 0
    assert {layer: strategy.devices for layer, strategy in plan.layers.items()} == devices
    assert {layer: strategy.replicas for layer, strategy in plan.layers.items()} == {
        layer: len(own) for layer, own in devices.items()
    }
    periods = {layer for layer, strategy in plan.layers.items() if strategy.update_period == 1}
    assert periods == (set(columns("fc6", "fc7")) | {"fc8"} if name == "4gpu-data-model" else set())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_verifies(folder: Path, name: str) -> None:
    found = small(folder, name)
    checked = parplan.verify(found.network, found.example_inputs(8), pins=found.pins, batch=8)
    assert checked.passed
    assert {row.group for row in checked.rows} == {"outputs", "loss", "gradients"}
    assert checked.plan.devices == found.gpus


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_runs(folder: Path, name: str) -> None:
    """Training on logical CPU devices tells two kinds of images apart, and predictions come without labels."""
    found = small(folder, name)
    torch.manual_seed(1)
    labels = torch.arange(8) % 2
    images = torch.randn(8, 3, 64, 64) + (2.0 * labels - 1.0).view(-1, 1, 1, 1)
    compiled = parplan.compile(found.network, devices=["cpu"] * (found.gpus or 1), pins=found.pins)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.05)
    before = without_dropout(found.network, images, labels)
    for _ in range(15):
        optimizer.zero_grad()
        compiled(images, labels).mean().backward()
        optimizer.step()
    assert without_dropout(found.network, images, labels) < 0.7 * before
    assert compiled.plan is not None
    first = next(iter(compiled.plan.layers.values()))
    assert first == Strategy(replicas=len(found.pins[0].devices or ()), devices=found.pins[0].devices or ())
    compiled.eval()
    predictions = compiled(images)
    torch.testing.assert_close(predictions.sum(1), torch.ones(8))


def without_dropout(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The plain network's mean cost."""
    network.eval()
    with torch.no_grad():
        cost = network(images, labels).mean().item()
    network.train()
    return float(cost)


@pytest.mark.full
def test_verifies_at_full_size() -> None:
    """All filters and units in float64, on images of 64 pixels: the sizes of maps change no layer's devices."""
    found = read(fixture("4gpu-data-model").path, shapes={0: (3, 64, 64)})
    assert parplan.verify(found.network, found.example_inputs(4), pins=found.pins, batch=4).passed
