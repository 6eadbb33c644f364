"""A graph at another batch has the shapes, and so the prices, of one captured at it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.repeated import repeated_blocks
from parplan.graph.resized import at_batch, with_fewer_blocks
from parplan.plan import Plan, Strategy
from parplan.planner.decide import predict
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.strategies import strategies
from parplan.planner.solver.problem import Problem
from tests.kinds import KINDS, Block

K20 = cluster_preset("k20", 2)


class Flat(nn.Module):
    """Rows of flattened sequences: four of them for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(12, 2), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.block(x).flatten(0, 1))
        return y


def captured(name: str, samples: int) -> LayerGraph:
    if name == "flat":
        return capture(Flat(), (torch.randn(samples, 4, 12),))
    kind = KINDS[name]
    return capture(kind.build(), tuple(_first(argument, samples) for argument in kind.args()))


def _first(argument: Any, samples: int) -> Any:
    if isinstance(argument, dict):
        return {name: value[:samples] for name, value in argument.items()}
    return argument[:samples]


def most_split(layer: Layer, batch: int) -> Strategy:
    return own[-1] if (own := strategies(layer, batch, [(0, 1)])) else Strategy()


def problem(graph: LayerGraph) -> Problem:
    """The search for a plan: what every strategy of every layer takes, and every transfer between two."""
    candidates = {
        name: strategies(layer, graph.batch or 0, [(0,), (1,), (0, 1)]) for name, layer in graph.layers.items()
    }
    return formulate(graph, K20, RooflineCosts(graph, K20), candidates).problem


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["flat", "encoder", "unet", "language"])
def test_it_is_as_if_captured_at_that_batch(name: str) -> None:
    few, many = captured(name, 4), captured(name, 12)
    for made, meant in ((at_batch(few, 12), many), (at_batch(many, 4), few)):
        assert made.batch == meant.batch
        assert made.values == meant.values
        assert {n: layer.batch for n, layer in made.layers.items()} == {n: o.batch for n, o in meant.layers.items()}
        np.testing.assert_equal(asdict(problem(made)), asdict(problem(meant)))
        layers = {name: most_split(layer, meant.batch or 0) for name, layer in meant.layers.items()}
        plan = Plan(meant.model, meant.fingerprint, meant.batch or 0, 2, layers)
        prices = [predict(graph, K20, RooflineCosts(graph, K20), plan) for graph in (made, meant)]
        assert prices[0] == prices[1]


def test_there_and_back_is_the_same() -> None:
    graph = captured("flat", 4)
    assert at_batch(graph, 4) is graph
    assert at_batch(at_batch(graph, 20), 4).values == graph.values


def test_what_is_not_in_proportion_is_refused() -> None:
    with pytest.raises(CaptureError, match="constants that depend on the batch; capture it at 6"):
        at_batch(captured("functions", 12), 6)


@pytest.mark.full
def test_nonsense_is_refused() -> None:
    graph = captured("flat", 4)
    with pytest.raises(CaptureError, match="a batch of 0"):
        at_batch(graph, 0)
    with pytest.raises(CaptureError, match="has no samples"):
        at_batch(replace(graph, batch=None), 8)
    with pytest.raises(CaptureError, match="no multiple of the batch of 3"):
        at_batch(replace(graph, batch=3), 6)


class Deep(nn.Module):
    """Equal blocks between two layers; `tapped` returns what a block in the middle makes, too."""

    def __init__(self, blocks: int, tapped: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.tapped = nn.Linear(6, 12), nn.Linear(12, 3), tapped
        self.blocks = nn.ModuleList(Block(12, 2) for _ in range(blocks))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = tap = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            tap = x if number == 5 and self.tapped else tap
        return self.last(x + x.mean(1, keepdim=True)), tap


@pytest.mark.full
@pytest.mark.parametrize("copies", [3, 5])
def test_fewer_blocks_are_as_if_captured_with_so_many(copies: int) -> None:
    inputs = (torch.randn(4, 5, 6),)
    many, few = capture(Deep(9), inputs), capture(Deep(copies), inputs)
    (blocks,) = repeated_blocks(many)
    made = with_fewer_blocks(many, blocks, copies)
    assert list(made.layers) == list(few.layers)
    assert [*made.parameters.values()] == [*few.parameters.values()]
    assert [(a, b, len(v)) for a, b, v in made.digraph.edges(data="values")] == [
        (a, b, len(v)) for a, b, v in few.digraph.edges(data="values")
    ]
    for batch in (4, 8):
        held = []
        for graph in (at_batch(made, batch), at_batch(few, batch)):
            layers = {name: most_split(layer, batch) for name, layer in graph.layers.items()}
            costs = RooflineCosts(graph, K20)
            plan = Plan(graph.model, graph.fingerprint, batch, 2, layers)
            held.append((costs.memory_over_step(layers).tolist(), predict(graph, K20, costs, plan).step_s))
        assert held[0] == held[1]
    assert with_fewer_blocks(few, repeated_blocks(few)[0], copies) is few


@pytest.mark.full
def test_what_is_taken_from_a_block_in_the_middle_is_refused() -> None:
    graph = capture(Deep(9, tapped=True), (torch.randn(4, 5, 6),))
    (blocks,) = repeated_blocks(graph)
    with pytest.raises(CaptureError, match="block in the middle"):
        with_fewer_blocks(graph, blocks, 5)
    assert with_fewer_blocks(graph, blocks, 6).user_outputs == graph.user_outputs
