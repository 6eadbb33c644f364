"""The processes that measure together, so that every device is as busy as it will be when a plan runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from parplan.cost_models.measurement.in_context_timing import ProcessGroup

__all__ = ["Ranks"]


class Ranks(ProcessGroup):
    """The first ranks of torch's process group.

    Args:
        count: how many ranks; made by all ranks of the default group together, in the same order.
        device: where messages have to be.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        whole = count == dist.get_world_size()
        self.count = count
        self.member = dist.get_rank() < count
        self.lead = dist.get_rank() == 0
        self._group: Any = None if whole else dist.new_group(list(range(count)))
        self._device = device

    def mean(self, figures: Sequence[float]) -> list[float]:
        """Each figure's mean over all processes."""
        total = torch.tensor(figures, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=self._group)
        return [float(figure) / self.count for figure in total.tolist()]

    def max(self, figure: float) -> float:
        """The largest figure of all processes."""
        found = torch.tensor([figure], dtype=torch.float64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return float(found.item())
