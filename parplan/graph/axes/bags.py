"""`nn.EmbeddingBag` of indices [samples, length]: one op with an axis row, in place of flat indices with offsets.

torch flattens the indices and adds offsets 0, length, 2 * length, ...: constants of the batch, along a dimension that
is no longer the samples'. Captured as one op on [samples, length] samples stay apart, and the table can be cut by
features, or by rows where bags are sums or means: each shard sums up the rows that it holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from parplan.graph.axes.call import range_of, shape_of
from parplan.graph.axes.row_syntax import OpAxis
from parplan.graph.axes.table import OWN_ROWS, Call

__all__ = ["EMBEDDING_BAGS", "join_bags", "run_bags"]

aten = torch.ops.aten
_MODES = ("sum", "mean", "max")


@torch.library.custom_op("parplan::embedding_bags", mutates_args=())
def embedding_bags(
    weight: Tensor, indices: Tensor, scales: Tensor | None, mode: int, padding_index: int, by_frequency: bool
) -> Tensor:
    """A bag per row of `indices`; see `run_bags`."""
    with torch.no_grad():
        return run_bags(weight, indices, scales, mode, padding_index, by_frequency)


@embedding_bags.register_fake
def _(
    weight: Tensor, indices: Tensor, scales: Tensor | None, mode: int, padding_index: int, by_frequency: bool
) -> Tensor:
    return weight.new_empty((indices.shape[0], weight.shape[1]))


EMBEDDING_BAGS = torch.ops.parplan.embedding_bags.default


def run_bags(
    weight: Tensor,
    indices: Tensor,
    scales: Tensor | None,
    mode: int,
    padding_index: int,
    by_frequency: bool,
    first_row: int | None = None,
) -> Tensor:
    """Look up the rows of every bag and reduce them.

    Args:
        weight: [rows, features].
        indices: [samples, length], into the whole table.
        scales: a factor for each of them, for sums.
        mode: 0 sum, 1 mean, 2 maximum.
        padding_index: row of the whole table that does not count; -1 for none.
        by_frequency: gradients are divided by how often an index occurs.
        first_row: where `weight` is a part of the table, the row of the table that it begins with; the results of all
            parts add up to the whole table's.

    Returns:
        [samples, features].
    """
    padding = padding_index if padding_index >= 0 else None
    if first_row is None:
        kind = _MODES[mode]
        return functional.embedding_bag(
            indices, weight, scale_grad_by_freq=by_frequency, mode=kind, per_sample_weights=scales, padding_idx=padding
        )
    counted = torch.ones_like(indices, dtype=torch.bool) if padding is None else indices != padding
    here = counted & (indices >= first_row) & (indices < first_row + weight.shape[0])
    factors = torch.ones_like(indices, dtype=weight.dtype) if scales is None else scales
    if _MODES[mode] == "mean":
        factors = factors / counted.sum(1, keepdim=True).clamp(min=1)
    local = torch.where(here, indices - first_row, 0)
    return functional.embedding_bag(local, weight, mode="sum", per_sample_weights=torch.where(here, factors, 0.0))


def _axes(call: Call) -> tuple[OpAxis, ...]:
    """Samples, features, and rows where parts add up; gradients by frequency need all indices and the whole table."""
    if call["by_frequency"]:
        return ()
    rows = "v!" if _MODES[call["mode"]] == "max" else "v+"
    names = {"v": "vocabulary", "f": "features"}
    return call.rows(f"{rows} f, n l!, n l! -> n f", ("weight", "indices", "scales"), names=names)


OWN_ROWS[EMBEDDING_BAGS] = _axes


def join_bags(graph: fx.Graph) -> None:
    """Replace embedding bags of flattened indices with regular offsets in an exported graph."""
    for node in list(graph.nodes):
        if getattr(node.target, "overloadpacket", None) is not aten.embedding_bag:
            continue
        call = Call(node)
        indices, scales = _rows(call["indices"]), _rows(call["per_sample_weights"])
        results = {user.args[1]: user for user in node.users}
        sizes = shape_of(indices) if isinstance(indices, fx.Node) else (0, 0)
        regular = range_of(call["offsets"]) == (0, sizes[0] * sizes[1], sizes[1]) and sizes != (0, 0)
        alike = scales is None or (isinstance(scales, fx.Node) and shape_of(scales) == shape_of(indices))
        used = {place for place, user in results.items() if user.users}
        if not regular or not alike or used != {0} or call["sparse"] or call["include_last_offset"]:
            continue
        padding = call["padding_idx"]
        rows = call.shape("weight")[0]
        args = (
            call["weight"],
            indices,
            scales,
            call["mode"] or 0,
            -1 if padding is None else padding % rows,
            bool(call["scale_grad_by_freq"]),
        )
        with graph.inserting_before(node):
            made = graph.call_function(EMBEDDING_BAGS, args)
        made.meta = {**node.meta, "val": results[0].meta["val"]}
        results[0].replace_all_uses_with(made)
        unused = [*results.values(), node, *(call[a] for a in ("indices", "offsets", "per_sample_weights"))]
        for old in unused:
            if isinstance(old, fx.Node) and old.op == "call_function" and not old.users:
                graph.erase_node(old)


def _rows(flat: Any) -> Any:
    """The [samples, length] that was flattened; False where it is something else."""
    if flat is None:
        return None
    if flat.target not in (aten.reshape.default, aten.view.default):
        return False
    source = flat.all_input_nodes[0]
    return source if len(shape_of(source)) == 2 and len(shape_of(flat)) == 1 else False
