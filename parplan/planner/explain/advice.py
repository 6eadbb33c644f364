"""One sentence of advice: this plan, plain data parallel, or one device."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.planner.decision import Baseline
from parplan.planner.search_space.verifier import uneven_replicas

__all__ = ["advice", "advised", "better_batch"]

DATA = "pure data parallel"

# A simpler plan that comes closer than this is preferred.
MARGIN = 0.03
# A larger batch is named where it rounds to this gain in samples/s, in percent.
NAMED_GAIN = 1


def better_batch(plan: Plan, graph: LayerGraph) -> str:
    """A sentence on the next batch that the replicas divide; empty where that brings next to nothing.

    The largest part of a batch decides how long a step takes, so one whose parts are all as large takes no longer.
    """
    counts = uneven_replicas(plan, graph)
    each = lcm(*counts)
    batch = -(-plan.batch // each) * each
    gain = round(100 * (batch / plan.batch - 1))
    if gain < NAMED_GAIN or any(-(-plan.batch // count) * count != batch for count in counts):
        return ""
    return f"{batch} divides by {' and '.join(map(str, counts))}: +{gain}% samples/s."


def advised(step_s: float, baselines: Sequence[Baseline]) -> str:
    """The name of the baseline to use instead of a plan of `step_s` seconds; empty where the plan is better.

    Of those within the margin of the fastest the simplest: one device, then plain data parallel.
    """
    legal = {one.name: one.step_s for one in baselines if one.fits and one.step_s is not None}
    fastest_s = min(step_s, *legal.values()) if legal else step_s
    for name in ("one device", DATA):
        if name in legal and legal[name] <= (1 + MARGIN) * fastest_s:
            return name
    best = min(legal, key=lambda name: legal[name]) if legal else ""
    return best if legal and legal[best] < (1 - MARGIN) * step_s else ""


def advice(step_s: float, baselines: Sequence[Baseline], hint: str = "") -> str:
    """The advice in a sentence, given the plan's step in seconds and the baselines' steps.

    Args:
        hint: a sentence that follows wherever more than one device is advised.
    """
    legal = {one.name: one.step_s for one in baselines if one.fits and one.step_s is not None}
    where = {one.name: one.on for one in baselines}
    name = advised(step_s, baselines)
    if name == "one device":
        return f"Use one device{f' ({where[name]})' if where[name] else ''}: more of them do not make this step faster."
    best = min(legal, key=lambda name: legal[name]) if legal else ""
    if name == DATA:
        count = next(f" on {one.plan.devices} devices" if one.plan else "" for one in baselines if one.name == name)
        which = f" on {where[name]}" if where[name] else count
        # A given plan may be far slower than the baseline.
        faster = legal[name] < (1 - MARGIN) * step_s
        close = (
            f"{step_s / legal[name]:.2f} x as fast as this plan"
            if faster
            else f"within {100 * MARGIN:.0f} % of the fastest plan found"
        )
        text = f"Use plain data parallel{which}: {close}."
    elif not legal:
        text = "Use this plan: none of the usual ways is legal and fits these devices."
    elif name:
        text = f"Use {name} instead of this plan: {step_s / legal[name]:.2f} x as fast."
    elif legal[best] <= (1 + MARGIN) * step_s:
        text = f"Use this plan: written by hand it would be {best}, which comes within {100 * MARGIN:.0f} % of it."
    else:
        text = f"Use this plan: {legal[best] / step_s:.2f} x as fast as {best}, the best of the usual ways."
    return f"{text} {hint}" if hint else text
