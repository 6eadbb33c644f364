"""Runs one step of a plain module and of its planned program, for comparison: results, gradients, buffers.

Neither leaves a trace: no `.grad` is written, and what forwards write is put back. Random draws are constants where the
captured graph has any. The user's module and tensor hooks are not called, on either side: they may count, log or stop
training, and would see samples twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parplan.accelerators import as_current
from parplan.compat import pytree
from parplan.graph.attributes.surroundings import callers_modes, seen_modes
from parplan.graph.layer_graph import Constant, LayerGraph
from parplan.graph.user_code.module_hooks import without_hooks
from parplan.runtime.calls import ModelCall
from parplan.runtime.compat import without_tensor_hooks
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.program_function import run_program
from parplan.runtime.execution.random_state import draws_any
from parplan.runtime.preserve_state import preserved_by_forward, preserved_modes, without_gradients
from parplan.runtime.self_check.comparison import projected
from parplan.runtime.self_check.constant_draws import ConstantDraws
from parplan.runtime.self_check.gathered_batch import returned_leaves

__all__ = [
    "StepValues",
    "Weigh",
    "begin_forward",
    "end_forward",
    "executed_step",
    "in_plain_step",
    "isolated",
    "plain_step",
    "with_callers_modes",
]


@dataclass(frozen=True)
class StepValues:
    """The values that one step leaves.

    Args:
        results: per leaf of the nested result, a tensor or another value.
        gradients: of the projection of all results, by parameter; None where none arrived.
        input_gradients: by the position of the input among the call's leaves.
        buffers: by name, after the step.
    """

    results: tuple[Any, ...]
    gradients: Mapping[str, Tensor | None]
    input_gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


# The weights of a step's results in its loss.
Weigh = Callable[[Sequence[Tensor]], Sequence[Tensor]]

_in_plain_step = ContextVar("in a step of a plain module", default=False)


def in_plain_step() -> bool:
    """Whether this is called by a forward that `plain_step` runs, which has the samples of all processes."""
    return _in_plain_step.get()


def plain_step(
    module: nn.Module, call: ModelCall, training: bool, weigh: Weigh | None, accumulated: bool = False
) -> StepValues:
    """One step of the module itself.

    Args:
        weigh: weighs results for the loss whose gradients are taken; None for no gradients.
        accumulated: read gradients from `.grad`, which are put back: checkpoints with use_reentrant=True refuse
            `torch.autograd.grad`.
    """
    with preserved_modes(module):
        if training != module.training:
            module.train(training)  # as its capture does
        args, kwargs = call.arguments
        before = _in_plain_step.set(True)
        try:
            leaves = pytree.tree_leaves(module(*args, **kwargs))
        finally:
            _in_plain_step.reset(before)
        return _values(module, call, leaves, weigh, accumulated)


def executed_step(module: nn.Module, executor: Executor, call: ModelCall, weigh: Weigh | None) -> StepValues:
    """One step of a program made from the module."""
    graph = executor.graph
    begin_forward(module, graph)
    results = iter(run_program(executor, call.named(graph.user_inputs)))
    end_forward(module, graph)
    leaves = [
        leaf.value if isinstance(leaf, Constant) else graph.as_returned(leaf, next(results))
        for leaf in returned_leaves(graph)
    ]
    return _values(module, call, leaves, weigh)


def begin_forward(module: nn.Module, graph: LayerGraph) -> None:
    """Bring counters and numbers of the module up to date before a forward."""
    _count(module, graph, graph.counters.keys() - graph.late)
    for name, number in graph.numbers.items():
        number.fill(graph.constants[name])


def end_forward(module: nn.Module, graph: LayerGraph) -> None:
    """Count a forward that has run to its end."""
    _count(module, graph, graph.counters.keys() & graph.late)


def _count(module: nn.Module, graph: LayerGraph, counters: Set[str]) -> None:
    if not counters:  # as of most models, whose every call asks
        return
    with torch.no_grad():
        for name in counters:
            counter = module.get_buffer(graph.buffers[name])
            with as_current(counter.device):
                counter.add_(graph.counters[name])


def _values(
    module: nn.Module, call: ModelCall, leaves: Sequence[Any], weigh: Weigh | None, accumulated: bool = False
) -> StepValues:
    """The values of a step whose forward has run, and the gradients of its results' projection."""
    gradients: dict[str, Tensor | None] = {}
    input_gradients: dict[str, Tensor | None] = {}
    if weigh is not None:
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        inputs = {f"input {i}": t for i, t in enumerate(call.leaves) if isinstance(t, Tensor) and t.requires_grad}
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        loss, wanted = projected(tensors, weigh(tensors)), [*parameters.values(), *inputs.values()]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if loss.requires_grad and wanted and accumulated:
            with without_gradients(wanted):
                loss.backward()
                found = [tensor.grad for tensor in wanted]
        elif loss.requires_grad and wanted:
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
        gradients = dict(zip(parameters, found, strict=False))
        input_gradients = dict(zip(inputs, found[len(parameters) :], strict=True))
    results = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    return StepValues(results, gradients, input_gradients, buffers)


@contextmanager
def with_callers_modes() -> Iterator[None]:
    """A context in which a forward that asks for torch's modes (gradients, inference) sees those of its caller."""
    with callers_modes(), seen_modes(lambda name, value: None):
        yield


@contextmanager
def isolated(module: nn.Module, graph: LayerGraph, gradients: bool) -> Iterator[ConstantDraws | None]:
    """A context in which one step leaves no trace; gives the mode that replaces random draws, where there are any.

    Args:
        graph: whose ops say whether random numbers are drawn.
        gradients: whether autograd records.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(gradients))
        stack.enter_context(preserved_by_forward(module))
        stack.enter_context(without_hooks(module))
        stack.enter_context(without_tensor_hooks(module.parameters()))
        # A checkpoint around must not see this step. Detached: a graph that holds its own results would stay.
        stack.enter_context(saved_tensors_hooks(Tensor.detach, lambda tensor: tensor))
        # Casts of weights made here must not serve the step itself: they may lack a graph.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        constants = ConstantDraws() if draws_any(graph, graph.layers) else None
        if constants is not None:
            stack.enter_context(constants)
        yield constants
