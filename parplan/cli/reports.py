"""`parplan diff` and `parplan analyze --check`: comparisons of plans and reports that were kept."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parplan.report.plan_diff import plan_diff, render_diff
from parplan.report.saved import SavedPlan, load_plan_or_report

if TYPE_CHECKING:
    from rich.console import Console

    from parplan.cli.options import TargetOptions
    from parplan.plan import Plan
    from parplan.planner.decision import Decision

__all__ = ["Answer", "check", "diff"]

Answer = tuple[Callable[["Console"], None], bool]
"""What prints the text of a command, and whether all is as it should be."""


def diff(first: str, second: str, target: TargetOptions, options: Namespace) -> Answer:
    """Compare two plans or reports; good if they run alike. With a target both are priced for the devices of `options`.

    Raises:
        ParplanError: a file, or the target, cannot be used.
    """
    old, new = load_plan_or_report(first), load_plan_or_report(second)
    steps_s: dict[str, tuple[float, float]] = {}
    if old.report is not None and new.report is not None:
        steps_s["as reported"] = old.report["predicted"]["step_s"], new.report["predicted"]["step_s"]
    remark = ""
    if target.target is not None:
        (before_s, before_on), (after_s, after_on) = (_priced(one.plan, target, options) for one in (old, new))
        steps_s[f"of {target.target}"] = before_s, after_s
        on = before_on if before_on == after_on else f"{before_on}, and on {after_on}"
        remark = f"{target.target} is priced on {on}, with {options.precision} and {options.optimizer}."
    found = plan_diff(old.plan, new.plan)
    return lambda console: render_diff(found, (first, second), steps_s, console, remark), found.runs_alike


def _priced(plan: Plan, target: TargetOptions, options: Namespace) -> tuple[float, str]:
    """The predicted step of a plan in seconds, at its own batch unless another is given, and on which devices."""
    with contextlib.redirect_stdout(sys.stderr):
        from parplan.cost_models.devices.requested import ClusterRequest, find_cluster
        from parplan.graph.capture.capture import capture
        from parplan.planner.request import PlanRequest
        from parplan.pricing import Pricing

        count = None if options.cluster is not None else plan.devices
        found = find_cluster(ClusterRequest(count, options.gpu, options.link, options.memory_bytes, options.cluster))
        model = replace(target, batch=target.batch or plan.batch).load()
        graph = capture(model.module, model.args, model.kwargs)
        request = PlanRequest(precision=options.precision, optimizer=options.optimizer)
        step_s = Pricing(found.cluster, request, found.device).predicted(graph, plan).step.step_s
        return step_s, found.cluster.describe()


def check(saved: SavedPlan, decision: Decision, tolerance: float) -> Answer:
    """Compare a decision with a report that was kept: good if it runs alike and its step is not slower.

    Args:
        tolerance: share of the kept report's step that the new one may take longer.
    """
    assert saved.report is not None
    report: Mapping[str, Any] = saved.report
    before_s, after_s = report["predicted"]["step_s"], decision.prediction.step_s
    found = plan_diff(saved.plan, decision.plan)
    slower = after_s > before_s * (1 + tolerance)
    reasons = ["the plan changed"] * (not found.runs_alike)
    reasons += [f"the step is {after_s / before_s - 1:.1%} slower, and {tolerance:.1%} is allowed"] * slower

    def write(console: Console) -> None:
        render_diff(found, (saved.name, "now"), {"as reported": (before_s, after_s)}, console)
        verdict = f"CHECK FAILED: {'; '.join(reasons)}." if reasons else "CHECK PASSED."
        console.print(verdict, markup=False, highlight=False, soft_wrap=True)

    return write, not reasons
