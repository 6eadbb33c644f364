"""Costs of a plan on hardware that is not here: roofline for layers, links' rates for transfers.

A layer's time is the sum of its kernels', each the slower of its arithmetic and its memory traffic at estimated
efficiencies (efficiency.py), on the device with the largest part. Nothing overlaps within a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

import torch

from parplan.cluster import Cluster
from parplan.cost_models.costs import LayerCost, LayerMemory, Source, TransferCost, TransferMatrix
from parplan.cost_models.efficiency import Efficiency, efficiency, kernel_seconds, rate_of
from parplan.cost_models.memory import MemoryModel
from parplan.cost_models.op_calls import op_calls
from parplan.cost_models.transfers import Transfers
from parplan.cost_models.work import Kernel, op_work
from parplan.errors import ClusterError
from parplan.graph.layer_graph import Layer, LayerGraph, TensorSpec
from parplan.graph.local import LocalLayer, local_shape
from parplan.layout import Layout
from parplan.plan import Strategy

__all__ = ["BUCKET_BYTES", "PartKey", "RooflineCosts", "part_key", "part_of"]

# Gradients are summed in buckets of this size (the default of torch's DistributedDataParallel), so a layer pays the
# latency of an all-reduce in proportion to its share of a bucket.
BUCKET_BYTES = 25 * 2**20

_PRECISIONS = {torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}

T = TypeVar("T")


@dataclass(frozen=True)
class PartKey:
    """What a device's part of a layer depends on: not on which devices there are."""

    layer: str
    replicas: int
    shards: int
    axis: str | None


def part_key(layer: Layer, strategy: Strategy) -> PartKey:
    """The key of `layer` under `strategy`."""
    return PartKey(layer.name, strategy.replicas, strategy.shards, strategy.axis)


def part_of(graph: LayerGraph, layer: Layer, strategy: Strategy) -> LocalLayer:
    """The largest part any device has of `layer`: the first shard, with ceil(batch / replicas) samples."""
    return LocalLayer(layer, strategy, 0, ceil((graph.batch or 1) / strategy.replicas))


class RooflineCosts:
    """Estimated costs of one graph on one cluster (a CostModel).

    Args:
        graph: the captured model, at the whole batch.
        cluster: where it is to run.
        precision: what float32 products are computed in: "fp32", "tf32", or "fp16" or "bf16" under autocast (bytes
            stay those of the captured types, which overstates autocast's traffic). Other types compute in their own.
        optimizer: whose state the memory includes.
        efficiencies: shares of peak by precision, in place of the estimated ones.

    Raises:
        ClusterError: the device has no rate for `precision`.
        ParplanError: unknown optimizer.
    """

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        precision: str = "fp32",
        optimizer: str = "adam",
        efficiencies: Mapping[str, Efficiency] | None = None,
    ) -> None:
        if precision not in cluster.device.flops_per_s:
            known = ", ".join(cluster.device.flops_per_s)
            raise ClusterError(f"{cluster.device.kind} has no {precision} rate; use one of {known}")
        self.graph = graph
        self.cluster = cluster
        self.precision = precision
        self.optimizer = optimizer
        self._efficiencies = dict(efficiencies or {})
        self._memory_model = MemoryModel(graph, optimizer)
        self.transfers = Transfers(cluster)
        self._layers: dict[PartKey, LayerCost] = {}
        self._memories: dict[PartKey, LayerMemory] = {}

    def layer(self, layer: Layer, strategy: Strategy) -> LayerCost:
        """Estimated seconds of the slowest device's part of `layer`."""
        return _once(self._layers, layer, strategy, lambda: self._layer(layer, strategy))

    def memory(self, layer: Layer, strategy: Strategy) -> LayerMemory:
        """Bytes on each device of `layer`."""
        part = part_of(self.graph, layer, strategy)
        return _once(self._memories, layer, strategy, lambda: self._memory_model.layer_memory(part))

    def transfer(self, value: TensorSpec, source: Layout, target: Layout) -> TransferCost:
        """Cost of changing `value` from one layout to another."""
        return self.transfers.transfer(value, source, target)

    def transfer_matrix(
        self, value: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> TransferMatrix:
        """Times of `transfer` for all pairs of layouts at once."""
        return self.transfers.transfer_matrix(value, sources, targets)

    def reduction(self, layer: Layer, strategy: Strategy) -> float:
        """Seconds on the links to sum the weight gradients of `layer` over its copies, in rings, bucketed.

        A cut parameter is summed over the replicas of each shard, all shards at once; another over all devices.
        Frozen parameters cost nothing.
        """
        axis = layer.axis(strategy.axis) if strategy.shards > 1 else None
        part = part_of(self.graph, layer, strategy)
        cut_bytes, whole_bytes = 0, 0
        for name in layer.parameters:
            spec = self.graph.values[name]
            if not spec.requires_grad:
                continue
            nbytes = TensorSpec(local_shape(self.graph, part, name), spec.dtype).nbytes
            if axis is not None and name in axis.dims:
                cut_bytes += nbytes
            else:
                whole_bytes += nbytes
        grid = strategy.grid
        columns = [grid.column(column) for column in range(grid.shards)]
        return self._all_reduce_s(columns, cut_bytes) + self._all_reduce_s([grid.devices], whole_bytes)

    def _all_reduce_s(self, groups: Sequence[tuple[int, ...]], nbytes: int) -> float:
        time = self.transfers.topology.all_reduce(groups)
        return nbytes * (time.s_per_byte + time.latency_s / BUCKET_BYTES)

    def _layer(self, layer: Layer, strategy: Strategy) -> LayerCost:
        works = [op_work(call) for call in op_calls(self.graph, part_of(self.graph, layer, strategy))]
        forward_s = sum(self._seconds(kernel) for work in works for kernel in work.forward)
        backward_s = sum(self._seconds(kernel) for work in works for kernel in work.backward)
        return LayerCost(forward_s, backward_s, Source.ESTIMATED)

    def _seconds(self, kernel: Kernel) -> float:
        device = self.cluster.device
        precision = _PRECISIONS.get(kernel.dtype, self.precision)
        if precision not in self._efficiencies:
            self._efficiencies[precision] = efficiency(device, precision)
        rate = rate_of(device.flops_per_s, precision)
        return kernel_seconds(kernel, device, rate, self._efficiencies[precision])


def _once(known: dict[PartKey, T], layer: Layer, strategy: Strategy, work_out: Callable[[], T]) -> T:
    key = part_key(layer, strategy)
    if key not in known:
        known[key] = work_out()
    return known[key]
