"""A whole call of a program as one differentiable function of its inputs and parameters.

Autograd is not asked to order anything across devices. One outer `autograd.Function` stands for the whole call, and its
backward takes the program's backward steps one by one. So every process meets every other one in the same order,
whatever the model, and nothing can wait in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from parplan.accelerators import as_current
from parplan.errors import RuntimeFailure
from parplan.runtime.compat import call_hooks_with_gradients_only, recomputed_once
from parplan.runtime.execution.executor import Executor, SingleDevice
from parplan.runtime.execution.run import Run
from parplan.runtime.out_of_memory import is_out_of_memory

__all__ = ["ProgramFunction", "run_program"]


def run_program(
    executor: Executor, inputs: Mapping[str, Tensor], explained: Callable[[RuntimeError], RuntimeError] | None = None
) -> list[Tensor]:
    """The program's results for the user's input values (by name); differentiable in inputs and parameters.

    Args:
        explained: a method that gives the error to raise in the backward in place of one of an allocation; the backward
            of one device alone is the caller's autograd's, whose errors are torch's.
    """
    single = executor.single_device
    if single is not None and not any(tensor.device != single.place for tensor in single.tensors):
        return _run_single(executor, single, inputs)
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
    run.end()
    return list(results)


def _run_single(executor: Executor, single: SingleDevice, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The results of a program that one device runs alone, in the order of the caller's autograd, which records it."""
    values = {name: tensor.to(single.place) for name, tensor in inputs.items()}
    with as_current(single.place):
        for step, code, states in single.calls:
            operands = [values[operand.slot] for operand in step.operands]
            own = executor.states(step, single.device, attached=True) if states is None else states
            results = executor.run_code(step, single.device, code, (*operands, *own))
            for result, tensor in zip(step.results, results, strict=True):
                values[result.slot] = tensor
            for slot in executor.last_reads[id(step)]:
                values.pop(slot, None)
    return [values[slot] for slot in executor.program.outputs]


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
        try:
            [gradient.data_ptr() for gradient in gradients if gradient is not None]
        except (NotImplementedError, RuntimeError) as error:
            raise RuntimeFailure(
                "a compiled model was differentiated for several gradients at once (is_grads_batched, vmap), of which "
                "its devices see no single one; call torch.autograd.grad once for each, or use the plain model, "
                "`module` of the compiled one"
            ) from error
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
