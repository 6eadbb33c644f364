"""The plan of two blocks of Llama 3 8B's widths on 8 H100, batch 8 x 2,048 in bf16, checked by arithmetic.

From the hardware table: 989 TFLOP/s, of which products reach 0.8 behind 5 us of launch; 3,350 GB/s of memory, of which
0.8; NVLink 368 GB/s and 3.4 us per hop, and 19 % of a gradient sum slow down the backward. Tokens T = 16,384; adam
moves 7 times the bytes of a weight; gradients are summed in messages of 25 MiB.

    head, 4096 x 128,256 (1.051 GB)       data parallel                    cut in 8 by words
    forward, 2 T 4096 128,256 / 8 FLOP    2.73 ms                          2.73 ms
    gradient sum, 2 x 7/8 x 1.051 GB      5.00 + 561 x 3.4 us = 6.90 ms    0
    update, 7 x 1.051 GB (/ 8)            2.74 ms                          0.34 ms
    gather of the input, 7/8 x 134 MB     0                                0.32 + 7 x 3.4 us = 0.34 ms, twice

So the head is cut by words, the loss with it, and the embedding, as large a table, by features: each saves 9.3 ms of
sums and updates and takes less than 1 ms of transfers.

    gate, 4096 x 14,336 (117 MB)          data parallel                    4 replicas of 2 shards
    forward, 2 T 4096 14,336 / 8 FLOP     0.310 ms                         0.310 ms
    gradient sum                          0.558 + 0.213 = 0.772 ms         2 x 3/4 x 59 MB: 0.239 + 0.046 = 0.285 ms
    update                                0.307 ms                         0.153 ms

The three products of an MLP save 1.9 ms by that. Its input is gathered by pairs, 16.8 MB: 0.049 ms, its result summed
and scattered in as much, and the gradients the same: 0.2 ms in all.

Data parallel takes: forward 8.6, loss and head backward 8.1 (1.3 of it the slowdown by the head's sum), then 0.81 of
19.5 ms of sums, behind which the rest of the backward hides, and 7.8 ms of updates: 40.4 ms. The plan takes 25.2.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.cluster import Cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.pins import pins_from
from parplan.plan import Strategy
from parplan.planner.decide import decide
from parplan.planner.decision import Decision
from parplan.planner.request import PlanRequest

WIDTH, KEYS, HIDDEN, WORDS, TOKENS = 4096, 1024, 14_336, 128_256, 8 * 2048
ALL = tuple(range(8))
PRODUCTS, LAUNCH_S, MEMORY, NVLINK, HOP_S = 0.8 * 989e12, 5e-6, 0.8 * 3350e9, 368e9, 3.4e-6
SLOWED, MESSAGE, ADAM = 0.19, 25 * 2**20, 7


class Block(nn.Module):
    """A pre-norm block with grouped queries and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, KEYS, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, WIDTH) to the same."""
        y = self.norm1(x)
        q, k, v = (own(y).view(*x.shape[:2], -1, 128).transpose(1, 2) for own in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Llama(nn.Module):
    """Embedding, two blocks, norm, head and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of (samples, tokens) of word numbers."""
        logits = self.head(self.norm(self.blocks(self.embed(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@cache
def planned() -> tuple[LayerGraph, Cluster, RooflineCosts, Decision]:
    """The model on 8 H100 with the fastest plan of whole state."""
    with torch.device("meta"):
        tokens = torch.zeros(8, 2048, dtype=torch.long)
        graph = capture(Llama().to(torch.bfloat16), (tokens, tokens))
    cluster = cluster_preset("h100-sxm", 8)
    costs = RooflineCosts(graph, cluster, precision="bf16", optimizer="adam")
    request = PlanRequest(tolerance=0.0, started_ranks=True, pins=pins_from(["*=state:replicated"]), price_pins=False)
    return graph, cluster, costs, decide(graph, cluster, costs, request)


def product_s(takes: int, gives: int) -> float:
    """Forward of an eighth of a product of all tokens with a weight."""
    return 2 * TOKENS / 8 * takes * gives / PRODUCTS + LAUNCH_S / 0.8


def sum_s(nbytes: float, ring: int) -> float:
    """A gradient sum in a ring: 2 (n - 1) / n of the bytes, and 2 (n - 1) hops per message."""
    return 2 * (ring - 1) * (nbytes / ring / NVLINK + HOP_S * nbytes / MESSAGE)


@pytest.mark.full
def test_embedding_head_and_mlp_are_cut() -> None:
    _, _, _, decision = planned()
    cut = {name: (own.replicas, own.shards, own.axis) for name, own in decision.plan.layers.items()}
    assert decision.proof.status == "OPTIMAL"
    assert (cut["embed"], cut["head"], cut["loss"]) == (
        (1, 8, "features"), (1, 8, "out-features"), (1, 8, "vocabulary")
    )  # fmt: skip
    for block in ("blocks.0", "blocks.1"):
        assert cut[f"{block}.gate"] == cut[f"{block}.up"] == (4, 2, "out-features")
        assert cut[f"{block}.down"] == (4, 2, "in-features")


@pytest.mark.full
def test_products_sums_and_updates_take_what_arithmetic_says() -> None:
    graph, _, costs, decision = planned()
    every, plan, whole = graph.layers, decision.plan.layers, Strategy(8, 1, None, ALL)
    mlp, table = 2 * WIDTH * HIDDEN, 2 * WIDTH * WORDS
    for name in ("gate", "up", "down"):
        layer, own = every[f"blocks.0.{name}"], plan[f"blocks.0.{name}"]
        cost = costs.layer(layer, own)
        assert cost.forward_s == pytest.approx(product_s(WIDTH, HIDDEN), rel=1e-6)
        assert cost.backward_s == pytest.approx(2 * product_s(WIDTH, HIDDEN), rel=1e-6)
        assert cost.update_s == pytest.approx(ADAM * mlp / 2 / MEMORY, rel=1e-6)
        assert costs.reduction(layer, own) == pytest.approx(sum_s(mlp / 2, 4), rel=1e-6)
        assert costs.reduction(layer, whole) == pytest.approx(sum_s(mlp, 8), rel=1e-6)
    head = every["head"]
    assert costs.layer(head, plan["head"]).forward_s == pytest.approx(product_s(WIDTH, WORDS), rel=1e-6)
    for name in ("embed", "head"):
        assert costs.reduction(every[name], plan[name]) == 0.0
        assert costs.layer(every[name], plan[name]).update_s == pytest.approx(ADAM * table / 8 / MEMORY, rel=1e-6)
        assert costs.layer(every[name], whole).update_s == pytest.approx(ADAM * table / MEMORY, rel=1e-6)
        assert costs.reduction(every[name], whole) == pytest.approx(sum_s(table, 8), rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "target", "kind", "received"),
    [
        ("norm", "head", "all-gather", 7 / 8),
        ("blocks.0.norm2", "blocks.0.gate", "all-gather", 1 / 8),
        ("blocks.0.down", "blocks.0.add_1", "reduce-scatter", 1 / 8),
    ],
)
def test_gathers_take_what_arithmetic_says(source: str, target: str, kind: str, received: float) -> None:
    graph, _, costs, decision = planned()
    (value,) = (own for own in graph.layers[target].inputs if graph.producer.get(own) == source)
    ends = (graph.layers[name].layout(value, decision.plan.layers[name]) for name in (source, target))
    moved = costs.transfer(graph.values[value], *ends)
    seconds = received * 2 * TOKENS * WIDTH / NVLINK + 8 * received * HOP_S
    assert moved.kind == kind
    assert [moved.forward_s, moved.backward_s] == pytest.approx([seconds, seconds])


@pytest.mark.full
def test_slices_of_the_state_gain_a_twentieth_more() -> None:
    """Weights that all devices hold are updated on one each."""
    graph, cluster, costs, decision = planned()
    free = decide(graph, cluster, costs, PlanRequest(tolerance=0.0, started_ranks=True))
    assert free.plan.sharded
    assert free.prediction.step_s == pytest.approx(0.946 * decision.prediction.step_s, rel=0.005)


def test_data_parallel_loses_by_what_arithmetic_says() -> None:
    """Elementwise layers and the loss are taken as priced; products, sums and updates by hand."""
    graph, _, costs, decision = planned()
    whole = Strategy(8, 1, None, ALL)
    plain = [own for own in graph.layers.values() if own.kind != "linear" and own.batch is not None]
    weights = 2 * [(WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, KEYS), (WIDTH, KEYS), *3 * [(WIDTH, HIDDEN)]]
    weights += [(WIDTH, WORDS)]
    tables = [2 * a * b for a, b in [*weights, (WORDS, WIDTH)]]
    forward_s = sum(product_s(*own) for own in weights) + sum(costs.layer(own, whole).forward_s for own in plain)
    loss_s = costs.layer(graph.layers["loss"], whole).backward_s
    head_s = 2 * product_s(WIDTH, WORDS) + SLOWED * sum_s(2 * WIDTH * WORDS, 8)
    sums_s = (1 - SLOWED) * sum(sum_s(own, 8) for own in tables)
    step_s = forward_s + loss_s + head_s + sums_s + sum(ADAM * own / MEMORY for own in tables)
    (known,) = (own for own in decision.baselines if own.name == "pure data parallel")
    assert step_s == pytest.approx(40.4e-3, rel=0.005)
    assert known.step_s == pytest.approx(step_s, rel=0.005)
    assert decision.prediction.step_s == pytest.approx(25.15e-3, rel=0.005)
