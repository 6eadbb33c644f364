"""Differences between captures of one model at two batch sizes.

Sizes of results follow from the axis table. Anything else that changes (`x / x.shape[0]` bakes the
batch into a number) is invisible in one capture, and would silently change the numbers on replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import fx

__all__ = ["BatchChanges", "batch_changes", "changed_constants", "everything_changes", "ops_digest"]


# Elements of a constant that is compared by value.
_COMPARED = 4096


@dataclass(frozen=True)
class BatchChanges:
    """The parts of a captured graph that change with the batch size, by the names of nodes.

    Args:
        all: ops with an argument that changes.
        unexplained: those of them where the argument is not simply the shape of the result.
        grown: by value, the dimensions whose size is in proportion to the batch.
        irregular: values with a size that changes otherwise.
        results: whether the model returns a number that changes (`x.shape[0]`).
        sized: whether such a number is returned or left on a module, and is no tensor.
        one_batch: the error of the capture at another batch size, where the model could be captured at one only.
    """

    all: frozenset[str] = frozenset()
    unexplained: frozenset[str] = frozenset()
    grown: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    irregular: frozenset[str] = frozenset()
    results: bool = False
    one_batch: str = ""
    sized: bool = False

    def __or__(self, other: BatchChanges) -> BatchChanges:
        """The union of two sets of changes."""
        return BatchChanges(
            self.all | other.all,
            self.unexplained | other.unexplained,
            {**self.grown, **other.grown},
            self.irregular | other.irregular,
            self.results or other.results,
            self.one_batch or other.one_batch,
            self.sized or other.sized,
        )


def everything_changes(module: fx.GraphModule, one_batch: str = "") -> BatchChanges:
    """The changes of a model that cannot be captured, or has other ops, at another batch size."""
    every = frozenset(node.name for node in _calls(module))
    return BatchChanges(every, every, one_batch=one_batch)


def batch_changes(one: fx.GraphModule, other: fx.GraphModule, ratio: Fraction | int = 2) -> BatchChanges:
    """Compare a graph captured at different batch sizes, node by node.

    Args:
        ratio: the second batch size by the first.
    """
    first, second = _calls(one), _calls(other)
    if [node.target for node in first] != [node.target for node in second]:
        return everything_changes(one)
    grown: dict[str, tuple[int, ...]] = {}
    irregular = set[str]()
    pairs = list(zip(first, second, strict=True))
    given = (module.graph.find_nodes(op="placeholder") for module in (one, other))
    for node, twin in [*zip(*given, strict=False), *pairs]:
        shape, other_shape = _shape(node), _shape(twin)
        if shape is None or other_shape is None or shape == other_shape:
            continue
        dims = [dim for dim, sizes in enumerate(zip(shape, other_shape, strict=False)) if sizes[0] != sizes[1]]
        if len(shape) == len(other_shape) and all(shape[dim] * ratio == other_shape[dim] for dim in dims):
            grown[node.name] = tuple(dims)
        else:
            irregular.add(node.name)
    places = _places(one) | _places(other)
    changed = [node for node, twin in pairs if _text(node, places) != _text(twin, places)]
    unexplained = [node for node, twin in pairs if _text(node, places, sizes=False) != _text(twin, places, sizes=False)]
    return BatchChanges(
        all=frozenset(node.name for node in changed),
        unexplained=frozenset(node.name for node in unexplained),
        grown=grown,
        irregular=frozenset(irregular),
        results=_text(one.graph.output_node(), places) != _text(other.graph.output_node(), places),
    )


def ops_digest(module: fx.GraphModule, changes: BatchChanges, constants: Mapping[str, torch.Tensor]) -> str:
    """A digest of what a graph has in common with captures at other batch sizes: ops, and arguments without sizes.

    Args:
        constants: tensors made in the forward, by their placeholders.
    """
    places = _places(module)
    told = {name: one for name, one in constants.items() if one.numel() <= _COMPARED}
    words = [f"{name}: {tuple(one.shape) if one.is_meta else one.tolist()}" for name, one in told.items()]
    words += [
        f"{n.target}{'' if n.name in changes.unexplained else _text(n, places, sizes=False)}" for n in _calls(module)
    ]
    words.append("" if changes.results else _text(module.graph.output_node(), places))
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def changed_constants(
    one: fx.GraphModule, own: Mapping[str, torch.Tensor], others: Sequence[torch.Tensor]
) -> BatchChanges:
    """The readers of tensors made in the forward whose values change with the batch size (`torch.tensor(x.shape)`).

    Args:
        own: by placeholder; `others` those of the graph captured at another batch size, in the same order.
    """
    if len(own) != len(others):
        return everything_changes(one)
    pairs = zip(own, own.values(), others, strict=True)
    changed = {name for name, tensor, other in pairs if _differ(tensor, other)}
    given = one.graph.find_nodes(op="placeholder")
    found = frozenset(user.name for node in given if node.name in changed for user in node.users)
    return BatchChanges(all=found, unexplained=found)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other or one.is_meta or one.shape != other.shape or one.numel() > _COMPARED:
        return one.shape != other.shape
    return not bool(((one == other) | ((one != one) & (other != other))).all())  # NaN is NaN


def _shape(node: fx.Node) -> list[int] | None:
    value = node.meta.get("val")
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    """All calls, those of regions (no_grad, autocast) too, in a fixed order."""
    found: list[fx.Node] = []
    for node in module.graph.nodes:
        inner = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            found += _calls(inner)
        elif node.op == "call_function":
            found.append(node)
    return found


def _places(module: fx.GraphModule) -> dict[fx.Node, int]:
    """The number of every node among those of its graph, by which nodes of two graphs are compared."""
    found: dict[fx.Node, int] = {}
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            found |= {node: number for number, node in enumerate(part.graph.nodes)}
    return found


def _text(node: fx.Node, places: Mapping[fx.Node, int], sizes: bool = True) -> str:
    """Arguments as text; without `sizes` a list that is the shape of the result reads as such."""
    shape = _shape(node)

    def word(argument: object) -> object:
        if isinstance(argument, fx.Node):
            return f"%{places[argument]}"
        if isinstance(argument, (list, tuple)):
            fits = not sizes and shape is not None and len(argument) == len(shape)
            if fits and all(size in (own, -1) for size, own in zip(argument, shape or (), strict=True)):
                return "shape of the result"
            return [word(item) for item in argument]
        return argument

    return repr([word(argument) for argument in (*node.args, *node.kwargs.values())])
