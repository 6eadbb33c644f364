"""What measuring must not change: parameters, gradients, buffers, the optimizer, random numbers, modules' modes.

Everything is put back bit by bit, into the memory it was in, whatever happens in between.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["kept", "kept_modes"]


@contextmanager
def kept_modes(module: nn.Module) -> Iterator[None]:
    """Put every part of `module` back in training or evaluation mode, as it was."""
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def kept(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Leave no trace of what happens to `module` and `optimizer` inside; gradients are None at first."""
    values = [_Value.of(tensor) for tensor in (*module.parameters(), *module.buffers())]
    grads = {parameter: parameter.grad for parameter in module.parameters()}
    state = _OptimizerState.of(optimizer) if optimizer is not None else None
    random = _RandomState.here()
    for parameter in grads:
        parameter.grad = None
    try:
        yield
    finally:
        random.restore()
        if state is not None:
            state.restore()
        for value in values:
            value.restore()
        for parameter, grad in grads.items():
            parameter.grad = grad


@dataclass(frozen=True)
class _Value:
    """A tensor and its values, which wait in the host's memory."""

    tensor: Tensor
    values: Tensor

    @staticmethod
    def of(tensor: Tensor) -> _Value:
        return _Value(tensor, tensor.detach().to("cpu", copy=True))

    @torch.no_grad()
    def restore(self) -> None:
        self.tensor.detach().copy_(self.values)


@dataclass(frozen=True)
class _OptimizerState:
    """An optimizer's state per parameter and its groups' options; tensors stay the ones they are."""

    optimizer: torch.optim.Optimizer
    states: Mapping[Tensor, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    tensors: list[_Value]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> _OptimizerState:
        states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        groups = [dict(group) for group in optimizer.param_groups]
        held = [value for mapping in (*states.values(), *groups) for value in mapping.values()]
        tensors = [_Value.of(value) for value in held if isinstance(value, Tensor)]
        plain = {p: {k: _own(v) for k, v in state.items()} for p, state in states.items()}
        return _OptimizerState(optimizer, plain, groups, tensors)

    def restore(self) -> None:
        self.optimizer.state.clear()
        for parameter, state in self.states.items():
            self.optimizer.state[parameter] = dict(state)
        for group, before in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(before)
        for value in self.tensors:
            value.restore()


def _own(value: Any) -> Any:
    return value if isinstance(value, Tensor) else copy.deepcopy(value)


@dataclass(frozen=True)
class _RandomState:
    """torch's generators of the CPU and of all CUDA devices that are in use."""

    cpu: Tensor
    cuda: list[Tensor]

    @staticmethod
    def here() -> _RandomState:
        return _RandomState(torch.get_rng_state(), torch.cuda.get_rng_state_all() if _cuda_in_use() else [])

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
