"""One training step with updates at the moments that the plan says.

Where all weights are updated once this is the loop everybody writes: forward, loss, backward, step. Where the plan has
an `update_period` below its passes, every pass goes forward and backward by itself, with the loss of its own samples:

    for every pass:
        loss = loss_fn(results of its samples, their targets)
        backward; sum the gradients of the layers behind
        after every `update_period` passes: optimizer.step() for their weights alone
    backward of the layers in front; optimizer.step() for theirs

The gradient of an update is that of the mean loss over the samples since the last one; layers in front see the mean
over all samples. So a loss has to be a mean over samples, as torch's are by default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parplan.compat import pytree
from parplan.errors import PlanError, RuntimeFailure
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Range
from parplan.lowering.program import OnePass, Slot, Staged
from parplan.plan import SCHEDULES
from parplan.runtime.calls import ModelCall
from parplan.runtime.compat import gradient_hooks
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.staged_run import MicroBatch, Moment, run_micro_batches, run_passes
from parplan.runtime.preserve_state import without_gradients
from parplan.runtime.programs.program_cache import Captured
from parplan.runtime.programs.sample_axes import SampleAxis, result_axis

__all__ = [
    "StagedStep", "arguments", "check_staged", "check_training", "checked_loss", "moments", "sample_axes",
]  # fmt: skip

_PARTS = "weights are updated between passes or a step has micro-batches"
_WHOLE = "take update_period and micro_batches out of the plan"

# How far the loss of two micro-batches may be off the mean of theirs: sums of another order, in this type.
_MEAN_WITHIN = {torch.float64: 1e-6, torch.float32: 1e-3}

Loss = Callable[[Any, Any], Tensor]


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a tuple of positional arguments or a dict of keyword arguments, as (args, kwargs)."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def check_training(module: nn.Module, loss_fn: Loss, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what cannot train `module`, before anything runs.

    Raises:
        RuntimeFailure: no optimizer, one without any of the model's parameters or whose `step` needs a closure, or a
            loss that cannot be called.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RuntimeFailure(f"{optimizer!r} is no optimizer; give one such as torch.optim.SGD(model.parameters())")
    if not callable(loss_fn):
        raise RuntimeFailure(f"{loss_fn!r} is no loss; give a function of results and targets")
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if trained.isdisjoint(id(parameter) for parameter in module.parameters()):
        raise RuntimeFailure("the optimizer has none of this model's parameters; make it from model.parameters()")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RuntimeFailure(
            f"{type(optimizer).__name__} calls the model again within its step (a closure), which train_step does not "
            "do; call optimizer.step(closure) yourself, with a plan without update_period"
        )


def check_staged(model: nn.Module, module: nn.Module, call: ModelCall, schedule: str) -> None:
    """Refuse what needs a whole step, where weights are updated between passes, or a step has micro-batches.

    Args:
        model: the compiled one, and `module` the user's.
        schedule: of micro-batches.

    Raises:
        RuntimeFailure: pipeline stages, hooks of the compiled model or of a parameter, or an input that needs a
            gradient.
    """
    if schedule != SCHEDULES[0]:
        raise RuntimeFailure(
            f"the plan has schedule {schedule}, in which the last stage goes back as soon as it has gone forward, and "
            "train_step takes the loss outside of the model; compile with loss=fn and call loss.backward(), or plan "
            f'with schedule "{SCHEDULES[0]}"'
        )
    if model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or model._backward_pre_hooks:
        raise RuntimeFailure(
            f"hooks of the compiled model itself see whole batches, which there are none of where {_PARTS}; put them "
            f"on model.module, or {_WHOLE}"
        )
    hooked = [name for name, parameter in module.named_parameters() if gradient_hooks(parameter)]
    if hooked:
        raise RuntimeFailure(
            f"{hooked[0]} has a gradient hook, which would see the gradient of a part only where {_PARTS}; remove it, "
            f"or {_WHOLE}"
        )
    if any(tensor.requires_grad for tensor in call.tensors):
        raise RuntimeFailure(
            f"an input needs a gradient, which train_step has none of where {_PARTS}; give it detached, or {_WHOLE}"
        )


def checked_loss(loss: Any) -> Tensor:
    """The result of a loss function, if it is one number.

    Raises:
        RuntimeFailure: it is something else.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise RuntimeFailure(f"loss_fn gave {what}; it has to give one number, as a tensor")
    return loss


