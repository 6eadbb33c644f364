"""The few ops a cut layer needs that ATen does not have."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["shard_embedding"]


def shard_embedding(weight: Tensor, indices: Tensor, first_row: int, padding_index: int = -1) -> Tensor:
    """Look up the rows this shard holds; rows of other shards give zeros.

    Args:
        weight: [rows, features], rows `first_row` to `first_row + rows` of the whole table.
        indices: integers of any shape, into the whole table.
        padding_index: row of the whole table that gets no gradient; -1 for none.

    Returns:
        [*indices, features]; summed over the shards it is the whole look-up (as in Megatron-LM).
    """
    local = indices - first_row
    here = (local >= 0) & (local < weight.shape[0])
    padding = padding_index - first_row
    padding_here = padding if 0 <= padding < weight.shape[0] else None
    found = functional.embedding(torch.where(here, local, 0), weight, padding_idx=padding_here)
    return torch.where(here.unsqueeze(-1), found, 0.0)
