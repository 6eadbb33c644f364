"""A bound on plans with layers on any block of devices, and with branches at the same time: positions folded away.

Which devices a block has matters to a step only where layers share some of them. Here every option stands for a size of
block, and each cost is the least over all positions; no device is followed but lanes that no plan is below:

    the mean of all devices: an option counts by its share of them
    the devices of a heavy layer: that layer, and all layers that use every device

Branches count as the longest of them, or by their shares of the devices, whichever is more. What is left is a problem
of the size of one pass; where its optimum is no better than the best plan, no plan on any blocks is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from parplan.plan import Strategy
from parplan.planner.search_space.step_time import EdgeParts, NodeParts
from parplan.planner.solver.problem import FloatArray

__all__ = ["folded"]

HEAVY = 4
"""Layers whose devices are followed, those with the longest updates and gradient sums."""

Groups = list[NDArray[np.intp]]


def folded(
    nodes: Sequence[NodeParts],
    edges: Sequence[EdgeParts],
    strategies: Sequence[Sequence[Strategy]],
    devices: int,
    inside: frozenset[int] = frozenset(),
) -> tuple[list[NodeParts], list[EdgeParts], list[list[int]]]:
    """Parts with one option per arrangement, and per layer the options that stand for them.

    Args:
        strategies: of every option, per layer; the delivery, the last node, has none.
        inside: layers that count by their share of the devices only.
    """
    groups: list[Groups] = [_arrangements(own) for own in strategies]
    groups += [[np.array([0])]] * (len(nodes) - len(groups))
    shares = [np.array([len(one.devices) / devices for one in own]) for own in strategies]
    shares += [np.zeros(1)] * (len(nodes) - len(shares))
    small = [_least(own, group, share) for own, group, share in zip(nodes, groups, shares, strict=True)]
    shares = [share[[one[0] for one in group]] for share, group in zip(shares, groups, strict=True)]
    heavy = sorted(
        (-float((own.update_s + own.sum_s)[share < 1].max(initial=0.0)), v)
        for v, (own, share) in enumerate(zip(small, shares, strict=True))
    )
    alone = [v for seconds, v in heavy[:HEAVY] if seconds < 0]
    found = []
    for v, (own, share) in enumerate(zip(small, shares, strict=True)):
        full = (share == 1).astype(float)
        lanes = [share, *(np.ones_like(share) if v == other else full for other in alone)]
        part = share if v in inside else 1.0
        found.append(replace(own, once_s=part * own.once_s, backward_s=part * own.backward_s, lanes=np.array(lanes)))
    fewer = []
    for edge in edges:
        ends = groups[edge.source], groups[edge.target]
        part = shares[edge.target] if edge.target in inside else 1.0
        once = (part * _least_pairs(edge.once[0], *ends), part * _least_pairs(edge.once[1], *ends))
        fewer.append(EdgeParts(edge.source, edge.target, _least_pairs(edge.allowed, *ends), once))
    return found, fewer, [[int(one[0]) for one in group] for group in groups[: len(strategies)]]


def _arrangements(strategies: Sequence[Strategy]) -> Groups:
    """Options that differ in the position of their block only."""
    found: dict[tuple[object, ...], list[int]] = {}
    for k, one in enumerate(strategies):
        found.setdefault((one.replicas, one.shards, one.axis, len(one.devices)), []).append(k)
    return [np.array(own) for own in found.values()]


def _least(own: NodeParts, groups: Groups, share: FloatArray) -> NodeParts:
    def least(seconds: FloatArray) -> FloatArray:
        return np.array([seconds[group].min() for group in groups])

    return NodeParts(
        once_s=least(own.once_s),
        arrival_s=least(own.arrival_s),
        backward_s=least(own.backward_s),
        pass_forward_s=least(own.pass_forward_s),
        pass_backward_s=least(own.pass_backward_s),
        samples_in_s=least(own.samples_in_s),
        sum_s=least(own.sum_s),
        update_s=least(own.update_s),
        lanes=share[None, [one[0] for one in groups]],
    )


def _least_pairs(seconds: FloatArray, sources: Groups, targets: Groups) -> FloatArray:
    rows = np.array([seconds[group].min(axis=0) for group in sources])
    columns = [rows[:, group].min(axis=1) for group in targets]
    least: FloatArray = np.array(columns).T
    return least
