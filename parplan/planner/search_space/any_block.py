"""A bound on plans with layers on any block of devices, and with branches at the same time: positions folded away.

Which devices a block has matters to a step only where layers share some of them. Here every option stands for a size of
block, and each cost is the least over all positions; no device is followed but lanes that no plan is below:

    the mean of all devices: an option counts by its share of them
    the devices of a heavy layer: that layer, and all layers that use every device

Branches count as the longest of them, or by their shares of the devices, whichever is more. What is left is a problem
of the size of one pass; where its optimum is no better than the best plan, no plan on any blocks is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from parplan.planner.search_space.step_time.parts import EdgeParts, NodeParts
from parplan.planner.solver.problem import FloatArray

__all__ = ["Within", "folded"]

HEAVY = 4
"""Layers whose devices are followed, those with the longest updates and gradient sums."""

COMPUTE = ("once_s", "backward_s", "interference_s", "scatter_interference_s", "gather_interference_s")
"""Seconds of layers that branches divide among the devices."""

Groups = list[NDArray[np.intp]]

Within = Mapping[str, frozenset[tuple[object, ...]]] | None
"""Keys of strategies that layers may have, by name, wherever their blocks are (`Strategy.key`); all if None."""


def folded(
    nodes: Sequence[NodeParts],
    edges: Sequence[EdgeParts],
    forms: Sequence[Sequence[tuple[Hashable, int]]],
    devices: int,
    inside: frozenset[int] = frozenset(),
) -> tuple[list[NodeParts], list[EdgeParts], list[list[int]]]:
    """Parts with one option per arrangement, and per layer the options that stand for them.

    Args:
        forms: per node and option, all that does not depend on where its devices are, and their number.
        inside: layers that count by their share of the devices only.
    """
    groups: list[Groups] = []
    for options in forms:  # those that differ in the position of their block only
        alike: dict[Hashable, list[int]] = {}
        for k, (form, _) in enumerate(options):
            alike.setdefault(form, []).append(k)
        groups.append([np.array(group) for group in alike.values()])
    shares = [
        np.array([options[group[0]][1] / devices for group in own]) for options, own in zip(forms, groups, strict=True)
    ]
    small = [
        replace(node.each(partial(_least, groups=group)), regathers=node.regathers[[one[0] for one in group]])
        for node, group in zip(nodes, groups, strict=True)
    ]
    heavy = sorted(
        (-float((node.update_s + node.sum_s)[share < 1].max(initial=0.0)), v)
        for v, (node, share) in enumerate(zip(small, shares, strict=True))
    )
    alone = [v for seconds, v in heavy[:HEAVY] if seconds < 0]
    found = []
    for v, (node, share) in enumerate(zip(small, shares, strict=True)):
        full = (share == 1).astype(float)
        lanes = [share, *(np.ones_like(share) if v == other else full for other in alone)]
        part = share if v in inside else 1.0
        own = {name: part * getattr(node, name) for name in COMPUTE}
        found.append(replace(node, **own, lanes=np.array(lanes)))
    fewer = []
    for edge in edges:
        part = shares[edge.target] if edge.counted_at in inside else 1.0
        forward, backward, allowed = (
            _least(_least(seconds, groups[edge.source]).T, groups[edge.target]).T
            for seconds in (*edge.once, edge.allowed)
        )
        fewer.append(
            EdgeParts(edge.source, edge.target, allowed, (part * forward, part * backward), reader=edge.reader)
        )
    return found, fewer, [[int(one[0]) for one in group] for group in groups]


def _least(seconds: FloatArray, groups: Groups) -> FloatArray:
    """The least seconds of each group of options, which are along the first dimension."""
    return np.array([seconds[group].min(axis=0) for group in groups])
