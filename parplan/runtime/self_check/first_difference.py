"""Finds the first layer at which a planned program leaves the plain module, for the message of an error.

The captured graph is run once more in one piece, layer by layer. Where it differs from the values of the plain module's
parts, capture has lost something; where the planned program differs from it, the plan is carried out wrongly. Where all
values agree, gradients differ: the layers are walked from the last one back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

from parplan.compat import pytree
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer, local_module
from parplan.graph.user_line import code_line
from parplan.lowering.program import Compute, Forward, Join, Transfer
from parplan.plan import Strategy
from parplan.runtime.calls import ModelCall
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.run import Run
from parplan.runtime.self_check.checked_step import StepValues, begin_forward, isolated, plain_step, with_callers_modes
from parplan.runtime.self_check.comparison import projected, relative_difference
from parplan.runtime.self_check.double_copy import double_casts
from parplan.runtime.self_check.gathered_batch import Batch, returned_leaves
from parplan.runtime.self_check.step_comparison import CheckedModel, StepDifference
from parplan.runtime.self_check.suspects import suspects
from parplan.runtime.transport.base import block_values

__all__ = ["FirstDifference", "first_difference"]

_TOLERANCE = 1e-3  # of a value's largest element; in float64 differences are far below or far above


@dataclass(frozen=True)
class FirstDifference:
    """The first layer at which two steps differ.

    Args:
        layer: its name; None where all layers agree one by one.
        text: sentences that say so, and what in the model's code is likely to be the reason.
    """

    layer: str | None
    text: tuple[str, ...]


def first_difference(subject: CheckedModel, batch: Batch, found: StepDifference) -> FirstDifference:
    """Name the first layer that differs; every process of the comparison has to call this.

    Args:
        subject: whose step differs.
        batch: on which samples.
        found: the differences.
    """
    module, graph = subject.module, subject.captured.graph
    alone = isolated(module, graph, subject.gradients)
    watch, recorded = suspects(module, graph), _module_outputs(module)
    casts = double_casts(subject.double)
    with subject.whole(), with_callers_modes(), alone, casts, watch as seen, recorded as outputs:
        plain_step(module, batch.whole.first(None), subject.training, None)
    executor = subject.programs.checking_executor(subject.captured, batch.sizes, keep=False)
    with subject.whole(), isolated(module, graph, subject.gradients):
        whole = _run_whole(module, executor, batch, subject.gradients)
    with isolated(module, graph, False):
        written = _written_slots(module, executor, batch.own.first(None))
    off = found.off
    forward = not off or any(name.startswith("result ") for name in off)
    place = _lost_in_capture(graph, outputs, whole, found.plain) if forward else None
    if place is None and forward:
        place = _lost_by_plan(graph, executor, written, whole)
    if place is None:
        place = _gradient_lost(graph, found.plain, whole, off)
    for name in sorted(off & {*graph.buffers.values()}) if place is None else ():
        users = [n for n, layer in graph.layers.items() if name in (graph.buffers.get(b) for b in layer.buffers)]
        text = f"buffer {name} has another value after the step" + (f"; {', '.join(users)} use it" if users else "")
        place = place or FirstDifference(users[0] if users else None, (text,))
    reasons = seen.text()
    if place is None:
        text = "no layer differs by itself: what goes into the model or comes out of it is put together otherwise"
        return FirstDifference(None, (text, *reasons))
    layer = graph.layers.get(place.layer) if place.layer is not None else None
    line = next(filter(None, map(code_line, layer.nodes if layer is not None else ())), "")
    return FirstDifference(place.layer, (*place.text, *([f"  at {line}"] if line else []), *reasons))


@contextmanager
def _module_outputs(module: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Records the tensors that every module returns, under the names that layers have: "conv1", "relu@1"."""
    calls, found = Counter[str](), dict[str, list[Tensor]]()

    def record(path: str, part: nn.Module, args: Any, result: Any) -> None:
        call = calls[path]
        calls[path] += 1
        tensors = [leaf.detach().clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        found[path if call == 0 else f"{path}@{call}"] = tensors

    with ExitStack() as stack:
        for path, part in module.named_modules():
            stack.enter_context(part.register_forward_hook(partial(record, path)))
        yield found


@dataclass(frozen=True)
class _Whole:
    """Values of the captured graph, run layer by layer in one piece, and the gradients of its parameters by name."""

    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]


def _run_whole(module: nn.Module, executor: Executor, batch: Batch, gradients: bool) -> _Whole:
    graph, call = executor.graph, batch.whole.first(None)
    begin_forward(module, graph)
    known: dict[str, Tensor] = dict(graph.constants)
    known |= {name: module.get_parameter(path) for name, path in graph.parameters.items()}
    known |= {name: module.get_buffer(path).detach().clone() for name, path in graph.buffers.items()}
    known |= call.named(graph.user_inputs)
    values: dict[str, Tensor] = {}
    for layer in graph.layers.values():
        names = [*layer.inputs, *layer.parameters, *layer.buffers]
        part = LocalLayer(layer, Strategy(), 0, call.batch if call.batch is not None else 1)
        code = local_module(graph, [part], names, layer.outputs)
        executor.hooks.apply(code, 0)
        results = code(*(known[name] for name in names))
        known |= dict(zip(layer.outputs, results, strict=True))
        values |= {name: result.detach().clone() for name, result in zip(layer.outputs, results, strict=True)}
    found: dict[str, Tensor | None] = {}
    if gradients:
        results = [known[value] for value in returned_leaves(graph) if isinstance(value, str)]
        loss = projected(results, batch.whole_weights(graph, results))
        parameters = {path: known[name] for name, path in graph.parameters.items() if known[name].requires_grad}
        found = dict.fromkeys(parameters)
        if loss.requires_grad and parameters:
            given_back = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            found = dict(zip(parameters, given_back, strict=True))
    return _Whole(values, found)


