"""Tensor subclass for tensors that are cut over processes: whole to its user, one block in memory.

`shape`, `numel`, norms, comparisons and every other op mean the whole tensor; each rank holds its own block (`local`).
Elementwise ops run on blocks alone; anything else is computed on the gathered tensor, which all ranks have to do alike
(parplan/runtime/sharded_state/ops.py has the rules). A view of it (`p[0]`, `p.view(-1)`) is a `ShardedView`: a view of
the gathered tensor that reads the present values of the blocks and writes back to them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from parplan.errors import RuntimeFailure
from parplan.layout import intervals, regions_of, shape_of
from parplan.runtime.compat import (
    as_subclass_with_dispatch,
    local_ops_only,
    memory_in_use,
    support_foreach,
    wrapper_tensor,
    writes,
)
from parplan.runtime.sharded_state.block_placement import Placement
from parplan.runtime.transport.base import block

__all__ = ["Gathered", "ShardedTensor", "ShardedView", "check_copies", "data_for", "local_tensor"]


def local_tensor(tensor: Tensor) -> Tensor:
    """The memory that this process has of a tensor: its block of a sharded one, else the tensor itself."""
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor


class ShardedTensor(torch.Tensor):
    """A tensor of which this rank holds one block.

    Attributes:
        local: this rank's block, an ordinary tensor without gradient; empty where the rank holds nothing.
        placement: which block every rank holds.
        dispatch: computes an op of which an operand is sharded; ops.py puts it here, as its rules make such tensors.
    """

    local: Tensor
    placement: Placement
    dispatch: ClassVar[Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]]

    @staticmethod
    def __new__(cls, local: Tensor, placement: Placement) -> ShardedTensor:
        """Wrap a block; its memory is shared, not copied."""
        made = wrapper_tensor(cls, placement.shape, local)
        made.local, made.placement = local, placement
        return made

    def __init__(self, local: Tensor, placement: Placement) -> None:
        super().__init__()

    @staticmethod
    def cut(whole: Tensor, placement: Placement) -> ShardedTensor:
        """This rank's block of a whole tensor that all ranks have, in new memory."""
        return ShardedTensor(placement.cut(whole.detach()).clone(), placement)

    def whole(self) -> Tensor:
        """The gathered tensor, an ordinary one in new memory; every rank has to call this."""
        return self.placement.collectives.gather(f"gathering {self.placement.name}", self.local, self.placement)

    def like(self, local: Tensor) -> ShardedTensor:
        """Another tensor of the same placement, such as the gradient."""
        return ShardedTensor(local, self.placement)

    def stand_in(self) -> nn.Parameter:
        """An ordinary parameter of the whole shape without values, to capture a model with."""
        made = nn.Parameter(self.local.new_empty(self.placement.shape), requires_grad=self.requires_grad)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return ShardedTensor.dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without values, as gathering them needs all ranks."""
        grad = ", requires_grad=True" if self.requires_grad else ""
        extents = (intervals(extent) for extent in self.placement.own)
        ranges = ", ".join("+".join(f"{part.start}:{part.stop}" for part in parts) for parts in extents)
        return (
            f"{type(self).__name__}({self.placement.name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"rank {self.placement.collectives.rank} holds [{ranges}]{grad})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        """An independent tensor of the same placement; a parameter without its gradient, as torch copies those."""
        if id(self) in memo:
            known: ShardedTensor = memo[id(self)]
            return known
        made: Any = ShardedTensor(self.local.clone(), self.placement)
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, requires_grad=self.requires_grad)
        memo[id(self)] = made
        own = vars(made)
        own.update({k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k not in own})
        if not isinstance(self, nn.Parameter):
            made.requires_grad_(self.requires_grad)
            made.grad = copy.deepcopy(self.grad, memo)
        copied: ShardedTensor = made
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: one process has a block only."""
        raise RuntimeFailure(
            f"{self.placement.name} is cut over processes, and this one holds {tuple(self.local.shape)} of "
            f"{tuple(self.shape)}: it is not pickled. Save what state_dict() of the compiled model or of the optimizer "
            "returns (on all ranks: it gathers), or parameter.whole()"
        )

    # -- torch.distributed.checkpoint's protocol: every rank saves and loads the block that it holds. Ranks that hold
    # the same block name it alike, and one of them writes it. Loading reads what of saved blocks lies within it --

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """The items to write for this rank's block, one for each of its regions; none where it holds nothing."""
        # Not at the top: it imports all of torch's parallel modules.
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """The extents of the regions of this rank's block; empty where it holds nothing."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        regions = [outer for outer, _ in regions_of(self.placement.own)] if self.local.numel() else []
        return [ChunkStorageMetadata(torch.Size(e.start for e in own), torch.Size(shape_of(own))) for own in regions]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """A region of this rank's block, to read from or write to.

        Raises:
            ValueError: the index is that of another rank's.
        """
        regions = {tuple(e.start for e in outer): inner for outer, inner in regions_of(self.placement.own)}
        inner = regions.get(tuple(index.offset or ()))
        if inner is None:
            raise ValueError(f"{index.fqn}: this rank holds the blocks at {[*regions]}, not {index.offset}")
        return block(self.local, inner)

    @property
    def data(self) -> Tensor:
        """The same memory without gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if tuple(value.shape) != tuple(self.shape):
            raise RuntimeFailure(
                f"{self.placement.name} has shape {tuple(self.shape)} and is cut over processes; its data cannot "
                f"become a tensor of shape {tuple(value.shape)}. Give it whole tensors, or build and compile anew"
            )
        same = isinstance(value, ShardedTensor) and value.placement.same(self.placement)
        if isinstance(value, ShardedTensor):
            new = value if same else ShardedTensor.cut(value.whole(), self.placement)
        else:
            plain = value.current() if isinstance(value, ShardedView) else value
            new = ShardedTensor.cut(plain, self.placement)
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.local = new.local

    def tolist(self) -> Any:
        """The gathered values; every rank has to call this."""
        return self.whole().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The gathered values, read only; every rank has to call this."""
        values = self.whole().numpy(force=force)
        values.setflags(write=False)
        return values

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """The gathered values, read only; every rank has to call this."""
        return self.numpy().__array__(*args, **kwargs)


def _refuse_memory(name: str) -> Callable[..., Any]:
    def refused(self: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeFailure(
            f"{name}() of {self.placement.name}: the tensor is cut over processes, so no memory holds all of it; use "
            "parameter.local (this process's block) or parameter.whole() (gathered, on all ranks)"
        )

    return refused


for _name in ("data_ptr", "untyped_storage", "storage", "__dlpack__", "share_memory_"):
    setattr(ShardedTensor, _name, _refuse_memory(_name))


class Gathered:
    """The whole of a sharded tensor in one memory, for views; kept equal to the blocks.

    Args:
        base: the sharded tensor.

    Attributes:
        local: this rank's block.
        whole: the gathered tensor.
        placement: the blocks'.
    """

    def __init__(self, base: ShardedTensor) -> None:
        self.local, self.placement = base.local, base.placement
        self.whole = base.whole()
        self._seen = writes(self.local)

    def refresh(self) -> None:
        """Gather again if the blocks were written since; all ranks come here alike."""
        if writes(self.local) != self._seen:
            self.whole.copy_(ShardedTensor(self.local, self.placement).whole())
            self._seen = writes(self.local)

    def write_back(self) -> None:
        """Give this rank's block what was written to the whole."""
        self.local.copy_(self.placement.cut(self.whole))
        torch.autograd.graph.increment_version(self.local)
        self._seen = writes(self.local)


