"""Assignments to buffers (`self.count = self.count + 1`), kept as writes in the captured graph.

torch.export keeps those of the root module only and loses the others. Reads after an assignment see the new tensor, and
the buffer itself is written where the forward ends: somebody may still hold the old tensor. A buffer
of another shape (a table that is made for the first sequence) is no write: it is a change that the first call makes, if
its values depend on no input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from parplan.compat import own_buffer_assignments
from parplan.errors import CaptureError
from parplan.graph.attributes.constant_values import constant_value
from parplan.graph.attributes.first_call import Change
from parplan.graph.attributes.held_values import MISSING

__all__ = ["assigned_buffers"]


@contextmanager
def assigned_buffers(model: nn.Module) -> Iterator[list[Change]]:
    """While it lasts, a forward of `model` ends by copying what its modules' buffers were assigned into the buffers.

    Yields:
        Buffers that the forward adds, or replaces by others of another shape.

    Raises:
        CaptureError: a module that has several names assigns one, of which torch.export makes two buffers; or a buffer
            of another shape has values that depend on inputs.
    """
    # By their dictionaries: torch.export calls a module that has several names through stand-ins that share its own.
    modules = {id(module._buffers): (name, module) for name, module in model.named_modules()}
    counts = Counter(id(module._buffers) for _, module in model.named_modules(remove_duplicate=False))
    own = {(id(module._buffers), name): b for module in model.modules() for name, b in module._buffers.items()}
    before: dict[tuple[int, str], Any] = {}  # in the export, with others in the place of the model's own
    changes: list[Change] = []

    def assigned(module: nn.Module, name: str, value: Any) -> None:
        current = module._buffers.get(name)
        if id(module._buffers) not in modules or not isinstance(value, Tensor):
            return
        if counts[id(module._buffers)] > 1 and current is not None:
            raise CaptureError(
                f"{name} of {type(module).__name__}, a module that the model has under several names, is assigned "
                f"in the forward; write it in place (self.{name}.add_(1), self.{name}.copy_(value)), or keep the "
                "module under one name"
            )
        before.setdefault((id(module._buffers), name), module._buffers.get(name, MISSING))

    def ended(*_: Any) -> None:
        for (place, name), buffer in before.items():
            path, module = modules[place]
            latest = module._buffers[name]
            same = isinstance(buffer, Tensor) and isinstance(latest, Tensor) and latest.shape == buffer.shape
            if buffer is MISSING:
                del module._buffers[name]
            else:
                module._buffers[name] = buffer
            if same and latest is not buffer:
                buffer.copy_(latest.detach() if latest.requires_grad else latest)
            elif isinstance(latest, Tensor) and not same:
                whole = f"{path}.{name}" if path else name
                changes.append(_replaced(whole, module, name, own.get((place, name), MISSING), latest))
        before.clear()

    handles = [register_module_buffer_registration_hook(assigned), model.register_forward_hook(ended)]
    try:
        with own_buffer_assignments():
            yield changes
    finally:
        for handle in handles:
            handle.remove()


def _replaced(path: str, module: nn.Module, name: str, buffer: Any, latest: Tensor) -> Change:
    """A buffer of another shape, with the values that it has at every call."""
    change = Change(path, module, ("_buffers", name), buffer, constant_value(latest), latest.device)
    if change.now is None:
        raise CaptureError(
            f"the forward replaces the buffer {path} by one of another shape, {list(latest.shape)}, with values that "
            "depend on its inputs; keep its shape, or return the tensor as a result"
        )
    return change
