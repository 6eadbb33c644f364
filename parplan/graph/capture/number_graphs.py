"""Comparison of two captures of one forward: with Python numbers as constants, and with tensors in their place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from parplan.compat import overload_name, schema_of
from parplan.graph.layer_graph import LayerGraph

__all__ = ["computes_alike"]

_VARIANT = re.compile(r"^(Tensor|Scalar)(_(Tensor|Scalar))?$")


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
                spec, schema = graph.values.get(node.name), schema_of(node.target)
                # What differs between an op on a number and one on a tensor is left out of its name.
                name = str(node.target if schema is None else schema.name)
                if schema is not None:
                    name = f"{name.replace('rsub', 'sub')}.{_VARIANT.sub('', overload_name(node.target))}"
                yield (name, *((spec.dtype, len(spec.shape), spec.requires_grad) if spec is not None else ()))
