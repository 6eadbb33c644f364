"""The blocks of the module's parameters and buffers that each device works on.

In one process the user's module keeps its tensors: a device in the same memory works on views of them, a device in
another memory on copies that are refreshed, all in one message, when the originals were written. Writes through
`.data`, which torch does not count, are found by a checksum wherever no counted write has made the copies anew. Under
torchrun each process's module holds just what its rank needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from parplan.accelerators import as_current
from parplan.errors import RuntimeFailure
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Block, Ranges, located, region_of, shape_of, whole_block
from parplan.lowering.holdings import Bucket
from parplan.lowering.program import Program, State
from parplan.runtime.compat import Version, version
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor, local_tensor
from parplan.runtime.transport.base import Transport, block, block_values
from parplan.runtime.transport.streams import sent

__all__ = ["Copies", "Store"]


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SCATTER = -7046029254386353131  # an odd number whose multiples have bits all over (2**64 / golden ratio, signed)

CHUNK = 2**22
"""Elements that a checksum takes at a time: it needs 16 bytes of memory for each."""


@dataclass
class _Copy:
    """A block of a tensor in another memory, which version of the original it is, and its checksum once it is known.

    `users` are the logical devices whose streams the allocator was told of.
    """

    tensor: Tensor
    version: Version
    checksum: Tensor | None = None
    users: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Where:
    """A block of one of the module's tensors in one memory; `path` is the same in all captured graphs."""

    path: str
    place: torch.device
    block: Block


@dataclass(frozen=True)
class _Wanted:
    """A block of a parameter, buffer or constant that a device works on."""

    name: str
    where: _Where
    shape: tuple[int, ...]
    sections: bool


Copies = dict[_Where, _Copy]
"""Blocks of a module's parameters and buffers in other memories, shared by all programs of a compiled model."""


