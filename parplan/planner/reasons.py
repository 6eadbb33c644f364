"""One line per layer that says why it is placed as it is, against its best alternative."""

from __future__ import annotations

from collections.abc import Sequence

from parplan.graph.layer_graph import Layer
from parplan.planner.formulate import Option
from parplan.planner.problem import Problem, evaluate
from parplan.planner.what_if import Change, WhatIf

__all__ = ["reason"]


def reason(
    layer: Layer, options: Sequence[Option], index: int, choice: Sequence[int], problem: Problem, what_if: WhatIf
) -> str:
    """Why the chosen strategy of node `index`: the seconds that its best alternative would cost."""
    now = options[choice[index]].strategy
    changes = [c for c in what_if.changes(index) if options[c.strategy].strategy.describe() != now.describe()]
    if not changes:
        return _only_way(layer)
    for change in changes:
        if change.total_s < 0 and not _fits(problem, choice, index, change):
            continue
        return _against(options[change.strategy], options[choice[index]], change)
    return "every other way needs more memory than there is"


def _fits(problem: Problem, choice: Sequence[int], index: int, change: Change) -> bool:
    tried = [*choice]
    tried[index] = change.strategy
    return evaluate(problem, tried).feasible


def _only_way(layer: Layer) -> str:
    if layer.is_loss:
        return "a loss is never sharded, and it needs all samples"
    if layer.batch is None and not layer.constant and not layer.axes:
        return "its samples depend on each other and it has no axis to cut"
    return "the rules leave no other way on these devices"


def _against(other: Option, now: Option, change: Change) -> str:
    name = other.strategy.describe()
    if abs(change.total_s) < 5e-8:
        return f"as fast as {name}"
    if change.total_s < 0:
        return f"{name} alone would save {_time(-change.total_s)}, but not with its neighbours"
    parts = {
        f"computes {_time(change.compute_s)} longer": change.compute_s,
        f"moves activations {_time(change.transfer_s)} longer": change.transfer_s,
        _reduction(other, now, change): change.exposed_s,
    }
    worst = max(parts, key=lambda text: parts[text])
    return f"saves {_time(change.total_s)} over {name}, which {worst}"


def _reduction(other: Option, now: Option, change: Change) -> str:
    return f"waits {_time(change.exposed_s)} longer for gradients"


def _time(seconds: float) -> str:
    size = abs(seconds)
    if size >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if size >= 1e-4 else f"{seconds * 1e6:.1f} µs"
