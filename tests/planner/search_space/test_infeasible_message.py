"""The message of a search without a plan: the machine that it names is large enough."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from parplan.api import analyze
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import InfeasiblePlan, ParplanError
from parplan.fields import size_text
from parplan.graph.capture.capture import capture
from parplan.graph.repeated import unit_of
from parplan.graph.resized import at_batch
from parplan.plan import Strategy

NET = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)))
X, SMALL = torch.randn(16, 512), 14 << 20  # weights, gradients and adam's state take 24 MiB


@cache
def told() -> re.Match[str]:
    """Devices, samples of a micro-batch and memory, as a message says them."""
    with pytest.raises(InfeasiblePlan, match="of these devices are enough") as refused:
        analyze(NET, X, gpus=1, gpu="a100", memory_bytes=SMALL)
    found = re.search(r"(\d+) of these .* micro-batches of (\d+) samples?, takes (\S+ MiB) on each", str(refused.value))
    assert found is not None
    return found


@pytest.mark.full
def test_a_model_that_does_not_fit_is_told_how_many_devices_are_enough() -> None:
    count, samples = int(told()[1]), int(told()[2])
    graph = at_batch(capture(NET, (X,)), samples)
    costs = RooflineCosts(graph, cluster_preset("a100", count), micro_batches=16 // samples)
    every, known = Strategy(count, 1, None, tuple(range(count))), unit_of(graph)
    layers = {
        name: replace(every, state="gathered" if own.parameters else "replicated", saved="replay")
        if name in known
        else every
        for name, own in graph.layers.items()
    }
    assert told()[3] == size_text(max(costs.peaks(layers)))


@pytest.mark.parametrize("options", [{"pins": "*=replicas:1"}, {"micro_batches": 1}, {"rules": "strict"}])
def test_no_larger_machine_is_named_beside_what_is_decided_by_hand(options: dict[str, Any]) -> None:
    with pytest.raises(ParplanError) as refused:
        analyze(nn.Linear(512, 512), torch.randn(16, 512), gpus=1, gpu="a100", memory_bytes=1 << 20, **options)
    assert "are enough" not in str(refused.value)


@pytest.mark.full
def test_a_plan_says_how_few_devices_are_enough() -> None:
    found = analyze(NET, X, gpus=2 * int(told()[1]), gpu="a100", memory_bytes=SMALL)
    assert found.notes[-1] == f"{told()[0]}."
    assert "enough" not in " ".join(analyze(NET, X, gpus=2, gpu="a100").notes)  # one has room for all
