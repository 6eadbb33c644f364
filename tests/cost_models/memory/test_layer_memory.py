"""Memory: saved activations against what autograd really keeps, and sums of what is resident."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from parplan.cost_models.costs import Moments
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.memory.layer_memory import MemoryModel
from parplan.cost_models.optimizers import OPTIMIZER_MEMORY, optimizer_memory
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import ParplanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer, local_module
from parplan.plan import Strategy
from tests.cost_models.networks import NETWORKS, Network, full_alexnet, network

ONE = Strategy()


def costs(graph: LayerGraph, optimizer: str = "adam") -> RooflineCosts:
    return RooflineCosts(graph, cluster_preset("v100", 8), optimizer=optimizer)


def kept_by_autograd(model: nn.Module, args: tuple[Tensor, ...], run: Callable[..., object] | None = None) -> int:
    """Bytes of the distinct storages autograd saves in one forward, without parameters and buffers.

    Args:
        run: other code of the model's, with the same parameters.
    """
    state = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in state:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (run or model)(*args)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


class Apart:
    """Marks between layers, which keep the parts of a loss apart, as they are where it is cut."""

    def before(self, layer: str) -> Callable[[], None]:
        return lambda: None

    def after(self, layer: str) -> Callable[[Sequence[Tensor]], None]:
        return lambda outputs: None


def own_code(case: Network) -> Callable[..., object]:
    """The code of the captured layers, with the model's parameters."""
    graph = case.graph
    state = {graph.parameters[name]: name for name in graph.parameters}
    inputs = [name for name in graph.user_inputs if name is not None]
    outputs = [name for name in graph.user_outputs if isinstance(name, str)]
    parts = [LocalLayer(layer, ONE, 0, graph.batch or 1) for layer in graph.layers.values()]
    code = local_module(graph, parts, [*state.values(), *graph.constants, *inputs], outputs, marks=Apart())
    held = [*(case.model.get_parameter(path) for path in state), *graph.constants.values()]
    return lambda *args: code(*held, *args)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_saved_activations_are_what_autograd_keeps(name: str) -> None:
    case = network(name)
    predicted = sum(costs(case.graph).memory(layer, ONE).saved_bytes for layer in case.graph.layers.values())
    # A loss inside is run in parts where it is cut, which keep what torch's own op does not.
    run = own_code(case) if any(layer.is_loss for layer in case.graph.layers.values()) else None
    # On CPU a dropout's mask takes four bytes an element instead of one.
    assert predicted == pytest.approx(kept_by_autograd(case.model, case.args, run), rel=0.01)


@pytest.mark.sampled(2)
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


@pytest.mark.full
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
    graph = capture(model, (torch.zeros(6, 4),))
    first, second = (costs(graph).memory(layer, ONE) for layer in graph.layers.values())
    assert (first.weights_bytes, first.gradients_bytes, first.optimizer_bytes) == (160, 0, 0)
    assert (second.gradients_bytes, second.optimizer_bytes) == (72, 144)
    assert first.saved_bytes == 6 * 8 * 4  # its result, which the second layer's weight gradient needs


def test_an_unknown_optimizer_is_told_which_are_known() -> None:
    with pytest.raises(ParplanError, match=r"'lion' is not known.*sgd, momentum, .*adamw"):
        optimizer_memory("lion")
    assert all(memory.states in (0, 1, 2) for memory in OPTIMIZER_MEMORY.values())


def test_shards_that_need_an_input_whole_keep_their_gathered_copy() -> None:
    graph = network("mlp").graph
    layer = next(layer for layer in list(graph.layers.values())[1:] if layer.kind == "linear")
    (value,) = layer.inputs
    gathered, cut = (
        costs(graph).memory(layer, Strategy(1, 2, axis, (0, 1))).saved_bytes for axis in ("out-features", "in-features")
    )
    assert gathered - cut >= graph.values[value].nbytes