class Store:
    """The parameters, buffers and constants of one captured graph, as its devices hold them.

    Attributes:
        parameters: the module's own, by placeholder; layers need not read all of them.
        shapes: of the block that each device holds of each parameter.
        label: the name of a parameter, buffer or constant in messages, by placeholder.

    Args:
        module: the user's module.
        graph: the captured graph.
        program: whose `holdings` say which block each device holds.
        transport: which devices are here, and where.
        sharded: the module's parameters are the blocks this process holds, not the whole tensors.
        copies: of other programs of the same module, to be shared with; default: none are shared.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: LayerGraph,
        program: Program,
        transport: Transport,
        sharded: bool,
        copies: Copies | None = None,
    ) -> None:
        self.label = graph.label
        self._paths = {**graph.parameters, **graph.buffers}
        self.parameters = {name: module.get_parameter(path) for name, path in graph.parameters.items()}
        self._buffers = {
            name: graph.constants[name] if name in graph.constants else module.get_buffer(path)
            for name, path in {**dict.fromkeys(graph.constants, ""), **graph.buffers}.items()
        }
        self._holdings = program.holdings
        self.shapes = {name: {d: shape_of(b) for d, b in held.items()} for name, held in program.holdings.items()}
        self._transport = transport
        self._sharded = sharded
        self._copies = copies if copies is not None else {}
        # By parameters: those with a gradient here, and whether any process has one.
        self._used: dict[tuple[str, ...], tuple[Set[str], dict[str, bool]]] = {}
        self._wanted = {
            (id(state), device): self._want(state, device)
            for step in program.computes
            for device in step.grid.devices
            if device in transport.owned
            for state in step.states
        }
        self._sections = any(wanted.sections for wanted in self._wanted.values())
        named = {**self._buffers, **self.parameters}
        self._lying = list({(w.name, w.where.place): named[w.name] for w in self._wanted.values()}.items())

    def _want(self, state: State, device: int) -> _Wanted:
        blocks = state.blocks[device]
        if not self._sharded and state.name in self._holdings:
            held = self._holdings[state.name][device]
            blocks = located(blocks, held)
        # A constant belongs to its graph alone.
        path = self._paths.get(state.name, f"{id(self._buffers.get(state.name))} of this graph")
        sections = any(isinstance(extent, Ranges) for extent in blocks)
        return _Wanted(state.name, _Where(path, self._transport.physical(device), blocks), shape_of(blocks), sections)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that layers read and that take gradients, by placeholder."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad and name in self._holdings}

    def sum_label(self, bucket: Bucket) -> str:
        """The gradient sum of a bucket, in messages."""
        return f"the gradient sum of {', '.join(map(self.label, bucket.parameters))}"

    def original(self, name: str) -> Tensor:
        """The module's own tensor; this process's block of a parameter that is cut over processes."""
        return local_tensor(self.parameters[name] if name in self.parameters else self._buffers[name])

    def as_gradients(
        self, found: Mapping[str, Tensor | None], touched: Set[str] | None = None, behind: Set[str] | None = None
    ) -> dict[str, Tensor | None]:
        """Gradients of the blocks that this process holds as gradients of the module's parameters, by placeholder.

        Every rank gets a gradient of a parameter that one of them has one of, as what a user does with gradients
        (norms above all) has to be the same on all.

        Args:
            touched: parameters that this process has a gradient of, where zeros may have been summed for others; of
                those that no process has touched there is no gradient.
            behind: parameters that this process's results with a gradient are computed from, where gradients of others
                have parts in its own; of those that are behind no process's results there is no gradient.
        """
        sharded = {n: p for n in found if isinstance(p := self.parameters[n], ShardedTensor)}
        partial = [name for name, parameter in sharded.items() if not parameter.placement.on_all_ranks]
        exchanged = partial if touched is None else list(found)
        known = touched if touched is not None else {name for name in partial if found[name] is not None}
        before = self._used.get(tuple(found)) if touched is None else None
        if before is None:
            both = [known] if behind is None else [known, behind]  # of a process without samples the first is empty
            flags = self._transport.any(name in some for name in exchanged for some in both) if exchanged else []
            before = known, {name: all(flags[n * len(both) :][: len(both)]) for n, name in enumerate(exchanged)}
            if touched is None:  # a matter of the program alone: asked once
                self._used[tuple(found)] = before
        known_before, used = before
        if known != known_before:
            which = ", ".join(self.label(name) for name in sorted(known ^ known_before))
            raise RuntimeFailure(
                f"rank {self._transport.rank}: {which} had a gradient in some steps and has none in others, while "
                "other processes rely on what the first step had; let a backward of your own return zeros, not None"
            )
        gradients: dict[str, Tensor | None] = {}
        for name, own in found.items():
            if not used.get(name, own is not None):
                own = None
            elif own is None and name in partial:
                own = torch.zeros_like(sharded[name].local)
            gradients[name] = sharded[name].like(own) if own is not None and name in sharded else own
        return gradients

    def get(self, state: State, device: int) -> Tensor:
        """The block that a compute step uses on `device`: a view, or a copy in the device's memory."""
        wanted, original = self._wanted[id(state), device], self.original(state.name)
        if wanted.sections or original.device != wanted.where.place:
            copy = self._copies.get(wanted.where)
            assert copy is not None  # refresh() came first
            return copy.tensor
        original = original.detach()
        return original if original.shape == wanted.shape else block(original, region_of(wanted.where.block))

    def slice(self, name: str, device: int) -> Tensor:
        """The part that `device` keeps of a parameter which lies in slices, in the device's memory."""
        original = self.original(name).detach()
        own = original if self._sharded else block_values(original, self._holdings[name][device])
        return sent(own, self._transport.physical(device))

    def _is_copied(self, wanted: _Wanted) -> bool:
        """Whether a device works on a copy: in another memory, or of a block with sections, which is no view."""
        return wanted.sections or self.original(wanted.name).device != wanted.where.place

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Make and bring up to date all copies, one message per memory and type; before any device starts."""
        if not self._sections and all(tensor.device == place for (_, place), tensor in self._lying):
            return  # as in most steps, which look at each tensor once
        pairs = [(device, wanted) for (_, device), wanted in self._wanted.items()]
        copied = [(d, wanted) for d, wanted in pairs if self._is_copied(wanted)]
        # Copies that travel in one message, by source, target and type.
        stale: dict[tuple[torch.device, torch.device, torch.dtype], dict[_Wanted, None]] = defaultdict(dict)
        unwritten: dict[_Wanted, _Copy] = {}
        written: list[_Wanted] = []
        for _, wanted in copied:
            known = self._copies.get(wanted.where)
            if known is not None and known.version == version(self.original(wanted.name)):
                unwritten[wanted] = known
            else:
                written.append(wanted)
        for wanted in (*written, *self._changed(unwritten)):
            original = self.original(wanted.name)
            stale[original.device, wanted.where.place, original.dtype][wanted] = None
        for (source, target, _), group in stale.items():
            with as_current(source):
                blocks = [block_values(self.original(wanted.name).detach(), wanted.where.block) for wanted in group]
                flat = sent(torch.cat([tensor.reshape(-1) for tensor in blocks]), target)
            parts = flat.split([tensor.numel() for tensor in blocks])
            for wanted, tensor, part in zip(group, blocks, parts, strict=True):
                self._copies[wanted.where] = _Copy(part.view(tensor.shape), version(self.original(wanted.name)))
        for device, wanted in copied:
            copy = self._copies.get(wanted.where)
            if copy is not None and device not in copy.users:
                copy.users.add(device)
                with self._transport.on(device):
                    self._transport.used_here(copy.tensor)

    def _changed(self, copies: Mapping[_Wanted, _Copy]) -> list[_Wanted]:
        """Those of the copies whose originals were written in a way that torch does not count, such as `.data`."""
        originals: dict[torch.device, list[Tensor]] = defaultdict(list)
        copies = {wanted: copy for wanted, copy in copies.items() if not copy.tensor.is_meta}  # those have no values
        for wanted, copy in copies.items():
            if copy.checksum is None:
                with as_current(copy.tensor.device):
                    copy.checksum = _checksum(copy.tensor)
            original = self.original(wanted.name).detach()
            with as_current(original.device):
                originals[original.device].append(_checksum(block_values(original, wanted.where.block)))
        # One reading of each device's numbers, however many copies there are.
        by_device = {device: iter(_numbers(sums)) for device, sums in originals.items()}
        held = [sent(copy.checksum, torch.device("cpu")) for copy in copies.values() if copy.checksum is not None]
        known = torch.stack(held).tolist() if held else []
        return [
            wanted
            for wanted, checksum in zip(copies, known, strict=True)
            if next(by_device[self.original(wanted.name).device]) != checksum
        ]

    def write_back(self, state: State, device: int) -> None:
        """Copy a buffer that `device` wrote to the module, or tell its copies that it was written there."""
        wanted = self._wanted[id(state), device]
        original = self.original(state.name)
        if self._is_copied(wanted):
            copy = self._copies.get(wanted.where)
            assert copy is not None  # `get` gave it to the step that wrote it
            block(original, region_of(wanted.where.block)).copy_(copy.tensor)
            self._copies[wanted.where] = _Copy(copy.tensor, version(original), users=copy.users)
        else:
            increment_version(original)

    def place(self, name: str, device: int) -> Block:
        """The extent, in the module's own tensor, of the block that `device` holds of a parameter."""
        held = self._holdings[name][device]
        return whole_block(self.shapes[name][device]) if self._sharded else held


def _numbers(numbers: Sequence[Tensor]) -> list[int]:
    """Numbers of one device, read at once."""
    with as_current(numbers[0].device):
        found: list[int] = torch.stack(list(numbers)).tolist()
    return found


def _checksum(tensor: Tensor) -> Tensor:
    """A number of shape () that differs if any bit, or the order, of the elements does; on the tensor's device."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[min(tensor.element_size(), 8)])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(bits.split(CHUNK)):
        weights = (torch.arange(chunk.numel(), dtype=torch.int64, device=tensor.device) + number * CHUNK) * _SCATTER
        total += (chunk.to(torch.int64) * (weights ^ (weights >> 31) | 1)).sum()
    return total
