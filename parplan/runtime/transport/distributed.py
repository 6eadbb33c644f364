"""The transport of torchrun: one logical device per process, rank i is logical device i.

Pieces go point to point: a rank packs what one other rank needs into one flat message, sends without waiting, and waits
for what it receives only when it is read. Gradient sums are all-reduces over the ranks that hold the same blocks.
Weights that lie in equal slices are gathered, and their gradients summed to slices, by collectives. Every failure of a
collective ends as a RuntimeFailure that names the step; the group's timeout bounds every wait.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parplan.errors import RuntimeFailure
from parplan.layout import EqualSlices, Piece, shape_of
from parplan.lowering.program import Exchange
from parplan.runtime.compat import WeakGroup, gather_slices, sum_to_slices
from parplan.runtime.transport.base import Held, Pending, Transport, assemble, block
from parplan.runtime.transport.rendezvous import RankAlone, Rendezvous

__all__ = ["DistributedTransport", "explained"]


LAG = 2
"""Calls of `free_earlier` after which what was sent is waited for: others are not held up by being a little behind."""
FEW = 8
"""Processes up to which a message from each to each takes less time than an all-gather between CPUs: 0.6 to 0.9 of
it."""
NUMBERS = 1
"""The tag of messages of numbers, beside which other messages are on their way."""

# The place in gloo's own source, and its advice, around the reason of an error.
_SOURCE = re.compile(r"^\[\S+\.(?:cc|cpp|h):\d+\] |\.? This is typically caused by .*$|\.$")


@contextmanager
def explained(what: str, rank: int) -> Iterator[None]:
    """Turn torch.distributed's errors into one that says which step failed where."""
    try:
        yield
    except RuntimeError as error:
        reason = _SOURCE.sub("", next(iter(str(error).strip().splitlines()), type(error).__name__))
        raise RuntimeFailure(
            f"rank {rank}: {what} failed: {reason}; another rank has probably stopped or fallen behind, see its output"
        ) from error


_Message = tuple[Callable[..., Any], Tensor, int]  # dist.isend or dist.irecv, what, and the other rank


@dataclass(frozen=True)
class _Sent:
    """Messages whose memory is kept until they have left."""

    name: str
    works: Sequence[Any]
    messages: Sequence[_Message]


@dataclass
class _Messages:
    """Messages on their way to this rank."""

    name: str
    rank: int
    works: Sequence[Any]

    def wait(self) -> None:
        with explained(self.name, self.rank):
            for work in self.works:
                work.wait()
        self.works = ()  # a second wait on gloo would be for another message


@dataclass
class _Receiving:
    """Blocks on their way to this rank, put together when they are first read.

    Args:
        blocks: those of messages that are still to arrive, and this rank's own.
    """

    transport: DistributedTransport
    exchange: Exchange
    messages: _Messages
    blocks: dict[Piece, Tensor]
    parts: Held | None = None

    def wait(self) -> Held:
        if self.parts is None:
            rank = self.transport.rank
            self.messages.wait()
            self.parts = {}
            plan = self.exchange.assemblies.get(rank)
            if plan is not None:
                place = self.transport.physical(rank)
                like = torch.empty(self.exchange.shapes[rank], dtype=self.exchange.dtype, device=place)
                self.parts[rank] = assemble(plan, self.blocks.__getitem__, like)
            self.blocks = {}
        return self.parts


@dataclass
class _Collective:
    """A collective on its way.

    Args:
        result: filled by it.
        given: read by it, and kept as long.
        slices: how many there are in `result`, along its first dimension.
        dim: the dimension along which they belong.
    """

    transport: DistributedTransport
    name: str
    work: Any
    result: Tensor
    given: Tensor | None = None
    slices: int = 1
    dim: int = 0

    def wait(self) -> Held:
        with explained(self.name, self.transport.rank):
            self.work.wait()
        self.given = None
        return {self.transport.rank: _reordered(self.result, self.slices, 0, self.dim)}


@dataclass(frozen=True)
class _Hosts:
    """The group in which ranks exchange numbers, and whether these lie on the CPU."""

    group: WeakGroup
    on_cpus: bool


def _reordered(tensor: Tensor, count: int, behind: int, dim: int) -> Tensor:
    """So many equal parts of a tensor that lie behind each other along one dimension, along another one."""
    return tensor if behind == dim or count == 1 else torch.cat(tensor.chunk(count, behind), dim)


