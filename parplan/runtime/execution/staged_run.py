"""A training step pass by pass: every pass goes forward and backward, and may update its weights, before the next one.

cuda-convnet2's `updatePeriod` (Krizhevsky 2014, section 4): layers that run in several passes per batch may be updated
after each of them, every so many, or once. Samples of the next pass are on their way while this one computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parplan.lowering.program import Staged
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.gradients import Gradients
from parplan.runtime.execution.run import Parts, Run

__all__ = ["Moment", "Pull", "StagedRun"]


class Pull(Protocol):
    """The caller's loss."""

    def __call__(self, number: int, results: list[Tensor]) -> list[Tensor | None]:
        """Gradients of one pass's results."""
        ...


@dataclass(frozen=True)
class Moment:
    """What is updated after a pass, other passes or the layers in front being still to come.

    Args:
        scales: per parameter (placeholder), a factor on its gradient, which is the sum since its last update.
    """

    scales: Mapping[str, float]


class Update(Protocol):
    """The caller's optimizer."""

    def __call__(self, gradients: Mapping[str, Tensor], last: bool) -> None:
        """Update parameters, by placeholder, with these gradients; `last`: no more updates follow in this step."""
        ...


class StagedRun(Run):
    """One training step of a program with passes.

    Args:
        executor: whose program is staged.
        inputs: names of the user's inputs.
        staged: the steps.
    """

    def __init__(self, executor: Executor, inputs: tuple[str, ...], staged: Staged) -> None:
        super().__init__(executor, inputs, tuple(executor.store.trainable))
        self._staged = staged
        self._done = True  # every graph is gone through once
        self._kept = frozenset(slot for one in staged.passes for slot in one.outputs)

    @torch.no_grad()
    def step(self, tensors: Sequence[Tensor], pull: Pull, moments: Sequence[Moment], update: Update) -> None:
        """Forward and backward of the whole step.

        Args:
            tensors: the user's inputs.
            pull: gives the gradients of each pass's results.
            moments: what is updated after each pass; the other parameters are at the end.
            update: updates parameters.
        """
        parts, grads, sums = self._begin(tensors), Parts(self._transport), self._sums()
        self._go(self._staged.before, parts, record=True)
        self._update_buffers(parts)
        self.end()
        for number, moment in enumerate(moments):
            self._pass(number, parts, grads, sums, pull)
            if moment.scales:
                self._sum(moment.scales.keys(), sums)
                self._update(moment, sums, update, last=False)
        rest = {name for name in self._parameters if not any(name in moment.scales for moment in moments)}
        self._sum(rest, sums)
        self._go_back(self._staged.after, grads, sums)
        self._update(Moment({name: 1.0 for name in self._parameters if name in rest}), sums, update, last=True)
        parts.settle()
        self._transport.end()

    def _pass(self, number: int, parts: Parts, grads: Parts, sums: Gradients, pull: Pull) -> None:
        one = self._staged.passes[number]
        self._go(one.forward, parts, record=True)
        results = [parts.get(slot)[self._executor.deliver_from] for slot in one.outputs]
        self._transport.show()
        pulls = pull(number, results)
        self._take_outputs(one.outputs, pulls, grads)
        self._transport.begin()
        for slot in one.outputs:
            parts.drop(slot)
        self._go_back(one.backward, grads, sums)

    def _sum(self, parameters: Set[str], sums: Gradients) -> None:
        """Start the sums over devices that an update of these parameters needs, of gradients that passes gave."""
        for reduce in self._staged.sums:
            if set(reduce.parameters) <= parameters:
                sums.launch(self._program.buckets[reduce.bucket])

    def _update(self, moment: Moment, sums: Gradients, update: Update, last: bool) -> None:
        sums.arrive()
        self._transport.show()
        totals = sums.totals(moment.scales, own=True)
        known = {name: total for name, total in totals.items() if total is not None}
        update({n: t if moment.scales[n] == 1 else t * moment.scales[n] for n, t in known.items()}, last)
        self._executor.store.refresh()
        self._transport.begin()