def _lost_in_capture(
    graph: LayerGraph, outputs: Mapping[str, Sequence[Tensor]], whole: _Whole, plain: StepValues
) -> FirstDifference | None:
    """The first layer whose value in the captured graph is not the module's."""
    between: list[str] = []
    for name, layer in graph.layers.items():
        tensors = outputs.get(name, [])
        if len(tensors) != len(layer.outputs):
            between.append(name)  # ops between modules: nothing of the plain model's to compare with
            continue
        for value, tensor in zip(layer.outputs, tensors, strict=True):
            if _differs(tensor, whole.values[value]):
                before = [other for other in between if nx.has_path(graph.digraph, other, name)]
                return _captured_otherwise(before[0] if before else name)
        between = [other for other in between if not nx.has_path(graph.digraph, other, name)]
    for leaf, result in zip(returned_leaves(graph), plain.results, strict=False):
        made = whole.values.get(str(leaf))
        if made is not None and isinstance(result, Tensor) and _differs(result, made):
            return _captured_otherwise(graph.producer[str(leaf)])
    return None


def _captured_otherwise(name: str) -> FirstDifference:
    text = f"the first layer that differs is {name}: the captured graph, run whole, does not give the module's value"
    return FirstDifference(name, (text,))


@dataclass(frozen=True)
class _Written:
    """A slot that a step of the planned program wrote, and its parts by device."""

    step: Forward
    slot: str
    held: Mapping[int, Tensor]


@torch.no_grad()
def _written_slots(module: nn.Module, executor: Executor, call: ModelCall) -> list[_Written]:
    """The values that every step of a forward of the planned program writes, in order."""
    begin_forward(module, executor.graph)
    inputs = call.named(executor.graph.user_inputs)
    run = Run(executor, tuple(inputs), (), kept=executor.program.slots.keys())
    parts, found = run.begin(list(inputs.values())), list[_Written]()
    for step in executor.program.forward:
        run.go_forward([step], parts, record=False)
        if isinstance(step, Compute):
            slots = tuple(result.slot for result in step.results)
        else:
            slots = (step.target,) if isinstance(step, (Transfer, Join)) else step.targets
        for slot in slots:
            held = {device: tensor.detach().clone() for device, tensor in parts.get(slot).items()}
            found.append(_Written(step, slot, held))
    run.finish(parts)
    return found


def _lost_by_plan(
    graph: LayerGraph, executor: Executor, written: Sequence[_Written], whole: _Whole
) -> FirstDifference | None:
    """The first step of the planned program that leaves another value than the captured graph."""
    for one in written:
        step, slot = one.step, executor.program.slots[one.slot]
        value = whole.values.get(slot.value)
        if value is None or slot.pass_number is not None or slot.layout.partial or tuple(value.shape) != slot.shape:
            continue
        for device, tensor in one.held.items():
            if _differs(block_values(value, slot.blocks[device]), tensor):
                name = graph.producer[slot.value]
                if isinstance(step, Compute):
                    others = f" (it runs with {', '.join(n for n in step.layers if n != name)})"
                    what = f"computed on device {device}{others if len(step.layers) > 1 else ''}"
                else:
                    what = f"moved to device {device} ({step.text()})"
                which = graph.label(slot.value)
                text = f"the first layer that differs is {name}: {which} is wrong where it is {what}"
                return FirstDifference(name, (text,))
    return None


def _gradient_lost(graph: LayerGraph, plain: StepValues, whole: _Whole, off: Set[str]) -> FirstDifference | None:
    """Going backward, the first layer whose parameters' gradients differ."""
    for name, layer in reversed(list(graph.layers.items())):
        paths = [graph.parameters[parameter] for parameter in layer.parameters]
        for path in paths:
            if path in off and path in plain.gradients:
                wanted, found = plain.gradients[path], whole.gradients.get(path)
                if wanted is not None and found is not None:
                    captured = _differs(wanted, found)
                else:
                    present = wanted if wanted is not None else found
                    captured = present is not None and bool(present.abs().max() > 0)
                readers = [reader for value in layer.outputs for reader in graph.consumers(value)]
                where = f"{name}, or behind it in {', '.join(dict.fromkeys(readers))}," if readers else name
                who = (
                    "the captured graph has another one" if captured else "the captured graph, run whole, has it right"
                )
                text = (
                    f"values agree, gradients do not: going backward the first layer that differs is {name} "
                    f"({path}); it goes wrong in {where} and {who}"
                )
                return FirstDifference(name, (text,))
    return None


def _differs(wanted: Tensor, found: Tensor) -> bool:
    return not relative_difference(wanted, found, 0.0) <= _TOLERANCE
