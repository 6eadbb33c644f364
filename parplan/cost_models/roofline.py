"""Costs of a plan on hardware that is not here: roofline for layers, links' rates for transfers.

A layer's time is the sum of its kernels', each the slower of its arithmetic and its memory traffic at estimated
efficiencies (efficiency.py), on the device with the largest part. Nothing overlaps within a layer. Where devices differ
the largest part is priced once for each kind of device that has a part, and the slowest counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from parplan.cluster import Cluster, Device
from parplan.cost_models.communication.measured_links import MeasuredLinks
from parplan.cost_models.communication.transfers import Transfers
from parplan.cost_models.costs import LayerCost, LayerMemory, Source, StepCost
from parplan.cost_models.memory.layer_memory import MemoryModel
from parplan.cost_models.memory.plan_peaks import memory_by_layer, memory_over_step
from parplan.cost_models.ops.efficiency import efficiency, kernel_seconds, rate_of
from parplan.cost_models.ops.op_calls import op_calls
from parplan.cost_models.ops.work import Engine, Kernel, op_work
from parplan.cost_models.optimizers import optimizer_memory
from parplan.errors import ClusterError
from parplan.graph.layer_graph import Layer, LayerGraph, TensorSpec
from parplan.graph.local import LocalLayer, local_shape
from parplan.layout import Grid, IntArray, equal_slices
from parplan.lowering.holdings import BUCKET_BYTES, slices
from parplan.lowering.lower import lower
from parplan.lowering.program import Program
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Strategy

__all__ = ["PRECISIONS", "RooflineCosts", "estimated_step", "part_key", "part_of", "precision_notes", "rate_notes"]

# How far estimates may be off, relative: of layers (nothing was measured), of links whose numbers were measured
# elsewhere, and of other links. Judgement, not statistics: the report prints ranges from them.
DOUBT, LINK_SPREAD, LINK_DOUBT = 0.4, 0.2, 0.4

PRECISIONS = {torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Names of the types whose products are computed as they are, whatever precision is asked for."""


KEPT_PLANS = 4
"""Plans whose programs and memory are kept: one that is predicted, and the plans by hand that may fit."""


@dataclass
class _Lowered:
    """The program of a plan, and its memory over the step once that was asked for."""

    program: Program
    curve: IntArray | None = None


def part_key(layer: Layer, strategy: Strategy, passes: int = 1) -> Hashable:
    """A key of a device's part of a layer in one of so many passes: all that its cost depends on, so not which devices
    there are."""
    return layer.name, strategy.key, passes


def part_of(graph: LayerGraph, layer: Layer, strategy: Strategy, passes: int = 1) -> LocalLayer:
    """The largest part any device has of `layer`: the first shard, with ceil(batch / replicas / passes) samples."""
    parts = strategy.replicas * passes if layer.batch is not None else 1  # what needs all samples runs once
    return LocalLayer(layer, strategy, 0, ceil((graph.batch or 1) / parts))


