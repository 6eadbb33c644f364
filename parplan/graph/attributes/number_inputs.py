"""Numbers among the attributes that a forward reads, as inputs of a captured graph.

A temperature that is annealed has another value every few calls. Where it only enters arithmetic, the graph can take it
as a tensor of shape () that is filled before every run: the model is captured once more with such a tensor in the place
of the number. Whether that is the same computation is checked op by op, types included; Python code that branches on
the number cannot be captured so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Number", "as_tensors", "container_of", "is_number"]

_DTYPES = {float: torch.float64, int: torch.int64}


def is_number(value: Any) -> bool:
    """Whether a value may become an input."""
    return type(value) in _DTYPES


def container_of(place: Any, keys: Sequence[Hashable]) -> Any:
    """The container of the last of `keys`, which lead there from the attributes `place`; of an object, its own."""
    for key in keys[:-1]:
        inner = place[key]
        place = inner if isinstance(inner, (dict, list, tuple, deque)) else vars(inner)
    return place


@dataclass(frozen=True)
class Number:
    """A number that is kept in an attribute, or in a container there.

    Args:
        path: what users call it.
        holder: path of the container that it is in; empty where it is an attribute of a module.
        place: the attributes of the module.
        keys: from there to the number.
        kind: its type, int or float.
    """

    path: str
    holder: str
    place: dict[Hashable, Any]
    keys: tuple[Hashable, ...]
    kind: type

    @property
    def value(self) -> Any:
        """The current value of the number."""
        return container_of(self.place, self.keys)[self.keys[-1]]

    def put(self, value: Any) -> None:
        """Something else in its place."""
        container_of(self.place, self.keys)[self.keys[-1]] = value

    def fill(self, tensor: Tensor) -> None:
        """Give a tensor the value of now."""
        with torch.inference_mode(False), torch.no_grad():
            tensor.fill_(self.value)


@contextmanager
def as_tensors(numbers: Sequence[Number]) -> Iterator[list[Tensor]]:
    """While it lasts there are tensors of shape () in the place of numbers: these."""
    before = [number.value for number in numbers]
    found = [torch.tensor(value, dtype=_DTYPES[n.kind]) for n, value in zip(numbers, before, strict=True)]
    try:
        for number, tensor in zip(numbers, found, strict=True):
            number.put(tensor)
        yield found
    finally:
        for number, value in zip(numbers, before, strict=True):
            number.put(value)
