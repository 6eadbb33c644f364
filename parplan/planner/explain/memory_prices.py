"""Prices of the decisions that save memory: each undone in the chosen plan, with everything else as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from parplan.plan import SAVED, SCHEDULES, STATES, Plan
from parplan.planner.decision import Prediction, Without
from parplan.planner.search.context import Case
from parplan.planner.search_space.verifier import is_legal

__all__ = ["memory_prices"]


def memory_prices(
    case: Case,
    plan: Plan,
    step: Prediction,
    sized: Callable[[int], Case | None],
    predicted: Callable[[Case, Plan], Prediction],
) -> tuple[Without, ...]:
    """The step and the memory of a plan without its recomputation, its state in slices, its micro-batches.

    Nothing is searched: a step that is shorter and does not fit says what the decision costs and saves, one that fits
    and is longer that it is taken for speed.

    Args:
        case: of the plan's number of micro-batches.
        step: what the plan itself takes.
        sized: the case at the size of so many micro-batches, counted in those that were asked for; None where there is
            none.
    """
    found = list[Without]()
    for name, own, other in _undone(case, plan, sized):
        if not is_legal(other, own.graph):
            continue
        changed = predicted(own, other)
        peak, _ = case.cluster.fullest(changed.memory_bytes)
        found.append(Without(name, changed.step_s / step.step_s, peak))
    return tuple(found)


def _undone(case: Case, plan: Plan, sized: Callable[[int], Case | None]) -> Iterator[tuple[str, Case, Plan]]:
    """Name of each decision, and the plan without it, in its case."""
    if plan.replayed:
        layers = {name: replace(own, saved=SAVED[0]) for name, own in plan.layers.items()}
        yield "recomputation", case, replace(plan, layers=layers)
    if plan.sharded:
        layers = {name: replace(own, state=STATES[0]) for name, own in plan.layers.items()}
        yield "state in slices", case, replace(plan, layers=layers)
    if plan.micro_batches > 1 and plan.schedule == SCHEDULES[0] and not case.request.asked_micro_batches:
        whole = sized(1)
        if whole is not None:
            yield "micro-batches", whole, replace(plan, micro_batches=1)
