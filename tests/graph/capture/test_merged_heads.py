"""Heads that are merged with samples in one dimension are cut, and give the uncut model's numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.layers import BOUNDARY
from parplan.plan import Strategy
from tests.graph.by_hand import assert_same_numbers, halves
from tests.runtime.helpers import compiled, differences, outcome, random_strategies

WIDTH, HEADS = 16, 4


class _Attention(nn.Module):
    """Products of stacks of matrices [samples * heads], dropout between them."""

    def __init__(self, added: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop, self.added = nn.Dropout(0.0), added

    def _stack(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], HEADS, -1).permute(0, 2, 1, 3).contiguous()
        return heads.view(-1, x.shape[1], WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self._stack(self.q(x)), self._stack(self.k(x)), self._stack(self.v(x))
        if self.added:
            scores = torch.baddbmm(x.new_zeros(n * HEADS, t, t), q, k.mT, beta=1.0, alpha=0.5)
        else:
            scores = torch.bmm(q, k.mT) * 0.5
        y = torch.bmm(self.drop(scores.softmax(-1)), v).view(n, HEADS, t, -1).permute(0, 2, 1, 3)
        result: Tensor = self.o(y.reshape(n, t, -1))
        return result


class _Repeated(_Attention):
    """A bias of positions, the same for all samples, that is laid out once for each."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self._stack(self.q(x)), self._stack(self.k(x)), self._stack(self.v(x))
        places = self._stack(self.k(self.positions)).repeat(n, 1, 1)
        scores = torch.bmm(q, k.mT) + torch.bmm(q, places.mT)[..., :t]
        y = torch.bmm(self.drop(scores.softmax(-1)), v).view(n, HEADS, t, -1).permute(0, 2, 1, 3)
        result: Tensor = self.o(y.reshape(n, t, -1))
        return result


class _Norm(nn.Module):
    """Heads normalised as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // HEADS))

    def forward(self, rows: Tensor, gate: Tensor) -> Tensor:
        return self.weight * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6) * torch.sigmoid(gate)


class _NormalisedRows(_Attention):
    """A gated delta net's norm: of rows [samples * tokens * heads]."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.norm, self.gate, self.masked = _Norm(), nn.Linear(WIDTH, WIDTH), masked

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (one(x).view(n, t, HEADS, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        if self.masked:
            y = nn.functional.scaled_dot_product_attention(q, k, v, x.new_ones(t, t).tril())
        else:
            y = torch.matmul(torch.matmul(q, k.mT).tril(), v)
        width = WIDTH // HEADS
        rows = self.norm(y.transpose(1, 2).reshape(-1, width), self.gate(x).view(n, t, -1, width).reshape(-1, width))
        result: Tensor = self.o(rows.reshape(n, t, -1))
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "products": _Attention,
    "added": lambda: _Attention(added=True),
    "repeated": _Repeated,
    "rows": _NormalisedRows,
    "masked_rows": lambda: _NormalisedRows(masked=True),
}


def _by_heads(graph: LayerGraph, layer: Layer, replicas: int = 1) -> Strategy:
    for name in ("heads", "channels", "features", "out-features"):
        axis = layer.axis(name)
        spread = replicas if layer.batch is not None else 1
        if axis is not None and axis.units % HEADS == 0:
            return Strategy(spread, HEADS, name, tuple(range(spread * HEADS)))
    return halves(graph, layer) if replicas > 1 else Strategy()


@pytest.mark.full
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_heads_behind_samples_are_cut_and_compute_the_whole(name: str, replicas: int) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]().double(), torch.randn(6, 5, WIDTH, dtype=torch.float64)
    graph, cut = capture(model, (x,)), set[str]()

    def by_heads(graph: LayerGraph, layer: Layer) -> Strategy:
        chosen = _by_heads(graph, layer, replicas)
        cut.update([layer.name] if chosen.shards > 1 else [])
        return chosen

    assert_same_numbers(graph, model, (x,), choose=by_heads)
    products = {layer.name for layer in graph.layers.values() if layer.kind == "attention"}
    assert products
    assert cut >= products | ({"norm"} & graph.layers.keys())
    assert all(layer.batch is not None for layer in graph.layers.values() if layer.name in products)
    assert graph.fixed_batch == (name == "repeated")  # how often it is laid out depends on the batch


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_any_plan_gives_the_plain_models_numbers(name: str) -> None:
    torch.manual_seed(0)
    plain, x = MODELS[name]().double(), torch.randn(4, 5, WIDTH, dtype=torch.float64)
    graph = capture(plain, (x,))
    for seed in range(3):
        model = compiled(plain, random_strategies(graph, 4, random.Random(seed)), 4)
        assert not differences(outcome(model.module, model, x), outcome(plain, plain, x)), seed


@pytest.mark.full
def test_verification_passes_for_another_batch() -> None:
    torch.manual_seed(0)
    model, x = _NormalisedRows().double(), torch.randn(4, 5, WIDTH, dtype=torch.float64)
    decision = parplan.analyze(model, x, gpus=4, gpu="a100-80g-sxm")
    assert parplan.verify(model, torch.randn(8, 5, WIDTH, dtype=torch.float64), plan=decision.plan).passed


class _Tokens(nn.Module):
    """Rows of all tokens, which nobody takes apart again by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x.reshape(-1, WIDTH)).relu()).reshape(x.shape)
        return result


def test_tokens_without_heads_stay_merged() -> None:
    graph = capture(_Tokens(), (torch.randn(4, 5, WIDTH),))
    assert not any(BOUNDARY in node.meta for layer in graph.layers.values() for node in layer.nodes)


class _Mixed(nn.Module):
    """Doge's router: a view that mixes the tokens of all samples, and a product for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        weights = self.gate(x).view(2, n * t, 2).sum(0).softmax(-1)
        return torch.matmul(weights[:, None], self.up(x).view(n * t, 2, WIDTH)).view(n, t, WIDTH)


def test_tokens_that_are_mixed_are_no_heads() -> None:
    torch.manual_seed(0)
    model, x = _Mixed().double(), torch.randn(4, 6, WIDTH, dtype=torch.float64)
    graph = capture(model, (x,))
    assert not any(BOUNDARY in node.meta for layer in graph.layers.values() for node in layer.nodes)
    assert_same_numbers(graph, model, (x,), choose=halves)
