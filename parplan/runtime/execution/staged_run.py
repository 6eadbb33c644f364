"""A training step pass by pass: every pass goes forward and backward, and may update its weights, before the next one.

cuda-convnet2's `updatePeriod` (Krizhevsky 2014, section 4): layers that run in several passes per batch may be updated
after each of them, every so many, or once. Samples of the next pass are on their way while this one computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from parplan.lowering.program import Staged
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.gradients import Gradients
from parplan.runtime.execution.run import Run, SlotParts

__all__ = ["LossGradients", "Moment", "StagedRun"]


# The caller's loss: gradients of the results of one pass, which is given by its number.
LossGradients = Callable[[int, list[Tensor]], list[Tensor | None]]

# The caller's optimizer: updates parameters, by placeholder, with gradients, and is told whether it is the last update.
Update = Callable[[Mapping[str, Tensor], bool], None]


@dataclass(frozen=True)
class Moment:
    """The parameters that are updated after a pass, other passes or the layers in front being still to come.

    Args:
        scales: per parameter (placeholder), a factor on its gradient, which is the sum since its last update.
    """

    scales: Mapping[str, float]


class StagedRun:
    """One training step of a program with passes.

    Args:
        executor: whose program is staged.
        inputs: names of the user's inputs.
        staged: the steps.
    """

    def __init__(self, executor: Executor, inputs: tuple[str, ...], staged: Staged) -> None:
        kept = frozenset(slot for one in staged.passes for slot in one.outputs)
        self._run = Run(executor, inputs, tuple(executor.store.trainable), kept, once=True)
        self._executor = executor
        self._transport = executor.transport
        self._staged = staged

    @torch.no_grad()
    def step(self, tensors: Sequence[Tensor], loss: LossGradients, moments: Sequence[Moment], update: Update) -> None:
        """Forward and backward of the whole step.

        Args:
            tensors: the user's inputs.
            loss: gives the gradients of each pass's results.
            moments: the parameters that are updated after each pass; the others are at the end.
            update: updates parameters.
        """
        run, staged, executor = self._run, self._staged, self._executor
        parts, grads = run.begin(tensors), SlotParts(self._transport, executor.recorder)
        sums = Gradients(executor.store, self._transport, executor.recorder)
        run.go_forward(staged.before, parts, record=True)
        run.update_buffers(parts)
        run.end()
        for number, (one, moment) in enumerate(zip(staged.passes, moments, strict=True)):
            run.go_forward(one.forward, parts, record=True)
            results = [parts.get(slot)[executor.deliver_from] for slot in one.outputs]
            self._transport.show()
            run.take_outputs(one.outputs, loss(number, results), grads)
            self._transport.begin()
            for slot in one.outputs:
                parts.drop(slot)
            run.go_backward(one.backward, grads, sums)
            if moment.scales:
                self._sum(moment.scales.keys(), sums)
                self._update(moment, sums, update, last=False)
        rest = {name for name in run.parameters if not any(name in moment.scales for moment in moments)}
        self._sum(rest, sums)
        run.go_backward(staged.after, grads, sums)
        self._update(Moment({name: 1.0 for name in run.parameters if name in rest}), sums, update, last=True)
        run.finish(parts)

    def _sum(self, parameters: Set[str], sums: Gradients) -> None:
        """Start the sums over devices that an update of these parameters needs, of gradients that passes gave."""
        for reduce in self._staged.sums:
            if set(reduce.bucket.parameters) <= parameters:
                sums.launch(reduce.bucket)

    def _update(self, moment: Moment, sums: Gradients, update: Update, last: bool) -> None:
        sums.arrive()
        self._transport.show()
        totals = sums.totals(moment.scales, own=True)
        known = {name: total for name, total in totals.items() if total is not None}
        update({n: t if moment.scales[n] == 1 else t * moment.scales[n] for n, t in known.items()}, last)
        self._executor.store.refresh()
        self._transport.begin()
