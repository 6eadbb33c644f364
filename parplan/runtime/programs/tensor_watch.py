"""The module's own parameters and buffers, watched: walking over a module at every call costs more than looking here.

A user may replace a parameter (`layer.weight = nn.Parameter(...)`, `load_state_dict(assign=True)`, `to()`); no captured
graph fits then. Attributes that the forward reads are watched per captured graph (parplan/graph/attributes/guards.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import nn

__all__ = ["OwnTensors"]


@dataclass(frozen=True)
class _Entry:
    """A parameter, buffer or submodule, and the dictionary of its module that it is in."""

    place: Mapping[str, object]
    key: str
    thing: object

    @property
    def current(self) -> bool:
        return self.place.get(self.key) is self.thing


class OwnTensors:
    """The parameters and buffers that `module` had when they were last looked up."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._entries: list[_Entry] = []
        self._parameters: list[nn.Parameter] = []
        self._modules: list[nn.Module] = []
        self.look_up()

    def look_up(self) -> None:
        """Take the module's tensors of now."""
        self._parameters = list(self._module.parameters())
        self._modules = list(self._module.modules())
        places: list[Mapping[str, object]] = [
            place for module in self._modules for place in (module._parameters, module._buffers, module._modules)
        ]
        self._entries = [_Entry(place, key, thing) for place in places for key, thing in place.items()]

    @property
    def replaced(self) -> bool:
        """Whether one of them is no longer the module's."""
        return not all(entry.current for entry in self._entries)

    @property
    def trained(self) -> Hashable:
        """Which parameters take gradients."""
        return tuple(parameter.requires_grad for parameter in self._parameters)

    def modes(self, training: bool) -> Hashable:
        """Which modules are in training mode when the whole is captured in this one: users switch parts by hand."""
        if training != self._module.training:
            return training  # capture switches every module
        return tuple(module.training for module in self._modules)
