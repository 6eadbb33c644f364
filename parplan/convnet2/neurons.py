"""cuda-convnet2's neurons: functions applied to every element, some with numbers in brackets, as in `tanh[1.7,0.6]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from parplan.convnet2.ini import IniSection

__all__ = ["Neuron", "neuron_of"]

_FORM = re.compile(r"\s*(?P<name>\w+)\s*(?:\[(?P<numbers>[^\]]*)\])?\s*")


@dataclass(frozen=True)
class _Known:
    """A function of an element, with as many numbers as `names` has."""

    apply: Callable[..., Tensor]
    names: tuple[str, ...] = ()


_KNOWN: Mapping[str, _Known] = {
    "ident": _Known(lambda x: x),
    "abs": _Known(torch.abs),
    "logistic": _Known(torch.sigmoid),
    "relu": _Known(F.relu),
    "softrelu": _Known(F.softplus),
    "sqrt": _Known(torch.sqrt),
    "square": _Known(torch.square),
    "brelu": _Known(lambda x, a: x.clamp(0.0, a), ("a",)),
    "drelu": _Known(lambda x, a: x - a * torch.tanh(x / a), ("a",)),
    "linear": _Known(lambda x, a, b: a * x + b, ("a", "b")),
    "log": _Known(lambda x, a: torch.log(a + x), ("a",)),
    "tanh": _Known(lambda x, a, b: a * torch.tanh(b * x), ("a", "b")),
}


@dataclass(frozen=True)
class Neuron:
    """One function with its numbers; called with a tensor of any shape."""

    name: str
    numbers: tuple[float, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        return _KNOWN[self.name].apply(x, *self.numbers)


def neuron_of(section: IniSection) -> Neuron:
    """The section's `neuron`, `ident` without one.

    Raises:
        LayerFileError: a neuron that is not known, or with other numbers than it takes.
    """
    if not section.has("neuron"):
        return Neuron("ident")
    found = _FORM.fullmatch(section.text("neuron"))
    known = _KNOWN.get(found["name"]) if found else None
    if found is None or known is None:
        raise section.error("neuron", f"it is not known here; use {', '.join(map(_form, _KNOWN))}")
    given = [part for part in (found["numbers"] or "").split(",") if part.strip()]
    try:
        numbers = tuple(float(part) for part in given)
    except ValueError:
        numbers = ()
    if len(numbers) != len(known.names):
        raise section.error("neuron", f"write it as {_form(found['name'])}, with numbers for the letters")
    return Neuron(found["name"], numbers)


def _form(name: str) -> str:
    names = _KNOWN[name].names
    return f"{name}[{','.join(names)}]" if names else name
