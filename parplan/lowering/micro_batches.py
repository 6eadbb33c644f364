"""Micro-batches: parts of the batch that go forward and backward one after another, for one update of the weights.

    for every micro-batch:  forward; loss; backward, gradients added to those of the ones before
    sums of the gradients over devices; update

Only one micro-batch's activations are there at a time. The step's numbers have to be those of the whole batch, so every
result has to follow from those of the micro-batches (gradient accumulation): samples put one behind another, a mean
over samples weighed by what each micro-batch counts, a sum added up. Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from parplan.errors import PlanError
from parplan.graph.axes.loss_ops import BATCH_MEAN, BATCH_SUM
from parplan.graph.layer_graph import LayerGraph, once_per_graph
from parplan.graph.sites import site_of
from parplan.plan import SCHEDULES, Plan, Scheme

__all__ = ["Combination", "How", "check_micro_batches", "combinations", "equal_size"]

aten = torch.ops.aten


class How(Enum):
    """How a result of the whole batch follows from those of its micro-batches."""

    SAMPLES = "samples, one micro-batch behind another"
    MEAN = "a mean over samples, weighed by what each micro-batch counts"
    SUM = "a sum over samples, added up"
    SAME = "the same in every micro-batch"


@dataclass(frozen=True)
class Combination:
    """How a result of the whole batch follows from those of its micro-batches.

    Args:
        how: as said there.
        counts: of a mean, the value [samples, ..., 2] whose last column is what it counts (ignored targets count
            nothing, class weights their weight); None: every sample counts 1.
    """

    how: How
    counts: str | None = None


SAME = Combination(How.SAME)

# Ops that keep a number what it is: a mean, or a sum.
_KEEPING = {
    aten.neg.default, aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default,
    aten.to.dtype, aten.view.default, aten.reshape.default, aten.squeeze.default, aten.unsqueeze.default,
}  # fmt: skip
_ADDING = {aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar}
_MULTIPLYING = {aten.mul.Tensor, aten.mul.Scalar}
_DIVIDING = {aten.div.Tensor, aten.div.Scalar}


def equal_size(graph: LayerGraph, count: int) -> int:
    """Samples of each of so many equal micro-batches, which is what plans are priced for.

    Raises:
        PlanError: they do not divide the batch, or the step would have other numbers than the whole batch's.
    """
    if count == 1:
        return graph.batch or 1
    if graph.batch is None or graph.batch % count:
        raise PlanError(
            f"a batch of {graph.batch} has no {count} equal micro-batches to be planned for; use a number that divides "
            "it (any batch can be run)"
        )
    combinations(graph)
    return graph.batch // count


def check_micro_batches(plan: Plan, graph: LayerGraph) -> None:
    """Refuse micro-batches whose step would have other numbers than the whole batch's.

    Raises:
        PlanError: passes beside them, fewer samples than micro-batches, a schedule of one, or a layer, buffer or result
            that needs all samples at once.
    """
    count = plan.micro_batches
    if count == 1 and plan.schedule != SCHEDULES[0]:
        raise PlanError(
            f"the plan has schedule {plan.schedule}, which is for several micro-batches, and 1; use micro_batches 2 or "
            f'more, or schedule "{SCHEDULES[0]}"'
        )
    if count == 1:
        return
    if plan.scheme is not Scheme.GATHER:
        raise PlanError(
            f"the plan has {count} micro-batches, and scheme {plan.scheme.value}, whose passes are parts of the batch "
            'too; use scheme "gather", or 1 micro-batch'
        )
    if graph.batch is None:
        raise PlanError(f"the plan has {count} micro-batches, and {graph.model} has no samples; use 1 micro-batch")
    if plan.batch < count:
        raise PlanError(f"the plan has {count} micro-batches of {plan.batch} samples; use at most {plan.batch}")
    combinations(graph)


@once_per_graph
def combinations(graph: LayerGraph) -> Mapping[str, Combination]:
    """How every result of the model follows from those of its micro-batches, by value.

    Raises:
        PlanError: a layer, a buffer or a result needs all samples at once.
    """
    if graph.buffer_updates:
        name = graph.label(next(iter(graph.buffer_updates)))
        raise _refused(name, "is written in the forward, once per micro-batch instead of once per step")
    if graph.stored or graph.containers.places or graph.containers.appended:
        raise _refused(graph.model, "leaves results on itself or in its arguments, of which each is a micro-batch's")
    known: dict[str, Combination] = {}
    for name, layer in graph.layers.items():
        if layer.mixes_batch:
            raise _refused(name, "takes its statistics of all samples, and would see one micro-batch's")
        if layer.batch is not None:
            known |= dict.fromkeys((node.name for node in layer.nodes), Combination(How.SAMPLES))
        elif not layer.reached:
            known |= dict.fromkeys((node.name for node in layer.nodes), SAME)
        else:
            for node in layer.nodes:
                known[node.name] = _combined(graph, name, node, known)
    found = {}
    for value in graph.results:
        own = known.get(value, SAME)
        found[value] = Combination(How.SAMPLES) if value in graph.batch_dims else own
        if found[value].how is How.SAMPLES and value not in graph.batch_dims:
            raise _refused(graph.label(value), "has no known dimension of samples")
    return found


def _combined(graph: LayerGraph, layer: str, node: fx.Node, known: Mapping[str, Combination]) -> Combination:
    """How what an op of a layer that needs all samples makes follows from micro-batches."""
    target, inputs = node.target, node.all_input_nodes
    if target in (BATCH_MEAN, BATCH_SUM):
        counted = bool(node.args[1])
        if target is BATCH_SUM:
            return Combination(How.SUM)
        return Combination(How.MEAN, inputs[0].name if counted else None)
    own = {each.name: _of(graph, each, known) for each in inputs}
    numbers = {one for one in own.values() if one.how in (How.MEAN, How.SUM)}
    if all(one is SAME for one in own.values()):
        return SAME
    first, second = (_operand(graph, operand, known) for operand in (*node.args, None, None)[:2])
    plain = site_of(node) is None and all(one.how is not How.SAMPLES for one in own.values())
    if plain and target in _ADDING and len(numbers) == 2:
        raise _refused(layer, f"adds {' and '.join(sorted(map(_words, numbers)))}, which micro-batches weigh otherwise")
    if plain and len(numbers) == 1:
        number = next(iter(numbers))
        # A constant is part of a mean, but would count in every term of a sum.
        added = target in _ADDING and (number.how is How.MEAN or first == second)
        scaled = (target in _MULTIPLYING and SAME in (first, second)) or (target in _DIVIDING and second == SAME)
        if added or scaled or (target in _KEEPING and first == number):
            return number
    raise _refused(layer, f"needs all samples at once ({target})")


def _of(graph: LayerGraph, node: fx.Node, known: Mapping[str, Combination]) -> Combination:
    """How a value that an op reads follows from micro-batches."""
    if node.name in graph.batch_dims:
        return Combination(How.SAMPLES)
    return known.get(node.name, SAME)


def _operand(graph: LayerGraph, operand: Any, known: Mapping[str, Combination]) -> Combination:
    return _of(graph, operand, known) if isinstance(operand, fx.Node) else SAME


def _words(one: Combination) -> str:
    return "a sum" if one.how is How.SUM else "a mean over targets" if one.counts else "a mean over samples"


def _refused(what: str, why: str) -> PlanError:
    return PlanError(f"{what}: {why}; use 1 micro-batch")
