"""Learning rates for larger batches; nothing here is applied unless it is called."""

from __future__ import annotations

from parplan.errors import ParplanError

__all__ = ["scaled_lr"]


def scaled_lr(lr: float, batch: int, base_batch: int = 128) -> float:
    """The learning rate for a batch k times as large: k times `lr`, momentum and weight decay unchanged.

    Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (arXiv 1404.5997), which found
    k to work better than the square root of k, up to batches of 1024.

    >>> scaled_lr(0.01, batch=512)
    0.04

    Raises:
        ParplanError: a batch below 1.
    """
    if batch < 1 or base_batch < 1:
        raise ParplanError(f"a batch of {batch} against one of {base_batch} gives no rate; both are at least 1")
    return lr * batch / base_batch
