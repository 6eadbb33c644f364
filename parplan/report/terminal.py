"""The report: what a person needs to believe a plan, or not to.

Order: what was planned for, the layers and why, the step it predicts, what pins cost, the plans people would write by
hand, the proof.
Every figure has its unit, every time its source; what is not known is said.
"""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from parplan.cluster import Cluster
from parplan.planner.decision import Decision, LayerReport
from parplan.report import units
from parplan.report.page import Page
from parplan.report.sections.batches import print_batches
from parplan.report.sections.layer_table import print_layers
from parplan.report.sections.passes import print_branches, print_passes
from parplan.report.sections.pins import print_pins
from parplan.report.sections.prediction import print_prediction
from parplan.report.sections.provenance import print_origin
from parplan.report.sections.verdict import print_baselines, print_proof, print_seconds

__all__ = ["render"]


def render(decision: Decision, console: Console, all_layers: bool = False) -> None:
    """Print the report on `console`; `all_layers` unfolds repeated blocks."""
    page = Page(console)
    _print_head(page, decision)
    mixed = print_layers(page, _as_updated(decision), all_layers)
    print_origin(page, decision, mixed)
    print_prediction(page, decision)
    if decision.branches is not None:
        print_branches(page, decision.branches, decision.prediction.step_s)
    if decision.passes is not None:
        print_passes(page, decision.passes)
    if decision.batches:
        print_batches(page, decision)
    if decision.pins is not None:
        print_pins(page, decision.pins)
    print_baselines(page, decision)
    print_proof(page, decision)
    print_seconds(page, decision.seconds)


def _as_updated(decision: Decision) -> list[LayerReport]:
    """The layers, with update periods only where they mean something: those in front of the passes run once."""
    once = () if decision.passes is None else decision.passes.in_front
    return [
        replace(layer, strategy=replace(layer.strategy, update_period=None)) if layer.name in once else layer
        for layer in decision.layers
    ]


def _print_head(page: Page, decision: Decision) -> None:
    for note in decision.notes:
        page.paragraph(note, style="yellow")
    if decision.notes:
        page.blank()
    plan, cluster = decision.plan, decision.cluster
    facts = f": {decision.parameters:,} parameters, batch {plan.batch:,}, {decision.precision}, {decision.optimizer}"
    page.paragraph(facts, first=plan.model, first_style="bold")
    page.paragraph(f"{cluster.describe()}; {_memory(cluster)}; {plan.rules} rules")


def _memory(cluster: Cluster) -> str:
    """What each device has; of which kind, where there are several."""
    sizes = [units.size(group.device.memory_bytes).text(group.device.memory_bytes) for group in cluster.groups]
    if len(sizes) == 1:
        return f"{sizes[0]}{' each' if cluster.count > 1 else ''}"
    return ", ".join(f"{size} on a {group.device.kind}" for size, group in zip(sizes, cluster.groups, strict=True))
