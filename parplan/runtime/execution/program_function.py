"""A whole call of a program as one differentiable function of its inputs and parameters.

Autograd is not asked to order anything across devices. One outer `autograd.Function` stands for the whole call, and its
backward takes the program's backward steps one by one. So every process meets every other one in the same order,
whatever the model, and nothing can wait in a circle.

A forward of which a device takes all steps runs in the caller's autograd, which records it as it does the plain
module's. Where processes sum gradients, those go through nodes that begin the sums. Where they exchange values, too,
the graph is the same in all of them, so that autograd comes to the exchanges in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from parplan.accelerators import as_current
from parplan.errors import RuntimeFailure
from parplan.lowering.program import Exchange, Transfer
from parplan.runtime.compat import call_hooks_with_gradients_only, recomputed_once
from parplan.runtime.execution.executor import Executor, GradientSum, LocalForward, LocalStep
from parplan.runtime.execution.run import Run
from parplan.runtime.out_of_memory import is_out_of_memory
from parplan.runtime.sharded_state.outside_gradients import ParameterAliases
from parplan.runtime.transport.base import Pending

__all__ = ["ProgramFunction", "run_program"]


def run_program(
    executor: Executor, inputs: Mapping[str, Tensor], explained: Callable[[RuntimeError], RuntimeError] | None = None
) -> list[Tensor]:
    """The program's results for the user's input values (by name); differentiable in inputs and parameters.

    Args:
        explained: a method that gives the error to raise in the backward in place of one of an allocation; the backward
            of a forward that a device computes alone is the caller's autograd's, whose errors are torch's.
    """
    local = executor.local_forward
    if local is not None and not any(tensor.device != local.place for tensor in local.tensors):
        return _run_local(executor, local, inputs)
    trainable = executor.store.trainable
    tensors: list[Tensor] = [*inputs.values(), *trainable.values()]
    run = Run(executor, tuple(inputs), tuple(trainable))
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        results = run.forward(list(inputs.values()), record=False)
    else:
        if executor.several_results:
            call_hooks_with_gradients_only(tensors)
        if executor.transport.processes > 1:
            run.aliases = executor.aliases()
            tensors[len(inputs) :] = run.aliases.tensors
        # Weak: results, whose graph holds it, do not keep the model alive.
        method = WeakMethod(explained) if explained is not None else None
        results = ProgramFunction.apply(run, method, *tensors)  # type: ignore[no-untyped-call]
        if executor.several_results:  # apart from each other: autograd calls the hooks of all results of one node
            # Not those that are an input, or a view of one: writes to these, if there are numbers in them, are refused.
            own = [one.requires_grad and not (one.numel() and (one.is_leaf or one._is_view())) for one in results]
            results = [_Result.apply(one) if new else one for one, new in zip(results, own, strict=True)]  # type: ignore[no-untyped-call]
    run.end()
    return list(results)


def _run_local(executor: Executor, local: LocalForward, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The results of a forward of which a device takes all steps, recorded by the caller's autograd."""
    values = {name: tensor.to(local.place) for name, tensor in inputs.items()}
    weights = _Weights(executor) if executor.transport.processes > 1 and torch.is_grad_enabled() else None
    with as_current(local.place), executor.own_draws().entered() if executor.seeded.apart else nullcontext():
        for taken, known in zip(executor.program.forward, local.steps, strict=True):
            if isinstance(known, Transfer):
                values[known.target] = _Exchanged.apply(executor, known, values[known.source])  # type: ignore[no-untyped-call]
            else:
                step, states = known.step, known.states
                operands = [values[operand.slot] for operand in step.operands]
                states = executor.states(step, local.device, attached=True) if states is None else states
                states = states if weights is None else weights.of_step(known, states)
                results = executor.run_code(step, local.device, known.code, (*operands, *states))
                for result, tensor in zip(step.results, results, strict=True):
                    values[result.slot] = tensor
                executor.done(step)
            for slot in executor.last_reads[id(taken)]:
                values.pop(slot, None)
    executor.share_buffers()
    if executor.program.transfers:
        executor.transport.end()
    if weights is not None and executor.may_leave_out:
        values |= weights.attached(values)
    return [values[slot] for slot in executor.program.outputs]


