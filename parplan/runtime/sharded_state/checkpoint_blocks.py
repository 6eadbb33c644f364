"""torch.distributed.checkpoint's protocol for tensors of which every rank saves and loads the block that it holds.

Ranks that hold the same block name it alike, and torch.distributed.checkpoint lets one of them write it. On loading it
reads what of the saved blocks, whatever they were, lies within this rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parplan.layout import Region

__all__ = ["chunks", "find_block", "write_items"]


def write_items(name: str, shape: Sequence[int], own: Region, local: Tensor) -> list[Any]:
    """The one item to write for this rank's block; none where it holds nothing.

    Args:
        name: the tensor's, in the state that is saved.
        shape: of the whole tensor.
        own: where this rank's block lies in it.
        local: the block.
    """
    # Not at the top: it imports all of torch's parallel modules.
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shape)),
        )
        for chunk in chunks(own, local)
    ]


def chunks(own: Region, local: Tensor) -> list[Any]:
    """Where this rank's block lies, empty where it holds nothing."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if not local.numel():
        return []
    return [ChunkStorageMetadata(torch.Size(e.start for e in own), torch.Size(len(e) for e in own))]


def find_block(index: Any, own: Region, local: Tensor) -> Tensor:
    """The block at an index, which is this rank's own.

    Raises:
        ValueError: it is another rank's.
    """
    if tuple(index.offset or ()) != tuple(extent.start for extent in own):
        raise ValueError(f"{index.fqn}: this rank holds the block at {[e.start for e in own]}, not {index.offset}")
    return local
