"""Casts of autocast in captured graphs, beside those that the plain model makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.decoder import Decoder, DecoderSize
from benchmarks.memory_networks import NETWORKS
from parplan.api import analyze
from parplan.graph.capture.capture import capture
from parplan.graph.kinds import op_name
from parplan.graph.layer_graph import CASTS, LayerGraph

BF16 = torch.bfloat16
DECODER = DecoderSize(6, 32, 48, 4, 2, 40, False, 8)
MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "decoder": lambda: (Decoder(DECODER), (torch.randint(40, (4, 8)), torch.randint(40, (4, 8)))),
    **{
        net.name: lambda net=net: (net.build(), (net.batch(4)[0],))  # type: ignore[misc]
        for net in NETWORKS
        if net.name in ("mlp, deep", "residual", "transformer", "alexnet-like", "tied words")
    },
}


class Conversions(TorchDispatchMode):
    """Counts the shapes that are converted from float32 to bf16."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].dtype, result.dtype) == (torch.float32, BF16):
            self.found[tuple(result.shape)] += 1
        return result


def captured(model: nn.Module, args: tuple[Tensor, ...]) -> LayerGraph:
    with torch.autocast("cpu", BF16):
        return capture(model, args)


def casts(graph: LayerGraph) -> list[tuple[str, dict[str, torch.dtype]]]:
    return [(node.name, node.meta.get(CASTS, {})) for layer in graph.layers.values() for node in layer.nodes]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_casts_are_those_of_the_plain_model(name: str) -> None:
    model, args = MODELS[name]()
    for module in model.modules():  # attention that drops is made of products, in float32
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    graph, plain = captured(model, args), Conversions()
    with torch.autocast("cpu", BF16, cache_enabled=False), plain, torch.no_grad():
        model(*args)
    found = Counter(
        graph.values[operand].shape for _, own in casts(graph) for operand, dtype in own.items() if dtype == BF16
    )
    assert found == plain.found
    assert sum(found.values()) > 3


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_meta_tensors_have_the_types_of_others(name: str) -> None:
    """Autocast passes meta tensors by."""
    model, args = MODELS[name]()
    graph = captured(model, args)
    with torch.device("meta"):
        other, _ = MODELS[name]()
    meta = captured(other, tuple(one.to("meta") for one in args))
    assert casts(meta) == casts(graph)
    assert {n: spec.dtype for n, spec in meta.values.items()} == {n: spec.dtype for n, spec in graph.values.items()}
    assert meta.read_as == graph.read_as
    assert graph.autocast is meta.autocast is BF16


@pytest.mark.full
def test_nothing_is_cast_without_autocast() -> None:
    model, args = MODELS["decoder"]()
    graph = capture(model, args)
    assert not any(own for _, own in casts(graph))
    assert (graph.autocast, dict(graph.read_as)) == (None, {})


class WithLoss(nn.Module):
    """A layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(x), y)


def test_casts_to_float32_alone_are_no_autocast() -> None:
    """Of a model in bf16 throughout, whose loss is in float32."""
    args = (torch.randn(4, 8).bfloat16(), torch.randn(4, 8).bfloat16())
    graph = captured(WithLoss().bfloat16(), args)
    assert {dtype for _, own in casts(graph) for dtype in own.values()} == {torch.float32}
    assert (graph.autocast, dict(graph.read_as)) == (None, {})
    with torch.autocast("cpu", BF16):
        notes = analyze(WithLoss().bfloat16(), args, gpus=2, gpu="a100").notes
    assert not any("autocast" in note for note in notes)


class Mixed(nn.Module):
    """A layer outside of autocast, one that casts its weight itself, a weight that is read in two types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.plain, self.own, self.both = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.plain(x.float())
            x = nn.functional.linear(x.bfloat16(), self.own.weight.bfloat16()).float()
        result: Tensor = self.both(x) + self.both.weight.sum()
        return result


@pytest.mark.full
def test_weights_are_read_in_another_type_where_all_readers_do() -> None:
    graph = captured(Mixed(), (torch.randn(4, 8),))
    assert {graph.parameters[name]: dtype for name, dtype in graph.read_as.items()} == {
        "first.weight": BF16, "own.weight": BF16,
    }  # fmt: skip
    plain = next(layer for layer in graph.layers.values() if "p_plain_weight" in layer.parameters)
    assert [graph.values[name].dtype for name in plain.outputs] == [torch.float32]
    assert any(op_name(node) == "linear" for node in plain.nodes)
