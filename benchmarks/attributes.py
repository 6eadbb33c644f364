"""What watching the attributes that a forward reads costs per call: `python -m benchmarks.attributes [--json]`.

Networks of the size of AlexNet and ResNet-50 with a configuration object on every module. Told in microseconds, beside
a fixed Python loop on the same machine at the same time (a ratio drifts less), and as a share of a 20 ms step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parplan.graph.capture.capture import capture

STEP_S = 0.02
REPEATS = 200


class Block(nn.Module):
    """A bottleneck with settings."""

    def __init__(self, config: Any, channels: int) -> None:
        super().__init__()
        self.config = config
        self.scale = 1.0
        self.skip = True
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        y = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = self.relu(norm(conv(y)))
        return x + y * self.scale * self.config.scale if self.skip else y


def network(blocks: int, settings: int) -> nn.Module:
    """Blocks that share one configuration of so many settings."""
    config = types.SimpleNamespace(scale=1.0, **{f"setting_{i}": [i, str(i)] for i in range(settings)})
    return nn.Sequential(*(Block(config, 8) for _ in range(blocks)))


def seconds(work: Callable[[], object]) -> float:
    """Median of one call."""
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def reference() -> None:
    """A fixed piece of interpreter work."""
    total = 0
    for i in range(1000):
        total += i


def measured(blocks: int, settings: int) -> dict[str, float]:
    """Cost of looking once."""
    model = network(blocks, settings)
    graph = capture(model, (torch.zeros(2, 8, 4, 4),), check_batch=False)
    cost, unit = seconds(lambda: graph.reads.hold), seconds(reference)
    modules = len(list(model.modules()))
    return {
        "modules": modules, "settings": settings, "attributes": len(graph.reads.entries), "microseconds": cost * 1e6,
        "reference_loops": cost / unit, "share_of_20_ms": cost / STEP_S,
    }  # fmt: skip


def main() -> None:
    """Print a row per network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    rows = [measured(blocks, settings) for blocks, settings in ((3, 0), (18, 0), (18, 100))]
    if parser.parse_args().json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
