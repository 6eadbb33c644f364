"""Time the planner's solver on problems of the shape real networks give.

python -m benchmarks.solver [--json FILE] [--time-limit S] [--workers N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.instances import Shape, chain, network, residual
from parplan.planner.solver.problem import Problem
from parplan.planner.solver.solve import solve


@dataclass(frozen=True)
class Case:
    """One problem with a name."""

    name: str
    problem: Problem


@dataclass(frozen=True)
class Result:
    """How one problem was solved."""

    name: str
    nodes: int
    strategies: int
    status: str
    objective: float
    gap: float
    seconds: float


def cases() -> Iterator[Case]:
    """Chains like AlexNet and residual networks like ResNet-50, loose and tight memory, fast and slow links."""
    shapes: dict[str, tuple[Shape, int]] = {
        "chain-22": (chain(22, seed=1), 8),
        "chain-22b": (chain(22, seed=2), 8),
        "residual-8": (residual(8, seed=1), 4),
        "residual-18": (residual(18, seed=1), 8),
        "residual-18b": (residual(18, seed=2), 8),
    }
    for name, (shape, devices) in shapes.items():
        for bandwidth in (10e9, 0.5e9):
            for limit in (0.7, 0.15):
                label = f"{name} {bandwidth / 1e9:g}GB/s mem {limit:g}"
                yield Case(label, network(shape, devices, seed=2, limit=limit, bandwidth=bandwidth))


def measure(case: Case, time_limit_s: float, workers: int | None) -> Result:
    """Solve one case."""
    sizes, found = case.problem.sizes, solve(case.problem, time_limit_s, workers)
    return Result(case.name, len(sizes), sum(sizes), found.status.value, found.objective, found.gap, found.seconds)


def main() -> None:
    """Print a table; write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    print(f"{'problem':34} {'nodes':>5} {'strategies':>10} {'status':>10} {'objective':>10} {'gap':>8} {'seconds':>8}")
    results = []
    for case in cases():
        r = measure(case, options.time_limit, options.workers)
        results.append(r)
        figures = f"{r.objective:10.6f} {r.gap:8.1e} {r.seconds:8.2f}"
        print(f"{r.name:34} {r.nodes:5} {r.strategies:10} {r.status:>10} {figures}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
