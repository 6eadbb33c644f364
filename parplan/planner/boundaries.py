"""The problem as it would be if passes hid most of what crosses from many replicas to few: for a plan to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from parplan.planner.formulate import Formulation
from parplan.planner.problem import Edge, Problem

__all__ = ["hidden_boundaries"]


def hidden_boundaries(formulation: Formulation) -> Problem | None:
    """The problem where samples that go from many replicas to few cost their first pass only; None if nothing changes.

    What is optimal here is a plan to try: the rest may turn out not to be hidden.
    """
    counts = [np.array([option.strategy.replicas for option in own]) for own in formulation.options]
    edges = tuple(_hidden(edge, counts) for edge in formulation.problem.edges)
    if all(one is other for one, other in zip(edges, formulation.problem.edges, strict=True)):
        return None
    return replace(formulation.problem, edges=edges)


def _hidden(edge: Edge, counts: Sequence[NDArray[np.int64]]) -> Edge:
    if edge.target >= len(counts):
        return edge
    many, few = counts[edge.source][:, None], counts[edge.target][None, :]
    share = np.where((many > few) & (many % few == 0), few / many, 1.0)
    if (share == 1).all() or not (np.isfinite(edge.ahead) & (edge.ahead > 0) & (share < 1)).any():
        return edge
    return Edge(edge.source, edge.target, share * edge.ahead, share * edge.back)
