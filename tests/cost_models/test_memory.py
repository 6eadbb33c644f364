"""Memory: saved activations against what autograd really keeps, and sums of what is resident."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parplan.cost_models.memory import OPTIMIZER_STATES, optimizer_states
from parplan.cost_models.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import ParplanError
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Strategy
from tests.cost_models.networks import NETWORKS, full_alexnet, network

ONE = Strategy()


def costs(graph: LayerGraph, optimizer: str = "adam") -> RooflineCosts:
    return RooflineCosts(graph, cluster_preset("v100", 8), optimizer=optimizer)


def kept_by_autograd(model: nn.Module, args: tuple[Tensor, ...]) -> int:
    """Bytes of the distinct storages autograd saves in one forward, without parameters and buffers."""
    state = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in state:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*args)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_saved_activations_are_what_autograd_keeps(name: str) -> None:
    case = network(name)
    predicted = sum(costs(case.graph).memory(layer, ONE).saved_bytes for layer in case.graph.layers.values())
    # On CPU a dropout's mask takes four bytes an element instead of one.
    assert predicted == pytest.approx(kept_by_autograd(case.model, case.args), rel=0.01)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("momentum", 1), ("adamw", 2)])
def test_what_stays_adds_up_to_the_parameters(name: str, optimizer: str, states: int) -> None:
    case = network(name)
    memories = [costs(case.graph, optimizer).memory(layer, ONE) for layer in case.graph.layers.values()]
    parameters = sum(p.numel() * p.element_size() for p in case.model.parameters())  # tied ones once
    buffers = sum(b.numel() * b.element_size() for b in case.model.buffers() if b.is_floating_point())
    assert sum(memory.weights_bytes for memory in memories) == parameters + buffers
    assert sum(memory.gradients_bytes for memory in memories) == parameters
    assert sum(memory.resident_bytes for memory in memories) == (2 + states) * parameters + buffers


def test_alexnet_in_full() -> None:
    graph = full_alexnet()
    memories = {name: costs(graph, "momentum").memory(layer, ONE) for name, layer in graph.layers.items()}
    assert sum(memory.resident_bytes for memory in memories.values()) == 3 * 4 * 61_100_840
    images, conv1 = 512 * 3 * 224 * 224 * 4, 512 * 64 * 55 * 55 * 4
    assert memories["conv1"].saved_bytes == images
    assert memories["relu1"].saved_bytes == conv1  # kept by relu1 and by pool1, counted once
    assert memories["flatten"].saved_bytes == 0  # a view of what pool5 made
    assert memories["pool5"].saved_bytes == 512 * 9216 * (4 + 8)  # its result, and where the maxima were
    assert memories["relu1"].transient_bytes == 2 * conv1


@pytest.mark.parametrize("shards", [2, 4])
def test_cutting_a_layer_cuts_its_weights_and_spreading_it_its_activations(shards: int) -> None:
    graph = full_alexnet()
    model = costs(graph)
    fc6, devices = graph.layers["fc6"], tuple(range(shards))
    whole = model.memory(fc6, ONE)
    cut = model.memory(fc6, Strategy(1, shards, "out-features", devices))
    spread = model.memory(fc6, Strategy(shards, 1, None, devices))
    assert cut.resident_bytes == whole.resident_bytes // shards
    assert spread.resident_bytes == whole.resident_bytes
    assert spread.transient_bytes == whole.transient_bytes // shards
    pool1 = graph.layers["pool1"]
    assert (
        model.memory(pool1, Strategy(shards, 1, None, devices)).saved_bytes
        == model.memory(pool1, ONE).saved_bytes // shards
    )


def test_frozen_parameters_have_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    from parplan.graph.capture import capture

    graph = capture(model, (torch.zeros(6, 4),))
    first, second = (costs(graph).memory(layer, ONE) for layer in graph.layers.values())
    assert (first.weights_bytes, first.gradients_bytes, first.optimizer_bytes) == (160, 0, 0)
    assert (second.gradients_bytes, second.optimizer_bytes) == (72, 144)
    assert first.saved_bytes == 6 * 8 * 4  # its result, which the second layer's weight gradient needs


def test_an_unknown_optimizer_is_told_which_are_known() -> None:
    with pytest.raises(ParplanError, match=r"'lion' is not known.*sgd, momentum, .*adamw"):
        optimizer_states("lion")
    assert all(states in (0, 1, 2) for states in OPTIMIZER_STATES.values())


def test_shards_that_need_an_input_whole_keep_their_gathered_copy() -> None:
    graph = network("mlp").graph
    layer = next(layer for layer in list(graph.layers.values())[1:] if layer.kind == "linear")
    (value,) = layer.inputs
    gathered, cut = (
        costs(graph).memory(layer, Strategy(1, 2, axis, (0, 1))).saved_bytes for axis in ("out-features", "in-features")
    )
    assert gathered - cut >= graph.values[value].nbytes