def at_tasks(graph: LayerGraph, optimizer: str, on_cpu: bool) -> list[int]:
    """Bytes on the one device in every task of the step."""
    model = MemoryModel(graph, optimizer, on_cpu)
    memories = [model.layer_memory(LocalLayer(layer, ONE, 0, graph.batch or 1)) for layer in graph.layers.values()]
    held = [one for memory in memories for one in memory.held]
    return [sum(h.nbytes for h in held if h.start <= time < h.end) for time in range(1, model.moments.end, 2)]


def test_every_task_of_a_small_step_by_hand() -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.zeros(6, 4),))
    stays = 3 * 4 * 58 + 6 * 4 * 4  # weights, Adam's two states, and the inputs
    hidden, result = 6 * 8 * 4, 6 * 2 * 4
    first, second = 4 * 40, 4 * 18  # gradients of the two layers' weights
    assert at_tasks(graph, "adam", on_cpu=True) == [
        stays + hidden,
        stays + 2 * hidden,  # what relu reads is gone after it
        stays + hidden + result,
        stays + hidden + result,
        stays + hidden + result + 3 * result,  # the results' gradient, and two tensors of the loss
        stays + hidden + 2 * result + hidden + second,
        stays + hidden + 2 * result + 2 * hidden + second,
        stays + 2 * result + hidden + second + first,
        stays + first + second + 2 * 4 * 32,  # two temporaries of the largest weight
        stays + first + second,
        stays + first + second + 2 * 4 * 16,
    ]


@pytest.mark.parametrize(
    ("optimizer", "one_by_one", "together"), [("sgd", 0, 0), ("momentum", 0, 0), ("adagrad", 1, 2), ("adam", 2, 1)]
)
def test_the_update_takes_temporaries_of_one_parameter_or_of_all(
    optimizer: str, one_by_one: int, together: int
) -> None:
    graph = capture(nn.Sequential(nn.Linear(256, 128, bias=False), nn.Linear(128, 128, bias=False)), _zeros(2, 256))
    weights = (256 * 128 * 4, 128 * 128 * 4)
    for on_cpu, most in ((True, one_by_one * weights[0]), (False, together * sum(weights))):
        by_time = at_tasks(graph, optimizer, on_cpu)
        assert by_time[-2] - by_time[-1] == (most if not on_cpu else most - one_by_one * weights[1])


def test_an_optimizer_may_be_given_by_how_much_it_keeps() -> None:
    assert optimizer_memory("3").states == 3
    graph = network("mlp").graph
    kept = {name: at_tasks(graph, name, on_cpu=True)[0] for name in ("1", "momentum", "3")}
    assert kept["1"] == kept["momentum"] < kept["3"]


def test_cuda_rounds_every_tensor_up() -> None:
    graph = capture(nn.Sequential(nn.Linear(3, 5)), _zeros(2, 3))
    cpu, cuda = (at_tasks(graph, "sgd", on_cpu) for on_cpu in (True, False))
    assert cpu[0] == 4 * (15 + 5 + 6 + 10)
    assert cuda[0] == 4 * 512  # weight, bias, inputs, result


def _zeros(*shape: int) -> tuple[Tensor]:
    return (torch.zeros(shape),)


def test_moments_have_names() -> None:
    names = ("a", "b")
    moments = Moments(2)
    told = [moments.text(point, names) for point in range(1, moments.end, 2)]
    assert told == [moments.text(point - 1, names) for point in range(1, moments.end, 2)]  # what travels before a task
    points = [*map(moments.forward, (0, 1)), moments.delivery, moments.loss, *map(moments.backward, (1, 0))]
    assert [*points, *map(moments.update, (0, 1))] == list(range(1, moments.end, 2))
    assert moments.passed == moments.backward(0) + 1
    assert told == [
        "in the forward of a",
        "in the forward of b",
        "when the results are delivered",
        "in the loss",
        "in the backward of b",
        "in the backward of a",
        "in the optimizer's update",
        "in the optimizer's update",
    ]
