"""Writes of values in place that autograd does not see, refused where a gradient would go through the value.

Under `torch.no_grad()`, through `.detach()` or `.data` a write leaves the gradient of the value what it was:

    h.data.clamp_(-1, 1)         the values are clamped, the gradient is that of the h before

A captured graph has the values alone: the written one is a new value, without a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from parplan.errors import CaptureError
from parplan.graph.axes.call import is_inplace, is_tensor, memory_of_node
from parplan.graph.export.late_writes import NO_GRAD
from parplan.graph.kinds import op_name
from parplan.graph.user_line import code_line

__all__ = ["hidden_write", "refuse_hidden_writes"]

aten = torch.ops.aten


def refuse_hidden_writes(exported: ExportedProgram) -> None:
    """Refuse such writes of values that the forward makes, where gradients are recorded and the value is read again.

    Raises:
        CaptureError: with the line and what to write in its place.
    """
    if not torch.is_grad_enabled():
        return
    given, trained = set[int](), set[int]()  # memories of what the program is given, and of values with a gradient
    cut = set[fx.Node]()  # aliases of these that have none
    hidden: dict[int, fx.Node] = {}
    for node, same in _in_order(exported.graph_module, {}):
        if same is not None:
            cut |= {node} if same in cut else set()
            continue
        sources = list(filter(is_tensor, node.all_input_nodes))
        unseen = bool(node.meta.get(NO_GRAD)) or node.target is aten.detach.default
        read = [] if unseen else [at for s in sources if s not in cut and (at := memory_of_node(s)) in trained]
        if written := next((hidden[at] for at in read if at in hidden), None):
            line = code_line(written, installed=True)
            raise hidden_write(op_name(written), f"\n  at {line}" if line else "")
        if not is_tensor(node):
            continue
        memory, is_write = memory_of_node(node), is_inplace(node)
        if node.op == "placeholder":
            given.add(memory)
        elif (is_write and node.args[0] in cut) or (not read and memory in map(memory_of_node, sources)):
            cut.add(node)
        if is_write and memory in trained - given and (unseen or node in cut):
            hidden.setdefault(memory, node)
        elif read or (node.op == "placeholder" and node.meta["val"].requires_grad):
            trained.add(memory)


def _in_order(module: fx.GraphModule, names: Mapping[fx.Node, fx.Node]) -> Iterator[tuple[fx.Node, fx.Node | None]]:
    """Nodes in the order in which they run, those of regions with autocast in their places; with the node that one is
    another name of, as operands and results of regions are.

    Args:
        names: of the module's placeholders.
    """
    results: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.wrap_with_autocast:
            part: fx.GraphModule = getattr(module, str(node.args[4].target))
            given = part.graph.find_nodes(op="placeholder")
            yield from _in_order(part, dict(zip(given, node.args[5:], strict=True)))
            results[node] = part.graph.output_node().args[0]
        elif node.target is operator.getitem and node.args[0] in results:
            yield node, results[node.args[0]][node.args[1]]
        else:
            yield node, names.get(node)


def hidden_write(op: str, where: str = "") -> CaptureError:
    """The refusal of such a write by an op, whose line follows."""
    return CaptureError(
        f"the forward writes a value in place where autograd does not see it ({op}, under no_grad or through detach() "
        "or .data), and a gradient goes through that value, which a captured graph cannot keep; make another one with "
        f"the gradient of the first: h = h + (written - h).detach(){where}"
    )
