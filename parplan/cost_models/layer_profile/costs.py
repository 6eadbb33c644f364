"""Costs of a profile's layers: times as somebody measured them, links and memory as for any model.

A device's time for its share of the samples is interpolated between the batches that were measured; outside of them it
is scaled in proportion to the samples, and shards divide it: both are marked as estimates. Memory follows the rules of
memory.py with the profile's figures: gradients are as large as the parameters, a value that is kept is counted by the
layer that makes it, and an input that every shard needs whole also by the layer that keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from parplan.cluster import Cluster
from parplan.cost_models.communication.transfers import Transfers
from parplan.cost_models.costs import (
    Held,
    LayerCost,
    LayerMemory,
    Moments,
    Source,
)
from parplan.cost_models.layer_profile.records import LayerProfile, Times
from parplan.cost_models.optimizers import optimizer_memory
from parplan.cost_models.roofline import estimated_step
from parplan.errors import ClusterError
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.lowering.holdings import BUCKET_BYTES
from parplan.plan import Strategy

__all__ = ["ProfileCosts"]

# How far figures may be off, relative. Judgement, not statistics: nobody said how they were measured.
_SPREADS = {Source.SHIPPED: 0.05, Source.INTERPOLATED: 0.1, Source.ESTIMATED: 0.2}


class ProfileCosts:
    """Costs of a profile's layers on one cluster (a CostModel): times as measured, links and memory as computed.

    Args:
        profile: the figures.
        graph: `profile_graph(profile, batch)`.
        cluster: equal devices; only their memory and links count.
        optimizer: whose state the memory includes.
        micro_batches: of a step, if the graph is at the size of one of them.

    Raises:
        ClusterError: devices of several kinds.
        ParplanError: unknown optimizer.
    """

    def __init__(
        self,
        profile: LayerProfile,
        graph: LayerGraph,
        cluster: Cluster,
        optimizer: str = "adam",
        micro_batches: int = 1,
    ) -> None:
        if cluster.mixed:
            raise ClusterError(
                f"{cluster.describe()}: a layer profile is of one kind of device ({profile.device}); name equal devices"
            )
        self.transfers = Transfers(cluster)
        self.transfer, self.transfer_matrix = self.transfers.transfer, self.transfers.transfer_matrix
        # Nothing is known of the runtime.
        self.step = replace(estimated_step(cluster), micro_batches=micro_batches)
        self._graph, self._batch = graph, graph.batch or profile.batch
        self._measured_batch = profile.batch
        self._layers = {layer.name: layer for layer in profile.layers}
        # As for models: a layer pays its share of a bucket, or of all gradients where these do not fill one.
        self._bucket_bytes = max(1, min(BUCKET_BYTES, sum(layer.parameter_bytes for layer in profile.layers)))
        self._optimizer = optimizer_memory(optimizer)
        self._position = {name: index for index, name in enumerate(graph.layers)}
        self._moments = Moments(len(graph.layers))

    def layer(self, layer: Layer, strategy: Strategy, passes: int = 1) -> LayerCost:
        """Seconds of the device with most samples, in one pass."""
        known, shards = self._layers[layer.name], strategy.shards
        samples = self._measured_batch if layer.constant else self._samples(layer, strategy, passes)
        times, source = _at(known.times, samples)
        source = source if shards == 1 else Source.ESTIMATED
        return LayerCost(
            times.forward_s / shards, times.backward_s / shards, source, _SPREADS[source], known.update_s / shards
        )

    def memory(self, layer: Layer, strategy: Strategy) -> LayerMemory:
        """Bytes on each device of `layer`."""
        weights_bytes = self._parameter_bytes(layer, strategy)
        known, state_bytes = self._layers[layer.name], self._optimizer.states * weights_bytes
        axis = layer.axis(strategy.axis) if strategy.shards > 1 else None
        whole = [] if axis is None or not layer.parameters else [name for name in layer.inputs if name not in axis.dims]
        saved_bytes = sum(self._held_bytes(layer, name, strategy) for name in whole)
        if known.saved_bytes is None:
            saved_bytes += self._held_bytes(layer, layer.name, strategy)
        else:
            share = 1.0 if layer.constant else self._samples(layer, strategy) / self._measured_batch
            saved_bytes += ceil(known.saved_bytes * share / strategy.shards)
        moved_bytes = sum(self._held_bytes(layer, value, strategy) for value in (*layer.inputs, layer.name))
        moments = self._moments
        forward, back = (at(self._position[layer.name]) for at in (moments.forward, moments.backward))
        held = (
            Held(0, moments.end, weights_bytes + state_bytes),
            Held(back if self.step.micro_batches == 1 else 0, moments.end, weights_bytes),
            Held(forward, back + 1, saved_bytes),
            Held(forward, forward + 1, moved_bytes),
            Held(back, back + 1, moved_bytes),
            Held(moments.update(), moments.update() + 1, self._optimizer.together * weights_bytes),
        )
        return LayerMemory(weights_bytes, weights_bytes, state_bytes, saved_bytes, moved_bytes, held)

    def peaks(self, strategies: Mapping[str, Strategy]) -> None:
        """None: a profile has no ops to simulate; layers are added up."""

    def memory_over_step(self, strategies: Mapping[str, Strategy]) -> None:
        """None, as for `peaks`."""

    def memory_by_layer(
        self, strategies: Mapping[str, Strategy], points: Sequence[int], device: int
    ) -> list[dict[str, int]]:
        """Nothing, as no points are known."""
        return [{} for _ in points]

    def reduction(self, layer: Layer, strategy: Strategy) -> float:
        """Seconds on the links to sum the weight gradients of `layer` over the replicas of each shard, bucketed."""
        nbytes = self._parameter_bytes(layer, strategy)
        reduced_s = self.transfers.all_reduce(strategy.grid, self._bucket_bytes)
        return nbytes * reduced_s / self._bucket_bytes if nbytes else 0.0

    def runs_again(self, layer: Layer) -> bool:
        """True: what a profile's layers keep is not known, and they are in no unit."""
        return True

    def gather(self, layer: Layer, strategy: Strategy) -> tuple[float, float]:
        """0: a profile knows the bytes of a layer's parameters, not their shapes, so none lie in slices."""
        return 0.0, 0.0

    def _samples(self, layer: Layer, strategy: Strategy, passes: int = 1) -> int:
        return ceil(self._batch / (strategy.replicas * passes)) if layer.batch is not None else self._batch

    def _parameter_bytes(self, layer: Layer, strategy: Strategy) -> int:
        return -(-self._layers[layer.name].parameter_bytes // strategy.shards)

    def _held_bytes(self, layer: Layer, value: str, strategy: Strategy) -> int:
        """Bytes of one device's share of a value under the layer's layout."""
        layout = layer.layout(value, strategy)
        rows = strategy.replicas if layout.batch_dim is not None else 1
        columns = strategy.shards if layout.shard_dim is not None else 1
        return -(-self._graph.values[value].nbytes // (rows * columns))


def _at(times: Sequence[Times], samples: int) -> tuple[Times, Source]:
    """Seconds for so many samples: as measured, interpolated, or (outside of what was measured) in proportion."""
    below = max((t for t in times if t.batch <= samples), key=lambda t: t.batch, default=None)
    above = min((t for t in times if t.batch >= samples), key=lambda t: t.batch, default=None)
    if below is None or above is None:
        nearest = times[0] if below is None else times[-1]
        scale = samples / nearest.batch
        return Times(samples, nearest.forward_s * scale, nearest.backward_s * scale), Source.ESTIMATED
    if below is above:
        return below, Source.SHIPPED
    share = (samples - below.batch) / (above.batch - below.batch)
    forward_s = below.forward_s + share * (above.forward_s - below.forward_s)
    backward_s = below.backward_s + share * (above.backward_s - below.backward_s)
    return Times(samples, forward_s, backward_s), Source.INTERPOLATED
