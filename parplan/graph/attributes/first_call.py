"""State that settles at the first call of a model: settings that it changes, hooks it registers, buffers it replaces.

A model may pick a kernel, collect its own hidden states with hooks, or size a table by what it is first given, and find
it settled at every later call. Whether it does is seen by capturing it again with these changes made
(parplan/graph/capture/settled_state.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parplan.errors import CaptureError
from parplan.graph.attributes.held_values import MISSING
from parplan.graph.attributes.number_inputs import container_of

__all__ = ["Change", "refusal", "short"]


@dataclass(frozen=True)
class Change:
    """Something that one call of a model leaves changed on one of its modules.

    Args:
        path: what users call it.
        module: whose it is.
        keys: from the module's attributes to the place that is written.
        before: what was there, MISSING for nothing.
        now: what is there then; of a buffer its values, on the CPU.
        device: of a buffer.
    """

    path: str
    module: nn.Module
    keys: tuple[Hashable, ...]
    before: Any
    now: Any
    device: torch.device | None = None

    @property
    def what(self) -> str:
        """The change in words, after "it"."""
        if isinstance(self.now, Tensor):
            shapes = [str(list(one.shape)) if isinstance(one, Tensor) else "nothing" for one in (self.before, self.now)]
            return f"replaces the buffer of shape {shapes[0]} by one of {shapes[1]}"
        if isinstance(self.now, nn.Module):
            return f"replaces {type(self.before).__name__} by {type(self.now).__name__}"
        if self.before is MISSING and callable(self.now):
            return "registers a hook"
        return f"changes it from {short(self.before)} to {short(self.now)}"

    def make(self) -> None:
        """Leave the module as the call does."""
        now = self.now if self.device is None else self.now.to(self.device)
        container_of(self.module.__dict__, self.keys)[self.keys[-1]] = now

    def undo(self) -> None:
        """Put back what was there."""
        place = container_of(self.module.__dict__, self.keys)
        if self.before is MISSING:
            place.pop(self.keys[-1], None)
        else:
            place[self.keys[-1]] = self.before


def short(value: Any) -> str:
    """The text of a value, up to 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def refusal(path: str, what: str) -> CaptureError:
    """The error for a write, in words after "it", that no captured graph can keep up."""
    return CaptureError(
        f"the forward writes {path}: it {what}, which a captured model would do once and not at every "
        "call; count in a buffer (register_buffer), return the value as a result, or write it outside of the forward"
    )
