"""Random problems as compilers make them: one-to-one edges, memory over time, a limit a little above the least peak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from parplan.planner.solver.problem import Edge, FloatArray, Node, Problem, Usage, evaluate

__all__ = ["compiler_problem", "with_one_to_one_edges"]


def compiler_problem(
    seed: int, nodes: int = 9, most: int = 3, slack: float = 1.1, extra: float = 0.5, share: float = 0.4
) -> Problem:
    """A problem of whole-number costs.

    Args:
        most: strategies of a node.
        slack: the limit, in peaks of the choice that holds least at every node.
        extra: edges per node beside a tree.
        share: of the tree's edges, those that are one-to-one.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most + 1, nodes)
    parts = []
    for v, size in enumerate(sizes):
        start = int(rng.integers(0, 2 * nodes))
        held = Usage(0, start, start + int(rng.integers(0, nodes)), rng.integers(1, 40, size))
        parts.append(Node(f"node{v}", rng.integers(0, 60, size), (held,) if rng.random() < 0.8 else ()))
    ends = [(int(rng.integers(max(0, v - 3), v)), v) for v in range(1, nodes)]
    ends += [tuple(sorted(rng.choice(nodes, 2, replace=False).tolist())) for _ in range(int(extra * nodes))]
    edges = tuple(
        Edge(u, v, _pairs(rng, int(sizes[u]), int(sizes[v]), share if e < nodes - 1 else 0.0))
        for e, (u, v) in enumerate(ends)
    )
    problem = Problem(tuple(parts), edges, (np.inf,))
    leanest = [int(node.usages[0].amounts.argmin()) if node.usages else 0 for node in parts]
    return replace(problem, limits=(float(int(slack * evaluate(problem, leanest).peaks[0])),))


def with_one_to_one_edges(problem: Problem, seed: int) -> Problem:
    """`problem` with some edges made one-to-one."""
    rng = np.random.default_rng(seed)
    edges = [
        replace(
            edge, cost_s=np.where(_pairs(rng, len(edge.cost_s), len(edge.cost_s.T), 0.5) < np.inf, edge.cost_s, np.inf)
        )
        for edge in problem.edges
    ]
    return replace(problem, edges=tuple(edges))


def _pairs(rng: np.random.Generator, rows: int, columns: int, share: float) -> FloatArray:
    """Costs of an edge; one-to-one for a share of the edges, sometimes without a partner for some strategies."""
    costs: FloatArray = rng.integers(0, 80, (rows, columns)).astype(np.float64)
    if rng.random() < share and (abs(rows - columns) <= 1 or rng.random() < 0.3):
        allowed = np.zeros((rows, columns), dtype=np.bool_)
        count = min(rows, columns)
        allowed[rng.permutation(rows)[:count], rng.permutation(columns)[:count]] = True
        costs = np.where(allowed, costs, np.inf)
    return costs
