"""One sentence of advice: this plan, plain data parallel, or one device."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from parplan.fields import at_most
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.planner.decision import Baseline, Simpler
from parplan.planner.search_space.verifier import uneven_replicas

__all__ = ["advice", "advised", "better_batch", "same_plan"]

ONE = "one device"

# A plan by hand is advised instead of one that the user decided where it is faster by more than this, relative.
MARGIN = 0.03
# A larger batch is named where it rounds to this gain in samples/s, in percent.
NAMED_GAIN = 1


def same_plan(plan: Plan, baselines: Sequence[Baseline]) -> Baseline | None:
    """The plan by hand that `plan` is, if it is one."""
    alike = (one for one in baselines if one.micro_batches == plan.micro_batches)
    return next((one for one in alike if one.plan is not None and one.plan.layers == plan.layers), None)


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


def advised(plan: Plan, step_s: float, baselines: Sequence[Baseline], chosen: bool = False, fits: bool = True) -> str:
    """The name of the plan by hand that `plan`, of `step_s` seconds, is, or that is clearly faster; else empty.

    Args:
        chosen: the plan is the one that the tolerance prefers, so that a faster one is no advice.
        fits: whether the plan has room; else the fastest plan by hand that has is advised.
    """
    legal = {one.name: one.whole_s for one in baselines if one.fits and one.whole_s is not None}
    same = same_plan(plan, baselines)
    own = same.name if same is not None else ""
    best = min(legal, key=lambda name: legal[name]) if legal else ""
    if not fits:
        return best
    if own and chosen:
        return own
    return best if legal and best != own and legal[best] < (1 - MARGIN) * step_s else own


def advice(
    plan: Plan,
    step_s: float,
    baselines: Sequence[Baseline],
    simpler: Simpler | None = None,
    hint: str = "",
    fits: bool = True,
) -> str:
    """The advice in a sentence, given the plan with its step in seconds and the baselines' steps.

    Args:
        simpler: the fastest plan, where `plan` is a simpler one.
        hint: a sentence that follows wherever more than one device is advised.
        fits: whether the plan has room, as all have that were not decided by hand.
    """
    if not fits:
        instead = advised(plan, step_s, baselines, fits=False)
        return f"Use {instead or 'another plan'} instead of this plan, which does not fit."
    legal = {one.name: one.whole_s for one in baselines if one.fits and one.whole_s is not None}
    name, same = advised(plan, step_s, baselines, simpler is not None), same_plan(plan, baselines)
    same = same if same is not None and same.name == name else None
    close = f", within {at_most(1 - simpler.fastest_s / step_s)} of the fastest plan found" if simpler else ""
    if same is not None and name == ONE:
        where = f" ({same.on})" if same.on else ""
        return f"Use one device{where}{close}." if close else f"Use one device{where}: more of them are not faster."
    best = min(legal, key=lambda name: legal[name]) if legal else ""
    if same is not None:
        which = f" on {same.on or f'all {plan.devices} devices'}"
        text = f"Use {name.replace('pure', 'plain')}{which}{close}."
    elif name:
        text = f"Use {name} instead of this plan: {step_s / legal[name]:.2f} x as fast."
    elif not legal:
        text = "Use this plan: none of the usual ways is legal and fits these devices."
    elif legal[best] <= (1 + MARGIN) * step_s:
        text = f"Use this plan: {best}, the best of the usual ways, is about as fast."
    else:
        text = f"Use this plan: {legal[best] / step_s:.2f} x as fast as {best}, the best of the usual ways."
    return f"{text} {hint}" if hint else text
