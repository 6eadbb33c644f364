"""Placement of one tensor over processes: the block that every rank holds, and the collectives that put it together.

Collectives run where the user's code asks for a norm or for the whole tensor, which every rank has to do alike. So each
begins with an exchange of tags (operation and name of the tensor) over a group of its own: ranks that run different
lines get an error, never each other's values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from parplan.errors import RuntimeFailure
from parplan.layout import Block, Range, regions_of, shape_of
from parplan.runtime.compat import WeakGroup, group_timeout
from parplan.runtime.transport.base import Transport, block, block_values

__all__ = ["Placement", "TaggedCollectives"]

# One message: the tag's text, its digest, and as many numbers as fit; fixed, as ranks that differ must still meet.
TEXT_BYTES, DIGEST_BYTES, NUMBERS = 128, 16, 14


class TaggedCollectives:
    """Collectives over the ranks of a transport that check that all ranks run the same operation.

    Making one is a collective itself. Tags and numbers travel over a gloo group in the host's memory, blocks of tensors
    over the transport's own group.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank, self.processes = transport.rank, transport.processes
        # Names of groups are numbered by all processes together, so where all are here they make this one together.
        part = transport.processes < dist.get_world_size()
        timeout = group_timeout(transport.process_group)
        self._group = WeakGroup(dist.new_group(transport.ranks, timeout, "gloo", use_local_synchronization=part))

    @staticmethod
    def of(transport: Transport) -> TaggedCollectives:
        """A transport's tagged collectives, made at the first request; a collective then."""
        if transport.tagged is None:
            transport.tagged = TaggedCollectives(transport)
        known: TaggedCollectives = transport.tagged
        return known

    def begin_together(self, tag: str) -> None:
        """Wait until all ranks are about to run one operation, which a rank may have come to alone.

        Raises:
            RuntimeFailure: another rank runs something else, or does not come.
        """
        remedy = "parameters are cut over processes: move it out of `if rank == 0:`, and save there what it returned"
        self._transport.begin_call()
        self._transport.come_together(f"in {tag}", remedy)
        self.exchange(tag)

    def exchange(self, tag: str, numbers: Sequence[float] = ()) -> Tensor:
        """Every rank's numbers: (ranks, numbers) in float64; equally many on all ranks.

        Raises:
            RuntimeFailure: another rank runs something else, has stopped, or does not come.
        """
        told = f"{tag} ({len(numbers)})" if numbers else tag
        own = torch.tensor(numbers, dtype=torch.float64)
        first, rest = own[:NUMBERS], own[NUMBERS:]
        message = torch.zeros(TEXT_BYTES + DIGEST_BYTES + 8 * NUMBERS, dtype=torch.uint8)
        text = told.encode()[:TEXT_BYTES]
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        digest = hashlib.blake2b(told.encode(), digest_size=DIGEST_BYTES).digest()
        message[TEXT_BYTES : TEXT_BYTES + DIGEST_BYTES] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        message[TEXT_BYTES + DIGEST_BYTES :][: 8 * len(first)] = first.view(torch.uint8)
        found = self._all_gather(tag, message)
        digests = found[:, TEXT_BYTES : TEXT_BYTES + DIGEST_BYTES]
        if not bool((digests == digests[0]).all()):
            texts = [bytes(row[:TEXT_BYTES].tolist()).rstrip(b"\0").decode(errors="replace") for row in found]
            told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise RuntimeFailure(
                f"ranks run different operations on tensors that are cut over them, which all have to run alike "
                f"({told}); move such lines out of `if rank == 0:` and the like"
            )
        values = found[:, TEXT_BYTES + DIGEST_BYTES :].contiguous().view(torch.float64)[:, : len(first)]
        return torch.cat([values, self._all_gather(tag, rest)], 1) if len(rest) else values

    def _all_gather(self, tag: str, own: Tensor) -> Tensor:
        found = [torch.empty_like(own) for _ in range(self.processes)]
        try:
            dist.all_gather(found, own, group=self._group())
        except RuntimeError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise RuntimeFailure(
                f"rank {self.rank}: {tag} failed: {reason}; every rank has to run this line: move it out "
                "of `if rank == 0:` and the like, or see the other ranks' output"
            ) from error
        return torch.stack(found)

    def gather(self, tag: str, own: Tensor, placement: Placement) -> Tensor:
        """The whole tensor, of which `own` is this rank's block; new memory."""
        self.exchange(tag)
        return self.gather_blocks(tag, own, placement)

    def gather_blocks(self, tag: str, own: Tensor, placement: Placement) -> Tensor:
        """The whole tensor, where all ranks are known to run this."""
        whole = own.new_empty(placement.shape)
        for region, speaker in placement.speakers.items():
            mine = self.rank == speaker
            moving = own.detach().contiguous() if mine else own.new_empty(shape_of(region))
            self._transport.broadcast(tag, moving, speaker, range(self.processes))
            for outer, inner in regions_of(region):
                block(whole, outer).copy_(block(moving, inner))
        return whole

    def share(self, tag: str, tensor: Tensor) -> Tensor:
        """Rank 0's values on all ranks."""
        self.exchange(tag)
        moving = tensor.contiguous()
        self._transport.broadcast(tag, moving, 0, range(self.processes))
        return moving

    def mean(self, tag: str, own: Tensor) -> Tensor:
        """The mean of all ranks' tensors; a number that is the same on all stays as it is, to the last bit."""
        if own.numel() == 1 and own.is_floating_point():
            told = self.exchange(tag, [float(own)])
            return own if bool((told == told[0]).all()) else torch.full_like(own, float(told.mean()))
        self.exchange(tag)
        total = own.detach().to(self._transport.physical(self.rank), copy=True, memory_format=torch.contiguous_format)
        self._transport.reduce(tag, range(self.processes), {self.rank: total}).wait()
        return total.div_(self.processes).to(own.device)


