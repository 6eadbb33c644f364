"""One sentence of advice: this plan, plain data parallel, or one device."""

from __future__ import annotations

from collections.abc import Sequence

from parplan.planner.decision import Baseline

__all__ = ["advice"]

# Closer than this, the simpler habit is worth more than the difference.
WORTH_IT = 0.03


def advice(step_s: float, rivals: Sequence[Baseline]) -> str:
    """What to do, given the step of the plan and what the usual ways would take."""
    legal = {rival.name: rival.step_s for rival in rivals if rival.fits and rival.step_s is not None}
    where = {rival.name: rival.on for rival in rivals}
    near = {name for name, own_s in legal.items() if own_s <= (1 + WORTH_IT) * min(step_s, *legal.values())}
    if (one := "one device") in near:
        which = f", a {where[one]}" if where[one] else ""
        return f"Use one device{which}: more of them do not make this step faster."
    if (data := "pure data parallel") in near:
        which = f" on {where[data]}" if where[data] else ""
        return f"Use plain data parallel{which}: it is {_closeness(legal[data] / step_s)} and needs no planning."
    if not legal:
        return "Use this plan: none of the usual ways is legal and fits these devices."
    best = min(legal, key=lambda name: legal[name])
    ratio = legal[best] / step_s
    if ratio < 1 - WORTH_IT:
        return f"Do not use this plan: {best} is {1 / ratio:.2f}x as fast."
    if ratio <= 1 + WORTH_IT:
        return f"Use this plan: written by hand it would be {best}, which comes within {WORTH_IT:.0%} of it."
    return f"Use this plan: {ratio:.2f}x as fast as {best}, the best of the usual ways."


def _closeness(ratio: float) -> str:
    """A given plan may be far slower than the habit."""
    if ratio < 1 - WORTH_IT:
        return f"{1 / ratio:.2f}x as fast as this plan"
    return f"within {WORTH_IT:.0%} of the best plan"
