"""Packed projections are cut by heads, whatever idiom takes them apart, and give the uncut model's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parplan.graph.axes.table import overload
from parplan.graph.capture.capture import capture
from parplan.graph.layer_axes import joint_axes
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.plan import Strategy
from tests.graph.by_hand import assert_same_numbers, close
from tests.graph.single_op import OneOp, part_results, whole_results
from tests.packed_models import GROUPED, PACKED, ConvolutionLike, Grouped, QueryKeyValue


def _widest(graph: LayerGraph, layer: Layer) -> Strategy:
    for axis in layer.axes:
        if axis.name in ("heads", "out-features", "features") and axis.units % 2 == 0:
            return Strategy(1, 2, axis.name, (0, 1))
    return Strategy()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_projection_is_cut_as_its_reader_cuts_it(name: str) -> None:
    torch.manual_seed(0)
    model, x = PACKED[name]().double(), torch.randn(3, 5, 16, dtype=torch.float64)
    graph = capture(model, (x,))
    assert_same_numbers(graph, model, (x,), choose=_widest)
    makers = [layer for layer in graph.layers.values() if layer.name in ("qkv", "up")]
    for layer in makers:
        (value,) = layer.outputs
        axis = layer.axis("out-features")
        assert axis is not None
        assert axis.sections[value].total > 1
        (reader,) = graph.consumers(value)
        cut = [own.sections[value].sizes for own in graph.layers[reader].axes if value in own.sections]
        assert axis.sections[value].sizes in cut
        parameter = layer.parameters[0]
        assert axis.sections[parameter] == axis.sections[value]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", GROUPED)
def test_neighbours_share_heads_of_keys(name: str) -> None:
    """Eight (or four) heads of queries in four shards, two heads of keys."""
    torch.manual_seed(0)
    model, x = GROUPED[name]().double(), torch.randn(3, 5, 16, dtype=torch.float64)
    graph = capture(model, (x,))
    (layer,) = (layer for layer in graph.layers.values() if layer.kind == "attention")
    heads = layer.axis("heads") or layer.axis("features")
    assert heads is not None
    assert heads.units == (4 if isinstance(model, QueryKeyValue) else 8)

    def shared(graph: LayerGraph, layer: Layer) -> Strategy:
        for wanted in ("shared-heads", "heads", "out-features", "features"):
            axis = layer.axis(wanted)
            if axis is not None and axis.units % 4 == 0:
                return Strategy(1, 4, wanted, (0, 1, 2, 3))
        return Strategy()

    assert_same_numbers(graph, model, (x,), choose=shared)
    if name == "normalised":
        assert {"heads", "shared-heads"} == {graph.layers[n].axes[-1].name for n in ("q_norm", "k_norm")}
    if name in ("enabled", "interleaved", "expanded", "normalised"):
        axes = {name: {axis.name: axis.units for axis in layer.axes} for name, layer in graph.layers.items()}
        assert "shared-heads" not in axes["q"]
        assert axes["k"]["shared-heads"] == axes["v"]["shared-heads"] == 8


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("repeat_interleave.self_int", ((3, 2, 5), 4, 1), {}),
        ("repeat_interleave.self_int", ((2, 3), 8, -2), {}),
        ("repeat_interleave.self_int", ((3, 1), 8, 1), {}),
        ("scaled_dot_product_attention", ((3, 8, 5, 4), (3, 2, 6, 4), (3, 2, 6, 3)), {"enable_gqa": True}),
        ("scaled_dot_product_attention", ((3, 8, 5, 4), (3, 4, 5, 4), (3, 4, 5, 4)), {"enable_gqa": True}),
        ("scaled_dot_product_attention", ((3, 8, 5, 4), (3, 1, 5, 4), (3, 1, 5, 4)), {"enable_gqa": True}),
    ],
)
def test_more_shards_than_heads_of_keys_compute_the_whole(op: str, args: Any, kwargs: Any) -> None:
    tensors = [torch.randn(a, dtype=torch.float64).requires_grad_() if isinstance(a, tuple) else a for a in args]
    call = OneOp.of(overload(op), tensors, kwargs)
    whole, widest = whole_results(call), 0
    for axis in call.open_axes():
        for parts in (2, 4, 8):
            if axis.units % parts == 0:
                found = part_results(call, axis, [axis.units // parts] * parts)
                widest = max(widest, parts)
                for one, other in ((found.outputs, whole.outputs), (found.gradients, whole.gradients)):
                    assert all(close(one[name], value) for name, value in other.items())
    assert widest == 8


def test_sums_leave_a_projection_through_views() -> None:
    """GPT-2's: in-features of the product of flattened tokens, behind heads that are cut."""
    model, x = ConvolutionLike(16, 12).double(), torch.randn(3, 5, 16, dtype=torch.float64)
    graph = capture(nn.Sequential(model), (x,))
    (layer,) = graph.layers.values()
    axis = layer.axis("in-features")
    assert axis is not None
    assert axis.partial >= set(layer.outputs)
    assert_same_numbers(
        graph, nn.Sequential(model), (x,), choose=lambda *_: Strategy(1, 4, "in-features", (0, 1, 2, 3))
    )