class ShardedView(torch.Tensor):
    """A view of a sharded tensor: of its gathered values, with writes that go back to the blocks.

    Attributes:
        source: the gathered tensor.
        plain: the view, as an ordinary tensor.
    """

    source: Gathered
    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor, source: Gathered) -> ShardedView:
        """A view of `source.whole`."""
        made = as_subclass_with_dispatch(cls, plain)
        made.source, made.plain = source, plain
        return made

    def __init__(self, plain: Tensor, source: Gathered) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return ShardedTensor.dispatch(func, args, kwargs or {})

    def current(self) -> Tensor:
        """The plain view, of the values that the blocks hold now."""
        self.source.refresh()
        return self.plain

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without values, as gathering them may need all ranks."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """An ordinary tensor with its values."""
        return self.current().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as an ordinary tensor."""
        return self.current().clone().__reduce_ex__(protocol)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The same memory without gradient."""
        return self.detach()

    def tolist(self) -> Any:
        """Its values."""
        return self.current().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Its values, read only."""
        values = self.current().clone().numpy(force=force)
        values.setflags(write=False)
        return values

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Its values, read only."""
        return self.numpy().__array__(*args, **kwargs)


# -- `plain.data = cut`: one memory in plain PyTorch, and a copy here --

# An attribute of a block: for each copy that an ordinary tensor was given, whether it is in use.
_COPIES = "_parplan_copies"


def data_for(tensor: Tensor, value: Any) -> Any:
    """The values that `tensor.data = value` gives an ordinary tensor: gathered ones where `value` is a cut tensor."""
    if isinstance(tensor, ShardedTensor) or not isinstance(value, (ShardedTensor, ShardedView)):
        return value
    if isinstance(value, ShardedTensor):
        block, given = value.local, value.whole()
    else:
        block, given = value.source.local, value.current().clone()
    copies = [in_use for in_use in getattr(block, _COPIES, ()) if in_use()]
    setattr(block, _COPIES, [*copies, memory_in_use(given)])
    return given


def check_copies(written: Tensor) -> None:
    """Refuse a write to a cut tensor, or a view of it, of which `data_for` made a copy that is in use.

    Raises:
        RuntimeFailure: there is one.
    """
    held = written.source if isinstance(written, ShardedView) else written
    if not isinstance(held, (ShardedTensor, Gathered)) or not hasattr(held.local, _COPIES):
        return
    if any(in_use() for in_use in getattr(held.local, _COPIES)):
        raise RuntimeFailure(
            f"{held.placement.name} was written, or a tensor computed from it, and a plain tensor was given the same "
            f"memory (plain.data = value), which would change in plain PyTorch; as {held.placement.name} is cut over "
            "processes, it has a copy. Write `plain.data = value.clone()`, or `plain.copy_(value)`"
        )


for _class in (ShardedTensor, ShardedView):
    local_ops_only(_class)
support_foreach(ShardedTensor)
