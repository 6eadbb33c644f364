"""A training step pass by pass: every pass goes forward and backward, and may update its weights, before the next one.

cuda-convnet2's `updatePeriod` (Krizhevsky 2014, section 4): layers that run in several passes per batch may be updated
after each of them, every so many, or once. Samples of the next pass are on their way while this one computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor

from parplan.lowering.program import Staged
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.gradients import Gradients
from parplan.runtime.execution.run import Run, SlotParts

__all__ = ["LossGradients", "Moment", "Update", "run_passes"]


# The caller's loss: gradients of the results of one pass, which is given by its number.
LossGradients = Callable[[int, list[Tensor]], list[Tensor | None]]

# The caller's optimizer: updates parameters, by placeholder, with gradients, and is told whether it is the last update.
Update = Callable[[Mapping[str, Tensor], bool], None]

# The parameters (placeholders) that are updated after a pass, other passes or the layers in front being still to come:
# of each a factor on its gradient, which is the sum since its last update.
Moment = Mapping[str, float]


@torch.no_grad()
def run_passes(
    executor: Executor,
    inputs: Mapping[str, Tensor],
    staged: Staged,
    loss: LossGradients,
    moments: Sequence[Moment],
    update: Update,
) -> None:
    """Forward and backward of one training step of a program with passes.

    Args:
        executor: whose program is staged.
        inputs: the user's, by name.
        staged: the steps.
        loss: gives the gradients of each pass's results.
        moments: the parameters that are updated after each pass; the others are at the end.
        update: updates parameters.
    """
    transport = executor.transport
    kept = frozenset(slot for one in staged.passes for slot in one.outputs)
    run = Run(executor, tuple(inputs), tuple(executor.store.trainable), kept, once=True)
    parts, grads = run.begin(list(inputs.values())), SlotParts(transport, executor.recorder)
    sums = Gradients(executor.store, transport, executor.recorder)

    def reduce(parameters: Set[str]) -> None:
        """Start the sums over devices that an update of these parameters needs, of gradients that passes gave."""
        for one in staged.sums:
            if set(one.bucket.parameters) <= parameters:
                sums.launch(one.bucket)

    def update_with(moment: Moment, last: bool) -> None:
        sums.arrive()
        transport.show()
        totals = sums.totals(moment, own=True)
        known = {name: total for name, total in totals.items() if total is not None}
        update({n: t if moment[n] == 1 else t * moment[n] for n, t in known.items()}, last)
        executor.store.refresh()
        transport.begin()

    run.go_forward(staged.before, parts, record=True)
    run.update_buffers(parts)
    run.end()
    for number, (one, moment) in enumerate(zip(staged.passes, moments, strict=True)):
        run.go_forward(one.forward, parts, record=True)
        results = [parts.get(slot)[executor.deliver_from] for slot in one.outputs]
        transport.show()
        run.take_outputs(one.outputs, loss(number, results), grads)
        transport.begin()
        for slot in one.outputs:
            parts.drop(slot)
        run.go_backward(one.backward, grads, sums)
        if moment:
            reduce(moment.keys())
            update_with(moment, last=False)
    rest = {name: 1.0 for name in run.parameters if not any(name in moment for moment in moments)}
    reduce(rest.keys())
    run.go_backward(staged.after, grads, sums)
    update_with(rest, last=True)
    run.finish(parts)
