"""Differences of two plans in groups of layers, and what they cost where the steps of both are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from rich.console import Console

from parplan.plan import Plan, Strategy
from parplan.report import units
from parplan.report.page import Column, Page, Styled, TableRow, printed
from parplan.report.sections.blocks import name_span
from parplan.report.sections.layer_table import updates

__all__ = ["Change", "PlanDiff", "plan_diff", "render_diff"]

MISSING = "not in the plan"


@dataclass(frozen=True)
class Change:
    """Adjacent layers that change in one way; `before` and `after` in words."""

    layers: tuple[str, ...]
    before: str
    after: str

    @property
    def label(self) -> str:
        """`fc6 .. fc8, 3 layers`."""
        if len(self.layers) == 1:
            return self.layers[0]
        return f"{name_span(self.layers)}, {len(self.layers)} layers"


@dataclass(frozen=True, repr=False)
class PlanDiff:
    """Differences of two plans: of what they are for, of layers, and of notes, which change nothing that runs."""

    head: tuple[Change, ...]
    layers: tuple[Change, ...]
    notes: tuple[Change, ...]
    same: int

    @property
    def runs_alike(self) -> bool:
        """Whether both run every layer in the same way for the same model, batch and devices."""
        return not self.head and not self.layers

    def __repr__(self) -> str:
        return f"<PlanDiff: {units.counted(sum(len(one.layers) for one in self.layers), 'layer')} changed>"

    def __str__(self) -> str:
        return printed(partial(render_diff, self, ("first", "second"), {}))


def plan_diff(first: Plan, second: Plan) -> PlanDiff:
    """The differences of two plans, in the forward order of the first, layers that it lacks at the end."""
    named = {
        name: (getattr(first, name), getattr(second, name))
        for name in ("model", "fingerprint", "batch", "devices", "rules", "micro_batches", "schedule")
    }
    named["scheme"] = (first.scheme.value, second.scheme.value)
    head = tuple(Change((name,), str(old), str(new)) for name, (old, new) in named.items() if old != new)
    names = [*first.layers, *(name for name in second.layers if name not in first.layers)]
    pairs = [(name, _words(first.layers.get(name)), _words(second.layers.get(name))) for name in names]
    layers = []
    for (before, after), run in groupby(pairs, key=lambda pair: pair[1:]):
        if before != after:
            layers.append(Change(tuple(name for name, *_ in run), before, after))
    noted = {"the plan": (first.note, second.note)}
    noted |= {name: (first.notes.get(name, ""), second.notes.get(name, "")) for name in names}
    notes = tuple(Change((name,), old or "none", new or "none") for name, (old, new) in noted.items() if old != new)
    same = sum(before == after for _, before, after in pairs)
    return PlanDiff(head, tuple(layers), notes, same)


def _words(strategy: Strategy | None) -> str:
    """A strategy with its devices and updates."""
    if strategy is None:
        return MISSING
    return f"{strategy.describe('whole')} on {units.number_ranges(strategy.devices)}{updates(strategy)}"


def render_diff(
    found: PlanDiff,
    names: tuple[str, str],
    steps_s: Mapping[str, tuple[float, float]],
    console: Console,
    remark: str = "",
) -> None:
    """Print the differences.

    Args:
        names: of the two files.
        steps_s: predicted steps of both plans, in seconds, by where they come from.
        remark: a sentence on those, such as the devices they are of.
    """
    page = Page(console)
    old, new = names
    if found.runs_alike:
        page.paragraph(f"{old} and {new} run alike: {units.counted(found.same, 'layer')}, no difference.", style="bold")
    else:
        changed = sum(len(change.layers) for change in found.layers)
        text = f": {units.counted(changed, 'layer')} of {changed + found.same} changed"
        page.paragraph(text, first=f"{old} -> {new}", first_style="bold")
    for title, changes in (("", found.head), ("Layers", found.layers), ("Notes", found.notes)):
        if changes and title:
            page.section(title)
        for change in changes:
            page.paragraph(f": {change.before} -> {change.after}", 2, first=change.label, first_style="bold")
    if steps_s:
        page.section("Predicted step")
        scale = units.step(max(max(pair) for pair in steps_s.values()))
        rows = []
        for where, (before_s, after_s) in steps_s.items():
            share = after_s / before_s - 1 if before_s > 0 else 0.0
            sign = "+" if share > 0 else "-"
            style = "" if abs(share) < 5e-4 else "red" if share > 0 else "green"
            ratio = Styled(f"{sign}{units.percent(abs(share))}" if abs(share) >= 5e-4 else "the same", style)
            rows.append(TableRow(where, [scale.text(before_s), scale.text(after_s), ratio]))
        page.table([Column("before"), Column("after"), Column("")], rows)
        if remark:
            page.paragraph(remark, style="dim")
    elif not found.runs_alike:
        page.blank()
        page.paragraph("What it costs is not known: give reports in place of plans, or a TARGET to price both with.")