def moments(captured: Captured, staged: Staged | None, periods: Mapping[str, int]) -> tuple[Moment, ...]:
    """The parameters that are updated after each pass.

    Args:
        staged: the steps pass by pass, where results come from passes alone.
        periods: passes between updates of those parameters that do not wait for the last pass.

    Raises:
        PlanError: a pass has no results of its own.
    """
    if staged is None:
        raise PlanError(
            f"{captured.graph.model}: weights are to be updated after {min(periods.values())} passes, but results or "
            "buffers are made in front of the passes, or need more than one pass's samples (a loss inside the model?); "
            "take update_period out of the plan, or return what the passes make"
        )
    # Every pass's share of the step's samples: the mean over processes, whose losses count alike.
    counts = [[sum(map(len, ranges)) for ranges in one.samples] for one in staged.passes]
    totals = [max(1, sum(own)) for own in zip(*counts, strict=True)]
    weights = [sum(c / t for c, t in zip(own, totals, strict=True)) / len(totals) for own in counts]
    found: list[Moment] = []
    for number in range(1, len(weights) + 1):
        # The parameters whose period ends with this pass, with one over the share of samples that the period had.
        ending = {name: period for name, period in periods.items() if number % period == 0}
        shares = {name: sum(weights[number - period : number]) for name, period in ending.items()}
        found.append({name: sum(weights) / share for name, share in shares.items() if share > 0})
    return tuple(found)


def sample_axes(graph: LayerGraph, dim: int) -> tuple[SampleAxis, ...]:
    """The dimensions along which a step's targets may have samples: those of its results, then that of its inputs."""
    found = [result_axis(graph, value) for value in graph.results]
    return tuple(dict.fromkeys([*(axis for axis in found if axis is not None), SampleAxis(dim, 1)]))


