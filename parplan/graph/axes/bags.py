"""`nn.EmbeddingBag` as ops with axis rows: of indices [samples, length], and of flat indices with offsets.

Of [samples, length] torch flattens the indices and adds offsets 0, length, 2 * length, ...: constants of the batch,
along a dimension that is no longer the samples'. Captured as one op on [samples, length] samples stay apart. Where the
user gives offsets, bags have any length, and samples stay together. In both forms the table can be cut by features, or
by rows where bags are sums or means: each shard sums up the rows that it holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from parplan.graph.axes.call import range_of, shape_of
from parplan.graph.axes.row_syntax import OpAxis
from parplan.graph.axes.table import OWN_ROWS, Call, own_op

__all__ = ["EMBEDDING_BAGS", "OFFSET_BAGS", "join_bags", "run_bags"]

aten = torch.ops.aten
_MODES = ("sum", "mean", "max")


def run_bags(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    scales: Tensor | None,
    mode: int,
    padding_index: int,
    by_frequency: bool,
    last: bool,
    first_row: int | None = None,
) -> Tensor:
    """Look up the rows of every bag and reduce them.

    Args:
        weight: [rows, features].
        indices: into the whole table: [bags, length], or [all], those of one bag behind those of the one before.
        offsets: [bags], where each bag begins among all indices.
        scales: a factor for each index, for sums.
        mode: 0 sum, 1 mean, 2 maximum.
        padding_index: row of the whole table that does not count; -1 for none.
        by_frequency: gradients are divided by how often an index occurs.
        last: whether `offsets` has the end of the last bag too.
        first_row: where `weight` is a part of the table, the row of the table that it begins with; the results of all
            parts add up to the whole table's.

    Returns:
        [bags, features].
    """
    padding = padding_index if padding_index >= 0 else None
    if first_row is None:
        return functional.embedding_bag(
            indices, weight, offsets, scale_grad_by_freq=by_frequency, mode=_MODES[mode], per_sample_weights=scales,
            padding_idx=padding, include_last_offset=last,
        )  # fmt: skip
    counted = indices != (-1 if padding is None else padding)
    factors = torch.ones_like(indices, dtype=weight.dtype) if scales is None else scales
    if _MODES[mode] == "mean":
        if offsets is None:
            lengths = counted.sum(1, keepdim=True)
        else:
            bag = torch.searchsorted(offsets, torch.arange(len(indices), device=indices.device), right=True) - 1
            lengths = factors.new_zeros(len(offsets)).index_add(0, bag, counted.to(factors.dtype))[bag]
        factors = factors / lengths.clamp(min=1)
    # Factors are zero for rows that this part of the table does not hold.
    here = counted & (indices >= first_row) & (indices < first_row + weight.shape[0])
    local, factors = torch.where(here, indices - first_row, 0), torch.where(here, factors, 0.0)
    return functional.embedding_bag(
        local, weight, offsets, mode="sum", per_sample_weights=factors, include_last_offset=last
    )


EMBEDDING_BAGS = own_op("embedding_bags", run_bags)
OFFSET_BAGS = own_op("offset_bags", run_bags)


def _axes(call: Call) -> tuple[OpAxis, ...]:
    """Samples, features, and rows where parts add up; gradients by frequency need all indices and the whole table.

    Bags by offsets are not told apart.
    """
    if call["by_frequency"]:
        return ()
    rows = "v!" if _MODES[call["mode"]] == "max" else "v+"
    names = {"v": "vocabulary", "f": "features"}
    if call["offsets"] is not None:
        return call.rows(f"{rows} f, l!, o!, l! -> n! f", ("weight", "indices", "offsets", "scales"), names=names)
    return call.rows(f"{rows} f, n l!, n l! -> n f", ("weight", "indices", "scales"), names=names)


OWN_ROWS[EMBEDDING_BAGS] = _axes
OWN_ROWS[OFFSET_BAGS] = _axes


def join_bags(graph: fx.Graph) -> None:
    """Replace the embedding bags of an exported graph: of flattened indices with regular offsets, and of any others."""
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
        last = bool(call["include_last_offset"])
        if used != {0} or call["sparse"]:
            continue
        padding = call["padding_idx"]
        rows = call.shape("weight")[0]
        options = call["mode"] or 0, -1 if padding is None else padding % rows, bool(call["scale_grad_by_freq"])
        with graph.inserting_before(node):
            if regular and alike and not last:
                made = graph.call_function(EMBEDDING_BAGS, (call["weight"], indices, None, scales, *options, last))
            else:
                given = (call[a] for a in ("weight", "indices", "offsets", "per_sample_weights"))
                made = graph.call_function(OFFSET_BAGS, (*given, *options, last))
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
