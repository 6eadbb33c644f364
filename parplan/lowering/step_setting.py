"""Devices, processes and samples of one step: the input of lowering beside the graph and the plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from parplan.cluster import Cluster
from parplan.layout import Grid, Layout, Range, split_evenly
from parplan.plan import Scheme

__all__ = ["StepSetting", "samples_per_replica"]


@lru_cache(maxsize=1000)
def samples_per_replica(brought: tuple[int, ...], replicas: int) -> tuple[int, ...]:
    """Samples per replica; where those who bring them divide into replicas, each takes its own as they are."""
    if len(brought) % replicas:
        return split_evenly(sum(brought), replicas)
    each = len(brought) // replicas
    return tuple(sum(brought[row * each : (row + 1) * each]) for row in range(replicas))


@dataclass(frozen=True)
class StepSetting:
    """Devices, processes and samples of one step.

    Args:
        devices: how many logical devices there are.
        samples: per process: all of them in one process, each rank's under torchrun.
        memories: for every logical device, which memory it works in (physical device, or process).
        home: in one process, the device where inputs arrive.
        output: in one process, the device that results go to.
        global_statistics: batch norm in training uses the statistics of all replicas.
        per_replica: results that are one number are computed by every replica on its own samples.
        scheme: how samples get from many replicas to layers with fewer.
        groups: processes in rows that bring the same samples; None when every process brings its own.
    """

    devices: int
    samples: tuple[int, ...]
    memories: tuple[int, ...]
    home: int = 0
    output: int = 0
    global_statistics: bool = True
    per_replica: bool = False
    scheme: Scheme = Scheme.GATHER
    groups: Grid | None = None

    @classmethod
    def per_process(cls, devices: int, batch: int, scheme: Scheme = Scheme.GATHER) -> StepSetting:
        """One process per device, with the samples spread evenly over them."""
        return cls(devices, split_evenly(batch, devices), tuple(range(devices)), scheme=scheme)

    @classmethod
    def on(cls, cluster: Cluster, batch: int, scheme: Scheme = Scheme.GATHER) -> StepSetting:
        """The setting that a cluster's steps are priced in: a process per device, or one with its home device."""
        if cluster.home is None:
            return cls.per_process(cluster.count, batch, scheme)
        memories = tuple(range(cluster.count))
        return cls(cluster.count, (batch,), memories, cluster.home, cluster.home, scheme=scheme)

    @property
    def batch(self) -> int:
        """Samples in the step, over all devices."""
        return sum(self._brought)

    @property
    def _brought(self) -> tuple[int, ...]:
        """Samples by who brings them: a process, or a row of processes."""
        if self.groups is None:
            return self.samples
        return tuple(self.samples[process] for process in self.groups.column(0))

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return len(self.samples)

    def rows(self, replicas: int) -> tuple[int, ...]:
        """Samples per replica; where ranks divide into replicas, each takes its ranks' samples as they are."""
        return samples_per_replica(self._brought, replicas)

    def own(self, process: int) -> Range:
        """The samples of one process in the whole batch."""
        row = process if self.groups is None else self.groups.position(process)[0]
        start = sum(self._brought[:row])
        return Range(start, start + self._brought[row])

    def arrival(self, batch_dim: int | None) -> Layout:
        """The layout in which user inputs arrive."""
        return self._edge(self.home, batch_dim)

    def delivery(self, batch_dim: int | None) -> Layout:
        """The layout in which results are handed back."""
        return self._edge(self.output, batch_dim)

    def _edge(self, device: int, batch_dim: int | None) -> Layout:
        if self.ranks == 1:
            return Layout(Grid((device,), 1, 1), None)
        grid = self.groups or Grid(tuple(range(self.ranks)), self.ranks, 1)
        return Layout(grid, batch_dim if grid.replicas > 1 else None)
