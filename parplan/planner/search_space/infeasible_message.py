"""Why there is no plan, in the reader's words: which device, when, which layers, how much is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from parplan.cluster import Cluster
from parplan.cost_models.costs import Moments
from parplan.fields import size_text
from parplan.planner.decision import Baseline, Prediction
from parplan.planner.search_space.formulation import Formulation
from parplan.planner.solver.problem import Cause, Solution

__all__ = ["nearest_to_fitting", "why_not"]

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
    limits = [device.memory_bytes for device in cluster.devices]
    peaks = enumerate(zip(step.memory_bytes, limits, strict=True))
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
