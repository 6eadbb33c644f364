"""What each device holds of the module's parameters and buffers.

In one process the user's module keeps its tensors: a device in the same memory works on views of them, a device in
another memory on copies that are refreshed, all in one message, when the originals were written. Under torchrun each
process's module holds just what its rank needs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Range, Region
from parplan.runtime.compat import Version, version
from parplan.runtime.program import Compute, Program, State, shape_of
from parplan.runtime.streams import sent
from parplan.runtime.transport import Transport, block

__all__ = ["Store"]


@dataclass(frozen=True)
class _Copy:
    """A block of a tensor in another memory, and which version of the original it is."""

    tensor: Tensor
    version: Version


@dataclass(frozen=True)
class _Wanted:
    """A block of a parameter, buffer or constant that a device works on."""

    name: str
    place: torch.device
    block: Region
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Way:
    """Copies that travel together."""

    source: torch.device
    target: torch.device
    dtype: torch.dtype


class Store:
    """The parameters, buffers and constants of one captured graph, as its devices hold them.

    Attributes:
        shapes: of the block that each device holds of each parameter.

    Args:
        module: the user's module.
        graph: the captured graph.
        program: whose `holdings` say which block each device holds.
        transport: which devices are here, and where.
        sharded: the module's parameters are the blocks this process holds, not the whole tensors.
    """

    def __init__(
        self, module: nn.Module, graph: LayerGraph, program: Program, transport: Transport, sharded: bool
    ) -> None:
        self._parameters = {name: module.get_parameter(path) for name, path in graph.parameters.items()}
        self._buffers = {
            name: graph.constants[name] if name in graph.constants else module.get_buffer(path)
            for name, path in {**dict.fromkeys(graph.constants, ""), **graph.buffers}.items()
        }
        self._program = program
        self._holdings = program.holdings
        self.shapes = {name: {d: shape_of(b) for d, b in held.items()} for name, held in program.holdings.items()}
        self._transport = transport
        self._sharded = sharded
        self._copies: dict[_Wanted, _Copy] = {}
        steps = [step for step in program.forward if isinstance(step, Compute)]
        self._wanted = {
            (id(state), device): self._want(state, device)
            for step in steps
            for device in step.grid.devices
            if device in transport.owned
            for state in step.states
        }

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that take gradients, by placeholder."""
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def original(self, name: str) -> Tensor:
        """The module's own tensor."""
        return self._parameters[name] if name in self._parameters else self._buffers[name]

    def get(self, state: State, device: int) -> Tensor:
        """The block that a compute step uses on `device`: a view, or a copy in the device's memory."""
        wanted = self._wanted[id(state), device]
        original = self.original(state.name).detach()
        if original.device != wanted.place:
            return self._copies[wanted].tensor
        return original if original.shape == wanted.shape else block(original, wanted.block)

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Make and bring up to date all copies, one message per memory and type; before any device starts."""
        stale: dict[_Way, dict[_Wanted, None]] = defaultdict(dict)
        for wanted in self._wanted.values():
            original, known = self.original(wanted.name), self._copies.get(wanted)
            if original.device != wanted.place and (known is None or known.version != version(original)):
                stale[_Way(original.device, wanted.place, original.dtype)][wanted] = None
        for way, group in stale.items():
            blocks = [block(self.original(wanted.name).detach(), wanted.block) for wanted in group]
            flat = sent(torch.cat([tensor.reshape(-1) for tensor in blocks]), way.target)
            parts = flat.split([tensor.numel() for tensor in blocks])
            for wanted, tensor, part in zip(group, blocks, parts, strict=True):
                self._copies[wanted] = _Copy(part.view(tensor.shape), version(self.original(wanted.name)))

    def write_back(self, state: State, device: int) -> None:
        """Bring a buffer that `device` wrote home to the module, or tell its copies that it was written there."""
        wanted = self._wanted[id(state), device]
        original = self.original(state.name)
        if original.device != wanted.place:
            written = self._copies[wanted].tensor
            block(original, wanted.block).copy_(written)
            self._copies[wanted] = _Copy(written, version(original))
        else:
            increment_version(original)

    def _want(self, state: State, device: int) -> _Wanted:
        blocks = state.blocks[device]
        if not self._sharded and state.name in self._holdings:
            blocks = _absolute(blocks, self._holdings[state.name][device])
        return _Wanted(state.name, self._transport.physical(device), blocks, shape_of(blocks))

    def place(self, name: str, device: int) -> Region:
        """Where the block that `device` holds of a parameter lies in the module's own tensor."""
        held = self._holdings[name][device]
        return tuple(Range(0, size) for size in self.shapes[name][device]) if self._sharded else held


def _absolute(inner: Region, outer: Region) -> Region:
    return tuple(extent.shifted(start.start) for extent, start in zip(inner, outer, strict=True))
