"""Accumulation of parameter gradients: terms of one device, sums over devices, the user's own parameter.

A gradient that travels alone is summed where autograd left it; those of a bucket are copied to one message and back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from parplan.accelerators import as_current
from parplan.layout import Block, located, whole_block
from parplan.lowering.holdings import Bucket
from parplan.lowering.program import State
from parplan.runtime.execution.parameter_store import Store
from parplan.runtime.execution.timeline import Recorder
from parplan.runtime.transport.base import Pending, Transport, add_block

__all__ = ["Gradients"]


@dataclass(frozen=True)
class _Term:
    """A gradient of a block of what a device holds; if it is our `own`, nobody else reads its memory."""

    block: Block
    gradient: Tensor
    own: bool


@dataclass(frozen=True)
class _BucketSum:
    """A bucket's all-reduce over one group, on its way to the first device that is here.

    Args:
        totals: per parameter the sum of that device's terms, which the result replaces.
    """

    parameters: Sequence[str]
    device: int
    totals: list[Tensor]
    pending: Pending


def _dense(gradient: Tensor) -> bool:
    """Whether each element has memory of its own; a linear layer's weights may have a transposed gradient."""
    return gradient.is_contiguous() or (gradient.dim() == 2 and gradient.t().is_contiguous())


class Gradients:
    """Gathers the parameter gradients of one backward.

    Args:
        store: the blocks of parameters that each device holds.
        transport: sums over devices.
        recorder: told of the sums.
    """

    def __init__(self, store: Store, transport: Transport, recorder: Recorder) -> None:
        self._store = store
        self._transport = transport
        self._recorder = recorder
        self._terms: dict[str, dict[int, list[_Term]]] = defaultdict(lambda: defaultdict(list))
        self._sums: list[_BucketSum] = []

    def known(self, state: State, device: int) -> Tensor | None:
        """The sum so far of the block that a compute step uses, to which its gradient may be added in place."""
        held = state.blocks[device]
        for one in self._terms[state.name][device]:
            if one.own and one.block == held and _dense(one.gradient):
                return one.gradient
        return None

    def add(self, state: State, device: int, gradient: Tensor, own: bool) -> None:
        """Take in one compute step's gradient of the block it used; our `own` may be written to."""
        terms, held, known = self._terms[state.name][device], state.blocks[device], self.known(state, device)
        with self._transport.on(device):
            if known is not None:  # steps that use a block one after another need no more memory than two of them
                known.add_(gradient)
                return
            if any(one.block == held for one in terms) and not (own and _dense(gradient)):
                gradient, own = gradient.clone(memory_format=torch.contiguous_format), True
        terms.append(_Term(held, gradient, own))

    def launch(self, bucket: Bucket) -> None:
        """Start the sums of a bucket whose terms are complete."""
        name = self._store.sum_label(bucket)
        with self._recorder.sums:
            for group in bucket.groups:
                here = [device for device in group if device in self._transport.owned]
                if not here or len(group) == 1:
                    continue
                flats, totals = {}, {}
                for device in here:
                    with self._transport.on(device):
                        totals[device] = [self._total_on(name, device) for name in bucket.parameters]
                        flats[device] = self._transport.message(bucket.parameters, totals[device])
                pending = self._transport.reduce(name, group, flats)
                self._sums.append(_BucketSum(bucket.parameters, here[0], totals[here[0]], pending))

    def _total_on(self, name: str, device: int) -> Tensor:
        """The sum of one device's terms, in the shape of what it holds, contiguous and ours to write to."""
        shape = self._store.shapes[name][device]
        terms = self._terms[name].pop(device, [])
        if len(terms) == 1 and terms[0].gradient.shape == shape:
            gradient = terms[0].gradient
            own = terms[0].own and gradient.is_contiguous()
            return gradient if own else gradient.clone(memory_format=torch.contiguous_format)
        original = self._store.original(name)
        total = torch.zeros(shape, dtype=original.dtype, device=self._transport.physical(device))
        for term in terms:
            add_block(total, term.block, term.gradient)
        return total

    def arrive(self) -> None:
        """Wait for the sums that were started."""
        with self._recorder.sums:
            for entry in self._sums:
                flat, totals = entry.pending.wait()[entry.device], entry.totals
                if flat.data_ptr() != totals[0].data_ptr():
                    parts = flat.split([total.numel() for total in totals])
                    with self._transport.on(entry.device):
                        torch._foreach_copy_(totals, [p.view_as(t) for p, t in zip(parts, totals, strict=True)])
                for name, total in zip(entry.parameters, totals, strict=True):
                    self._terms[name][entry.device] = [_Term(whole_block(total.shape), total, True)]
            self._sums.clear()

    def totals(
        self,
        names: Iterable[str],
        own: bool = False,
        touched: Set[str] | None = None,
        behind: Set[str] | None = None,
    ) -> dict[str, Tensor | None]:
        """The gradients of the module's own parameters; None for one that no step has used. All ranks call this.

        Args:
            own: nobody else may read their memory, as the caller may write to it.
            touched: parameters that this process's losses depend on, where those of all leave some out; default: all.
            behind: as in `Store.as_gradients`.
        """
        with self._recorder.totals:
            return self._store.as_gradients({name: self._total(name, own) for name in names}, touched, behind)

    def _total(self, name: str, own: bool) -> Tensor | None:
        original = self._store.original(name)
        by_device = {device: terms for device, terms in sorted(self._terms.pop(name, {}).items()) if terms}
        if not by_device:
            return None
        terms = [term for held in by_device.values() for term in held]
        for term in terms:
            self._transport.used_here(term.gradient)
        if len(terms) == 1 and terms[0].gradient.shape == original.shape:
            return terms[0].gradient.to(original.device, copy=own and not terms[0].own)
        with as_current(original.device):
            total = torch.zeros_like(original, memory_format=torch.contiguous_format)
            for device, held in by_device.items():
                place = self._store.place(name, device)
                for term in held:
                    add_block(total, located(term.block, place), term.gradient.to(original.device))
        return total
