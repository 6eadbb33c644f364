"""Running statistics of batch norms whose result nobody reads, as ops of their own.

The last stage of a backbone of which hooks take the earlier features is computed for nothing, and yet its statistics
follow the batches. As an op without readers it would go from the graph, and they would stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from parplan.errors import CaptureError
from parplan.graph.axes.call import call_like
from parplan.graph.user_line import code_line

__all__ = ["unread_norms"]

aten = torch.ops.aten
_FUNCTIONAL = aten._native_batch_norm_legit_functional.default  # whose place plain ones have taken


def unread_norms(graph: fx.Graph, results: Iterable[fx.Node]) -> dict[str, fx.Node]:
    """New values of such statistics, by the placeholder of their buffer; the norms are without readers as before.

    Args:
        results: of the graph, those that buffers are written with among them.

    Raises:
        CaptureError: the statistics of such a norm are used elsewhere, too.
    """
    updates: dict[str, fx.Node] = {}
    needed = set(results)
    for node in reversed(list(graph.nodes)):
        trains = node.target is aten.batch_norm.default and node.args[5] and node.args[3] is not None
        if trains and node not in needed:
            for buffer, value in _statistics(graph, node):
                own = {node, *value.all_input_nodes}
                others = [user for user in buffer.users if user not in own and user.target is not _FUNCTIONAL]
                if buffer.op != "placeholder" or others:
                    line = code_line(node, installed=True)
                    raise CaptureError(
                        "nobody reads the result of a batch norm whose running statistics are used elsewhere, too; "
                        f"leave the call out, or return its result{f' at {line}' if line else ''}"
                    )
                updates[buffer.name] = value
            needed.add(node.args[0])
        elif node in needed:
            needed.update(node.all_input_nodes)
    return updates


def _statistics(graph: fx.Graph, norm: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The buffers of a norm in training, each with what it is after the call."""
    args: tuple[Any, ...] = norm.args
    x, _, _, *buffers, _, momentum, _, _ = args
    dims = [dim for dim in range(x.meta["val"].dim()) if dim != 1]
    found = []
    with graph.inserting_before(norm.next):
        given = call_like(norm, aten.detach.default, x)
        for buffer, op in zip(buffers, (aten.mean.dim, aten.var.correction), strict=True):
            dtype = buffer.meta["val"].dtype
            wide = given if x.meta["val"].dtype == dtype else call_like(norm, aten._to_copy.default, given, dtype=dtype)
            latest = call_like(norm, op, wide, dims)
            kept = call_like(norm, aten.mul.Tensor, buffer, 1 - momentum)
            found.append((buffer, call_like(norm, aten.add.Tensor, kept, latest, alpha=momentum)))
    return found
