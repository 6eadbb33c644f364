"""Small models and clusters drawn at random, on which proofs are compared with simulated steps (benchmarks/proofs.py).

Each kind of model is one of which a search over plans has to get something else right: layers that follow each other,
values that two layers read, branches that could run at the same time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from parplan.cluster import Cluster, Device, Link
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.planner.request import PlanRequest

__all__ = ["KINDS", "Problem", "drawn", "drawn_cluster", "drawn_model"]

BATCHES = (1, 2, 4, 8, 32, 128)
WIDTHS = (8, 64, 512)
STARTED_RANKS = 0.8


class Residual(nn.Module):
    """Blocks of one or two layers with what they read added to what they give: (N, width) to the same."""

    def __init__(self, width: int, lengths: Sequence[int], last: int | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(width, width) for _ in range(n))) for n in lengths)
        self.last = nn.Identity() if last is None else nn.Linear(width, last)

    def forward(self, x: Tensor) -> Tensor:
        """Block after block, then the last layer."""
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.last(x)
        return result


class Attention(nn.Module):
    """One head of attention, with or without its input added: (N, steps, width) to the same."""

    def __init__(self, width: int, residual: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """Scores of all steps, and the values that they weigh."""
        mixed = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return x + mixed if self.residual else mixed


class Experts(nn.Module):
    """Layers on one input whose results are weighed or added up: (N, width) to the same."""

    def __init__(self, width: int, count: int, weighed: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.gate = nn.Linear(width, count) if weighed else None

    def forward(self, x: Tensor) -> Tensor:
        """The sum of what the experts give, each times its weight where there is a gate."""
        given = [expert(x) for expert in self.experts]
        if self.gate is not None:
            weights = self.gate(x).softmax(1)
            given = [weights[:, k : k + 1] * one for k, one in enumerate(given)]
        total: Tensor = given[0]
        for one in given[1:]:
            total = total + one
        return total


class Towers(nn.Module):
    """Rows of layers of several lengths on one input, joined by a last layer: (N, width) to (N, 8)."""

    def __init__(self, draw: random.Random, lengths: Sequence[int], stem: bool, joined: str) -> None:
        super().__init__()
        self.width, self.joined = draw.choice(WIDTHS), joined
        end = draw.choice(WIDTHS)
        self.stem = nn.Linear(self.width, self.width) if stem else nn.Identity()
        inner = [[self.width, *(draw.choice(WIDTHS) for _ in range(n - 1)), end] for n in lengths]
        self.rows = nn.ModuleList(nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(own))) for own in inner)
        self.last = nn.Linear(end * (len(lengths) if joined == "cat" else 1), 8) if joined != "none" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """All rows, then the last layer, or what the rows give."""
        x = self.stem(x)
        given = [row(x) for row in self.rows]
        if self.joined == "none":
            return tuple(given)
        joined = torch.cat(given, 1) if self.joined == "cat" else sum(given[1:], given[0])
        result: Tensor = self.last(joined)
        return result


class Recurrent(nn.Module):
    """LSTM after LSTM: (N, steps, width) to the same."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's outputs."""
        for layer in self.layers:
            x = layer(x)[0]
        return x