@dataclass(frozen=True, eq=False)
class Placement:
    """The block of one tensor that every rank holds: blocks are equal or apart, and cover the tensor.

    Args:
        name: the parameter's dotted name, for errors and tags.
        shape: of the whole tensor.
        blocks: by rank; a rank that holds nothing is absent.
        collectives: over all ranks.

    Raises:
        RuntimeFailure: the blocks do not cover the tensor.
    """

    name: str
    shape: tuple[int, ...]
    blocks: Mapping[int, Block]
    collectives: TaggedCollectives = field(repr=False)

    def __post_init__(self) -> None:
        covered = sum(prod(shape_of(region)) for region in self.speakers)
        if covered != prod(self.shape):
            raise RuntimeFailure(
                f"{self.name}: ranks hold {covered} of its {prod(self.shape)} elements, so it cannot be put together; "
                "pin its layers to one shard"
            )

    @cached_property
    def speakers(self) -> Mapping[Block, int]:
        """The distinct blocks, each with the first rank that holds it, which speaks for all that do."""
        found: dict[Block, int] = {}
        for rank, region in sorted(self.blocks.items()):
            found.setdefault(region, rank)
        return found

    @cached_property
    def own(self) -> Block:
        """This rank's block; empty where it holds nothing."""
        return self.blocks.get(self.collectives.rank, tuple(Range(0, 0) for _ in self.shape))

    @cached_property
    def counts(self) -> bool:
        """Whether this rank speaks for its block in sums over all elements."""
        return self.collectives.rank in self.speakers.values()

    @property
    def on_all_ranks(self) -> bool:
        """Whether every rank holds a block."""
        return len(self.blocks) == self.collectives.processes

    def same(self, other: Placement) -> bool:
        """Whether tensors of both placements can be combined block by block."""
        return self is other or (self.shape == other.shape and self.blocks == other.blocks)

    def cut(self, tensor: Tensor) -> Tensor:
        """This rank's block of a whole tensor, or of one that broadcasts to it; of sections a copy."""
        if not self.shape:
            return tensor if self.collectives.rank in self.blocks else tensor.reshape(1)[:0]
        first = len(self.shape) - tensor.dim()
        last_dims = zip(tensor.shape, self.shape[first:], self.own[first:], strict=True)
        return block_values(tensor, tuple(own if n == size else Range(0, n) for n, size, own in last_dims))
