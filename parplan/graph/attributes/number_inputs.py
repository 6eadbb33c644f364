"""Numbers among the attributes that a forward reads, as inputs of a captured graph.

A temperature that is annealed has another value every few calls. Where it only enters arithmetic, the graph can take it
as a tensor of shape () that is filled before every run: the model is captured once more with such a tensor in the place
of the number. Whether that is the same computation is checked op by op, types included; Python code that branches on
the number cannot be captured so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from parplan.compat import overload_name, schema_of

if TYPE_CHECKING:
    from parplan.graph.layer_graph import LayerGraph

__all__ = ["Number", "as_tensors", "computes_alike", "is_number"]

_DTYPES = {float: torch.float64, int: torch.int64}


def is_number(value: Any) -> bool:
    """Whether a value may become an input."""
    return type(value) in _DTYPES


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
        """What it is now."""
        return self._home()[self.keys[-1]]

    def put(self, value: Any) -> None:
        """Something else in its place."""
        self._home()[self.keys[-1]] = value

    def _home(self) -> Any:
        home: Any = self.place
        for key in self.keys[:-1]:
            inner = home[key]
            home = inner if isinstance(inner, (dict, list, tuple, deque)) else vars(inner)
        return home

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


def computes_alike(plain: LayerGraph, other: LayerGraph) -> bool:
    """Whether `other`, captured with tensors in the place of numbers, does what `plain` does with the numbers."""
    first, second = list(_ops(plain, {})), list(_ops(other, other.numbers))
    return first == second and _results(plain) == _results(other)


def _results(graph: LayerGraph) -> list[Any]:
    values = graph.values
    return [(values[v].dtype, len(values[v].shape)) if isinstance(v, str) else v for v in graph.user_outputs]


def _ops(graph: LayerGraph, numbers: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Ops by name and by the type of their results, but for arithmetic on the numbers themselves."""
    scalars = set(numbers)
    for layer in graph.layers.values():
        for node in layer.nodes:
            sources = {source.name for source in node.all_input_nodes}
            if sources and sources <= scalars:
                scalars.add(node.name)
            else:
                spec = graph.values.get(node.name)
                yield (_name(node), *((spec.dtype, len(spec.shape), spec.requires_grad) if spec is not None else ()))


def _name(node: fx.Node) -> str:
    """Of the op; what differs between an op on a number and one on a tensor is left out."""
    schema = schema_of(node.target)
    if schema is None:
        return str(node.target)
    name = str(schema.name)
    return f"{name.replace('rsub', 'sub')}.{_variant(overload_name(node.target))}"


def _variant(name: str) -> str:
    return "" if name in ("Tensor", "Scalar", "Tensor_Scalar", "Tensor_Tensor", "Scalar_Tensor") else name
