"""A training step in parts, passes or micro-batches, each of which goes forward and backward before the next one.

Passes: cuda-convnet2's `updatePeriod` (Krizhevsky 2014, section 4). Layers that run in several passes per batch may be
updated after each of them, every so many, or once. Samples of the next pass are on their way while this one computes.

Micro-batches: one program, that of a micro-batch, runs once for each, gradients add up, and their sums over devices
begin in the backward of the last one. With the loss in the graph this is the forward of a step: what `loss.backward()`
gives is multiplied by the loss's own gradient, which is all that the backward then has to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parplan.accelerators import as_current
from parplan.errors import RuntimeFailure
from parplan.lowering.micro_batches import Combination, How
from parplan.lowering.pipeline.orders import Action
from parplan.lowering.program import Staged, Transfer
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.gradients import Gradients
from parplan.runtime.execution.run import Run
from parplan.runtime.execution.slot_parts import SlotParts, start_together
from parplan.runtime.sharded_state.outside_gradients import ParameterAliases
from parplan.runtime.transport.base import Pending

__all__ = [
    "LossGradients", "LossInside", "MicroBatch", "Moment", "Update", "run_micro_batches", "run_passes", "run_with_loss",
]  # fmt: skip

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
        totals = {name: total for name, total in sums.totals(moment, own=True).items() if total is not None}
        for name in (name for name in totals if moment[name] != 1):
            with as_current(totals[name].device):
                totals[name].mul_(moment[name])
        update(totals, last)
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


# ---- micro-batches ----


@dataclass(frozen=True)
class MicroBatch:
    """One of a step: the executor of a program for its samples, and the user's inputs by name."""

    executor: Executor
    inputs: Mapping[str, Tensor]


@torch.no_grad()
def run_micro_batches(
    micro_batches: Sequence[MicroBatch], loss: Callable[[int, list[Tensor]], Sequence[Tensor | None]]
) -> tuple[dict[str, Tensor | None], list[list[Tensor | None]]]:
    """Forward and backward of every micro-batch; gradients of the parameters, and per micro-batch of the inputs.

    Args:
        loss: gives the gradients of the results of a micro-batch, which is given by its number.
    """
    last = micro_batches[-1].executor
    sums, names = Gradients(last.store, last.transport, last.recorder), tuple(last.store.trainable)
    of_inputs = []
    for number, one in enumerate(micro_batches):
        run = Run(one.executor, tuple(one.inputs), names, once=True, micro_batch=number)
        results = run.forward(list(one.inputs.values()), record=True)
        run.end()
        of_inputs.append(run.go_back(loss(number, results), sums, last=number + 1 == len(micro_batches)))
    return sums.totals(names, own=True), of_inputs