@dataclass(frozen=True)
class StagedStep:
    """A step in parts, passes or micro-batches, each of which has its own loss: the user's side of `run_passes` and of
    `run_micro_batches`.

    Args:
        executor: whose program is staged.
        nested: puts results together as the model returns them.
        targets: of all samples of this process; tensors that have them along one of `axes` are cut as the samples are.
        batch: samples of this process.
        axes: where targets may have samples, the likeliest first.
    """

    executor: Executor
    nested: Callable[[Sequence[Tensor]], Any]
    targets: Any
    batch: int
    axes: tuple[SampleAxis, ...]
    loss_fn: Loss
    optimizer: torch.optim.Optimizer
    losses: list[Tensor] = field(default_factory=list)
    updated: set[int] = field(default_factory=set)

    def run(self, staged: Staged, inputs: Mapping[str, Tensor], moments: Sequence[Moment]) -> Tensor:
        """Run the step; this process's mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        run_passes(
            self.executor,
            inputs,
            staged,
            lambda number, results: self._of_pass(staged.passes[number], results),
            moments,
            self._update,
        )
        return self._loss()

    def run_in_micro_batches(
        self, micro_batches: Sequence[MicroBatch], ranges: Sequence[Range], check: bool = False
    ) -> Tensor:
        """Run the step, of which each micro-batch has a range of this process's samples; this process's mean loss.

        Args:
            check: compare the loss of the first two together with those of each, before anything is updated.
        """
        self.optimizer.zero_grad(set_to_none=True)
        first: list[tuple[list[Tensor], Tensor]] = []

        def gradients(number: int, results: list[Tensor]) -> list[Tensor | None]:
            program = micro_batches[number].executor.program
            found = self._gradients((ranges[number],), results, [program.slots[slot] for slot in program.outputs])
            if check and number < 2 and len(ranges[number]):
                first.append((results, self.losses[-1]))
            if check and number == 1 and len(first) == 2:
                self._check_mean(first, ranges[:2])
            return found

        found, _ = run_micro_batches(micro_batches, gradients)
        self._update({name: gradient for name, gradient in found.items() if gradient is not None}, last=True)
        return self._loss()

    def _check_mean(self, parts: Sequence[tuple[Sequence[Tensor], Tensor]], ranges: Sequence[Range]) -> None:
        """Refuse a loss that is no mean over samples, as far as the first two micro-batches show it.

        Raises:
            RuntimeFailure: their loss together is another one.
        """
        graph = self.executor.graph
        values = graph.results
        if any(value not in graph.batch_dims for value in values):
            return
        pairs = zip(*(results for results, _ in parts), strict=True)
        results = [torch.cat(pair, graph.batch_dims[value]) for value, pair in zip(values, pairs, strict=True)]
        state = torch.random.get_rng_state()
        with torch.no_grad():
            targets = pytree.tree_map(partial(self._cut, ranges), self.targets)
            together = checked_loss(self.loss_fn(self.nested(results), targets))
        if not torch.equal(state, torch.random.get_rng_state()):  # it draws random numbers, which are others each time
            torch.random.set_rng_state(state)
            return
        share = sum(map(len, ranges)) / self.batch
        mean = torch.stack([loss for _, loss in parts]).sum() / share
        if not torch.isclose(together.to(mean), mean, rtol=_MEAN_WITHIN.get(mean.dtype, 0.05), atol=1e-6):
            raise RuntimeFailure(
                f"loss_fn gives {together.item():.6g} for the first two micro-batches together, and the mean of those "
                f"of each is {mean.item():.6g}: it is no mean over samples, so its parts do not add up to it; use "
                'reduction="mean" without ignored targets, have the loss in the model (loss=fn, which weighs what '
                "counts), or plan with 1 micro-batch"
            )

    def _loss(self) -> Tensor:
        """This process's mean loss."""
        if self.losses:
            return torch.stack(self.losses).sum()
        # A process without samples has a loss of 0, in the type of the first result.
        slots = [self.executor.program.slots[slot] for slot in self.executor.program.outputs]
        dtype = next((slot.dtype for slot in slots if slot.requires_grad), None)
        return torch.zeros((), dtype=dtype, device=self.executor.transport.physical(self.executor.deliver_from))

    def _of_pass(self, one: OnePass, results: list[Tensor]) -> list[Tensor | None]:
        """The gradients of the loss of one pass's own samples."""
        ranges = one.samples[0 if self.executor.transport.processes == 1 else self.executor.transport.owned[0]]
        return self._gradients(ranges, results, [self.executor.program.slots[slot] for slot in one.outputs])

    def _gradients(self, ranges: Sequence[Range], results: list[Tensor], slots: Sequence[Slot]) -> list[Tensor | None]:
        """The gradients of the loss of these samples.

        Raises:
            RuntimeFailure: the loss gives gradients to parameters of the model. They would be this process's alone, of
                some passes and not of others.
        """
        share = sum(map(len, ranges)) / self.batch
        if not share:
            return [None] * len(results)
        leaves = [r.detach().requires_grad_(s.requires_grad) for r, s in zip(results, slots, strict=True)]
        parameters = self.executor.store.parameters
        with torch.enable_grad():
            targets = pytree.tree_map(partial(self._cut, ranges), self.targets)
            weighed = checked_loss(self.loss_fn(self.nested(leaves), targets)) * share
            with without_gradients(parameters.values()):
                weighed.backward()
                taken = [name for name, parameter in parameters.items() if parameter.grad is not None]
        if taken:
            raise RuntimeFailure(
                f"loss_fn takes the gradient of {self.executor.graph.parameters[taken[0]]} itself (a penalty on "
                "weights?), which cannot be told apart by passes or micro-batches; use the optimizer's "
                f"weight_decay, or {_WHOLE}"
            )

        self.losses.append(weighed.detach())
        return [leaf.grad for leaf in leaves]

    def _cut(self, ranges: Sequence[Range], leaf: Any) -> Any:
        """The part of a target that is of one pass's samples."""
        if not isinstance(leaf, Tensor):
            return leaf
        axis = next((axis for axis in self.axes if axis.of(leaf, self.batch)), None)
        return leaf if axis is None else axis.take(leaf, ranges)

    def _update(self, gradients: Mapping[str, Tensor], last: bool) -> None:
        """One step of the optimizer for some parameters alone: it leaves out those without a gradient.

        The last one is for all that had none yet, the parameters of a loss among them.
        """
        own = {name: self.executor.store.trainable[name] for name in gradients}
        for name, parameter in own.items():
            parameter.grad = gradients[name]
        now = {id(parameter) for parameter in own.values()}
        every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        waiting = [p for p in every if p.grad is not None and (id(p) in self.updated if last else id(p) not in now)]
        with without_gradients(waiting):
            self.optimizer.step()
        self.updated.update(now)
