"""Values that no sample reaches and that a forward lays out once per sample: masks, positions, zeros.

`mask.expand(batch, -1, -1, -1)` has the same rows for every sample, and so has whatever is computed from it row by row.
Such values are computed with one row, and expanded where samples meet them: then no device computes or holds them once
per sample, and nothing in them depends on the number of samples. Others that the model makes of the batch's size
(`arange(batch)`) are computed whole and hold one entry per sample, as an input does.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from parplan.graph.axes.call import call_value, shape_of
from parplan.graph.axes.row_syntax import Cut
from parplan.graph.axes.table import axes_of, overload
from parplan.graph.batch_changes import BatchChanges
from parplan.graph.kinds import kind_of
from parplan.graph.layers import BOUNDARY

__all__ = ["compute_rows_once", "counted_samples", "sample_sources"]

aten = torch.ops.aten

# Where an op that makes or spreads one value names the shape of its result.
_FILLS = {overload(name): 0 for name in ("empty.memory_format", "full", "ones", "zeros")}
_SHAPED = _FILLS | {overload(name): 1 for name in ("expand", "reshape", "view")}


def compute_rows_once(graph: fx.Graph, changes: BatchChanges, samples: Set[str]) -> BatchChanges:
    """Rewrite a canonical graph.

    Args:
        samples: user inputs that hold samples.

    Returns:
        What changes with the batch in the new graph.
    """
    equal = _equal_rows(graph, changes, _reached(graph, samples))
    shapes = {node: shape_of(node) for node in equal}
    expansions: dict[str, tuple[int, ...]] = {}
    for node, dim in equal.items():
        one = list(shapes[node])
        one[dim] = 1
        if node.target in _SHAPED:
            place = _SHAPED[node.target]
            node.args = (*node.args[:place], one, *node.args[place + 1 :])
        node.meta["val"] = call_value(node)
    for node, dim in equal.items():
        for user in [user for user in node.users if user not in equal]:
            with graph.inserting_before(user):
                rows = graph.call_function(aten.expand.default, (node, list(shapes[node])))
            kept: dict[str, Any] = {
                key: user.meta[key] for key in ("nn_module_stack", "stack_trace") if key in user.meta
            }
            rows.meta = {**kept, "val": node.meta["val"].expand(shapes[node])}
            if user.op == "call_function" and kind_of([user]) not in ("hooks", "function"):
                rows.meta[BOUNDARY] = user
            else:
                rows.meta |= {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
            user.replace_input_with(node, rows)
            expansions[rows.name] = (dim,)
    once = {node.name for node in equal}
    return replace(
        changes,
        all=(changes.all - once) | expansions.keys(),
        unexplained=changes.unexplained - once,
        grown={name: dims for name, dims in changes.grown.items() if name not in once} | expansions,
    )


def sample_sources(graph: fx.Graph, changes: BatchChanges, samples: Set[str]) -> dict[str, int]:
    """Values that the model itself makes of the batch's size: the dimension that grows, by name."""
    reached, found = _reached(graph, samples), dict[str, int]()
    for node in graph.nodes:
        dims = changes.grown.get(node.name, ())
        made = node.op == "call_function" and node not in reached
        if made and len(dims) == 1 and not any(operand.name in changes.grown for operand in node.all_input_nodes):
            found[node.name] = dims[0]
    return found


def counted_samples(graph: fx.Graph, changes: BatchChanges, samples: Set[str]) -> frozenset[str]:
    """Values that grow with the batch, that no sample reaches, and whose rows differ: they count samples."""
    reached, found = _reached(graph, samples), set[fx.Node]()
    for node in graph.nodes:
        if node.op != "call_function" or node in reached or node.name not in changes.grown:
            continue
        alone = node.target is aten.expand.default or node.target in _FILLS
        if not alone or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(node.name for node in found)


def _reached(graph: fx.Graph, samples: Set[str]) -> set[fx.Node]:
    found = set[fx.Node]()
    for node in graph.nodes:
        if node.name in samples or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _equal_rows(graph: fx.Graph, changes: BatchChanges, reached: Set[fx.Node]) -> dict[fx.Node, int]:
    """Nodes that no sample reaches and whose rows along the one dimension that grows are all the same.

    Where a number in an op changes with the batch (`ones(batch, 1) / batch`), one row is no row of other batches.
    """
    grown, found = changes.grown, dict[fx.Node, int]()
    for node in graph.nodes:
        dims = grown.get(node.name, ())
        bound = node in reached or node.name in changes.unexplained
        if bound or len(dims) != 1 or not isinstance(node.target, torch._ops.OpOverload):
            continue
        operands = [operand for operand in node.all_input_nodes if operand.name in grown]
        if not all(operand in found for operand in operands) or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        if _is_row_by_row(node, dims[0], {operand.name: found[operand] for operand in operands}):
            found[node] = dims[0]
    return found


def _is_row_by_row(node: fx.Node, dim: int, operands: Mapping[str, int]) -> bool:
    if node.target in _FILLS:
        return True
    axis = next((axis for axis in axes_of(node) if axis.dims.get(node.name) == dim), None)
    if axis is None or axis.cut is not Cut.MAP or axis.outer or axis.units > 1:
        return False
    alone = node.target is aten.expand.default or bool(operands)
    size, sizes = shape_of(node)[dim], {operand.name: shape_of(operand) for operand in node.all_input_nodes}
    # Rows that a view merges with another dimension are rows no longer.
    in_step = all(axis.dims.get(name) == at and sizes[name][at] == size for name, at in operands.items())
    return alone and in_step
