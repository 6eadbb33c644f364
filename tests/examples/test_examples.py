"""The example networks are the published ones, and their small siblings are fit for every plan the tests try."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from examples import alexnet, gpt2, mlp, resnet50, two_tower, vgg16

# (example, its published parameter count, its batch, scores per sample or token)
EXAMPLES = [
    pytest.param(alexnet, 61_100_840, 512, 1000, id="alexnet"),
    pytest.param(two_tower, 60_965_224, 256, 1000, id="two_tower"),
    pytest.param(vgg16, 138_357_544, 256, 1000, id="vgg16"),
    pytest.param(resnet50, 25_557_032, 256, 1000, id="resnet50"),
    pytest.param(gpt2, 124_439_808, 8, 50_257, id="gpt2"),
    pytest.param(mlp, 36_818_954, 256, 10, id="mlp"),
]
MODULES = [pytest.param(*case.values[:1], id=case.id) for case in EXAMPLES]


@pytest.mark.parametrize(("example", "parameters", "batch", "classes"), EXAMPLES)
def test_full_size(example: ModuleType, parameters: int, batch: int, classes: int) -> None:
    with torch.device("meta"):
        network: nn.Module = example.build()
    (inputs,) = example.example_inputs()
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert inputs.shape[0] == batch
    scores = network(inputs.to("meta"))
    assert (scores.shape[0], scores.shape[-1]) == (batch, classes)


@pytest.mark.parametrize("example", MODULES)
def test_example_inputs_take_the_memory_of_at_most_one_mebibyte(example: ModuleType) -> None:
    (inputs,) = example.example_inputs()
    assert inputs.untyped_storage().nbytes() <= 2**20


@pytest.mark.parametrize("example", MODULES)
def test_small_runs_forward_and_backward(example: ModuleType) -> None:
    network, (inputs,) = example.small()
    scores: Tensor = network(inputs)
    scores.square().mean().backward()
    assert (scores.shape[0], scores.shape[-1]) == (12, 12)
    assert [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("example", MODULES)
def test_small_has_the_inputs_it_had_before(example: ModuleType) -> None:
    assert torch.equal(example.small()[1][0], example.small()[1][0])


@pytest.mark.parametrize("example", MODULES)
def test_small_can_be_cut_in_2_3_and_4(example: ModuleType) -> None:
    network, _ = example.small()
    weights = {name: p.shape[0] for name, p in network.named_parameters()}
    assert {name: size for name, size in weights.items() if size % 12} == {}


@pytest.mark.parametrize("example", MODULES)
def test_small_has_the_layers_of_the_full_network(example: ModuleType) -> None:
    with torch.device("meta"):
        full = dict(example.build().named_modules())
    network, _ = example.small()
    differing = {name for name, layer in network.named_modules() if type(full.get(name)) is not type(layer)}
    assert differing == set()


def test_the_towers_see_each_other_only_at_conv3_and_the_fully_connected_layers() -> None:
    """With tower b's weights and biases doubled before conv3, tower a's activations stay as they were until conv3."""
    network, (inputs,) = two_tower.small()
    network.eval()
    before = record(network, inputs)
    for name in ("conv1b", "conv2b"):
        layer = network.get_submodule(name)
        for parameter in layer.parameters():
            parameter.data.mul_(2)
    after = record(network, inputs)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in changed if name.endswith("a")} == {"conv3a", "conv4a", "conv5a", "fc6a", "fc7a"}


def record(network: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """What each layer with weights gives, by name."""
    seen: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _layer, _args, out, name=name: seen.__setitem__(name, out.detach().clone()))
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    ]
    network(inputs)
    for hook in hooks:
        hook.remove()
    return seen
