"""Local batch norm under torchrun: the buffers of the first replica are the model's, so the others are given them.

As with DistributedDataParallel this happens before the next forward, one message per group of ranks and type.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Region
from parplan.runtime.codes import written_buffers
from parplan.runtime.distributed import DistributedTransport
from parplan.runtime.parameters import Store
from parplan.runtime.program import Compute, Program
from parplan.runtime.transport import block

__all__ = ["BufferSync", "fresh_buffers"]


@dataclass(frozen=True)
class _Kind:
    """Buffers that travel together."""

    ranks: tuple[int, ...]
    dtype: torch.dtype


class BufferSync:
    """Brings the first replica's batch-norm statistics to the other replicas.

    Args:
        graph, program: which layers write buffers, and where they run.
        store: the module's buffers.
    """

    def __init__(self, graph: LayerGraph, program: Program, store: Store, transport: DistributedTransport) -> None:
        self._transport = transport
        self._groups: dict[_Kind, list[Tensor]] = defaultdict(list)
        self._stale = False
        steps = [step for step in program.forward if isinstance(step, Compute) and step.grid.replicas > 1]
        for step in steps:
            for column in range(step.grid.shards):
                ranks = step.grid.column(column)
                transport.group(ranks)
                self._collect(graph, step, ranks, store)

    def _collect(self, graph: LayerGraph, step: Compute, ranks: tuple[int, ...], store: Store) -> None:
        written = written_buffers(graph, step)
        for state in step.states:
            if state.name in written and self._transport.rank in ranks:
                tensor = block(store.original(state.name), state.blocks[self._transport.rank])
                self._groups[_Kind(ranks, tensor.dtype)].append(tensor)

    def written(self) -> None:
        """A training forward has changed the statistics."""
        self._stale = True

    @torch.no_grad()
    def run(self) -> None:
        """Overwrite the other replicas' statistics, if they have changed since the last time."""
        if not self._stale:
            return
        self._stale = False
        for kind, tensors in self._groups.items():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            self._transport.broadcast("sharing batch norm statistics", flat, kind.ranks[0], kind.ranks)
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))


def fresh_buffers(graph: LayerGraph, program: Program) -> dict[str, dict[int, Region]]:
    """Where the first replica's batch-norm statistics are, by dotted name: block per device."""
    found: dict[str, dict[int, Region]] = {}
    for step in program.forward:
        if isinstance(step, Compute):
            written = written_buffers(graph, step)
            first = step.grid.row(0)
            found |= {
                graph.buffers[state.name]: {device: state.blocks[device] for device in first}
                for state in step.states
                if state.name in written
            }
    return found