@dataclass(eq=False)
class LossInside:
    """A step whose loss is one of the program's results.

    Args:
        micro_batches: of the step.
        results: per result how that of the whole batch follows from those of micro-batches, and along which dimension
            it has samples.
        loss: which result is the loss.
        fractions: of samples, per micro-batch: this process's, or of all where the loss is of all (`whole`).
        inputs: dimension of the samples per input, None without.
        rows: of the step, which count in the loss as a result behind the model's own says; 0 where samples count alike.
        actions: of pipeline stages, in the order that all processes follow; none: one micro-batch after another.

    Attributes:
        weights: of the micro-batches, as far as they have run.
    """

    micro_batches: Sequence[MicroBatch]
    results: Sequence[tuple[Combination, int | None]]
    loss: int
    fractions: Sequence[float]
    whole: bool
    inputs: Mapping[str, int | None]
    rows: float = 0.0
    actions: Sequence[Action] = ()
    weights: list[Tensor] = field(default_factory=list)
    kept: list[list[Tensor]] = field(default_factory=list)

    @property
    def executor(self) -> Executor:
        """That of the last micro-batch."""
        return self.micro_batches[-1].executor

    def gradients(self, number: int, results: list[Tensor]) -> list[Tensor | None]:
        """Gradients of a micro-batch's results: the loss's weight, unscaled where it counts targets."""
        loss, counted = results[self.loss], None
        if self.rows:
            counted = results[-1][..., -1].to(torch.float64).sum()
            transport = self.executor.transport
            if self.whole and transport.processes > 1:
                counted = torch.stack(transport.gather_tensors("what a micro-batch counts", counted)).sum()
        weight = self.weight(number, loss.device, counted)
        self.weights.append(weight)
        self.keep(results)
        gradients: list[Tensor | None] = [None] * len(results)
        gradients[self.loss] = weight.to(loss.dtype).expand_as(loss)
        return gradients

    def weight(self, number: int, place: torch.device, counted: Tensor | None) -> Tensor:
        """The weight of a micro-batch's loss, not yet scaled where it counts targets: so many."""
        weight = torch.ones((), dtype=torch.float64, device=place)
        if counted is not None:
            return counted / self.rows  # at most 1 together, so that gradients keep their size while they add up
        return weight * self.fractions[number] if self.results[self.loss][0].how is How.MEAN else weight

    def keep(self, results: Sequence[Tensor]) -> None:
        """Keep the results of the next micro-batch, without what counts in its loss."""
        self.kept.append([result.detach() for result in results[: len(self.results)]])

    @property
    def scale(self) -> Tensor:
        """Factor on gradients and on the loss: one over what all micro-batches count together."""
        total = torch.stack(self.weights).sum()
        return torch.where(total == 0, 0.0, 1 / total) if self.rows else torch.ones_like(total)

    def combined(self) -> list[Tensor]:
        """The results of the whole batch."""
        found = []
        for number, (how, dim) in enumerate(self.results):
            parts = [own[number] for own in self.kept]
            if how.how is How.SAMPLES:
                assert dim is not None  # such a result has samples
                found.append(torch.cat(parts, dim))
            elif how.how is How.SAME:
                found.append(parts[0])
            else:
                found.append(self._number(how, parts, how.counts == self.results[self.loss][0].counts))
        return found

    def _number(self, how: Combination, parts: list[Tensor], as_loss: bool) -> Tensor:
        """A mean or a sum of the whole batch.

        Args:
            as_loss: it counts what the loss does.
        """
        stacked = torch.stack(parts)
        if how.how is How.SUM:
            return stacked.sum(0)
        fractions = torch.tensor(self.fractions, dtype=torch.float64, device=stacked.device)
        weights = torch.stack(self.weights) if as_loss and self.rows else fractions
        weights = weights.view(-1, *(1,) * (stacked.dim() - 1))
        # Where nothing counts in a micro-batch its mean is no number; where nothing does at all, neither is the whole.
        terms = torch.where(weights == 0, 0.0, stacked.to(torch.float64) * weights)
        total = terms.sum(0) * (self.scale if as_loss else 1.0)
        nothing = weights.sum() == 0
        return torch.where(nothing, torch.nan, total).to(stacked.dtype)


