"""One sentence of advice: this plan, plain data parallel, or one device."""

from __future__ import annotations

from collections.abc import Sequence

from parplan.planner.decision import Baseline

__all__ = ["advice"]

# Closer than this, the simpler habit is worth more than the difference.
WORTH_IT = 0.03


def advice(step_s: float, rivals: Sequence[Baseline]) -> str:
    """What to do, given the step of the plan and what the usual ways would take."""
    by_name = {rival.name: rival for rival in rivals}
    one, data = by_name.get("one device"), by_name.get("pure data parallel")
    if one is not None and one.fits and one.step_s is not None and one.step_s <= step_s * (1 + WORTH_IT):
        which = f", a {one.on}" if one.on else ""
        return f"Use one device{which}: more of them do not make this step faster."
    if data is not None and data.fits and data.step_s is not None and data.step_s <= step_s * (1 + WORTH_IT):
        where = f" on {data.on}" if data.on else ""
        return f"Use plain data parallel{where}: it is {_closeness(data.step_s / step_s)} and needs no planning."
    legal = [rival for rival in rivals if rival.fits and rival.step_s is not None]
    if not legal:
        return "Use this plan: none of the usual ways is legal and fits these devices."
    best = min(legal, key=lambda rival: rival.step_s or 0.0)
    ratio = (best.step_s or 0.0) / step_s
    if ratio < 1 - WORTH_IT:
        return f"Do not use this plan: {best.name} is {1 / ratio:.2f}x as fast."
    if ratio <= 1 + WORTH_IT:
        return f"Use this plan: written by hand it would be {best.name}, which comes within {WORTH_IT:.0%} of it."
    return f"Use this plan: {ratio:.2f}x as fast as {best.name}, the best of the usual ways."


def _closeness(ratio: float) -> str:
    """A given plan may be far slower than the habit."""
    if ratio < 1 - WORTH_IT:
        return f"{1 / ratio:.2f}x as fast as this plan"
    return f"within {WORTH_IT:.0%} of the best plan"
