"""Which buffers a forward writes after everything that its backward needs.

A checkpoint runs a forward again, and ends it where the last tensor is saved for the backward. Buffers that are written
before that are written twice (running statistics, a counter at the start of the forward), others once. A captured graph
has no such order of its own, so it is read from the exported program, where in-place ops still are where they were.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from parplan.compat import schema_of
from parplan.graph.axes.call import is_inplace, is_tensor, memory_of_node

__all__ = ["DETACHED", "NO_GRAD", "written_late"]

aten = torch.ops.aten

# Mark nodes that came out of a torch.no_grad region, and those that detach its results.
NO_GRAD, DETACHED = "parplan_no_grad", "parplan_detached"
# Ops whose backward needs no tensor of the forward, and those that need none beside a number.
# fmt: off
_SAVES_NOTHING = frozenset((
    "add", "add_", "alias", "cat", "chunk", "clone", "contiguous", "copy", "copy_", "detach", "detach_", "expand",
    "flatten", "lift_fresh_copy", "mean", "narrow", "neg", "permute", "reshape", "select", "slice", "split", "squeeze",
    "stack", "sub", "sub_", "sum", "t", "to", "transpose", "unflatten", "unsqueeze", "view", "_to_copy",
))
_SAVES_NO_NUMBER = frozenset(("div", "div_", "mul", "mul_"))
# fmt: on


def written_late(exported: ExportedProgram) -> frozenset[str]:
    """Placeholders of buffers whose last write comes after every op that saves a tensor for the backward."""
    specs = exported.graph_signature.input_specs
    differentiable = {s.arg.name for s in specs if s.kind in (InputKind.PARAMETER, InputKind.USER_INPUT)}
    last_saved, reached, positions = -1, set[fx.Node](), dict[fx.Node, int]()
    written: dict[int, int] = {}
    for position, node in enumerate(exported.graph.nodes):
        positions[node] = position
        if node.name in differentiable:
            reached.add(node)
        if node.op != "call_function":
            continue
        if is_inplace(node):
            written[memory_of_node(node.args[0])] = positions[_write(node)]
        cut = node.meta.get(NO_GRAD) or node.target is aten.detach.default
        if not cut and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            schema = schema_of(node.target)
            if schema is None:
                continue  # takes one of several results
            name = str(schema.name).split("::")[-1]
            number = name in _SAVES_NO_NUMBER and not isinstance(node.args[1], fx.Node)
            last_saved = last_saved if number or name in _SAVES_NOTHING else position
    placeholders = filter(is_tensor, exported.graph.find_nodes(op="placeholder"))
    return frozenset(node.name for node in placeholders if written.get(memory_of_node(node), -1) > last_saved)


def _write(node: fx.Node) -> fx.Node:
    """Where the user's code writes: `self.buffer = value` is kept as a copy at the end, with the value's line (by
    torch.export) or outside of its module's forward (graph/export/assigned_buffers.py)."""
    source = node.args[1] if node.target is aten.copy_.default else None
    if not isinstance(source, fx.Node) or source.op != "call_function":
        return node
    # Calls of forwards that lead to an op; a copy behind the whole forward is in none that its value was not in.
    trace, made = node.meta.get("stack_trace") or "", source.meta.get("stack_trace") or ""
    return source if made.startswith(trace) else node
