"""The module's own parameters and buffers, watched: walking over a module at every call costs more than looking here.

A user may replace a parameter (`layer.weight = nn.Parameter(...)`, `load_state_dict(assign=True)`, `to()`), or a
setting of one of torch's own modules (`dropout.p = 0.1`); what was captured from the old one no longer fits then.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import nn

__all__ = ["OwnTensors"]


# A captured graph holds them as constants.
_SETTINGS = (bool, int, float, str, tuple)


@dataclass(frozen=True)
class _Entry:
    """A parameter, buffer, submodule or setting, and the dictionary of its module that it is in."""

    place: Mapping[str, object]
    key: str
    thing: object

    @property
    def current(self) -> bool:
        now = self.place.get(self.key)
        return now is self.thing or (isinstance(now, _SETTINGS) and type(now) is type(self.thing) and now == self.thing)


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
        self._entries += [entry for module in self._modules for entry in _settings(module)]

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


def _settings(module: nn.Module) -> list[_Entry]:
    """What a module of torch's declares constant: a rate, a momentum. Other classes may count in their attributes."""
    if not type(module).__module__.startswith("torch.nn."):
        return []
    names = [name for name in getattr(module, "__constants__", ()) if name in module.__dict__]
    return [_Entry(module.__dict__, name, module.__dict__[name]) for name in names]
