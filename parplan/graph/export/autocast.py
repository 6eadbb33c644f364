"""Casts of a captured graph: the operands that autocast hands to an op in another type than they have.

torch.export gives the results of a forward under autocast their types, but leaves the casts to autocast, inside the
ops that ask for them. What they read, write and keep is part of the step, and a weight that is read in another type
alone need not be sent in its own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parplan.accelerators import autocast_types
from parplan.compat import FakeTensor, pytree
from parplan.graph.kinds import op_name
from parplan.graph.layer_graph import CASTS, UNCAST

__all__ = ["autocast_as", "record_casts"]

_CONVERSIONS = ("to", "to_copy", "type_as")


def autocast_as(precision: str, model: nn.Module) -> AbstractContextManager[Any]:
    """Autocast to "fp16" or "bf16" where the model has float32 parameters; nothing for another precision or model."""
    dtype, parameters = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision), list(model.parameters())
    if dtype is None or all(one.dtype != torch.float32 for one in parameters):
        return nullcontext()
    kinds = [one.device.type for one in parameters if one.device.type in autocast_types()]  # not those on meta
    return torch.autocast(next((kind for kind in kinds if kind != "cpu"), "cpu"), dtype=dtype)


class _Conversions(TorchDispatchMode):
    """The types that some tensors are converted to."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = tensors
        self.found: dict[int, torch.dtype] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            place = next((n for n, one in enumerate(self._tensors) if one is args[0]), None)
            if place is not None and result.dtype != args[0].dtype:
                self.found[place] = result.dtype
        return result


def record_casts(graph: fx.Graph) -> None:
    """Note at every node what autocast, as it is set now, casts for it (CASTS).

    Autocast passes meta tensors by: types of values there become those that the CPU's autocast gives them. Ops of a
    region of the forward without autocast, or with another type, keep theirs (UNCAST).
    """
    if not any(map(torch.is_autocast_enabled, autocast_types())):
        return
    known: dict[Any, tuple[Any, dict[int, torch.dtype]]] = {}  # of a call: the types of its results, and its casts
    for node in (node for node in graph.nodes if node.op == "call_function"):
        operands = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor)]
        value, kind = node.meta.get("val"), next((one.meta["val"].device.type for one in operands), "")
        if node.target is operator.getitem and isinstance(node.args[0].meta.get("val"), (tuple, list)):
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
        set_kind = _set_for(kind)
        # Own ops, of the user's code too, cast what they like inside.
        if set_kind is None or op_name(node) in _CONVERSIONS or getattr(node.target, "namespace", "") != "aten":
            continue
        values = [one.meta["val"] for one in operands]
        places = {one: place for place, one in enumerate(operands)}
        spelled = fx.node.map_arg((node.args, node.kwargs), lambda one: f"%{places.get(one, one.name)}")  # noqa: B023
        key = (node.target, repr(spelled), *((one.dtype, one.shape, one.stride()) for one in values))
        if key not in known:
            known[key] = _run(node, operands, kind, set_kind)
        types, casts = known[key]
        if kind == "meta":
            node.meta["val"] = pytree.tree_map(_of_type, value, types)
        elif types != _types(value):
            node.meta[UNCAST] = set_kind
            continue
        if casts:
            node.meta[CASTS] = {operands[place].name: dtype for place, dtype in casts.items()}


def _set_for(kind: str) -> str | None:
    """The kind of device whose autocast is in force for tensors of a kind, None where none is."""
    if kind == "meta":
        return "cpu"
    return kind if kind in autocast_types() and torch.is_autocast_enabled(kind) else None


def _run(node: fx.Node, operands: Sequence[fx.Node], kind: str, set_kind: str) -> tuple[Any, dict[int, torch.dtype]]:
    """The types of a call's results under autocast, and of the operands that it casts, by their places."""
    values = [one.meta["val"] for one in operands]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    dtype = next(torch.get_autocast_dtype(one) for one in autocast_types() if torch.is_autocast_enabled(one))
    casting = torch.autocast(set_kind, dtype=dtype if kind == "meta" else None, cache_enabled=False)
    with mode:
        if kind == "meta":
            values = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="cpu") for v in values]
        given = dict(zip(operands, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: given.get(one, one.meta.get("val")))
        op: Any = node.target
        with torch.no_grad(), casting, _Conversions(values) as conversions:
            result = op(*args, **kwargs)
        found = conversions.found
        if torch.float32 in found.values():  # which attention made of products computes in by itself
            with torch.no_grad(), torch.autocast(set_kind, enabled=False), _Conversions(values) as own:
                op(*args, **kwargs)
            found = {place: dtype for place, dtype in found.items() if own.found.get(place) != dtype}
    return _types(result), found


def _types(value: Any) -> Any:
    return pytree.tree_map(lambda one: one.dtype if isinstance(one, Tensor) else None, value)


def _of_type(value: Any, dtype: torch.dtype | None) -> Any:
    """A tensor in a type; what is none stays."""
    if not isinstance(value, Tensor) or value.dtype == dtype:
        return value
    return value.new_empty_strided(value.shape, value.stride(), dtype=dtype)