class _Twice(ConvolutionLike):
    def forward(self, x: Tensor) -> Any:
        y = torch.addmm(self.bias, x, self.weight)
        return y, y.view(-1)


def test_a_sum_that_leaves_and_is_viewed_too_stays_a_sum() -> None:
    model, x = _Twice(16, 12).double(), torch.randn(6, 16, dtype=torch.float64)
    graph = capture(model, (x,))

    def widest(graph: LayerGraph, layer: Layer) -> Strategy:
        return Strategy(1, 4, "in-features", (0, 1, 2, 3)) if layer.axis("in-features") else Strategy()

    assert_same_numbers(graph, model, (x,), choose=widest)


class _ScoresApart(nn.Module):
    """GPT-1's attention: its scores and their product with the values are two layers, dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.drop, self.o = ConvolutionLike(16, 48), nn.Dropout(0.0), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(*x.shape[:2], 4, 4) for part in self.qkv(x).split(16, dim=2))
        scores = torch.matmul(q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1)).softmax(dim=-1)
        y = torch.matmul(self.drop(scores), v.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)
        result: Tensor = self.o(y.reshape(*x.shape[:2], -1))
        return result


class _DepthwiseBeforeHeads(nn.Module):
    """A gated delta net's: projections joined, a convolution of each channel, heads last but one in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.weight, self.o = nn.Parameter(torch.randn(48, 1, 2)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        joined = torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1).transpose(1, 2)
        mixed = nn.functional.conv1d(joined, self.weight, padding=1, groups=48)[:, :, :t]
        q, k, v = (part.view(n, t, 4, 4) for part in torch.split(mixed.transpose(1, 2), [16, 16, 16], dim=-1))
        q, k, v = (nn.functional.pad(part.transpose(1, 2), (0, 0, 0, 2)) for part in (q, k, v))
        y = torch.matmul(torch.matmul(q, k.transpose(2, 3)).tril(), v)[:, :, :t].transpose(1, 2)
        result: Tensor = self.o(y.contiguous().view(n, t, -1))
        return result


def _differences(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Diff-Llama: both halves of the heads have the values of one half, then of the other, and are subtracted."""
    halves = [half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1)]
    one, two = (nn.functional.scaled_dot_product_attention(q, k, half, is_causal=True) for half in halves)
    first, second = torch.cat([one, two], dim=-1).chunk(2, dim=1)
    return first - second * 0.3


class _Halves(Grouped):
    def __init__(self) -> None:
        super().__init__(_differences, heads=8)


@pytest.mark.full
@pytest.mark.parametrize("kind", [_ScoresApart, _DepthwiseBeforeHeads, _Halves])
def test_products_are_cut_by_heads_wherever_their_projections_were_packed(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(3, 5, 16, dtype=torch.float64)
    graph, cut = capture(model, (x,)), set[str]()

    def by_heads(graph: LayerGraph, layer: Layer) -> Strategy:
        found = [axis.name for axis in layer.axes if axis.name in ("heads", "groups", "features", "out-features")]
        found = [name for name in found if (axis := layer.axis(name)) is not None and axis.units % 4 == 0]
        cut.update([layer.name] if found else [])
        return Strategy(1, 4, found[0], (0, 1, 2, 3)) if found else Strategy()

    assert_same_numbers(graph, model, (x,), choose=by_heads)
    assert cut >= {layer.name for layer in graph.layers.values() if layer.kind in ("attention", "conv")}


class _SummedToo(nn.Module):
    """Queries are a section of features that a product with a computed matrix sums over, in the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        q, k, v = x[..., :16], x[..., 16:20], x[..., 20:]
        heads = nn.functional.scaled_dot_product_attention(
            q.view(*x.shape[:2], 4, 4).transpose(1, 2), k[:, None], v[:, None]
        )
        return heads.transpose(1, 2).reshape(*x.shape[:2], 16), torch.matmul(x, self.weight * 0.5)


@pytest.mark.full
def test_what_all_shards_have_whole_is_not_summed_up_by_each() -> None:
    torch.manual_seed(0)
    model, x = _SummedToo().double(), torch.randn(3, 5, 24, dtype=torch.float64)
    graph = capture(model, (x,))

    def widest(graph: LayerGraph, layer: Layer) -> Strategy:
        axis = next((axis for axis in layer.axes if axis.units % 4 == 0), None)
        return Strategy() if axis is None else Strategy(1, 4, axis.name, (0, 1, 2, 3))

    assert_same_numbers(graph, model, (x,), choose=widest)
    (layer,) = (layer for layer in graph.layers.values() if layer.kind == "attention")
    assert not any(axis.open for axis in joint_axes(layer.nodes) if axis.sections)
