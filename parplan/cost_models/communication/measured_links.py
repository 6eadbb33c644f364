"""Measured communication: what a message or a sum of so many bytes takes among so many devices.

Between two measured sizes time is latency plus bytes over bandwidth, each range with its own two numbers; below the
smallest it is the smallest's, beyond the largest the last range goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parplan.cost_models.profile.records import LinkEntry, scale_to_now

__all__ = ["BESIDE", "Curve", "MeasuredLinks"]

# What a gradient sum takes from compute that goes on while it is under way.
BESIDE = "all-reduce beside compute"


@dataclass(frozen=True, eq=False)
class Curve:
    """Seconds by bytes, through measured points."""

    nbytes: NDArray[np.float64]
    measured_s: NDArray[np.float64]

    def seconds(self, nbytes: ArrayLike) -> NDArray[np.float64]:
        """Seconds for these numbers of bytes; nothing to send takes no time."""
        wanted = np.asarray(nbytes, dtype=np.float64)
        found = np.interp(wanted, self.nbytes, self.measured_s)
        if len(self.nbytes) > 1:
            slope = (self.measured_s[-1] - self.measured_s[-2]) / (self.nbytes[-1] - self.nbytes[-2])
            found = found + np.maximum(0.0, wanted - self.nbytes[-1]) * max(0.0, float(slope))
        return np.where(wanted > 0, found, 0.0)


class MeasuredLinks:
    """Communication measured with one backend.

    Args:
        entries: what was measured; they may be of several kinds and groups.
        reference_s: what the reference kernel takes now; 0 leaves times as they were measured.
    """

    def __init__(self, entries: Sequence[LinkEntry], reference_s: float = 0.0) -> None:
        points: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for entry in entries:
            seconds = entry.seconds * scale_to_now(entry, reference_s)
            points.setdefault((entry.kind, entry.group), []).append((entry.nbytes, seconds))
        self._curves: dict[tuple[str, int], Curve] = {}
        for key, found in points.items():
            ordered = np.array(sorted(found), dtype=np.float64)
            self._curves[key] = Curve(ordered[:, 0], _rising(ordered[:, 1]))
        self.spread = median(entry.spread for entry in entries) if entries else 0.0

    def curve(self, kind: str, group: int) -> Curve | None:
        """What `group` devices take for communication of this kind, or None where nothing like it was measured.

        A group that was not measured counts as the next larger one that was.
        """
        groups = sorted(size for known, size in self._curves if known == kind and size >= group)
        return self._curves[kind, groups[0]] if groups else None


def _rising(measured_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The curve that never falls nearest to the points (isotonic regression): a larger message does not take less,
    whatever the noise."""
    pools: list[tuple[float, int]] = []
    for seconds in measured_s:
        mean_s, count = float(seconds), 1
        while pools and pools[-1][0] > mean_s:
            before_s, others = pools.pop()
            mean_s, count = (others * before_s + count * mean_s) / (others + count), others + count
        pools.append((mean_s, count))
    return np.repeat([mean_s for mean_s, _ in pools], [count for _, count in pools])
