"""The samples of one compared step: those of all processes, for the plain module, and this process's own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parplan.graph.layer_graph import Constant, LayerGraph
from parplan.layout import Grid, Range
from parplan.runtime.calls import ModelCall, digest
from parplan.runtime.programs.sample_axes import SampleAxis, result_axis
from parplan.runtime.self_check.comparison import projection_weights
from parplan.runtime.transport.base import Transport

__all__ = ["Batch", "gather_batch", "returned_leaves", "shared_digest"]

_SEED = 0


@dataclass(frozen=True)
class Batch:
    """The samples of one step.

    Args:
        whole: a call with the samples of all processes.
        own: the call of this process.
        sizes: samples per process.
        start: of this process's samples among all of them.
        repeats: how many processes bring each sample.
    """

    whole: ModelCall
    own: ModelCall
    sizes: tuple[int, ...]
    start: int = 0
    repeats: int = 1

    @property
    def processes(self) -> int:
        """Number of processes that share the step."""
        return len(self.sizes)

    def whole_weights(self, graph: LayerGraph, results: Sequence[Tensor]) -> list[Tensor]:
        """The projection of the whole step's results whose gradients are the mean over processes of their own ones.

        Scaled here and not in the comparison: a custom backward need not be linear (it may clamp, or take a sign).
        """
        drawn = zip(self._axes(graph), projection_weights(results, _SEED), strict=True)
        return [weights * (self.repeats / self.processes if axis is not None else 1) for axis, weights in drawn]

    def own_weights(self, graph: LayerGraph, results: Sequence[Tensor]) -> list[Tensor]:
        """The projection of this process's results: its rows of the whole one's."""
        axes, like = self._axes(graph), []
        for result, axis in zip(results, axes, strict=True):
            shape = list(result.shape)
            if axis is not None and self.processes > 1:
                shape[axis.dim] = axis.size(self.whole.batch or 0)
            like.append(torch.empty(shape, dtype=result.dtype, device="meta"))
        return [self._rows(w, a) for w, a in zip(projection_weights(like, _SEED), axes, strict=True)]

    def own_results(self, graph: LayerGraph, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """This process's share of the whole step's nested result."""
        axes = iter(self._axes(graph))
        if sum(isinstance(leaf, Tensor) for leaf in leaves) != len(self._axes(graph)):
            return tuple(leaves)
        return tuple(self._rows(leaf, next(axes)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)

    def own_input(self, gradient: Tensor) -> Tensor:
        """This process's rows of the gradient of an input with samples."""
        return self._rows(gradient, SampleAxis(self.whole.dim, 1))

    def shares_input(self, position: int) -> bool:
        """Whether several processes hold the same input, so that each has a part of its gradient."""
        return self.processes > 1 and not self.own.has_samples(self.own.leaves[position])

    def _axes(self, graph: LayerGraph) -> list[SampleAxis | None]:
        """Per result that is a tensor, where it has samples."""
        values = [value for value in returned_leaves(graph) if isinstance(value, str)]
        return [result_axis(graph, value) for value in values]

    def _rows(self, tensor: Tensor, axis: SampleAxis | None) -> Tensor:
        if axis is None or self.processes == 1:
            return tensor
        return axis.take(tensor, [Range(self.start, self.start + (self.own.batch or 0))])


def returned_leaves(graph: LayerGraph) -> tuple[str | Constant, ...]:
    """The leaves of what the model returns; behind them a graph has tensors that the forward stores elsewhere."""
    stored = graph.containers.appended + sum(one.count for one in graph.stored)
    return graph.user_outputs[: len(graph.user_outputs) - stored]


def gather_batch(transport: Transport, own: ModelCall, sizes: Sequence[int], groups: Grid | None) -> Batch:
    """The samples of all processes, on every one of them; inputs without samples are the same (`shared_digest`).

    Args:
        own: this process's call; the others' have the same shapes but for their `sizes`.
        groups: ranks in rows that bring the same samples; None when every rank brings its own.
    """
    if own.batch is None:
        return Batch(own, own, tuple(sizes))
    bringing = tuple(range(len(sizes))) if groups is None else groups.column(0)
    mine = transport.rank if groups is None else groups.column(0)[groups.position(transport.rank)[0]]

    def gathered(leaf: Any) -> Any:
        if not own.has_samples(leaf):
            return leaf
        rows = leaf.detach().movedim(own.dim, 0)
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))  # gloo gathers tensors of one shape only
        padded[: rows.shape[0]] = rows
        found = transport.gather_tensors("gathering inputs for the self-check", padded)
        every = torch.cat([found[rank][: sizes[rank]] for rank in bringing]).movedim(0, own.dim)
        return every.requires_grad_(leaf.requires_grad)

    whole = ModelCall(tuple(map(gathered, own.leaves)), own.spec, own.dim, sum(sizes[rank] for rank in bringing))
    start = sum(sizes[rank] for rank in bringing[: bringing.index(mine)])
    return Batch(whole, own, tuple(sizes), start, len(sizes) // len(bringing))


def shared_digest(call: ModelCall) -> int:
    """A number that calls have in common, over processes, which differ in their samples alone."""
    found = hashlib.blake2b(repr(call.signature).encode(), digest_size=7)
    for tensor in call.tensors:
        if not call.has_samples(tensor):
            found.update(digest(tensor))
    return int.from_bytes(found.digest(), "big")
