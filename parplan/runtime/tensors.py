"""The module's own parameters and buffers, watched: walking over a module at every call costs more than looking here.

A user may replace a parameter (`layer.weight = nn.Parameter(...)`, `load_state_dict(assign=True)`, `to()`); what was
captured from the old one no longer fits then.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["OwnTensors"]


@dataclass(frozen=True)
class _Entry:
    """One parameter or buffer and the dictionary of the submodule that it is in."""

    place: Mapping[str, Tensor | None]
    key: str
    tensor: Tensor

    @property
    def current(self) -> bool:
        return self.place.get(self.key) is self.tensor


class OwnTensors:
    """The parameters and buffers that `module` had when they were last looked up."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters: list[_Entry] = []
        self._buffers: list[_Entry] = []
        self.look_up()

    def look_up(self) -> None:
        """Take the module's tensors of now."""
        modules = list(self._module.modules())
        self._parameters = _entries([module._parameters for module in modules])
        self._buffers = _entries([module._buffers for module in modules])

    @property
    def replaced(self) -> bool:
        """Whether one of them is no longer the module's."""
        return not all(entry.current for entry in self._parameters) or not all(e.current for e in self._buffers)

    @property
    def trained(self) -> Hashable:
        """Which parameters take gradients."""
        return tuple(entry.tensor.requires_grad for entry in self._parameters)


def _entries(places: Sequence[Mapping[str, Tensor | None]]) -> list[_Entry]:
    return [_Entry(place, key, tensor) for place in places for key, tensor in place.items() if tensor is not None]
