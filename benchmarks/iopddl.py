"""Solve public instances of the planner's core problem (IOPDDL, the ASPLOS / EuroSys 2025 contest) and score them.

    python -m benchmarks.iopddl PATH... [--time-limit S] [--workers N] [--json FILE]

PATH is a `.json.gz` (or `.json`) file of github.com/google/iopddl. Costs are whole numbers; 10^18 forbids.
Score = best cost known from the contest / our cost, at the contest's time limit.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parplan.planner.solver.problem import Edge, FloatArray, Node, Problem, Usage
from parplan.planner.solver.solve import solve

__all__ = ["read"]

FORBIDDEN = 1e18


@dataclass(frozen=True)
class Known:
    """The contest's time limit in seconds and best cost for one instance."""

    time_limit_s: float
    best: float


KNOWN = {
    "A": Known(60, 6_548_641_531),
    "G": Known(120, 217_039),
    "M": Known(180, 49_928_460_991),
    "S": Known(240, 1_534_613_444),
}


def read(path: Path) -> Problem:
    """The problem in a file of the contest's format: one memory, no maxima."""
    raw = path.read_bytes()
    data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["problem"]
    parts = data["nodes"]
    rows = zip(parts["intervals"], parts["costs"], parts["usages"], strict=True)
    nodes = tuple(_node(v, *row) for v, row in enumerate(rows))
    pairs = zip(data["edges"]["nodes"], data["edges"]["costs"], strict=True)
    edges = tuple(_edge(nodes, a, b, costs) for (a, b), costs in pairs)
    return Problem(nodes, edges, (float(data["usage_limit"]),))


def _costs(values: list[float]) -> FloatArray:
    costs = np.array(values, dtype=np.float64)
    return np.where(costs >= FORBIDDEN, np.inf, costs)


def _node(v: int, interval: list[int], costs: list[float], usages: list[float]) -> Node:
    usage = (Usage(0, interval[0], interval[1], np.array(usages)),) if interval[0] < interval[1] else ()
    return Node(f"node{v}", _costs(costs), usage)


def _edge(nodes: tuple[Node, ...], a: int, b: int, values: list[float]) -> Edge:
    costs = _costs(values).reshape(nodes[a].size, nodes[b].size)
    costs = costs if a < b else costs.T
    return Edge(min(a, b), max(a, b), costs)


def _letter(path: Path) -> str:
    """`A` of `asplos-2025-iopddl-A.json.gz`."""
    return path.name.split(".")[0].split("-")[-1]


def report(path: Path, time_limit_s: float | None, workers: int | None) -> dict[str, Any]:
    """Read, solve and score one file; reading counts."""
    began = time.monotonic()
    known = KNOWN.get(_letter(path))
    limit = time_limit_s or (known.time_limit_s if known else 60.0)
    problem = read(path)
    found = solve(problem, limit - (time.monotonic() - began), workers)
    score = None if known is None else known.best / found.objective if found.choice else 0.0
    return {
        "instance": path.name,
        "status": found.status.value,
        "cost": found.objective if found.choice else None,
        "bound": found.bound,
        "best": known.best if known else None,
        "score": score,
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    """Print one line per file."""
    parser = argparse.ArgumentParser(description="Solve and score IOPDDL instances.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--time-limit", type=float, help="seconds; the contest's limit of each instance by default")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a list, too")
    options = parser.parse_args()
    print(f"{'instance':32} {'status':>10} {'cost':>16} {'bound':>16} {'best known':>16} {'score':>7} {'seconds':>8}")
    results = []
    for path in options.paths:
        result = report(path, options.time_limit, options.workers)
        results.append(result)
        cost, bound, best = (f"{result[key] or np.nan:16,.0f}" for key in ("cost", "bound", "best"))
        score = f"{np.nan if result['score'] is None else result['score']:7.4f}"
        print(
            f"{path.name:32} {result['status']:>10} {cost} {bound} {best} {score} {result['seconds']:8.1f}", flush=True
        )
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