class DistributedTransport(Transport):
    """Moves tensors between the ranks of a process group.

    Args:
        device: where this rank's logical device lives.
        group: the process group; None for the default one.
        collectives: whether equal slices are exchanged by collectives; None: except on the CPU, where gloo's
            reduce-scatter takes 2 to 5 times as long as the pieces, and its all-gather about as long.
    """

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup | None = None, collectives: bool | None = None
    ) -> None:
        self._group = WeakGroup(group)
        self._device = device
        self.collectives = device.type != "cpu" if collectives is None else collectives
        self.rank = dist.get_rank(group)
        self.processes = dist.get_world_size(group)
        self.ranks = [self._peer(rank) for rank in range(self.processes)]
        self.owned: tuple[int, ...] = (self.rank,)
        self._groups: dict[tuple[int, ...], WeakGroup] = {tuple(range(self.processes)): self._group}
        self._sent: list[_Sent] = []
        self._earlier: list[int] = []  # how many of them had been sent in calls of `free_earlier`, of the last LAG
        self._kept: dict[Hashable, Tensor] = {}
        self._rendezvous: Rendezvous | None = None
        self._hosts: _Hosts | None = None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of the ranks; None for the default one."""
        group: dist.ProcessGroup | None = self._group()
        return group

    def physical(self, device: int) -> torch.device:
        """This rank's physical device."""
        return self._device

    def end(self) -> None:
        """Wait until what was sent has left, so that its memory may be reused."""
        self.free_sent()

    def free_sent(self) -> None:
        """As `Transport.free_sent`; a rank that waits here has started all that others wait for."""
        self._free(len(self._sent))
        self._earlier.clear()

    def free_earlier(self) -> None:
        """As `Transport.free_earlier`."""
        self._earlier.append(len(self._sent))
        if len(self._earlier) > LAG:
            count = self._earlier.pop(0)
            self._free(count)
            self._earlier = [known - count for known in self._earlier]

    def _free(self, count: int) -> None:
        """Wait until the first messages have left, and free their memory."""
        for sent in self._sent[:count]:
            with explained(sent.name, self.rank):
                for work in sent.works:
                    work.wait()
        del self._sent[:count]

    def group(self, devices: Sequence[int]) -> None:
        """Make the process group of `devices`, once; every rank has to call this, also those outside."""
        key = tuple(devices)
        if key not in self._groups:
            with explained(f"making a group of ranks {key}", self.rank):
                self._groups[key] = WeakGroup(dist.new_group([self._peer(device) for device in key]))

    def start(self, exchange: Exchange, tensors: Held) -> Pending:
        """Send this rank's blocks, begin to receive what it needs."""
        slices = exchange.slices if self.collectives else None
        group = next((own for own in slices.groups if self.rank in own), None) if slices is not None else None
        if slices is not None and group is not None:
            return self._exchange_slices(exchange, slices, group, tensors[self.rank])
        return self.start_together([(exchange, tensors)])[0]

    def start_together(self, moves: Sequence[tuple[Exchange, Held]]) -> Sequence[Pending]:
        """Send this rank's blocks, one message to each other rank, and begin to receive what it needs."""
        sending = self._sending(moves)
        receiving, blocks = self._receiving([exchange for exchange, _ in moves])
        messages, name = [*sending, *receiving], ", ".join(dict.fromkeys(exchange.name for exchange, _ in moves))
        with explained(name, self.rank):
            works = self._begin(messages)
        # One group call (NCCL) gives one work for all; gloo gives one each, and sends need not be waited for here.
        each = len(works) == len(messages)
        self._sent.append(_Sent(name, works[: len(sending)] if each else works, sending))
        coming = _Messages(name, self.rank, works[len(sending) :] if each else works)
        for (exchange, tensors), known in zip(moves, blocks, strict=True):
            for piece in exchange.assemblies[self.rank].pieces if self.rank in exchange.assemblies else ():
                if piece.source == self.rank:
                    known[piece] = block(tensors[self.rank], piece.source_region)
        return [_Receiving(self, move[0], coming, known) for move, known in zip(moves, blocks, strict=True)]

    def _begin(self, messages: Sequence[_Message]) -> Sequence[Any]:
        """Begin to send and receive; on the CPU one by one, as a batch checks each again and does the same."""
        group = self.process_group
        if self._device.type == "cpu":
            return [begin(tensor, peer, group) for begin, tensor, peer in messages]
        return dist.batch_isend_irecv([dist.P2POp(*one, group) for one in messages]) if messages else []

    def message(self, name: Hashable, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors behind each other; on the CPU in memory that is kept, as new memory costs as much as the copy."""
        if len(tensors) == 1:
            return tensors[0].view(-1)
        flat = [tensor.view(-1) for tensor in tensors]
        elements = sum(tensor.numel() for tensor in flat)
        kept = self._kept.get(name)
        if kept is None or kept.numel() != elements or kept.dtype != flat[0].dtype:
            kept = torch.empty(elements, dtype=flat[0].dtype, device=self._device)
            if self._device.type == "cpu":
                self._kept[name] = kept
        return torch.cat(flat, out=kept)

    def _exchange_slices(
        self, exchange: Exchange, slices: EqualSlices, group: tuple[int, ...], own: Tensor
    ) -> _Collective:
        """Start the collective of this rank's group."""
        count, run = len(group), gather_slices if slices.gathered else sum_to_slices
        given = own if slices.gathered else _reordered(own, count, slices.dim, 0)
        rows = given.shape[0] * count if slices.gathered else given.shape[0] // count
        result = torch.empty((rows, *given.shape[1:]), dtype=exchange.dtype, device=self._device)
        given = given.contiguous()
        with explained(exchange.name, self.rank):
            work = run(result, given, group=self._groups[group](), async_op=True)
        return _Collective(self, exchange.name, work, result, given, count if slices.gathered else 1, slices.dim)

    def reduce(self, name: str, group: Sequence[int], flats: Held) -> _Collective:
        """Start an all-reduce in place of this rank's flat tensor over `group`."""
        flat = flats[self.rank]
        with explained(name, self.rank):
            work = dist.all_reduce(flat, group=self._groups[tuple(group)](), async_op=True)
        return _Collective(self, name, work, flat)

    def broadcast(self, name: str, tensor: Tensor, source: int, devices: Sequence[int]) -> None:
        """Overwrite `tensor` on all of `devices` with that of `source`."""
        with explained(name, self.rank):
            dist.broadcast(tensor, self._peer(source), group=self._groups[tuple(devices)]())

    def start_broadcast(self, name: str, tensor: Tensor, source: int) -> _Collective:
        """As `Transport.start_broadcast`."""
        with explained(name, self.rank):
            work = dist.broadcast(tensor, self._peer(source), group=self.process_group, async_op=True)
        return _Collective(self, name, work, tensor)

    def open_rendezvous(self) -> None:
        """Agree on a number for a rendezvous, as processes may have made different numbers of groups."""
        number = max(known for (known,) in self.gather(Rendezvous.latest + 1))
        self._rendezvous = Rendezvous(self._group, self.ranks, self.rank, number)

    def begin_call(self) -> None:
        """A call of the compiled model begins."""
        if self._rendezvous is not None:
            self._rendezvous.begin_call()

    def busy(self) -> AbstractContextManager[object]:
        """A context in which the other ranks know that this one will come."""
        return self._rendezvous.busy() if self._rendezvous is not None else nullcontext()

    def come_together(self, what: str, remedy: str, gradients: bool = False) -> None:
        """As `Transport.come_together`."""
        absent = self._rendezvous.come_together(what, gradients) if self._rendezvous is not None else ""
        if absent:
            raise RankAlone(f"rank {self.rank} is {what} and all ranks have to be, but {absent}; {remedy}", absent)

    def gather(self, *numbers: int) -> list[tuple[int, ...]]:
        """The numbers that every rank passes here, by rank; all pass equally many.

        They go between hosts where they can: read from an accelerator they wait for all that it still has to do.
        """
        if self._hosts is None:
            self._hosts = self._host_group()
        place = torch.device("cpu") if self._hosts.on_cpus else self._device
        own = torch.tensor(numbers, dtype=torch.int64, device=place)
        gathered = self._told if self._hosts.on_cpus and self.processes <= FEW else self._all_gather
        found = gathered("exchanging the numbers of samples", own, self._hosts.group())
        return [tuple(entry.tolist()) for entry in found]

    def _told(self, name: str, own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
        """Every rank's tensor, by a message to each, which unlike gloo's collectives takes no other thread."""
        found, works = [own, *(torch.empty_like(own) for _ in range(1, self.processes))], list[Any]()
        with explained(name, self.rank):
            for behind in range(1, self.processes):
                to, of = (self._peer((self.rank + way) % self.processes) for way in (behind, -behind))
                works.append(dist.isend(own, to, group, tag=NUMBERS))
                works.append(dist.irecv(found[behind], of, group, tag=NUMBERS))
            for work in works:
                work.wait()
        return [found[self.rank - rank] for rank in range(self.processes)]

    def _host_group(self) -> _Hosts:
        """The ranks' own group, if it has a backend for CPUs, else one beside it."""
        group = self.process_group
        if self._device.type == "cpu" or "cpu:" in str(dist.get_backend_config(group)):
            return _Hosts(self._group, on_cpus=True)
        # Of a part of all processes torch would ask the others, too, which may never come here.
        if group is not None or not dist.is_gloo_available():
            return _Hosts(self._group, on_cpus=False)
        return _Hosts(WeakGroup(dist.new_group(backend="gloo")), on_cpus=True)

    def gather_texts(self, text: str, name: str = "exchanging findings of the self-check") -> list[str]:
        """As `Transport.gather_texts`."""
        found: list[Any] = [None] * self.processes
        with explained(name, self.rank):
            dist.all_gather_object(found, text, group=self.process_group)
        return [str(entry) for entry in found]

    def gather_tensors(self, name: str, own: Tensor) -> list[Tensor]:
        """Every rank's tensor, by rank; all of one shape and type."""
        return self._all_gather(name, own, self.process_group)

    def _all_gather(self, name: str, own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self.processes)]
        with explained(name, self.rank):
            dist.all_gather(found, own, group=group)
        return found

    def from_first(self, make: Callable[[], str]) -> str:
        """A text that rank 0 makes and all ranks get; its error, if any, is raised on all."""
        told: list[Any] = [None, None]
        error: Exception | None = None
        if self.rank == 0:
            try:
                told[0] = make()
            except Exception as caught:
                error, told[1] = caught, str(caught)
        with explained("sharing rank 0's plan", self.rank):
            dist.broadcast_object_list(told, self._peer(0), group=self.process_group, device=self._device)
        if error is not None:
            raise error
        if told[1] is not None:
            raise RuntimeFailure(f"rank {self.rank}: rank 0 could not make the plan: {told[1]}")
        return str(told[0])

    def _peer(self, device: int) -> int:
        return device if (group := self.process_group) is None else dist.get_global_rank(group, device)

    def _sending(self, moves: Sequence[tuple[Exchange, Held]]) -> list[_Message]:
        blocks: dict[int, list[Tensor]] = defaultdict(list)  # by the rank that they are for
        for exchange, tensors in moves:
            for target, pieces in exchange.sent.get(self.rank, {}).items():
                blocks[target] += [block(tensors[self.rank], piece.source_region).reshape(-1) for piece in pieces]
        # Contiguous memory that nothing writes to before it has left.
        flats = {to: own[0].contiguous() if len(own) == 1 else torch.cat(own) for to, own in blocks.items()}
        return [(dist.isend, flat, self._peer(target)) for target, flat in flats.items()]

    def _receiving(self, exchanges: Sequence[Exchange]) -> tuple[list[_Message], list[dict[Piece, Tensor]]]:
        """Messages to receive, and per exchange the blocks in them."""
        found, blocks = list[_Message](), [dict[Piece, Tensor]() for _ in exchanges]
        pieces: dict[int, list[tuple[int, Piece]]] = defaultdict(list)  # by the rank that they come from
        for number, exchange in enumerate(exchanges):
            for source, own in exchange.received.get(self.rank, {}).items():
                pieces[source] += [(number, piece) for piece in own]
        for source, coming in pieces.items():
            sizes = [piece.elements for _, piece in coming]
            flat = torch.empty(sum(sizes), dtype=exchanges[0].dtype, device=self._device)
            found.append((dist.irecv, flat, self._peer(source)))
            for (number, piece), part in zip(coming, flat.split(sizes), strict=True):
                blocks[number][piece] = part.view(shape_of(piece.source_region))
        return found, blocks