class _Weights:
    """The parameters in a forward of one of several processes, whose gradients are summed over all.

    Autograd goes back last to what was recorded first. So the sum of a bucket is recorded in front of the first step
    that uses its parameters, and begins beside the backward of the steps before that; what waits for all sums is
    recorded in front of the whole forward.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._aliases = executor.aliases()
        tensors: Sequence[Tensor] = self._aliases.tensors
        # One sum alone has no backward to run beside, and is waited for where it begins.
        joined = executor.may_leave_out or len(executor.program.buckets) > 1
        self._sums = _Sums(executor) if joined and tensors else None
        if self._sums is not None:
            if executor.may_leave_out:
                call_hooks_with_gradients_only(executor.store.trainable.values())
            tensors = _SumsArrived.apply(self._sums, *tensors)  # type: ignore[no-untyped-call]
        self._last = tensors[:1]  # of the backward
        self._known = dict(zip(executor.store.trainable, tensors, strict=True))

    def of_step(self, known: LocalStep, states: Sequence[Tensor]) -> list[Tensor]:
        """The states of a step, of which parameters go through their sums."""
        for one in known.sums:
            names = one.bucket.parameters
            # The module's tensors as they are now: aliases of a call before know the memory that they had then.
            values = [self._executor.store.original(name) for name in names]
            held = (self._executor, self._aliases, one, self._sums, values)
            made = _BucketSum.apply(*held, *map(self._known.__getitem__, names))  # type: ignore[no-untyped-call]
            self._known.update(zip(names, made, strict=True))
        named = zip(known.step.states, states, strict=True)
        return [self._known.get(state.name, tensor) for state, tensor in named]

    def attached(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The results, each of whose backwards comes to the sums, also to those of which it has no gradient; and of all
        of them together, where processes exchange values, to all exchanges."""
        named = {name: values[name] for name in self._executor.differentiable_results}
        if self._executor.program.transfers:
            named = {name: one for name, one in named.items() if one.requires_grad}
            joined = _JoinedResults.apply(self._sums, list(named), *self._last, *named.values())  # type: ignore[no-untyped-call]
            named = dict(zip(named, joined, strict=True))
        elif not self._last:
            return {}
        # Apart from each other: autograd calls the hooks of one node's results, also of those without a gradient.
        apart = _Result.apply
        return {name: apart(one, *self._last) for name, one in named.items() if one.requires_grad}  # type: ignore[no-untyped-call]


