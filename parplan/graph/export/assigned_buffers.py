"""Assignments to buffers (`self.count = self.count + 1`), kept as writes in the captured graph.

torch.export keeps those of the root module only and loses the others. Reads after an assignment see the new tensor, and
the buffer itself is written where the forward ends: somebody may still hold the old tensor. A buffer
of another shape (a table that is made for the first sequence) is no write: it is a change that the first call makes, if
its values depend on no input.

A module that two others hold is exported with its buffers under both names, which torch's functionalisation cannot
write: one input of the program stands for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from parplan.compat import memory_of, own_buffer_assignments
from parplan.errors import CaptureError
from parplan.graph.attributes.constant_values import constant_value
from parplan.graph.attributes.first_call import Change
from parplan.graph.attributes.held_values import MISSING
from parplan.graph.axes.call import is_tensor, memory_of_node, written_memories

__all__ = ["assigned_buffers", "merge_shared_buffers"]


@contextmanager
def assigned_buffers(model: nn.Module) -> Iterator[list[Change]]:
    """While it lasts, a forward of `model` ends by copying what its modules' buffers were assigned into the buffers.

    Yields:
        Buffers that the forward adds, or replaces by others of another shape or type.

    Raises:
        CaptureError: a module that has several names assigns one, of which torch.export makes two buffers; a buffer of
            another shape has values that depend on inputs, or is gone; or parameters are added, replaced or frozen.
    """
    # By their dictionaries: torch.export calls a module that has several names through stand-ins that share its own.
    modules = dict(model.named_modules())
    counts = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    own = {path: dict(module._buffers) for path, module in modules.items()}  # in an export there are others
    before: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    changes: list[Change] = []

    def begun(*_: Any) -> None:
        for path, module in modules.items():
            before[path] = _trained(module), dict(module._buffers)

    def ended(*_: Any) -> None:
        held = {memory_of(one) for _, own in before.values() for one in own.values() if isinstance(one, Tensor)}
        writes = list[tuple[Tensor, Tensor]]()
        for path, (parameters, buffers) in before.items():
            module = modules[path]
            now = _trained(module)
            for name in parameters | now:
                (was, trained), (one, trains) = (held.get(name, (MISSING, False)) for held in (parameters, now))
                if one is not was or trains is not trained:
                    raise CaptureError(
                        f"the forward adds, replaces or freezes the parameter {_path(path, name)}, which a captured "
                        "model does not do; do it in __init__, or call the model once before it is captured"
                    )
            latest = dict(module._buffers)
            module._buffers.clear()
            module._buffers.update(buffers)
            for name in latest | buffers:
                one, was = latest.get(name), buffers.get(name, MISSING)
                if one is was:
                    continue
                if one is None:
                    raise CaptureError(
                        f"the forward takes the buffer {_path(path, name)} away, which a captured model does not do; "
                        "keep it, or call the model once before it is captured"
                    )
                if counts[module] > 1 and isinstance(was, Tensor):
                    raise CaptureError(
                        f"{name} of {type(module).__name__}, a module that the model has under several names, is "
                        f"assigned in the forward; write it in place (self.{name}.add_(1), self.{name}.copy_(value)), "
                        "or keep the module under one name"
                    )
                if isinstance(was, Tensor) and (one.shape, one.dtype) == (was.shape, was.dtype):
                    one = one.detach() if one.requires_grad else one
                    # What another buffer has now (`self.p, self.q = self.q, self.p`) is read before that is written.
                    writes.append((was, one.clone() if memory_of(one) in held else one))
                else:
                    changes.append(_replaced(_path(path, name), module, name, own[path].get(name, MISSING), one))
        for was, one in writes:
            was.copy_(one)
        before.clear()

    try:
        entering, leaving = model.register_forward_pre_hook(begun, prepend=True), model.register_forward_hook(ended)
        with entering, leaving, own_buffer_assignments():
            yield changes
    finally:
        for path, held in before.items():  # of a forward that has failed
            for now, known in zip((modules[path]._parameters, modules[path]._buffers), held, strict=True):
                for name in now.keys() - known.keys():
                    del now[name]


def _trained(module: nn.Module) -> dict[str, tuple[nn.Parameter | None, bool]]:
    """A module's own parameters, and whether they are trained."""
    return {name: (one, one is not None and one.requires_grad) for name, one in module._parameters.items()}


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _replaced(path: str, module: nn.Module, name: str, buffer: Any, latest: Tensor) -> Change:
    """A buffer of another shape, with the values that it has at every call."""
    made = constant_value(latest, lambda tensor: True)  # of now, as in the call that makes it
    change = Change(path, module, ("_buffers", name), buffer, made and made[0], latest.device)
    if change.now is None:
        resized = not isinstance(buffer, Tensor) or latest.shape != buffer.shape
        other = f"shape, {list(latest.shape)}" if resized else f"type, {latest.dtype}"
        raise CaptureError(
            f"the forward replaces the buffer {path} by one of another {other}, with values that depend on its inputs "
            "or on the model's tensors; keep its shape and type, or return the tensor as a result"
        )
    return change


def merge_shared_buffers(exported: ExportedProgram) -> None:
    """Let the first name of a buffer stand for its others.

    Raises:
        CaptureError: the forward writes a tensor of which a buffer, or an attribute, is a view.
    """
    graph, signature = exported.graph, exported.graph_signature
    written = written_memories(graph.nodes)
    paths = {spec.arg.name: spec.target for spec in signature.input_specs if spec.kind is not InputKind.USER_INPUT}
    first: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node.name not in paths or not is_tensor(node):
            continue
        memory = memory_of_node(node)
        known = first.setdefault(memory, node)
        if known is node:
            continue
        if node.name not in signature.inputs_to_parameters and _place(known) == _place(node):
            node.replace_all_uses_with(known)
            graph.erase_node(node)
            signature.input_specs[:] = [spec for spec in signature.input_specs if spec.arg.name != node.name]
        elif memory in written:
            raise CaptureError(
                f"the forward writes {paths[known.name]} or {paths[node.name]} in place, which share memory; keep one "
                "of them, and take the other from it in the forward"
            )


def _place(node: fx.Node) -> tuple[object, ...]:
    value = node.meta["val"]
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad
