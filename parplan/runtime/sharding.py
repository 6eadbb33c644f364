"""Parameters cut over processes: each rank's module holds the blocks its rank needs, under the user's own Parameters.

The Parameter objects stay, only their memory changes, so an optimizer made before or after works on the blocks. What is
saved is the plain model's state: full tensors under the original names, whatever plan trained them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parplan.errors import RuntimeFailure
from parplan.layout import Region
from parplan.runtime.distributed import DistributedTransport
from parplan.runtime.program import shape_of
from parplan.runtime.transport import block

__all__ = ["Sharding", "same_start"]


def same_start(module: nn.Module, transport: DistributedTransport) -> None:
    """Give every rank the parameters and buffers of rank 0, as DistributedDataParallel does."""
    everyone = range(transport.processes)
    with torch.no_grad():
        for group in _by_kind([*module.parameters(), *module.buffers()]):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            transport.broadcast("sharing rank 0's parameters and buffers", flat, 0, everyone)
            for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        found[tensor.dtype, tensor.device].append(tensor)
    return list(found.values())


@dataclass(frozen=True)
class _Part:
    """A block of a tensor of the state and the ranks that hold it, the first of which speaks for all."""

    block: Region
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Memory:
    """What a parameter held before its memory was changed, and its shape in the plain model."""

    parameter: nn.Parameter
    data: Tensor
    grad: Tensor | None
    whole: tuple[int, ...]

    @staticmethod
    def of(parameter: nn.Parameter, whole: tuple[int, ...]) -> _Memory:
        return _Memory(parameter, parameter.data, parameter.grad, whole)


class Sharding:
    """Which block of every parameter and buffer each rank holds, by dotted name.

    Args:
        module: the user's module, whose parameters become blocks.
        parameters: block per device, by dotted name; a parameter that is not named stays whole everywhere.

    Attributes:
        fresh: the same for buffers that are only up to date on some ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Mapping[int, Region]],
        transport: DistributedTransport,
    ) -> None:
        self._module = module
        self._transport = transport
        self._held = parameters
        self.fresh: dict[str, dict[int, Region]] = {}
        self._shapes = {name: tuple(module.get_parameter(name).shape) for name in parameters}
        self._aliases = _aliases(module)
        for name, held in parameters.items():
            parameter = module.get_parameter(name)
            own = self._cut(parameter.data, held)
            if own.shape != parameter.shape:
                parameter.grad = None
                parameter.data = own

    @property
    def cuts(self) -> bool:
        """Whether this rank's module holds less than the whole model."""
        return any(tuple(self._module.get_parameter(n).shape) != shape for n, shape in self._shapes.items())

    @property
    def partial(self) -> bool:
        """Whether any rank's module holds less than the whole model; the same on every rank."""
        everyone = range(self._transport.processes)
        held = ((blocks.get(rank), self._shapes[name]) for name, blocks in self._held.items() for rank in everyone)
        return any(own is None or shape_of(own) != whole for own, whole in held)

    def _cut(self, whole: Tensor, held: Mapping[int, Region]) -> Tensor:
        own = held.get(self._transport.rank)
        if own is None:
            return whole.new_empty(0)
        return whole if shape_of(own) == tuple(whole.shape) else block(whole, own).clone()

    @contextmanager
    def whole_shapes(self) -> Iterator[None]:
        """Give parameters their whole shapes, without their values, while the model is captured again."""
        kept = [_Memory.of(self._module.get_parameter(name), shape) for name, shape in self._shapes.items()]
        try:
            for memory in kept:
                memory.parameter.grad = None
                memory.parameter.data = memory.data.new_empty(memory.whole)
            yield
        finally:
            for memory in kept:
                memory.parameter.data = memory.data
                memory.parameter.grad = memory.grad

    @contextmanager
    def whole_values(self) -> Iterator[None]:
        """Give parameters and buffers their whole shapes and values for a while; every rank has to call this."""
        held = {**self._held, **self.fresh}
        tensors: dict[str, Tensor] = {name: self._module.get_parameter(name) for name in self._shapes}
        tensors |= {name: self._module.get_buffer(name) for name in self.fresh}
        before = {name: (tensor.data, tensor.grad) for name, tensor in tensors.items()}
        try:
            for name, tensor in tensors.items():
                whole = self._gathered(name, tensor.data, held[name], self._shapes.get(name, tuple(tensor.shape)))
                if whole is not tensor.data:
                    tensor.grad = None
                    tensor.data = whole
            yield
        finally:
            for name, (data, grad) in before.items():
                tensors[name].data = data
                tensors[name].grad = grad

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """Full tensors for a module's state dict; every rank has to call this."""
        whole: dict[str, Any] = {}
        for name, value in state.items():
            first = self._aliases.get(name, name)
            if first in self._held:
                whole[name] = self._gathered(name, value, self._held[first], self._shapes[first])
            elif name in self.fresh:
                whole[name] = self._gathered(name, value, self.fresh[name], tuple(value.shape))
            else:
                whole[name] = value
        return whole

    def _gathered(self, name: str, own: Tensor, held: Mapping[int, Region], shape: tuple[int, ...]) -> Tensor:
        rank, parts = self._transport.rank, _parts(held)
        if len(parts) == 1 and len(parts[0].ranks) == self._transport.processes:
            return own
        whole = own.new_empty(shape)
        for part in parts:
            moving = own.new_empty(shape_of(part.block))
            if rank == part.ranks[0]:
                moving.copy_(own if tuple(own.shape) == shape_of(part.block) else block(own, part.block))
            self._transport.broadcast(f"gathering {name}", moving, part.ranks[0], range(self._transport.processes))
            block(whole, part.block).copy_(moving)
        return whole

    def cut(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's blocks of a state dict of full tensors.

        Raises:
            RuntimeFailure: a tensor does not have the model's shape.
        """
        cut = dict(state)
        for name, value in state.items():
            first = self._aliases.get(name, name)
            if first in self._held:
                if tuple(value.shape) != self._shapes[first]:
                    raise RuntimeFailure(
                        f"{name} has shape {tuple(value.shape)} in the state to load and {self._shapes[first]} in the "
                        "model; load the state of this model, with full tensors"
                    )
                cut[name] = self._cut(value, self._held[first])
        return cut


def _parts(held: Mapping[int, Region]) -> list[_Part]:
    found: dict[Region, list[int]] = {}
    for rank, region in held.items():
        found.setdefault(region, []).append(rank)
    return [_Part(region, tuple(ranks)) for region, ranks in found.items()]


def _aliases(module: nn.Module) -> dict[str, str]:
    """First name of every parameter name, for tied parameters."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
