"""The slow truth: try every choice."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from parplan.planner.problem import Problem, evaluate

__all__ = ["Optimum", "brute_force"]


@dataclass(frozen=True)
class Optimum:
    """The first best choice and its objective; no choice and inf if none is feasible."""

    objective: float
    choice: tuple[int, ...] | None


def brute_force(problem: Problem) -> Optimum:
    """The optimum of a problem of a few thousand choices at most."""
    best = Optimum(np.inf, None)
    for choice in product(*map(range, problem.sizes)):
        found = evaluate(problem, choice)
        if found.feasible and found.objective < best.objective:
            best = Optimum(found.objective, choice)
    return best
