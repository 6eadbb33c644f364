"""The graph of layers: names, kinds, what goes in and out, the edges, and that no layer waits for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Constant, LayerGraph
from parplan.plan import Strategy
from tests.graph.models import MODELS, Case, rand


def captured(name: str, training: bool = True) -> LayerGraph:
    case = MODELS[name]()
    return capture(case.model, case.args, case.kwargs, training=training)


# (model, its layers in forward order with their kinds)
LAYERS = [
    (
        "repeated",
        "conv conv, relu activation, mean reduce, fc linear, relu@1 activation, fc@1 linear",
    ),
    (
        "functional",
        "conv2d conv, relu activation, batch_norm batch_norm, max_pool2d pool, linear linear, softmax softmax",
    ),
    ("custom", "scale linear, add add, head linear"),
    ("tied", "embed embedding, add add, head linear"),
    ("fused", "qkv linear, attention attention, o linear"),
    ("loss", "fc linear, loss loss, row_losses reduce, loss_1 loss, row_losses_1 reduce, batch_mean reduce"),
    ("frozen", "a linear, relu activation, b linear, relu_1 activation"),
    ("recurrent", "lstm recurrent, select reshape, fc linear"),
    (
        "residual",
        "conv1 conv, bn1 batch_norm, relu activation, conv2 conv, bn2 batch_norm, down conv, add add,"
        " relu@1 activation, pool pool, flatten reshape, drop dropout, fc linear",
    ),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "expected"), LAYERS, ids=[name for name, _ in LAYERS])
def test_layers_have_the_names_and_kinds_a_reader_expects(name: str, expected: str) -> None:
    found = ", ".join(f"{layer.name} {layer.kind}" for layer in captured(name).layers.values())
    assert found == expected


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_what_every_graph_of_layers_is(name: str) -> None:
    graph = captured(name)
    again = captured(name)
    assert list(graph.layers) == list(again.layers)
    assert graph.fingerprint == again.fingerprint == captured(name, training=False).fingerprint
    assert_convex(graph)
    assert_edges(graph)
    assert_every_node_is_in_one_layer(graph)


def assert_convex(graph: LayerGraph) -> None:
    """Layers in forward order only read what earlier ones, or the user, made."""
    assert nx.is_directed_acyclic_graph(graph.digraph)
    known = {name for name in graph.user_inputs if name} | set(graph.parameters) | set(graph.buffers)
    known |= set(graph.constants)
    for layer in graph.layers.values():
        assert {*layer.inputs, *layer.parameters, *layer.buffers} <= known
        known |= set(layer.outputs)
    wanted = {leaf for leaf in graph.user_outputs if isinstance(leaf, str)} | set(graph.buffer_updates.values())
    assert wanted <= known


def assert_edges(graph: LayerGraph) -> None:
    """An edge per pair of layers where one takes what the other makes, with those values."""
    edges = {
        (source, name): tuple(value for value in layer.inputs if graph.producer.get(value) == source)
        for name, layer in graph.layers.items()
        for source in {graph.producer[value] for value in layer.inputs if value in graph.producer}
    }
    assert {(a, b): graph.digraph.edges[a, b]["values"] for a, b in graph.digraph.edges} == edges
    assert set(graph.digraph) == set(graph.layers)
    for name, layer in graph.layers.items():
        assert all(graph.producer[value] == name for value in layer.outputs)
        assert all(name in graph.consumers(value) for value in layer.inputs)


def assert_every_node_is_in_one_layer(graph: LayerGraph) -> None:
    nodes = [node.name for layer in graph.layers.values() for node in layer.nodes]
    assert len(nodes) == len(set(nodes))
    assert {node.op for layer in graph.layers.values() for node in layer.nodes} == {"call_function"}
    assert all(layer.name == name for name, layer in graph.layers.items())
    assert all(axis.units > 1 for layer in graph.layers.values() for axis in layer.axes)


def test_results_keep_their_structure() -> None:
    graph = captured("outputs")
    constants = [leaf.value for leaf in graph.user_outputs if isinstance(leaf, Constant)]
    values = [leaf for leaf in graph.user_outputs if isinstance(leaf, str)]
    assert constants == [None, "fast", 3]
    assert values[0] == values[1]  # one value, handed out twice
    assert values[2] in graph.user_inputs  # an input handed back
    assert [name is None for name in graph.user_inputs] == [False, False, False, True, True, True]


def widths(hidden: int, batch: int = 6, bias: bool = True) -> Case:
    return Case(nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2, bias=bias)), rand(batch, 4))


@pytest.mark.parametrize(
    ("other", "same"),
    [(widths(6, batch=12), True), (widths(8), False), (widths(6, bias=False), False)],
    ids=["batch", "width", "bias"],
)
def test_the_fingerprint_is_of_the_parameters_shapes(other: Case, same: bool) -> None:
    one = widths(6)
    first, second = (capture(case.model, case.args).fingerprint for case in (one, other))
    assert (first == second) is same


def test_axes_of_a_convolution() -> None:
    graph = captured("residual")
    conv1, conv2 = graph.layers["conv1"], graph.layers["conv2"]
    assert {axis.name: axis.units for axis in conv1.axes} == {"in-channels": 3, "out-channels": 6}
    assert {axis.name: axis.units for axis in conv2.axes} == {"groups": 3}
    assert conv1.axes[0].partial == frozenset(conv1.outputs)
    assert graph.layers["fc"].axes[0].first_only == {graph.layers["fc"].parameters[1]}


def test_only_the_mean_of_a_loss_needs_all_samples() -> None:
    graph = captured("loss")
    terms, rows, mean = graph.layers["loss_1"], graph.layers["row_losses_1"], graph.layers["batch_mean"]
    assert (terms.is_loss, rows.is_loss, mean.is_loss) == (True, False, False)
    assert [axis.name for axis in terms.axes] == ["vocabulary"]
    assert rows.axes == mean.axes == ()
    assert (terms.batch is None, rows.batch is None, mean.batch is None) == (False, False, True)
    assert mean.inputs == rows.outputs
    assert graph.values[rows.outputs[0]].shape == (6, 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("strategy", "value", "batch_dim", "shard_dim", "partial"),
    [
        (Strategy(2, 1, None, (0, 1)), "x", 0, None, False),
        (Strategy(1, 2, "out-features", (0, 1)), "x", None, None, False),
        (Strategy(1, 2, "out-features", (0, 1)), "linear", None, 1, False),
        (Strategy(2, 2, "in-features", (0, 1, 2, 3)), "x", 0, 1, False),
        (Strategy(2, 2, "in-features", (0, 1, 2, 3)), "linear", 0, None, True),
        (Strategy(2, 2, "in-features", (0, 1, 2, 3)), "p_a_bias", None, None, False),
    ],
)
def test_layouts_of_a_linear_layer(
    strategy: Strategy, value: str, batch_dim: int | None, shard_dim: int | None, partial: bool
) -> None:
    layout = captured("frozen").layers["a"].layout(value, strategy)
    assert (layout.batch_dim, layout.shard_dim, layout.partial) == (batch_dim, shard_dim, partial)
    assert layout.grid == strategy.grid


NAMED_ALIKE: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(inplace=True)),
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.BatchNorm1d(4)),
]


@pytest.mark.parametrize("make", NAMED_ALIKE)
def test_training_and_evaluation_share_their_layers(make: Any) -> None:
    model = make()
    names = [list(capture(model, (torch.randn(6, 4),), training=training).layers) for training in (True, False)]
    assert names[0] == names[1]


def test_samples_that_meet_in_no_tensor_are_cut_together() -> None:
    class Rotated(nn.Module):
        """Queries and keys are turned by the same positions, and do not meet."""

        def forward(self, queries: Tensor, keys: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
            turn = turn * 2
            return queries * turn, keys * turn

    given = torch.randn(4, 3), torch.randn(4, 3), torch.randn(3)
    (layer,) = (layer for layer in capture(Rotated(), given).layers.values() if len(layer.outputs) == 2)
    assert layer.batch is not None
    assert {layer.batch.dims[value] for value in ("queries", "keys", *layer.outputs)} == {0}
