"""Times of an optimizer's update by the elements of a parameter.

Measured on parameters of several sizes with torch's own optimizers: what calling the optimizer takes, and what one more
parameter of a size does. By the time of the update a backward pass has emptied the caches of weights and state, so the
caches are emptied before every measured update too. Between two sizes the time per element is interpolated; beyond the
largest the largest one's is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import log
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from parplan.cost_models.measurement.in_context_timing import ProcessGroup, now, reference_now
from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.profile.records import PartEntry, SessionProfile
from parplan.cost_models.sampling import Measurement, one_thread, spread_of

__all__ = ["OPTIMIZERS", "UpdateTimes", "measure_updates"]

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-3),
}

_SIZES = (1 << 6, 1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
# Parameters are updated one after another: their number times their size is what passes through the caches.
_COUNT, _PASSING = 8, 1 << 24
# More than any cache holds.
_CACHES_BYTES = 1 << 26


def measure_updates(
    optimizer: str,
    device: torch.device,
    profile: SessionProfile,
    ranks: ProcessGroup | None = None,
    runs: int = 7,
    again: bool = False,
) -> None:
    """Keep in `profile` what calling `optimizer` takes, and what one more parameter of every size adds."""
    ranks = ranks or ProcessGroup()
    if ranks.any(again or any(profile.get(_signature(optimizer, size)) is None for size in (0, *_SIZES))):
        timer = _Timer(optimizer, device, ranks, runs)
        profile.put(PartEntry(_signature(optimizer, 0), _family(optimizer), 0.0, 0.0, timer.calling()))
        for size in _SIZES:
            entry = PartEntry(_signature(optimizer, size), _family(optimizer), 0.0, 4.0 * size, timer.parameter(size))
            profile.put(entry)


class _Timer:
    """Times updates of one optimizer on cold caches."""

    def __init__(self, optimizer: str, device: torch.device, ranks: ProcessGroup, runs: int) -> None:
        self._optimizer, self._device, self._ranks, self._runs = optimizer, device, ranks, runs
        self._reference = Reference(device)
        self._caches = torch.zeros(_CACHES_BYTES // 4, device=device)

    def calling(self) -> Measurement:
        """Seconds of an update before the first parameter."""
        one, nine = (_stepper(self._optimizer, 1, count, self._device) for count in (1, 9))
        return self._measured(lambda: max(0.0, self._timed(one) - (self._timed(nine) - self._timed(one)) / 8))

    def parameter(self, size: int) -> Measurement:
        """Seconds of one more parameter of `size` elements."""
        count = max(2, min(_COUNT, _PASSING // size))
        one, several = (_stepper(self._optimizer, size, number, self._device) for number in (1, count))
        return self._measured(lambda: max(0.0, self._timed(several) - self._timed(one)) / (count - 1))

    def _measured(self, seconds: Callable[[], float]) -> Measurement:
        times, references = [], []
        with one_thread(self._device):
            seconds()
            for _ in range(self._runs):
                references.append(reference_now(self._reference, self._ranks))
                times.append(seconds())
        mean_s, reference_s = self._ranks.mean([fmean(times), median(references)])
        return Measurement(mean_s, 0.0, spread_of(times, mean_s), len(times), reference_s, when=now())

    def _timed(self, step: Callable[[], Any]) -> float:
        self._caches.add_(1.0)
        self._reference.wait()
        start = perf_counter()
        step()
        self._reference.wait()
        return perf_counter() - start


def _stepper(optimizer: str, size: int, count: int, device: torch.device) -> Callable[[], Any]:
    parameters = [nn.Parameter(torch.ones(size, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return OPTIMIZERS[optimizer](parameters).step


class UpdateTimes:
    """Update times of one optimizer, from a profile.

    Args:
        profile: where they were measured.
        optimizer: its name.
        scale: by what measured times are multiplied (the reference kernel's time now over then).
    """

    def __init__(self, profile: SessionProfile, optimizer: str, scale: Callable[[Measurement], float]) -> None:
        entries = sorted(profile.family(_family(optimizer)), key=lambda entry: entry.nbytes)
        points = [_Point(entry.nbytes, entry.measurement.forward_s * scale(entry.measurement)) for entry in entries]
        self.calling_s = sum(point.seconds for point in points if not point.nbytes)
        self._points = [point for point in points if point.nbytes]

    def __bool__(self) -> bool:
        return bool(self._points)

    def seconds(self, sizes: Iterable[int]) -> float:
        """Seconds for parameters of these sizes in bytes, without what calling the optimizer takes."""
        points, total_s = self._points, 0.0
        for nbytes in (size for size in sizes if size):
            if nbytes <= points[0].nbytes:
                total_s += points[0].seconds
            elif nbytes >= points[-1].nbytes:
                total_s += points[-1].seconds * nbytes / points[-1].nbytes
            else:
                low, high = next(pair for pair in pairwise(points) if nbytes <= pair[1].nbytes)
                share = log(nbytes / low.nbytes) / log(high.nbytes / low.nbytes)
                if min(low.seconds, high.seconds) <= 0:  # too short to be seen beside noise
                    total_s += nbytes * ((1 - share) * low.per_byte + share * high.per_byte)
                else:
                    total_s += nbytes * low.per_byte ** (1 - share) * high.per_byte**share
        return total_s


@dataclass(frozen=True)
class _Point:
    nbytes: float
    seconds: float

    @property
    def per_byte(self) -> float:
        return self.seconds / self.nbytes


def _family(optimizer: str) -> str:
    return f"update {optimizer} float32"


def _signature(optimizer: str, size: int) -> str:
    return f"update {optimizer} float32[{size}]"
