"""One sentence of advice: this plan, plain data parallel, or one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import lcm

from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.planner.decision import Baseline
from parplan.planner.search_space.verifier import uneven_replicas

__all__ = ["advice", "better_batch"]

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


def advice(step_s: float, baselines: Sequence[Baseline], hint: str = "") -> str:
    """The advice, given the plan's step in seconds and the baselines' steps.

    Args:
        hint: a sentence that follows wherever more than one device is advised.
    """
    legal = {one.name: one.step_s for one in baselines if one.fits and one.step_s is not None}
    where = {one.name: one.on for one in baselines}
    near = {name for name, own_s in legal.items() if own_s <= (1 + MARGIN) * min(step_s, *legal.values())}
    if (one := "one device") in near:
        which = f", a {where[one]}" if where[one] else ""
        return f"Use one device{which}: more of them do not make this step faster."
    text = _several_devices(step_s, legal, where, near)
    return f"{text} {hint}" if hint else text


def _several_devices(step_s: float, legal: Mapping[str, float], where: Mapping[str, str], near: Set[str]) -> str:
    """The advice where one device is not as good: plain data parallel, this plan, or another."""
    if (data := "pure data parallel") in near:
        which, ratio = f" on {where[data]}" if where[data] else "", legal[data] / step_s
        # A given plan may be far slower than the baseline.
        close = f"within {MARGIN:.0%} of the best plan"
        close = f"{1 / ratio:.2f}x as fast as this plan" if ratio < 1 - MARGIN else close
        return f"Use plain data parallel{which}: it is {close} and needs no planning."
    if not legal:
        return "Use this plan: none of the usual ways is legal and fits these devices."
    best = min(legal, key=lambda name: legal[name])
    ratio = legal[best] / step_s
    if ratio < 1 - MARGIN:
        return f"Do not use this plan: {best} is {1 / ratio:.2f}x as fast."
    if ratio <= 1 + MARGIN:
        return f"Use this plan: written by hand it would be {best}, which comes within {MARGIN:.0%} of it."
    return f"Use this plan: {ratio:.2f}x as fast as {best}, the best of the usual ways."
