"""The predicted step: its time with the parts that add up to it, and the memory of every device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from parplan.plan import SCHEDULES
from parplan.planner.decision import Decision, Prediction
from parplan.report import units
from parplan.report.page import Column, Page, Styled, TableRow

__all__ = ["print_prediction"]

SIMULATED = "of the device done last; lines above need not add up to it"
LEAST = 1e-3  # part of the step below which what is in no layer's line goes without saying

ROUNDING = 0.005  # shares are printed in percent


def print_prediction(page: Page, decision: Decision) -> None:
    """Print step time, parts, speedup and memory."""
    step = decision.prediction
    scale = units.step(step.step_s)
    headline = [f"{decision.plan.batch / step.step_s:,.0f} samples/s"] if step.step_s > 0 else []
    if decision.speedup and decision.cluster.count > 1:
        fits = next(one.fits for one in decision.baselines if one.name == "one device")
        headline.append(f"{decision.speedup:.2f} x as fast as one device{'' if fits else ' with enough memory'}")
    if decision.passes is not None and decision.passes.count > 1:
        headline.append(f"{decision.passes.count} passes")
    if decision.plan.micro_batches > 1:
        order = "" if decision.plan.schedule == SCHEDULES[0] else f" through stages ({decision.plan.schedule})"
        headline.append(f"{decision.plan.micro_batches} micro-batches{order}")
    rows = [_row("step", scale.text(step.step_s), "", ", ".join(headline), "bold")]
    # Where all lines add up to the step, what of the transfers is in no layer's line: results on their way back.
    rest_s, moved = step.transfer_s - sum(layer.transfer_s for layer in decision.layers), list[str]()
    if not step.simulated and rest_s > LEAST * step.step_s:
        moved.append(f"{units.time(rest_s).text(rest_s)} of it brings results back to all devices, in no line above")
    if step.batch_norm_s > LEAST * step.step_s:
        shared, share = units.time(step.batch_norm_s).text(step.batch_norm_s), step.batch_norm_s / step.step_s
        told = f"{shared} of it ({units.percent(share)} of the step) shares batch norm's statistics among replicas, so"
        saved = '`batch_norm="local"` takes each replica\'s own, as DDP does, and saves it'
        moved.append(f"{told} that they are those of the whole batch; {saved}")
    again_s = sum(layer.forward_s for layer in decision.layers if layer.strategy.saved == "replay")
    parts = [
        (
            "forward",
            step.forward_s,
            f"{units.time(again_s).text(again_s)} of it again, for the backward" * (again_s > 0),
        ),
        ("backward", step.backward_s, ""),
        ("transfer", step.transfer_s, "; ".join(moved)),
        ("reduce", step.exposed_reduce_s, _hidden(step)),
    ]
    if step.update_s > 0:
        parts.append(("update", step.update_s, "the optimizer's, of what each device holds"))
    if step.overhead_s > 0:
        parts.append(("runtime", step.overhead_s, "Python and autograd, whatever the plan"))
    for name, value, remark in parts:
        rows.append(_row(name, scale.text(value), units.percent(value / step.step_s) if value > 0 else "", remark))
    if step.high_s > step.low_s:
        ends = f"{scale.text(step.low_s)} to {scale.text(step.high_s)}"
        rows.append(_row("range", "", "", f"{ends}, by the uncertainty of each figure"))
    page.section("Predicted step", SIMULATED if step.simulated else "")
    page.table([Column(""), Column("")], [*rows, *_memory_rows(decision)])


def _row(name: str, figure: str, share: str, remark: str, style: str = "") -> TableRow:
    return TableRow(name, (Styled(figure, style), share), [Styled(remark, style or "dim")])


def _hidden(step: Prediction) -> str:
    """Text on gradient reductions: their time on the links, and the share that is hidden."""
    if step.reduce_s <= 0:
        return ""
    links = units.time(step.reduce_s).text(step.reduce_s)
    share = max(0.0, step.reduce_s - step.exposed_reduce_s) / step.reduce_s
    # Sums of devices that are done early are waited for by nobody, whatever else hides them.
    elsewhere = share > step.most_hidden + ROUNDING
    most = f", {units.percent(step.most_hidden)} at most" if step.most_hidden < 1 and not elsewhere else ""
    behind = "the backward pass and other devices' work" if elsewhere else "the backward pass"
    return f"the rest of {links} of gradient sums runs beside {behind} ({units.percent(share)}{most})"


def _memory_rows(decision: Decision) -> Iterator[TableRow]:
    """One line per run of devices whose figures read the same."""
    used, limits = decision.prediction.memory_bytes, decision.cluster.memory_bytes
    scale = units.size(used)
    name = "memory"
    for (text, limit), run in groupby(enumerate(used), key=lambda entry: (scale.text(entry[1]), limits[entry[0]])):
        members, most = dict(run), units.size(limit).text(limit)
        where = f"on {'each of ' if len(members) > 1 else ''}{units.devices(list(members))}"
        excess = max(members.values()) - limit
        over = f": {scale.text(excess)} TOO MUCH" if excess > 0 else ""
        remark = f"of {most}{f' {where}' if len(used) > 1 else ''}{over}"
        yield _row(name, text, units.percent(max(members.values()) / limit), remark, "bold red" if over else "")
        name = ""