class WithLoss(nn.Module):
    """A model with its loss inside, the mean squared error of each result: (input, a target of each) to a scalar."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, *targets: Tensor) -> Tensor:
        """The sum of the errors of all results."""
        given = self.net(x)
        given = given if isinstance(given, tuple) else (given,)
        errors = [nn.functional.mse_loss(*pair) for pair in zip(given, targets, strict=True)]
        total: Tensor = sum(errors[1:], errors[0])
        return total


Drawn = tuple[nn.Module, tuple[int, ...]]
"""A model and the shape of its input."""


def _chain(draw: random.Random, batch: int) -> Drawn:
    widths = [draw.choice(WIDTHS) for _ in range(draw.choice((3, 4, 5)))]
    layers: list[nn.Module] = [nn.Linear(*pair) for pair in pairwise(widths)]
    return nn.Sequential(*layers, *([nn.ReLU()] if draw.random() < 0.5 else [])), (batch, widths[0])


def _conv(draw: random.Random, batch: int) -> Drawn:
    channels = [3, *(draw.choice((4, 16, 32)) for _ in range(draw.choice((1, 2))))]
    body: list[nn.Module] = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(channels)]
    body += [nn.BatchNorm2d(channels[-1])] if draw.random() < 0.3 else []
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(64 * channels[-1], draw.choice((8, 512)))), (batch, 3, 8, 8)


def _lstm(draw: random.Random, batch: int) -> Drawn:
    width = draw.choice(WIDTHS)
    return Recurrent(width, draw.choice((2, 3, 4))), (batch, 3, width)


def _residual(draw: random.Random, batch: int) -> Drawn:
    width, lengths = draw.choice(WIDTHS), draw.choice(((1,), (2,), (1, 1), (2, 1)))
    return Residual(width, lengths, draw.choice((None, 8, width))), (batch, width)


def _attention(draw: random.Random, batch: int) -> Drawn:
    width = draw.choice(WIDTHS)
    return Attention(width, draw.random() < 0.6), (batch, draw.choice((2, 16)), width)


def _experts(draw: random.Random, batch: int) -> Drawn:
    width, count = draw.choice(WIDTHS), draw.choice((2, 2, 3))
    return Experts(width, count, count == 2 and draw.random() < 0.5), (batch, width)


def _towers(draw: random.Random, batch: int) -> Drawn:
    lengths = draw.choice(((1, 1), (1, 2), (2, 2), (1, 3), (1, 1, 1)))
    net = Towers(draw, lengths, sum(lengths) < 4 and draw.random() < 0.3, draw.choice(("cat", "sum", "none")))
    return net, (batch, net.width)


KINDS: dict[str, Callable[[random.Random, int], Drawn]] = {
    "chain": _chain, "conv": _conv, "lstm": _lstm, "residual": _residual, "attention": _attention,
    "experts": _experts, "towers": _towers,
}  # fmt: skip


@cache
def drawn_model(kind: str, seed: int, loss: bool = False) -> LayerGraph:
    """A model of this kind, with two to eight layers, and with its loss inside where asked for."""
    draw = random.Random(f"{kind} {seed}")
    net, shape = KINDS[kind](draw, draw.choice(BATCHES))
    x = torch.zeros(shape)
    if not loss:
        return capture(net, (x,))
    with torch.no_grad():
        given = net(x)
    return capture(WithLoss(net), (x, *(given if isinstance(given, tuple) else (given,))))


def drawn_cluster(draw: random.Random, most_devices: int) -> Cluster:
    """Two to so many equal devices of any speed on one or two levels of links, from NVLink to a slow network."""
    device = Device(
        "made up", 1 << 36, {"fp32": draw.choice((2e9, 1e11, 1e13))}, draw.choice((1e9, 1e11, 1e12)),
        draw.choice((0.0, 1e-7, 5e-6)), "made up", like="",
    )  # fmt: skip
    count = draw.randint(2, most_devices)

    def link(size: int) -> Link:
        latency_s, bandwidth = draw.choice((0.0, 1e-6, 1e-5, 1e-4)), draw.choice((1e8, 1e9, 1e10, 1e11))
        return Link(f"link of {size}", size, latency_s, bandwidth, overlap=draw.choice((0.0, 0.5, 1.0)))

    links = (link(2), link(count)) if count == 4 and draw.random() < 0.3 else (link(count),)
    return Cluster.of(device, count, links)


@dataclass(frozen=True, eq=False)
class Problem:
    """A model on a cluster with its costs, the request for its fastest plan, and the name that draws it again."""

    name: str
    graph: LayerGraph
    cluster: Cluster
    costs: RooflineCosts
    request: PlanRequest


def drawn(kind: str, seed: int, most_devices: int = 4, loss: bool = False) -> Problem:
    """The problem of a seed."""
    graph, draw = drawn_model(kind, seed, loss), random.Random(f"{kind} {seed} devices")
    cluster = drawn_cluster(draw, most_devices)
    costs = RooflineCosts(graph, cluster, optimizer=draw.choice(("sgd", "momentum", "adam")))
    # Where each device has its process, one device alone gets its samples from the others, and is rarely the fastest.
    request = PlanRequest(tolerance=0.0, started_ranks=draw.random() < STARTED_RANKS)
    return Problem(f"{kind}:{seed}", graph, cluster, costs, request)