class _Pipelined:
    """One micro-batch of a step in pipeline stages, whose loss is made on the device `maker`.

    Args:
        one: the micro-batch.
        number: of it.
        step: that it is of.
    """

    def __init__(self, one: MicroBatch, number: int, step: LossInside) -> None:
        self._step, self._number, self._executor = step, number, one.executor
        self.pipeline, self.transport = one.executor.pipeline, one.executor.transport
        self._last = number + 1 == len(step.micro_batches)
        # The loss goes back from where it was made: by way of its readers each backward would wait for all of them.
        self._loss = self.pipeline.homes[step.loss]
        self.maker = one.executor.program.slots[self._loss].devices[0]
        self._counts = self._find_counts() if step.rows else None
        self._kept = {*one.executor.program.outputs, self._loss, *([self._counts] if self._counts else [])}
        names = tuple(one.executor.store.trainable)
        self._run = Run(one.executor, tuple(one.inputs), names, self._kept, once=True, micro_batch=number)
        self._parts = self._run.begin(list(one.inputs.values()))
        self._run.reached = one.executor.program.reached({self._loss})
        self._run.last_reads = self.pipeline.last_reads
        self._grads = SlotParts(self.transport, one.executor.recorder)

    def _find_counts(self) -> str:
        """Where all that counts in the loss is beside it: its mean reads that.

        Raises:
            RuntimeFailure: nowhere.
        """
        graph, slots = self._executor.graph, self._executor.program.slots
        device, value = slots[self._loss].devices[0], slots[self._executor.program.outputs[-1]].value
        for name, slot in slots.items():
            if slot.value == value and slot.local_shapes.get(device) == slot.shape:
                return name
        raise RuntimeFailure(
            f"device {device} makes the loss and has not all of {graph.label(value)}, which weighs micro-batches; plan "
            'the loss with one replica and one shard, or with schedule "serial"'
        )

    def forward(self, stage: int) -> None:
        """One stage forward."""
        for own in self.pipeline.stages[stage : stage + 1]:  # one of another size may have fewer
            self._run.go_forward(own.forward, self._parts, record=True)

    def weigh(self) -> Tensor | None:
        """Begin to go back from the loss; its weight, where it is made in this process."""
        transport, device = self.transport, self.maker
        if device not in transport.owned:
            return None
        loss, counts = (None if slot is None else self._parts.get(slot)[device] for slot in (self._loss, self._counts))
        assert loss is not None  # this device makes it
        with transport.on(device):
            counted = None if counts is None else counts[..., -1].to(torch.float64).sum()
            weight = self._step.weight(self._number, loss.device, counted)
            self._grads.put(self._loss, device, weight.to(loss.dtype).expand_as(loss))
        return weight

    def backward(self, stage: int, sums: Gradients) -> None:
        """One stage backward."""
        for own in self.pipeline.stages[stage : stage + 1]:
            self._run.go_backward(own.backward, self._grads, sums, self._last)
        self._run.take_slices(self._grads, sums)

    @staticmethod
    def move(several: Sequence[_Pipelined], transfers: Sequence[Sequence[Transfer]]) -> None:
        """Start transfers of micro-batches, of each its own."""
        pairs = [(one, transfer) for one, own in zip(several, transfers, strict=True) for transfer in own]
        start_together([(one._parts, transfer) for one, transfer in pairs], several[0].transport)
        for one, transfer in pairs:
            for slot in one.pipeline.last_reads[id(transfer)]:
                if slot not in one._kept:
                    one._parts.drop(slot)

    def finish(self) -> list[Tensor | None]:
        """Keep the results; gradients of the inputs."""
        place, program = self._executor.deliver_from, self._executor.program
        self._step.keep([self._parts.get(slot)[place] for slot in program.outputs])
        given = self._run.input_gradients(self._grads)
        self._run.finish(self._parts)
        return given


@torch.no_grad()
def run_pipeline(step: LossInside) -> tuple[dict[str, Tensor | None], list[list[Tensor | None]]]:
    """Forward and backward of all micro-batches through pipeline stages; gradients as of `run_micro_batches`.

    Every process follows the one order of all actions and takes its own part in each, so that any two meet in every
    transfer in one order. Results are handed back before the loss's last backward: earlier, a stage would wait for the
    last one's, and at the end the last stage would wait for the first one's last backward.
    """
    last = step.executor
    transport, sums = last.transport, Gradients(last.store, last.transport, last.recorder)
    own = [_Pipelined(one, number, step) for number, one in enumerate(step.micro_batches)]
    last_stage, weights = max(action.stage for action in step.actions), dict[int, Tensor]()
    closing = [action for action in step.actions if action.stage == last_stage and not action.forward][-1]
    coming: Pending | None = None
    _Pipelined.move(own, [one.pipeline.arrivals for one in own])
    for action in step.actions:
        one = own[action.micro_batch]
        if action.forward:
            one.forward(action.stage)
            continue
        if action.stage == last_stage and (weight := one.weigh()) is not None:
            weights[action.micro_batch] = weight
        if action is closing:
            _Pipelined.move(own, [each.pipeline.deliveries for each in own])
            coming = _start_weights(step, own[-1], weights)
        one.backward(action.stage, sums)
        transport.free_earlier()
    sums.arrive()
    of_inputs = [one.finish() for one in own]
    place = transport.physical(last.deliver_from)
    for weight in weights.values():
        transport.used_here(weight)
    if coming is not None:
        step.weights += coming.wait()[last.deliver_from].unbind()
    elif step.rows:
        step.weights += [weights[number].to(place) for number in sorted(weights)]
    else:
        step.weights += [step.weight(number, place, None) for number in range(len(own))]
    return sums.totals(tuple(last.store.trainable), own=True), of_inputs


