"""One line per layer that says why it is placed as it is, against its best alternative."""

from __future__ import annotations

from collections.abc import Sequence

from parplan.graph.axes.table import unknown_ops
from parplan.graph.layer_graph import Layer
from parplan.graph.sites import is_repeatable, why_whole
from parplan.planner.explain.what_if import Change, WhatIf
from parplan.planner.search_space.formulation import Option
from parplan.planner.solver.problem import Problem, evaluate

__all__ = ["against", "only_way", "reason", "time_text"]


def reason(
    layer: Layer,
    options: Sequence[Option],
    index: int,
    choice: Sequence[int],
    problem: Problem,
    what_if: WhatIf,
    followed: str | None = None,
) -> str:
    """Why the chosen strategy of node `index`: what its best alternative would cost.

    `followed` names the layer whose layout it takes over unchanged, if it does.
    """
    now = options[choice[index]].strategy
    changes = [c for c in what_if.changes(index) if options[c.strategy].strategy.describe() != now.describe()]
    if not changes:
        return only_way(layer)
    best = next((c for c in changes if c.total_s >= 0 or _fits(problem, choice, index, c)), None)
    if best is None:
        return "every other way needs more memory than there is"
    if followed and best.total_s > 0:
        return f"follows {followed}; any other way costs {time_text(best.total_s)}"
    return against(options[best.strategy].strategy.describe(), best)


def _fits(problem: Problem, choice: Sequence[int], index: int, change: Change) -> bool:
    tried = [*choice]
    tried[index] = change.strategy
    return evaluate(problem, tried).feasible


def only_way(layer: Layer) -> str:
    """Words for a layer that has no other strategy."""
    if layer.is_loss:
        return "a loss is never sharded, and it needs all samples"
    whole = layer.batch is None and not layer.constant and not layer.axes
    if whole and (why := why_whole(layer.nodes)):
        return f"{why}, so it runs whole"
    if whole and not is_repeatable(layer.nodes):
        return "its backward needs the whole gradient, so it runs once, on one device"
    if whole and (unknown := unknown_ops(layer.nodes)):
        return f"parplan does not know how {' and '.join(unknown)} treats samples, so it runs whole"
    if whole:
        return "its samples depend on each other and it has no axis to cut"
    return "the rules leave no other way on these devices"


def against(other: str, change: Change) -> str:
    """What another strategy costs, and mostly for what."""
    if abs(change.total_s) < 5e-8:
        return f"{other}: no slower, no faster"
    parts = {
        "slower compute": change.compute_s,
        "activations to move": change.transfer_s,
        "gradients to wait for": change.exposed_s,
    }
    if change.total_s < 0:
        parts = {
            "less compute": -change.compute_s,
            "less to move": -change.transfer_s,
            "less to wait for": -change.exposed_s,
        }
    cause = max(parts, key=lambda text: parts[text])
    return f"{other}: {time_text(change.total_s)}, {cause}"


def time_text(seconds: float) -> str:
    """Seconds with a sign, in a unit that suits them."""
    size = abs(seconds)
    if size >= 1:
        return f"{seconds:+.2f} s"
    return f"{seconds * 1e3:+.2f} ms" if size >= 1e-4 else f"{seconds * 1e6:+.1f} µs"