class _Sums:
    """The gradient sums of one backward, begun in the program's order: the order in which autograd comes to them is its
    own, and a process without samples runs the program's backward.

    Attributes:
        touched: parameters that this process has a gradient of, where a loss may leave out a result.
        used: results that have a gradient, where processes exchange values: those of others have parts in its own.
    """

    def __init__(self, executor: Executor) -> None:
        self.touched, self.used = set[str](), frozenset[str]()
        self._executor = executor
        self._ready: dict[int, Callable[[], Pending]] = {}
        self._begun: list[Pending] = []

    def begin(self, number: int, sum_up: Callable[[], Pending]) -> None:
        """A sum can begin, when all in front of it have."""
        self._ready[number] = sum_up
        while (following := self._ready.pop(len(self._begun), None)) is not None:
            self._begun.append(following())

    def arrive(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Wait for all, after beginning those that others have not come in front of: a backward to some parameters.

        Args:
            gradients: of the parameters, which the sums fill.

        Returns:
            Those of parameters that a process has a gradient of.
        """
        executor, named = self._executor, dict[str, Tensor | None]()
        if executor.may_leave_out:
            named = dict(zip(executor.store.trainable, gradients, strict=True)) | self._begin_missing()
        begun = [*self._begun, *(self._ready[number]() for number in sorted(self._ready))]
        touched, self.touched, self._ready, self._begun = self.touched, set(), {}, []
        if executor.may_leave_out:  # processes tell each other while the sums go on
            gradients = tuple(
                executor.store.as_gradients(named, touched, executor.parameters_behind(self.used)).values()
            )
        for one in begun:
            one.wait()
        return gradients

    def _begin_missing(self) -> dict[str, Tensor | None]:
        """Begin with zeros what this process has no gradient for, as others may have one; what they fill, by name."""
        executor, local, found = self._executor, self._executor.local_forward, dict[str, Tensor | None]()
        for wanted in local.sums if local is not None else ():
            if wanted.number >= len(self._begun) and wanted.number not in self._ready:
                flat, parts = _mean_terms(executor, wanted, [None] * len(wanted.sizes))
                found |= zip(wanted.bucket.parameters, parts, strict=True)
                self.begin(wanted.number, partial(_sum_up, executor, wanted, flat))
        return found


class _Result(torch.autograd.Function):
    """A result as it is; its backward comes to the node that waits for all gradient sums, if there is one."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *last: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.given = 1 + len(last)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        return (gradient, *[None] * (ctx.given - 1))


class _JoinedResults(torch.autograd.Function):
    """Results as they are; a backward from one of them goes through the graphs of all, so that every process comes to
    every exchange."""

    @staticmethod
    def forward(ctx: Any, sums: _Sums | None, names: Sequence[str], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.names, ctx.given = sums, names, len(tensors)
        ctx.save_for_backward(torch.empty(0))
        return tuple(result.detach() for result in tensors[len(tensors) - len(names) :])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # a checkpoint computes the forward again here, where all processes are
        if ctx.sums is not None:
            given = zip(ctx.names, gradients, strict=True)
            ctx.sums.used = frozenset(name for name, gradient in given if gradient is not None)
        return (None, None, *(None,) * (ctx.given - len(gradients)), *gradients)


class _Exchanged(torch.autograd.Function):
    """A value that processes move to another layout; the backward moves its gradient back."""

    @staticmethod
    def forward(ctx: Any, executor: Executor, transfer: Transfer, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.executor, ctx.transfer = executor, transfer
        return _moved(executor, transfer.exchange, tensor.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_several([gradient])
        executor, slot = ctx.executor, ctx.transfer.wanted
        if gradient is None:  # of a result that this process's loss leaves out, and another's may not
            device = executor.deliver_from
            place = executor.transport.physical(device)
            gradient = torch.zeros(slot.local_shapes[device], dtype=slot.dtype, device=place)
        count = executor.transport.processes
        with torch.no_grad():  # between processes go shares of the mean over them, as in the program's own backward
            found = _moved(executor, ctx.transfer.transposed, gradient / count) * count
            executor.transport.free_earlier()
        if torch.is_grad_enabled() and gradient.requires_grad:  # create_graph=True
            found = _OnceDifferentiable.apply(found, gradient)  # type: ignore[no-untyped-call]
        return None, None, found


def _moved(executor: Executor, exchange: Exchange, tensor: Tensor) -> Tensor:
    """This process's part of a value in another layout."""
    device = executor.deliver_from
    return executor.transport.start(exchange, {device: tensor.to(exchange.dtype)}).wait()[device]


class _SumsArrived(torch.autograd.Function):
    """Parameters as they are; the backward waits for the sums that fill their gradients."""

    @staticmethod
    def forward(ctx: Any, sums: _Sums, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums = sums
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.sums.arrive(gradients))


class _BucketSum(torch.autograd.Function):
    """The values of a bucket's parameters; the backward begins the mean of their gradients over processes."""

    @staticmethod
    def forward(
        ctx: Any,
        executor: Executor,
        aliases: ParameterAliases,
        wanted: GradientSum,
        sums: _Sums | None,
        values: Sequence[Tensor],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.executor, ctx.wanted, ctx.sums = executor, wanted, sums
        ctx.aliases = aliases  # shared with other calls as long as the backward may still come
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_several(gradients)
        executor, wanted = ctx.executor, ctx.wanted
        with torch.no_grad():
            flat, found = _mean_terms(executor, wanted, gradients)
            sum_up = partial(_sum_up, executor, wanted, flat)
            if ctx.sums is None:
                sum_up().wait()
            else:
                if executor.may_leave_out:
                    named = zip(wanted.bucket.parameters, gradients, strict=True)
                    ctx.sums.touched.update(name for name, gradient in named if gradient is not None)
                ctx.sums.begin(wanted.number, sum_up)
        if torch.is_grad_enabled():  # create_graph=True
            depends_on = [one for one in gradients if one is not None and one.requires_grad]
            found = [_OnceDifferentiable.apply(one, *depends_on) for one in found]  # type: ignore[no-untyped-call]
        return (None, None, None, None, None, *found)


def _sum_up(executor: Executor, wanted: GradientSum, flat: Tensor) -> Pending:
    """Begin the sum of a bucket's terms over processes, in their own memory."""
    (group,) = wanted.bucket.groups
    return executor.transport.reduce(wanted.label, group, dict.fromkeys(executor.transport.owned, flat))


_LARGE = 1 << 15
"""Mean bytes of a bucket's gradients from which a second pass over its memory takes longer than a call of Python for
each of them."""


def _mean_terms(
    executor: Executor, wanted: GradientSum, gradients: Sequence[Tensor | None]
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """This process's terms of the mean of a bucket's gradients: one flat tensor, and its parts for each parameter.

    The memory is new, where that of the gradients may be someone else's, and becomes that of `.grad`.
    """
    (first, *_), count = gradients, executor.transport.processes
    if wanted.in_place and first is not None and first.is_contiguous() and not first.requires_grad:
        return first.div_(count).view(-1), gradients
    like = executor.store.original(wanted.bucket.parameters[0])
    flat = torch.empty(sum(wanted.sizes), dtype=like.dtype, device=like.device)
    parts = [part.view(shape) for part, shape in zip(flat.split(wanted.sizes), wanted.shapes, strict=True)]
    known = [part.zero_() if one is None else one for part, one in zip(parts, gradients, strict=True)]
    if flat.nbytes < _LARGE * len(parts):
        torch._foreach_copy_(parts, known)
        flat.div_(count)
    else:
        for part, one in zip(parts, known, strict=True):
            torch.div(one, count, out=part)
    return flat, parts


def _refuse_several(gradients: Sequence[Tensor | None]) -> None:
    """Refuse gradients that stand for several at once (is_grads_batched, vmap)."""
    try:
        [gradient.data_ptr() for gradient in gradients if gradient is not None]
    except (NotImplementedError, RuntimeError) as error:
        raise RuntimeFailure(
            "a compiled model was differentiated for several gradients at once (is_grads_batched, vmap), of which "
            "its devices see no single one; call torch.autograd.grad once for each, or use the plain model, "
            "`module` of the compiled one"
        ) from error


class ProgramFunction(torch.autograd.Function):
    """A whole call of the compiled model as one node of the caller's graph."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, explained: WeakMethod[Callable[[RuntimeError], RuntimeError]] | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """The results of a run for its inputs, which the parameters follow."""
        ctx.run, ctx.explained, ctx.given = run, explained, [tensor for tensor in tensors if tensor.requires_grad]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0))
        results = run.forward(list(tensors[: len(run.inputs)]), record=True)
        constant = [
            tensor
            for tensor, wants in zip(results, run.wanting, strict=True)
            if not wants or not (tensor.is_floating_point() or tensor.is_complex())
        ]
        ctx.mark_non_differentiable(*constant)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs and parameters."""
        differentiable = torch.is_grad_enabled()  # create_graph=True
        _refuse_several(gradients)
        ctx.run.enter_backward()
        with torch.no_grad(), recomputed_once():
            # Under a checkpoint this computes the forward again: here, where all processes are, and not at the first
            # step that needs it, where others wait for what this one has yet to send.
            try:
                _ = ctx.saved_tensors
                found = ctx.run.backward(gradients)
            except RuntimeError as error:
                explained = ctx.explained() if ctx.explained is not None and is_out_of_memory(error) else None
                if explained is not None:
                    raise explained(error) from error
                raise
        if differentiable:
            # What comes in may be a constant (1, for a sum); the results depend on inputs and parameters all the same,
            # which autograd has to find whichever of them it is asked for.
            once = _OnceDifferentiable.apply
            found = [None if one is None else once(one, *ctx.given) for one in found]  # type: ignore[no-untyped-call]
        return (None, None, *found)


class _OnceDifferentiable(torch.autograd.Function):
    """A gradient that raises when it is differentiated again, rather than counting as a constant."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *depends_on: Tensor) -> Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise RuntimeFailure(
            "second derivatives through a compiled model are refused (gradient penalties, Hessians: a gradient made "
            "with create_graph=True was differentiated); compute that term with the plain model, `module` of the "
            "compiled one"
        )
