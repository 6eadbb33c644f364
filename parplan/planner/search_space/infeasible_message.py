"""The message of a search without a plan: which device, when, which layers, how much is missing, and what would fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from parplan.cluster import Cluster, Link
from parplan.cost_models.costs import Moments
from parplan.cost_models.memory.layer_memory import training_state_bytes
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import CaptureError, PlanError
from parplan.fields import counted, size_text
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.resized import at_batch
from parplan.lowering.micro_batches import equal_size
from parplan.plan import SAVED, STATES
from parplan.planner.decision import Baseline, Prediction
from parplan.planner.search_space.formulation import Formulation
from parplan.planner.search_space.strategies import data_parallel
from parplan.planner.solver.problem import Cause, Solution

__all__ = ["enough_devices", "nearest_to_fitting", "why_not"]

_REMEDIES = (
    "possible remedies: more devices, devices with more memory (--memory), a smaller --batch, --dtype bf16, or an "
    "--optimizer with less state"
)


def why_not(formulation: Formulation, solution: Solution) -> str:
    """The message of a problem without a solution."""
    found = solution.infeasibility
    if found is None:
        return f"no plan was found in {solution.seconds:.3g} s, and none was excluded; give more --time-limit"
    if found.cause is not Cause.MEMORY:
        return f"no plan obeys the rules: {found.message}; relax them with --rules default"
    resource = found.resource or 0
    amounts: Counter[str] = Counter()
    for name, amount in zip(found.names, found.amounts, strict=True):
        amounts[name] += round(amount)
    times = {name: formulation.times(index) for index, name in enumerate(formulation.names)}
    held = ", ".join(
        f"{name}{f' and {times[name] - 1} like it' if times[name] > 1 else ''} {size_text(amount)}"
        for name, amount in amounts.most_common()
        if amount
    )
    limit = size_text(formulation.problem.limits[resource])
    where = formulation.problem.resource_name(resource)
    layers = tuple(formulation.layers)
    moment = "at any moment" if found.time is None else Moments(len(layers)).text(found.time, layers)
    lacks = f"{where} has {limit} and lacks {size_text(found.missing)} {moment}"
    return f"no plan fits: {lacks}, where the most is held by {held}\n  {_REMEDIES}"


def nearest_to_fitting(cluster: Cluster, step: Prediction, by_hand: Sequence[Baseline]) -> str:
    """The message of a search that ended with a plan which needs more memory than a device has, transfers included.

    Args:
        by_hand: plans of which one may lack less.
    """
    peaks = enumerate(zip(step.memory_bytes, cluster.memory_bytes, strict=True))
    tried = [(needed, limit, "", f"device {number}") for number, (needed, limit) in peaks]
    needs = [max(tried, key=lambda one: one[0] - one[1])]
    for own in by_hand:
        if own.memory_bytes is not None and own.limit_bytes is not None and own.memory_bytes > own.limit_bytes:
            needs.append((own.memory_bytes, own.limit_bytes, f", {own.name},", "a device"))
    needed, limit, name, device = min(needs, key=lambda one: one[0] - one[1])
    return (
        f"no plan was found that fits with its transfers: the nearest one{name} needs {size_text(needed)} on {device}, "
        f"which has {size_text(limit)} and lacks {size_text(needed - limit)}\n  {_REMEDIES}"
    )


def enough_devices(graph: LayerGraph, cluster: Cluster, precision: str, optimizer: str, counts: range) -> str:
    """The sentence that names the fewest devices, doubled, on which data parallel training fits with all state in
    slices, everything replayed and a sample at a time; empty where none do.

    Args:
        graph: of the whole batch, of equal devices with a process each.
        counts: from the least number of devices to look at.
    """
    batch, limit = graph.batch or 1, cluster.devices[0].memory_bytes
    held, count = training_state_bytes(graph, optimizer), counts.start // 2
    while (count := max(1, 2 * count)) in counts and count <= batch:
        if batch % count or held > count * limit:
            continue
        try:
            parts, small = batch // count, at_batch(graph, equal_size(graph, batch // count))
        except (CaptureError, PlanError):
            parts, small = 1, graph  # what needs all samples at once
        chosen = data_parallel(small, tuple(range(count)), STATES[-1], SAVED[-1])
        wider = Cluster.of(cluster.devices[0], count, (Link("any", count, 0.0, 1.0),))  # memory is that of any link
        peak = max(RooflineCosts(small, wider, precision, optimizer, micro_batches=parts).peaks(chosen))
        if peak <= limit:
            several = f"{parts} micro-batches of " if parts > 1 else ""
            which = f"{count} of these devices are enough: data parallel with state in slices and"
            return (
                f"{which if count > 1 else 'one of these devices is enough:'} recomputation, {several}"
                f"{counted(batch // parts, 'sample')}, takes {size_text(peak)}{' on each' if count > 1 else ''}"
            )
    return ""
