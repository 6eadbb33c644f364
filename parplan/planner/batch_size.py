"""Which batch to train with, as far as time goes: a model priced at several, the smallest of the fastest chosen.

More samples in a step hide what a step costs whatever its batch (weight gradients on the links, updates, launches), so
samples per second grow with the batch, less and less: once a doubling brings little, all further ones together bring no
more than it did. So batches are doubled from one sample per device until memory ends or two doublings in a row bring
next to nothing; where memory ends, batches between the last two are tried as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import lcm

from parplan.cluster import Cluster
from parplan.errors import InfeasiblePlan
from parplan.planner.decision import BatchTried, Decision, Prediction
from parplan.planner.request import PlanRequest

__all__ = ["CLOSE", "FLAT", "best_batch", "chosen", "smallest_step", "tried_as"]

# Batches whose samples/s are so close to the most are as good.
CLOSE = 0.02
# A doubling that brings less than this brings next to nothing.
FLAT = 0.01
# Batches tried between the last that fits and the first that does not.
BETWEEN = 2
# Each attempt may take this part of the solver's time.
SHARE = 8
# Samples per device beyond which nothing is tried.
MOST = 2**20


Estimated = Callable[[int, PlanRequest], Prediction]
"""The predicted step of the fastest plan of a model at a batch; InfeasiblePlan where none fits."""


def smallest_step(devices: int, request: PlanRequest) -> int:
    """The fewest samples of which every multiple is a batch that the rules allow: one per device and micro-batch, if
    nothing is fixed.

    >>> smallest_step(4, PlanRequest())
    4
    """
    planned = [strategy.replicas for strategy in request.plan.layers.values()] if request.plan is not None else []
    return lcm(devices, *planned, *(pin.replicas or 1 for pin in request.pins)) * (request.asked_micro_batches or 1)


def best_batch(
    estimated: Estimated,
    decided: Callable[[int, PlanRequest], Decision],
    cluster: Cluster,
    request: PlanRequest,
    asked: int | None,
) -> Decision:
    """The decision at the smallest batch within CLOSE of the most samples per second, with all that were tried.

    Args:
        decided: the full decision at a batch.
        request: of the plan; each attempt gets a share of its time.
        asked: the batch of the example inputs, which the note compares with.

    Raises:
        InfeasiblePlan: not even one sample for each device fits.
    """
    tried = _tried_batches(estimated, cluster, replace(request, time_limit_s=request.time_limit_s / SHARE))
    batch = chosen(tried)
    found = decided(batch, request)
    # An estimate knows plans in one pass only; the full search may find a faster one.
    rows = [tried_as(batch, found.prediction, cluster) if one.batch == batch else one for one in tried]
    text = f"Batch {batch:,}: the smallest of {len(tried)} tried that is within {CLOSE:.0%} of the most samples/s."
    if asked is None or asked == batch:
        text += " Another batch is another training, with another learning rate."
    else:
        text += (
            f" Another batch is another training: from the example inputs' {asked:,} samples to {batch:,}, the "
            f"learning rate is multiplied by {batch / asked:.4g} (Krizhevsky 2014: batch x k, rate x k; momentum and "
            "weight decay stay)."
        )
    return replace(found, notes=(*found.notes, text), batches=tuple(rows))


def chosen(tried: Sequence[BatchTried]) -> int:
    """The smallest batch that fits and has nearly the most samples per second."""
    fitting = [one for one in tried if one.fits]
    most = max(one.samples_per_s for one in fitting)
    return min(one.batch for one in fitting if one.samples_per_s >= (1 - CLOSE) * most)


def _tried_batches(estimated: Estimated, cluster: Cluster, request: PlanRequest) -> list[BatchTried]:
    """Estimates by batch, ascending: doubled from one sample per device, then closing in on where memory ends.

    Raises:
        InfeasiblePlan: no plan of the smallest batch fits.
    """
    tried: list[BatchTried] = []

    def fits(batch: int) -> bool:
        try:
            row = tried_as(batch, estimated(batch, request), cluster)
        except InfeasiblePlan:
            if not tried:
                raise
            row = BatchTried(batch, None, None, None, False)
        tried.append(row)
        if not row.fits and len(tried) == 1:
            raise InfeasiblePlan(
                f"--batch auto: {batch} samples, the fewest that the rules allow, need {row.memory_bytes:,} bytes on a "
                f"device that has {row.limit_bytes:,}; plan with more devices, or with a larger --memory"
            )
        return row.fits

    def is_flat() -> bool:
        """Whether each of the last two doublings brought next to nothing."""
        last = [one.samples_per_s for one in tried[-3:]]
        return len(last) == 3 and all(more < (1 + FLAT) * few for few, more in pairwise(last))

    unit = smallest_step(cluster.count, request)
    batch = unit
    while fits(batch) and not is_flat() and batch < MOST * unit:
        batch *= 2
    if not tried[-1].fits:
        most, over = max(one.batch for one in tried if one.fits), tried[-1].batch
        for _ in range(BETWEEN):
            between = (most + over) // 2 // unit * unit
            if between in (most, over):
                break
            most, over = (between, over) if fits(between) else (most, between)
    return sorted(tried, key=lambda one: one.batch)


def tried_as(batch: int, prediction: Prediction, cluster: Cluster) -> BatchTried:
    """How a batch did; memory is that of the device with the least room left."""
    needed, limit = cluster.fullest(prediction.memory_bytes)
    return BatchTried(batch, prediction.step_s, needed, limit, needed <= limit)
