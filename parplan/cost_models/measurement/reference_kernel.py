"""The reference kernel: fixed work whose time says how fast a device is right now.

Shared machines drift: medians of the same step move by a third within minutes. So every measurement keeps what this
kernel took in the same second, measurements are compared in units of it, and a prediction is scaled by what it takes
now. Half of its time on a CPU is arithmetic (products), half memory traffic, as in the layers it stands for.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch

from parplan.cost_models.sampling import one_thread

__all__ = ["Reference"]

# About half a millisecond of products and half a millisecond of traffic on one core of a server.
_SIDE, _ELEMENTS = 256, 1 << 20
_WIDE_SIDE, _MANY_ELEMENTS = 2048, 1 << 25


class Reference:
    """The reference kernel on one device, ready to be timed.

    Args:
        device: a CPU (one thread of it) or an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        side, elements = (_WIDE_SIDE, _MANY_ELEMENTS) if device.type != "cpu" else (_SIDE, _ELEMENTS)
        self._factor = torch.ones(side, side, device=device)
        self._source = torch.ones(elements, device=device)
        self._product = torch.empty_like(self._factor)
        self._target = torch.empty_like(self._source)

    def seconds(self, runs: int = 1) -> float:
        """Median seconds of `runs` runs; waits for the device before and after."""
        times = []
        with one_thread(self._device):
            for _ in range(runs):
                self.wait()
                start = perf_counter()
                torch.mm(self._factor, self._factor, out=self._product)
                torch.add(self._source, 1.0, out=self._target)
                self.wait()
                times.append(perf_counter() - start)
        return median(times)

    def wait(self) -> None:
        """Wait for the device."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
