"""Saves and restores the state that measuring and checking must not change, whatever happens in between.

Parameters, buffers, gradients, the optimizer and random generators are put back bit by bit, into the memory they were
in; so are modules' modes, attributes and the containers that attributes hold.
"""

from __future__ import annotations

import copy
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parplan.accelerators import generators_in_use
from parplan.runtime.sharded_state.sharded_tensor import local_tensor

__all__ = ["preserved", "preserved_by_forward", "preserved_generators", "preserved_modes", "without_gradients"]


@contextmanager
def preserved_modes(module: nn.Module) -> Iterator[None]:
    """Put every part of `module` back in training or evaluation mode, as it was."""
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put torch's generators of the CPU and of all accelerators that are in use, Python's and NumPy's back."""
    python, numpy = random.getstate(), np.random.get_state()
    states = [(generator, generator.get_state()) for generator in generators_in_use()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def without_gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, `.grad` of leaves is None at first; afterwards it is what it was."""
    before = {tensor: tensor.grad for tensor in tensors}
    for tensor in before:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, grad in before.items():
            tensor.grad = grad


@contextmanager
def preserved(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Leave no trace of changes to `module` and `optimizer` inside; gradients are None at first."""
    held: list[Any] = [*module.parameters(), *module.buffers()]
    states: dict[Tensor, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        groups = [dict(group) for group in optimizer.param_groups]
        for parameter, state in optimizer.state.items():
            # Tensors stay the ones they are.
            states[parameter] = {k: v if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in state.items()}
        held += [value for mapping in (*states.values(), *groups) for value in mapping.values()]
    tensors = [tensor for tensor in held if isinstance(tensor, Tensor)]
    values = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    with without_gradients(module.parameters()), preserved_generators():
        try:
            yield
        finally:
            if optimizer is not None:
                optimizer.state.clear()
                optimizer.state.update({parameter: dict(state) for parameter, state in states.items()})
                for group, before in zip(optimizer.param_groups, groups, strict=True):
                    group.clear()
                    group.update(before)
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.detach().copy_(value)


@contextmanager
def preserved_by_forward(module: nn.Module) -> Iterator[None]:
    """Leave no trace of forwards of `module` that run inside.

    Restored: parameters and buffers, torch's, Python's and NumPy's random generators, every module's `__dict__` and the
    containers, tensors and plain objects that are reached from there. Tensors that did not change are not written, as
    an earlier call's backward may still need them.
    """
    attributes = _Attributes(module)
    with preserved_generators():
        try:
            yield
        finally:
            attributes.restore()


# Containers and objects that are looked into from a model's attributes: a data set on a module is not walked through.
_MOST_ENTRIES = 100_000
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.Generator)


class _Attributes:
    """The attributes of a module's parts, and what is reached from them, as they were.

    Args:
        module: every part of it is looked into.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._mappings: list[tuple[Any, dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        # Modules first, so that none is left out for what another one holds.
        parts = list(module.modules())
        waiting: deque[Any] = deque(place for part in parts for place in (part._parameters, part._buffers))
        waiting.extend(parts)
        self._mappings += [(part._modules, dict(part._modules)) for part in parts]
        seen, left = {id(part._modules) for part in parts}, _MOST_ENTRIES
        while waiting:
            value = waiting.popleft()
            if isinstance(value, (bool, int, float, str, bytes, *_OPAQUE)) or value is None:
                continue
            # Not into objects of torch's or our own: compiled forms, optimizers.
            own = isinstance(value, nn.Module) or type(value).__module__.split(".")[0] not in ("torch", "parplan")
            held = isinstance(value, (Tensor, dict, list, set, deque, tuple))
            if not held and own and isinstance(getattr(value, "__dict__", None), dict):
                value = value.__dict__
            if id(value) in seen:
                continue
            seen.add(id(value))
            inside: Iterable[Any] = ()
            if isinstance(value, Tensor):
                block = local_tensor(value)
                self._tensors.append((block, block.detach().clone()))
            elif isinstance(value, dict):
                self._mappings.append((value, dict(value)))
                inside = value.values()
            elif isinstance(value, (list, set, deque)):
                self._sequences.append((value, list(value)))
                inside = value
            elif isinstance(value, tuple):
                inside = value
            new = list(islice(inside, max(0, left)))
            left -= len(new)
            waiting.extend(new)

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what changed."""
        for mapping, before in self._mappings:
            if list(mapping) != list(before) or any(mapping[key] is not value for key, value in before.items()):
                mapping.clear()
                mapping.update(before)
        for sequence, values in self._sequences:
            if len(sequence) != len(values) or any(a is not b for a, b in zip(sequence, values, strict=True)):
                sequence.clear()
                sequence.update(values) if isinstance(sequence, set) else sequence.extend(values)
        for tensor, value in self._tensors:
            if tensor.shape != value.shape or not torch.equal(tensor, value):
                tensor.data = value if tensor.shape != value.shape else tensor.data.copy_(value)
