"""Networks with branches that the planner's tests draw or share."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from torch import Tensor, nn

from parplan.cluster import Cluster, Device, Link
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph

__all__ = ["GPU", "Branchy", "Pair", "cluster_of", "drawn", "pair"]

GPU = Device("gpu", 1 << 30, {"fp32": 2e9}, 1e10, 1e-7, "made up", like="")


def cluster_of(count: int, latency_s: float = 1e-5, bandwidth_bytes_per_s: float = 1e9) -> Cluster:
    """Equal devices that small layers keep busy, on one link."""
    return Cluster.of(GPU, count, (Link("link", count, latency_s, bandwidth_bytes_per_s),))


class Pair(nn.Module):
    """Two equal rows of linear layers on one input, joined at the end: (N, width) to (N, 8)."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))) for _ in "ab")
        self.last = nn.Linear(2 * width, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Both rows side by side, then the last layer."""
        result: Tensor = self.last(torch.cat((self.a(x), self.b(x)), 1))
        return result


def pair(width: int = 64, depth: int = 3, batch: int = 1) -> LayerGraph:
    """`Pair`, captured."""
    return capture(Pair(width, depth), (torch.randn(batch, width),))


class Branchy(nn.Module):
    """A random network of a few rows of linear layers, some of which read each other half way: (N, 64) to (N, 8)."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64) if draw.random() < 0.3 else nn.Identity()
        self.crossed = draw.random() < 0.3
        lengths = draw.choice(((1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (1, 1, 1), (2, 1, 1), (1, 1, 1, 1)))
        self.rows = nn.ModuleList(self._row(draw, 64, length) for length in ((1, 1) if self.crossed else lengths))
        width = sum(_ends(row) for row in self.rows)
        self.crossing = nn.ModuleList(self._row(draw, width, 1) for _ in range(2 if self.crossed else 0))
        width = sum(_ends(row) for row in self.crossing) if self.crossed else width
        self.last = nn.Linear(width, 8)

    @staticmethod
    def _row(draw: random.Random, width: int, length: int) -> nn.Sequential:
        widths = [width, *(draw.choice((64, 128, 256)) for _ in range(length))]
        return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))

    def forward(self, x: Tensor) -> Tensor:
        """The stem, the rows, and the last layer on all of them."""
        x = self.stem(x)
        found = [row(x) for row in self.rows]
        if self.crossed:
            found = [row(torch.cat(found, 1)) for row in self.crossing]
        result: Tensor = self.last(torch.cat(found, 1))
        return result


def _ends(row: nn.Module) -> int:
    """The width that a row of linear layers ends with."""
    widths = [layer.out_features for layer in row.modules() if isinstance(layer, nn.Linear)]
    return widths[-1]


def drawn(seed: int) -> LayerGraph:
    """A `Branchy` network, captured at a batch of 1 or 2."""
    draw = random.Random(seed)
    return capture(Branchy(draw), (torch.randn(draw.choice((1, 1, 2)), 64),))
