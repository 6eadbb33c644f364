"""The order of a program's steps.

Forward, a transfer starts as soon as its value is there; backward, as soon as the last reader has given its gradient,
and the sum of a bucket as soon as its last gradient is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from parplan.graph.layer_graph import LayerGraph
from parplan.runtime.placing import Placed
from parplan.runtime.program import Bucket, Compute, Reduce, Step, Transfer

__all__ = ["backward", "bucket_heads", "forward"]


def forward(steps: Sequence[Compute], moves: Sequence[Placed]) -> list[Compute | Transfer]:
    """Forward steps: every compute step, and behind it the transfers that can start then."""
    order: list[Compute | Transfer] = []
    for index in range(-1, len(steps)):
        if index >= 0:
            order.append(steps[index])
        order += [placed.transfer for placed in moves if placed.forward_at == index]
    return order


def backward(steps: Sequence[Compute], moves: Sequence[Placed], buckets: Sequence[Bucket]) -> list[Step]:
    """Backward steps: every compute step reversed, and behind it the sums and transfers that can start then."""
    complete = _completed_by(steps, buckets)
    order: list[Step] = []
    for index in range(len(steps), -1, -1):
        if index < len(steps):
            order.append(steps[index])
        order += [Reduce(number, buckets[number].parameters) for number in complete.get(index, [])]
        order += [placed.transfer for placed in reversed(moves) if placed.backward_at == index]
    return order


def _completed_by(steps: Sequence[Compute], buckets: Sequence[Bucket]) -> dict[int, list[int]]:
    """Buckets by the segment whose backward completes them."""
    found: dict[int, list[int]] = {}
    for number, bucket in enumerate(buckets):
        first = min(i for i, step in enumerate(steps) if any(s.name in bucket.parameters for s in step.states))
        found.setdefault(first, []).append(number)
    return found


def bucket_heads(graph: LayerGraph, buckets: Sequence[Bucket]) -> set[str]:
    """The first layer of each bucket, at which a segment is split so that the bucket can leave early."""
    order = list(graph.layers)
    heads = set()
    for bucket in buckets:
        using = (i for i, name in enumerate(order) if set(graph.layers[name].parameters) & set(bucket.parameters))
        heads.add(order[min(using)])
    return heads