class RooflineCosts:
    """Estimated costs of one graph on one cluster (a CostModel).

    Args:
        graph: the captured model, at the whole batch or the size of a micro-batch.
        cluster: where it is to run.
        precision: what float32 products are computed in: "fp32", "tf32", or "fp16" or "bf16" under autocast (of a graph
            that was captured without it bytes stay those of the captured types, which overstates the traffic). Other
            types compute in their own. With "fp32" convolutions are in TF32 where a device has it, as torch computes
            them by default.
        optimizer: whose state the memory includes.
        links: measured communication, in place of the cluster's rates.
        micro_batches: of a step, if the graph is at the size of one of them.

    Attributes:
        memory_model: bytes of its layers.
        step: as much overlap as the cluster allows, and no time for the runtime itself.
        message_bytes: of gradients that are summed at a time.

    Raises:
        ClusterError: a device other than the CPU has no rate for `precision`.
        ParplanError: unknown optimizer.
    """

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        precision: str = "fp32",
        optimizer: str = "adam",
        links: MeasuredLinks | None = None,
        micro_batches: int = 1,
    ) -> None:
        rate_notes(cluster, precision)  # refuses what has no rate
        self.graph = graph
        self.cluster = cluster
        self.precision = precision
        self.optimizer = optimizer
        self._kind_of = {number: kind for kind, group in enumerate(cluster.groups) for number in group.members}
        self.memory_model = MemoryModel(graph, optimizer, cluster.of_cpus, micro_batches)
        self.transfers = Transfers(cluster, links)
        self.transfer, self.transfer_matrix = self.transfers.transfer, self.transfers.transfer_matrix
        self.step = replace(estimated_step(cluster), micro_batches=micro_batches)
        specs = [graph.values[name] for name in graph.parameters]
        # Gradients are summed a bucket at a time, or all together where they do not fill one: a layer pays the latency
        # of an all-reduce in proportion to its share.
        self.message_bytes = max(1, min(BUCKET_BYTES, sum(spec.nbytes for spec in specs if spec.requires_grad)))
        self._layers: dict[Hashable, LayerCost] = {}
        self._memories: dict[Hashable, LayerMemory] = {}
        self._reductions: dict[Hashable, float] = {}
        self._peaks: dict[tuple[Strategy, ...], tuple[int, ...]] = {}
        self._plans: dict[tuple[Strategy, ...], _Lowered] = {}  # the last few

    def layer(self, layer: Layer, strategy: Strategy, passes: int = 1) -> LayerCost:
        """Estimated seconds of the slowest device's part of `layer` in one pass."""
        groups, key = self.cluster.groups, part_key(layer, strategy, passes)
        used = {0} if len(groups) == 1 else {self._kind_of[number] for number in strategy.devices}
        for kind in (kind for kind in used if (kind, key) not in self._layers):
            own = groups[kind].device
            works = [op_work(call) for call in op_calls(self.graph, part_of(self.graph, layer, strategy, passes))]
            forward_s = sum(self._seconds(kernel, own) for work in works for kernel in work.forward)
            backward_s = sum(self._seconds(kernel, own) for work in works for kernel in work.backward)
            trained_bytes = sum(self.memory_model.trained_bytes(part_of(self.graph, layer, strategy)))
            # The update in one go reads weights, gradients and state, and writes weights and state.
            moved_bytes = (3 + 2 * self.memory_model.optimizer.states) * trained_bytes
            update = Kernel(Engine.MEMORY, 0.0, moved_bytes, torch.float32)
            update_s = self._seconds(update, own) if trained_bytes else 0.0
            self._layers[kind, key] = LayerCost(forward_s, backward_s, Source.ESTIMATED, DOUBT, update_s)
        costs = [self._layers[kind, key] for kind in used]
        if len(costs) == 1:
            return costs[0]
        return replace(  # where devices differ, forward, backward and update each wait for the slowest
            costs[0],
            forward_s=max(cost.forward_s for cost in costs),
            backward_s=max(cost.backward_s for cost in costs),
            update_s=max(cost.update_s for cost in costs),
        )

    def ideal_seconds(self, flops: float, nbytes: float) -> float:
        """Seconds of so much work at the peaks of the first device: the slower of arithmetic and memory."""
        return max(self.peak_seconds(flops, nbytes), self.cluster.devices[0].launch_s)

    def peak_seconds(self, flops: float, nbytes: float) -> float:
        """The same without the least time that a kernel takes."""
        device = self.cluster.devices[0]
        compute_s = flops / rate_of(device.flops_per_s, self.precision)
        return max(compute_s, nbytes / device.bandwidth_bytes_per_s)

    def memory(self, layer: Layer, strategy: Strategy) -> LayerMemory:
        """Bytes on each device of `layer`."""
        key = part_key(layer, strategy)
        if key not in self._memories:
            self._memories[key] = self.memory_model.layer_memory(part_of(self.graph, layer, strategy))
        return self._memories[key]

    def peaks(self, strategies: Mapping[str, Strategy]) -> tuple[int, ...]:
        """Peak bytes per device of a whole plan, transfers included."""
        key = tuple(strategies[name] for name in self.graph.layers)
        if key not in self._peaks:
            self._peaks[key] = tuple(self.memory_over_step(strategies).max(axis=0).tolist())
        return self._peaks[key]

    def memory_over_step(self, strategies: Mapping[str, Strategy]) -> IntArray:
        """Bytes by point of the step and device of a whole plan in one pass, transfers included."""
        plan = self._lowered(strategies)
        if plan.curve is None:
            plan.curve = memory_over_step(self.memory_model, plan.program)
        return plan.curve

    def memory_by_layer(
        self, strategies: Mapping[str, Strategy], points: Sequence[int], device: int
    ) -> list[dict[str, int]]:
        """Bytes of that on one device at some points, by the layer that has them."""
        plan = self._lowered(strategies)
        shares, plan.curve = memory_by_layer(self.memory_model, plan.program, points, device)
        return shares

    def _lowered(self, strategies: Mapping[str, Strategy]) -> _Lowered:
        """A plan's program and memory; of the last few plans, as the peaks of one are asked for again after those of
        plans by hand."""
        key = tuple(strategies[name] for name in self.graph.layers)
        if key not in self._plans:
            for other in [*self._plans][: 1 - KEPT_PLANS]:
                del self._plans[other]
            setting = StepSetting.on(self.cluster, self.graph.batch or 1)
            self._plans[key] = _Lowered(lower(self.graph, strategies, setting))
        return self._plans[key]

    def reduction(self, layer: Layer, strategy: Strategy) -> float:
        """Seconds on the links to sum the weight gradients of `layer` over its copies, in rings, bucketed.

        A cut parameter is summed over the replicas of each shard, and the shards that share the part, all parts at
        once; another over all devices; one in slices to each. Frozen parameters cost nothing.
        """
        key = part_key(layer, strategy), strategy.grid.key
        if (known := self._reductions.get(key)) is not None:
            return known
        axis = layer.axis(strategy.axis) if strategy.shards > 1 else None
        part = part_of(self.graph, layer, strategy)
        by_copies: dict[int, int] = defaultdict(int)  # shards that hold the same part -> bytes
        sliced = slices(self.graph, layer, strategy)
        _, total_s = self.gather(layer, strategy)
        for name in layer.parameters:
            spec = self.graph.values[name]
            if not spec.requires_grad or name in sliced:
                continue
            nbytes = TensorSpec(local_shape(self.graph, part, name), spec.dtype).nbytes
            is_cut = axis is not None and name in axis.dims
            by_copies[axis.sharers(name, strategy.shards) if axis and is_cut else strategy.shards] += nbytes
        grid = strategy.grid
        rows = [grid.row(row) for row in range(grid.replicas)] if {*by_copies} - {1, grid.shards} else []
        for copies, nbytes in by_copies.items():
            devices = grid.devices  # in which columns of the same part lie together
            if 1 < copies < grid.shards:
                devices = tuple(device for row in rows for copy in range(copies) for device in row[copy::copies])
            own = Grid(devices, grid.replicas * copies, grid.shards // copies)
            if nbytes:  # a layer's share of a message
                total_s += nbytes * self.transfers.all_reduce(own, self.message_bytes) / self.message_bytes
        self._reductions[key] = total_s
        return total_s

    def runs_again(self, layer: Layer) -> bool:
        """Whether a layer has to run forward again where its unit is replayed."""
        return layer.name in self.memory_model.ops.run_again

    def gather(self, layer: Layer, strategy: Strategy) -> tuple[float, float]:
        """Seconds on the links to put the weights of `layer` together from slices, one parameter after another, and to
        sum gradients to those.

        Equal slices go in rings, as the libraries' collectives send them: half of an all-reduce. What was measured is
        the transport's own messages.
        """
        gather_s = scatter_s = 0.0
        for name, own in slices(self.graph, layer, strategy).items():
            value = self.graph.values[name]
            sent = replace(value, dtype=self.graph.read_as.get(name, value.dtype))  # gradients in the parameter's type
            grid, ways = own.layout.grid, [sent] if sent.dtype == value.dtype else [sent, value]
            if self.transfers.links is None and equal_slices(own.layout, own.rows) is not None:
                seconds = [(self.transfers.all_reduce(grid, one.nbytes // grid.shards) / 2,) * 2 for one in ways]
            else:
                moved = [self.transfer(one, own.layout, layer.layout(name, strategy)) for one in ways]
                seconds = [(one.forward_s, one.backward_s) for one in moved]
            gather_s += seconds[0][0]
            scatter_s += seconds[-1][1] if value.requires_grad else 0.0
        return gather_s, scatter_s

    def _seconds(self, kernel: Kernel, device: Device) -> float:
        precision = PRECISIONS.get(kernel.dtype, self.precision if self.graph.autocast is None else "fp32")
        if kernel.engine is Engine.CONV and precision == "fp32" and "tf32" in device.flops_per_s:
            precision = "tf32"  # torch.backends.cudnn.allow_tf32 is on by default, ...cuda.matmul.allow_tf32 is off
        return kernel_seconds(kernel, device, rate_of(device.flops_per_s, precision), efficiency(device, precision))


def estimated_step(cluster: Cluster) -> StepCost:
    """Step costs that a cluster's links imply; nothing is known of the runtime."""
    spread = LINK_DOUBT if any(link.estimated for link in cluster.links) else LINK_SPREAD
    return StepCost(overlap=1 - cluster.slowdown, spread=spread, late=1 - cluster.overlap)


def rate_notes(cluster: Cluster, precision: str) -> tuple[str, ...]:
    """Notes on devices that have no rate for `precision`: CPUs fall back on their fp32 rate.

    Raises:
        ClusterError: another device has none.
    """
    lacking = [group.device for group in cluster.groups if precision not in group.device.flops_per_s]
    for device in lacking:
        if not device.is_cpu:
            known = ", ".join(device.flops_per_s)
            raise ClusterError(f"{device.kind} has no {precision} rate; use one of {known}")
    return tuple(f"{d.kind} has no {precision} rate: what it computes is priced at its fp32 rate." for d in lacking)


def precision_notes(graph: LayerGraph, cluster: Cluster, precision: str, optimizer: str) -> tuple[str, ...]:
    """Notes on the types that products are priced in, and on those of the optimizer's state."""
    types = {graph.values[name].dtype for name in graph.parameters}
    notes, has_tf32 = list(rate_notes(cluster, precision)), any("tf32" in d.flops_per_s for d in cluster.devices)
    if graph.autocast is not None:
        bytes_each = torch.float32.itemsize * (2 + optimizer_memory(optimizer).states)
        notes.append(
            f"Priced as under torch.autocast to {PRECISIONS[graph.autocast]}, under which the model has to be called: "
            f"parameters, gradients and the optimizer's state stay float32 ({bytes_each} bytes per parameter), and "
            f"{len(graph.read_as)} of {len(graph.parameters)} parameters are cast for every use, before they are "
            "gathered where they lie in slices."
        )
    elif precision == "fp32" and torch.float32 in types and has_tf32:
        convolutions = any(layer.kind == "conv" for layer in graph.layers.values())
        notes.append(
            f"fp32 as torch computes it by default: {'convolutions in TF32, ' * convolutions}matrix products not in "
            'TF32. With torch.set_float32_matmul_precision("high") they are: plan for that with --precision tf32.'
        )
    for dtype in sorted(types & {torch.float16, torch.bfloat16}, key=str):
        each, name = 2 + optimizer_memory(optimizer).states, PRECISIONS[dtype]
        state = f" and {optimizer}'s state" if each > 2 else ""
        notes.append(
            f"Parameters, gradients{state} are {name}, {2 * each} bytes per parameter: no float32 master weights are "
            "planned for, as plain torch keeps none."
        )
    return tuple(notes)
