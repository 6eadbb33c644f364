"""Assignments to buffers of submodules (`self.count = self.count + 1`), kept as writes in the captured graph.

torch.export keeps those of the root module only and loses the others. Reads after an assignment see the new tensor, and
the buffer itself is written where the forward ends, as for the root: somebody may still hold the old tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from parplan.errors import CaptureError

__all__ = ["assigned_buffers"]


@contextmanager
def assigned_buffers(model: nn.Module) -> Iterator[None]:
    """While it lasts, a forward of `model` ends by copying what submodules' buffers were assigned into the buffers.

    Raises:
        CaptureError: a module that has several names assigns one, of which torch.export makes two buffers.
    """
    # By their dictionaries: torch.export calls a module that has several names through stand-ins that share its own.
    places = {id(module._buffers): module._buffers for module in model.modules() if module is not model}
    counts = Counter(id(module._buffers) for _, module in model.named_modules(remove_duplicate=False))
    before: dict[tuple[int, str], Tensor] = {}

    def assigned(module: nn.Module, name: str, value: Any) -> None:
        current = module._buffers.get(name)
        if id(module._buffers) in places and isinstance(value, Tensor) and current is not None:
            if counts[id(module._buffers)] > 1:
                raise CaptureError(
                    f"{name} of {type(module).__name__}, a module that the model has under several names, is assigned "
                    f"in the forward; write it in place (self.{name}.add_(1), self.{name}.copy_(value)), or keep the "
                    "module under one name"
                )
            before.setdefault((id(module._buffers), name), current)

    def ended(*_: Any) -> None:
        for (place, name), buffer in before.items():
            latest = places[place][name]
            places[place][name] = buffer
            if latest is not None and latest is not buffer:
                buffer.copy_(latest.detach() if latest.requires_grad else latest)
        before.clear()

    handles = [register_module_buffer_registration_hook(assigned), model.register_forward_hook(ended)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
