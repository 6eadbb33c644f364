"""The interface that moves tensors between devices, with one implementation per way of owning devices.

Program and executor know only `Transport`. `LocalTransport` owns every device of one process, `DistributedTransport`
owns one device of many processes. Both start a movement at once and hand the result over when it is first needed, so
that a step never waits for data another step will use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parplan.layout import Block, Piece, Ranges, Region, regions_of
from parplan.lowering.program import Assembly, Exchange

__all__ = ["Held", "Pending", "Transport", "add_block", "assemble", "block", "block_values"]

Held = dict[int, Tensor]  # logical device -> the part of one tensor that it holds


class Pending(Protocol):
    """A movement or a sum that was started."""

    def wait(self) -> Held:
        """The parts that arrived, by device; on CUDA, safe to use on each device's compute stream."""
        ...


class Transport(ABC):
    """Moves tensors between logical devices; what is not said otherwise holds for one process with one stream.

    Attributes:
        owned: the logical devices whose tensors live in this process.
        processes: how many processes share the logical devices.
        rank: of this process among them.
        ranks: those of the processes, as numbered among all.
        collectives: exchanges of equal slices are collectives of torch.distributed, among groups made ready for them.
    """

    owned: tuple[int, ...]
    processes = 1
    rank = 0
    ranks: Sequence[int] = (0,)
    collectives = False
    tagged: Any = None  # collectives of sharded state, made at the first request (sharded_state/block_placement.py)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of torch.distributed; None for the default one, or for one process."""
        return None

    @abstractmethod
    def physical(self, device: int) -> torch.device:
        """The physical device of an owned logical device."""

    def on(self, device: int) -> AbstractContextManager[object]:
        """The context in which an owned device computes (its stream, on CUDA)."""
        return nullcontext()

    def begin(self) -> None:  # noqa: B027
        """Order everything that runs from here on after the caller's work so far."""

    def show(self) -> None:  # noqa: B027
        """Order the caller's work from here on after everything that ran before."""

    def free_sent(self) -> None:  # noqa: B027
        """Free what was sent, once it has left; all devices have started to receive it."""

    def free_earlier(self) -> None:  # noqa: B027
        """Free what was sent some calls of this ago, once it has left; others have started to receive it."""

    def end(self) -> None:
        """The same, and everything sent has left."""
        self.show()

    def used_here(self, tensor: Tensor) -> None:  # noqa: B027
        """The current stream uses a tensor's memory, which another stream may have allocated."""

    def ready_on(self, device: int) -> None:  # noqa: B027
        """Order the next work on the current stream of an owned device after that of all current streams."""

    @abstractmethod
    def start(self, exchange: Exchange, tensors: Held) -> Pending:
        """Start a movement from the owned source parts to the owned target parts."""

    def start_together(self, moves: Sequence[tuple[Exchange, Held]]) -> Sequence[Pending]:
        """Start movements of one data type; between two processes they are one message."""
        return [self.start(*move) for move in moves]

    @abstractmethod
    def message(self, name: Hashable, tensors: Sequence[Tensor]) -> Tensor:
        """Contiguous tensors of one owned device as one flat tensor, to be summed; the tensor itself where it is one.

        Its memory may be used again for the next message of this `name`.
        """

    @abstractmethod
    def reduce(self, name: str, group: Sequence[int], flats: Held) -> Pending:
        """Start the sum of one flat tensor per device of `group`.

        The result is held by the first owned device of the group. All devices of a group give equally long tensors.
        """

    # -- calls that all processes have to make (runtime/transport/rendezvous.py) --

    def open_rendezvous(self) -> None:  # noqa: B027
        """Let processes see from here on where the others are; every process calls this."""

    def begin_call(self) -> None:  # noqa: B027
        """A call of the compiled model begins."""

    def busy(self) -> AbstractContextManager[object]:
        """A context in which this process takes its time, and will come to what others wait for."""
        return nullcontext()

    def come_together(self, what: str, remedy: str, gradients: bool = False) -> None:  # noqa: B027
        """Wait, in front of a collective, until all processes are in the call `what`; once per call of the model.

        Args:
            remedy: the end of an error's text.
            gradients: the call records them: this process says that it is there, and does not wait.

        Raises:
            RankAlone: another process is somewhere else.
        """

    # -- collectives: every process calls them, in the same order --

    def group(self, devices: Sequence[int]) -> None:  # noqa: B027
        """Make ready for sums and other collectives over `devices`, once."""

    def any(self, flags: Iterable[bool]) -> list[bool]:
        """Per flag, equally many in all processes, whether it is set in at least one of them."""
        return [max(column) == 1 for column in zip(*self.gather(*map(int, flags)), strict=True)]

    def gather(self, *numbers: int) -> list[tuple[int, ...]]:
        """The numbers that every process passes here, by rank; all pass equally many."""
        return [numbers]

    def gather_texts(self, text: str, name: str = "exchanging findings of the self-check") -> list[str]:
        """The text that every process passes here, by rank; an error says that this was `name`."""
        return [text]

    def gather_tensors(self, name: str, own: Tensor) -> list[Tensor]:
        """Every process's tensor, by rank; all of one shape and type."""
        return [own]

    def broadcast(self, name: str, tensor: Tensor, source: int, devices: Sequence[int]) -> None:  # noqa: B027
        """Overwrite `tensor` in the processes of `devices` with that of the process of `source`."""

    def start_broadcast(self, name: str, tensor: Tensor, source: int) -> Pending | None:
        """Start to overwrite `tensor` in all processes with that of `source`; None where there is one process."""
        return None

    def from_first(self, make: Callable[[], str]) -> str:
        """A text that rank 0 makes and all processes get; its error, if any, is raised in all."""
        return make()


def block(tensor: Tensor, region: Region) -> Tensor:
    """A view of one block of `tensor`; the tensor itself when the block is all of it."""
    for dim, extent in enumerate(region):
        if len(extent) != tensor.shape[dim]:
            tensor = tensor.narrow(dim, extent.start, len(extent))
    return tensor


def block_values(tensor: Tensor, held: Block) -> Tensor:
    """The values of a block, to be read: a view where it is one region, a copy where it has sections."""
    for dim, extent in enumerate(held):
        if isinstance(extent, Ranges):
            tensor = torch.cat([tensor.narrow(dim, part.start, len(part)) for part in extent.parts], dim)
        elif len(extent) != tensor.shape[dim]:
            tensor = tensor.narrow(dim, extent.start, len(extent))
    return tensor


def add_block(tensor: Tensor, held: Block, values: Tensor) -> None:
    """Add the values of a block where it lies in `tensor`."""
    for outer, inner in regions_of(held):
        block(tensor, outer).add_(block(values, inner))


def assemble(plan: Assembly, fetch: Callable[[Piece], Tensor], like: Tensor) -> Tensor:
    """One device's part: its pieces, copied or added into place; `like` gives shape, type and device (uninitialised).

    `fetch` gives a piece's block on the target's device. A piece that is the whole part is returned without a copy.
    """
    if plan.whole:
        return fetch(plan.pieces[0])
    if not plan.tiled:
        like.zero_()
    for piece in plan.pieces:
        place = block(like, piece.target_region)
        place.copy_(fetch(piece)) if plan.tiled else place.add_(fetch(piece))
    return like
