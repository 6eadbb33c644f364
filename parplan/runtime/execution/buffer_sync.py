"""Running statistics under torchrun, where every rank has its own copy of them and not every rank writes it.

Local batch norm: the buffers of the first replica are the model's, so the others are given them. As with
DistributedDataParallel this happens before the next forward, one message per group of ranks and type. A module that is
called again on other ranks goes on from what its first call left, so that is handed on right away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Region, region_of
from parplan.lowering.program import Compute, Program, State
from parplan.runtime.execution.parameter_store import Store
from parplan.runtime.execution.segment_cache import written_buffers
from parplan.runtime.transport.base import Transport, block

__all__ = ["BufferBroadcast", "BufferSync"]


@dataclass(frozen=True)
class _ReplicatedBlock:
    """A block of a buffer, by dotted name, that several replicas keep."""

    name: str
    region: Region
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _WrittenBlock:
    """A block of a buffer, by placeholder, and the rank that writes it, or the first of those that do."""

    name: str
    region: Region
    rank: int


class BufferSync:
    """Broadcast of the first replica's batch-norm statistics to the other replicas, before the next forward.

    Args:
        module: whose buffers they are.

    Attributes:
        stale: the first replica has others than the rest, until the next `run`.
    """

    def __init__(self, module: nn.Module, transport: Transport) -> None:
        self._module = module
        self._transport = transport
        self._blocks: dict[_ReplicatedBlock, None] = {}
        self._messages: Mapping[tuple[tuple[int, ...], torch.dtype], list[Tensor]] | None = None  # by ranks and type
        self.stale = False

    def know(self, graph: LayerGraph, program: Program) -> None:
        """A program writes buffers; every rank has to call this."""
        rank = self._transport.rank
        for step in program.computes:
            written = written_buffers(graph, step)
            if step.grid.replicas == 1 or not written:
                continue
            for column in range(step.grid.shards):
                ranks = step.grid.column(column)
                self._transport.group(ranks)
                own = [state for state in step.states if state.name in written and rank in ranks]
                found = (_ReplicatedBlock(graph.buffers[s.name], region_of(s.blocks[rank]), ranks) for s in own)
                self._blocks |= dict.fromkeys(found)
        self.forget()

    def forget(self) -> None:
        """The module's tensors may be others from here on (`.double()`); which are to be shared stays known."""
        self._messages = None

    def written(self) -> None:
        """A training forward has changed the statistics."""
        self.stale = True

    @torch.no_grad()
    def run(self) -> None:
        """Overwrite the other replicas' statistics, if they have changed since the last time."""
        if not self.stale:
            return
        self.stale = False
        if self._messages is None:
            messages: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)
            for known in self._blocks:
                tensor = block(self._module.get_buffer(known.name), known.region)
                messages[known.ranks, tensor.dtype].append(tensor)
            self._messages = messages
        for (ranks, _), tensors in self._messages.items():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            self._transport.broadcast("sharing batch norm statistics", flat, ranks[0], ranks)
            for tensor, part in zip(tensors, _pieces(flat, tensors), strict=True):
                tensor.copy_(part)


class BufferBroadcast:
    """Broadcast of the statistics that a step wrote to all ranks: at once where steps on other ranks use the same
    buffer, else at the end of the forward, so that the module's buffers are the plain model's on every rank.

    Args:
        graph, program: which steps write which buffers, and where.
        rewritten: those buffers that steps on different ranks use.
        store: the module's buffers.
    """

    def __init__(
        self, graph: LayerGraph, program: Program, rewritten: Set[str], store: Store, transport: Transport
    ) -> None:
        self._transport = transport
        self._store = store
        self._states: dict[int, list[State]] = {}
        self._at_end: dict[_WrittenBlock, None] = {}
        for step in program.computes:
            written = written_buffers(graph, step)
            self._states[id(step)] = [state for state in step.states if state.name in written & rewritten]
            if step.grid.shards > 1 or len(step.grid.devices) < transport.processes:
                alone = [state for state in step.states if state.name in written - rewritten]
                ends = (
                    _WrittenBlock(s.name, region_of(s.blocks[rank]), rank) for s in alone for rank in step.grid.row(0)
                )
                self._at_end |= dict.fromkeys(ends)

    @torch.no_grad()
    def after(self, step: Compute) -> None:
        """Every rank has to call this when a step has run, also those that the step is not on."""
        rank, everyone = self._transport.rank, range(self._transport.processes)
        for state in self._states[id(step)]:
            for source in step.grid.row(0):
                with self._transport.on(rank):
                    # As batch norm itself does, without a trace in autograd: the backward's saved values are others.
                    held = block(self._store.original(state.name).data, region_of(state.blocks[source]))
                    moving = held.contiguous()
                    self._transport.broadcast(f"handing on {self._store.label(state.name)}", moving, source, everyone)
                    if rank != source:
                        held.copy_(moving)

    @torch.no_grad()
    def finish(self) -> None:
        """Every rank has to call this when the forward's steps have run."""
        by_dtype: dict[torch.dtype, list[_WrittenBlock]] = defaultdict(list)
        for written in self._at_end:
            by_dtype[self._store.original(written.name).dtype].append(written)
        for group in by_dtype.values():
            blocks: dict[int, list[Tensor]] = {rank: [] for rank in range(self._transport.processes)}
            for written in group:
                blocks[written.rank].append(block(self._store.original(written.name).data, written.region))
            own = blocks[self._transport.rank]
            longest = max(sum(tensor.numel() for tensor in tensors) for tensors in blocks.values())
            message = self._store.original(group[0].name).new_zeros(longest)
            for tensor, part in zip(own, _pieces(message, own), strict=True):
                part.copy_(tensor)
            for rank, received in enumerate(self._transport.gather_tensors("sharing buffers", message)):
                if rank != self._transport.rank:
                    for tensor, part in zip(blocks[rank], _pieces(received, blocks[rank]), strict=True):
                        tensor.copy_(part)


def _pieces(message: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Parts of a flat message, from its start, with the shapes of `tensors`."""
    sizes = [tensor.numel() for tensor in tensors]
    return [p.view(t.shape) for p, t in zip(message[: sum(sizes)].split(sizes), tensors, strict=True)]