def _start_weights(step: LossInside, one: _Pipelined, weights: Mapping[int, Tensor]) -> Pending | None:
    """Start the broadcast of what micro-batches count, which the process that makes the loss knows; None: all know."""
    transport = one.transport
    if not step.rows or transport.processes == 1:
        return None
    known = [weights[number] for number in sorted(weights)]
    place = transport.physical(transport.owned[0])
    told = torch.stack(known) if known else torch.zeros(len(step.micro_batches), dtype=torch.float64, device=place)
    return transport.start_broadcast("the weights of micro-batches", told, one.maker)


def run_with_loss(step: LossInside, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The results of a step with its loss inside; the loss is differentiable in inputs and parameters, once."""
    executor = step.executor
    tensors, aliases = [*inputs.values(), *executor.store.trainable.values()], None
    if executor.transport.processes > 1:
        aliases = executor.aliases()
        tensors[len(inputs) :] = aliases.tensors
    with as_current(executor.transport.physical(executor.deliver_from)):
        results = _StepWithLoss.apply(step, tuple(inputs), aliases, *tensors)  # type: ignore[no-untyped-call]
    return list(results)


class _StepWithLoss(torch.autograd.Function):
    """Forward and backward of all micro-batches as one node of the caller's graph, whose backward multiplies."""

    @staticmethod
    def forward(
        ctx: Any, step: LossInside, names: tuple[str, ...], aliases: ParameterAliases | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        run = run_pipeline(step) if step.actions else run_micro_batches(step.micro_batches, step.gradients)
        of_parameters, of_inputs = run
        found: list[Tensor | None] = []
        for place, dim in enumerate(step.inputs[name] for name in names):
            known = [part for own in of_inputs if (part := own[place]) is not None]
            whole = None if not known else torch.cat(known, dim) if dim is not None else torch.stack(known).sum(0)
            found.append(whole)
        ctx.found, ctx.step, ctx.aliases = [*found, *of_parameters.values()], step, aliases
        ctx.set_materialize_grads(False)
        results = step.combined()
        ctx.mark_non_differentiable(
            *(result for result in results if not (result.is_floating_point() or result.is_complex()))
        )
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        step: LossInside = ctx.step
        graph, transport = step.executor.graph, step.executor.transport
        outputs = [value for value in graph.user_outputs if isinstance(value, str)]
        others = [n for n, one in enumerate(gradients) if one is not None and n != step.loss]
        if others:
            raise RuntimeFailure(
                f"{graph.label(outputs[others[0]])} takes part in a loss outside of the model, and {len(step.weights)} "
                f"micro-batches have gone back by {graph.label(outputs[step.loss])} alone; compute the whole loss in "
                "the model (loss=fn), use train_step, or plan with 1 micro-batch"
            )
        if ctx.found is None:
            raise RuntimeFailure(
                "the gradients of a step in micro-batches are there for one backward; call the model again, or plan "
                "with 1 micro-batch"
            )
        found, ctx.found = ctx.found, None
        own = gradients[step.loss]
        if own is None:
            return (None, None, None, *(None for _ in found))
        own = own.to(torch.float64).reshape(())  # of one process a number of its own has one entry
        if transport.processes > 1:
            every = transport.gather_tensors("the gradient of the loss", own)
            if not all(torch.allclose(one, every[0], rtol=0, atol=0, equal_nan=True) for one in every):
                told = ", ".join(f"{one.item():.6g}" for one in every)
                raise RuntimeFailure(
                    f"processes multiply the loss by different numbers ({told}), which micro-batches that have gone "
                    "back already cannot tell apart; multiply by one number in all, or plan with 1 micro-batch"
                )
        factor = own * step.scale
        if transport.processes > 1:  # known to be the same in all, which each tensor in blocks would ask again
            number = factor.item()
            return (None, None, None, *(one if one is None or number == 1 else one.mul_(number) for one in found))
        for one in (one for one in found if one is not None):
            with as_current(one.device):
                one.mul_(factor.to(one.dtype).to(one.device))
        transport.ready_on(step.executor.deliver_from)
        return (None, None, None, *found)
