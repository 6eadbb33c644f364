"""Pytree registration of transformers' caches, and updates of caches that a caller passes in.

A cache of keys and values is an object that holds tensors in its attributes, in lists of further objects. Registered as
a pytree node its tensors are arguments and results of the graph like any others, and its other attributes a part of the
signature. A forward also changes the object that it is given, which a graph cannot; so the object that was passed in is
updated from the results, and handed back where the forward returns it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parplan.compat import pytree
from parplan.errors import CaptureError

__all__ = ["ContainerResults", "containers_in", "register_caches", "returned_containers"]

_LIBRARY = "transformers.cache_utils"
_REGISTERED: set[type] = set()


def register_caches() -> None:
    """Register the cache classes of transformers, where the program has imported it; classes that are known stay so."""
    library = sys.modules.get(_LIBRARY)
    kinds = [kind for kind in vars(library).values() if isinstance(kind, type) and kind.__module__ == _LIBRARY] if (
        library is not None
    ) else []  # fmt: skip
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind not in _REGISTERED:
            register_container(kind)


def register_container(kind: type) -> None:
    """Register a class whose objects hold tensors in their attributes."""
    _REGISTERED.add(kind)
    if kind not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            kind,
            lambda value: (list(_parts(value)[0].values()), _context(value)),
            lambda children, context: _rebuilt(kind, children, context),
            serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
            flatten_with_keys_fn=lambda value: (
                [(pytree.GetAttrKey(name), child) for name, child in _parts(value)[0].items()],
                _context(value),
            ),
        )


def _parts(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes that hold tensors, and the others."""
    state = vars(value)
    held = {k: v for k, v in state.items() if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(v))}
    return held, {name: attribute for name, attribute in state.items() if name not in held}


def _context(value: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    held, others = _parts(value)
    # A forward writes into lists and dictionaries, which are the caller's.
    plain = {n: copy.deepcopy(a) if isinstance(a, (list, dict, set)) else a for n, a in others.items()}
    return tuple(held), plain


def _rebuilt(kind: Any, children: Any, context: Any) -> Any:
    names, others = context
    made = kind.__new__(kind)
    plain = {n: copy.deepcopy(a) if isinstance(a, (list, dict, set)) else a for n, a in others.items()}
    vars(made).update(plain | dict(zip(names, children, strict=True)))
    return made


def _is_container(value: Any) -> bool:
    return type(value) in _REGISTERED


def containers_in(values: Any) -> list[Any]:
    """The outermost registered containers in nested values, in the order of their leaves."""
    return [leaf for leaf in pytree.tree_leaves(values, is_leaf=_is_container) if _is_container(leaf)]


@dataclass(frozen=True)
class ContainerResults:
    """Containers among the arguments that a forward returns or changes.

    Args:
        places: pairs of a container among the arguments and one among the results, both by number.
        appended: leaves of the containers that follow the model's own results, as they are changed and not returned.
    """

    places: tuple[tuple[int, int], ...] = ()
    appended: int = 0

    def delivered(self, nested: Any, given: Sequence[Any]) -> Any:
        """The model's own result, with the caller's containers, updated, in the place of new ones.

        Args:
            nested: the results of the graph, nested.
            given: the caller's containers; empty where nobody holds them.
        """
        output = nested[0] if self.appended else nested
        if not given or not self.places:
            return output
        made = containers_in(nested)
        returned = {id(made[new]): _updated(given[old], made[new]) for old, new in self.places}
        return pytree.tree_map(lambda leaf: returned.get(id(leaf), leaf), output, is_leaf=_is_container)


def _updated(old: Any, new: Any) -> Any:
    """`old` in the state of `new`, as deep as both are containers, lists or dictionaries of one kind."""
    if type(old) is not type(new) or not (_is_container(old) or isinstance(old, (list, dict))):
        return new
    if isinstance(old, list):
        old[:] = [*(_updated(a, b) for a, b in zip(old, new, strict=False)), *new[len(old) :]]
        return old
    before, after = (old, new) if isinstance(old, dict) else (vars(old), vars(new))
    state = {key: _updated(before.get(key), value) for key, value in after.items()}
    before.clear()
    before.update(state)
    return old


def _plain_containers(values: Any) -> Iterator[list[Any] | dict[Any, Any]]:
    """Lists and dictionaries in nested values."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, (list, dict)):
            yield value
        if isinstance(value, (list, dict, tuple)):
            yield from _plain_containers(value)


@contextmanager
def returned_containers(model: nn.Module) -> Iterator[Callable[[], ContainerResults]]:
    """While it lasts, the containers that a forward of `model` is given and changes are results of it as well.

    Yields a function for the places of the containers in the last forward.

    Raises:
        CaptureError: it changes a list or dictionary that it is given.
    """
    given: list[tuple[Any, list[Any], Any]] = []
    found = ContainerResults()
    plain: list[tuple[Any, Any]] = []

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        plain[:] = [(one, copy.copy(one)) for one in _plain_containers((*args, *kwargs.values()))]

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        given[:] = [(one, *pytree.tree_flatten(one)) for one in containers_in((args, kwargs))]

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        nonlocal found
        for one, before in plain:
            keys = one.keys() if isinstance(one, dict) else range(len(one))
            same = len(one) == len(before) and all(isinstance(one, list) or key in before for key in keys)
            if not same or any(one[key] is not before[key] for key in keys):
                raise CaptureError(
                    f"the forward changes a {type(one).__name__} that it is given, of {len(before)} entries, which a "
                    "captured model would not do; return the values as results, or let the forward change a copy"
                )
        returned = [id(one) for one in containers_in(output)]
        changed: list[Any] = []
        places: list[tuple[int, int]] = []
        for number, (one, leaves, spec) in enumerate(given):
            now, now_spec = pytree.tree_flatten(one)
            same = now_spec == spec and all(a is b for a, b in zip(leaves, now, strict=True))
            if id(one) not in returned and not same:
                returned.append(id(one))
                changed.append(one)
            if id(one) in returned:
                places.append((number, returned.index(id(one))))
        found = ContainerResults(tuple(places), len(pytree.tree_leaves(changed)))
        return (output, changed) if changed else None

    with (
        model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        model.register_forward_pre_hook(look, with_kwargs=True),
        model.register_forward_hook(leave, with_kwargs=True),
    ):
        yield lambda: found
