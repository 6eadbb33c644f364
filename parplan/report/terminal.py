"""The report on a plan: the verdict and the groups of layers first, then layers, predicted step, prices and proof.

Every figure has its unit, every time its source; what is not known is said.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from rich.console import Console

from parplan.planner.decision import Decision
from parplan.planner.explain.reasons import NO_DIFFERENCE
from parplan.report import units
from parplan.report.page import Page
from parplan.report.sections.batches import print_batches, print_micro_batches
from parplan.report.sections.layer_table import print_layers
from parplan.report.sections.passes import print_branches, print_passes
from parplan.report.sections.pins import print_pins
from parplan.report.sections.prediction import print_prediction
from parplan.report.sections.proof import print_baselines, print_proof, seconds_text
from parplan.report.sections.provenance import print_origin
from parplan.report.sections.verdict import print_groups, print_verdict

__all__ = ["Detail", "render"]


class Detail(Enum):
    """How much is printed: verdict and groups; also the details, long models folded; every layer."""

    SUMMARY = "summary"
    DEFAULT = "default"
    FULL = "full"


def render(decision: Decision, console: Console, detail: Detail = Detail.DEFAULT) -> None:
    """Print the report on `console`."""
    page = Page(console)
    print_verdict(page, decision)
    page.blank()
    plan, cluster = decision.plan, decision.cluster
    parameters = units.counted(decision.parameters, "parameter")
    several = f" in {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    facts = f": {parameters}, batch {plan.batch:,}{several}, {decision.precision}, {decision.optimizer}"
    page.paragraph(facts, first=plan.model, first_style="bold")
    memory = [units.size(group.device.memory_bytes).text(group.device.memory_bytes) for group in cluster.groups]
    if len(memory) > 1:
        memory = [f"{size} on each {group.device.kind}" for size, group in zip(memory, cluster.groups, strict=True)]
    elif cluster.count > 1:
        memory = [f"{memory[0]} usable on each"]
    rules = "" if plan.rules == "default" else f"; {plan.rules} rules"
    page.paragraph(f"{cluster.describe()}; {', '.join(memory)}{rules}")
    if plan.note:
        page.paragraph(plan.note, first="Note: ", first_style="bold")
    for note in decision.notes:
        page.paragraph(note, style="yellow")
    # Layers in front of the passes run once: their update periods mean nothing.
    once = () if decision.passes is None else decision.passes.in_front
    layers = [
        replace(layer, strategy=replace(layer.strategy, update_period=None)) if layer.name in once else layer
        for layer in decision.layers
    ]
    print_groups(page, layers, every=detail is Detail.FULL)
    if detail is Detail.SUMMARY:
        return
    full = detail is Detail.FULL
    mixed = print_layers(page, layers, decision.prediction.step_s, full, plan.notes)
    cheapest = (next((other for other in layer.alternatives if other.fits), None) for layer in layers)
    if decision.proof.simpler is not None and any(
        one is not None and one.total_s <= -NO_DIFFERENCE for one in cheapest
    ):
        text = "Strategies that cost less than nothing are left for a simpler plan; `--tolerance 0` takes the fastest."
        page.paragraph(text, style="dim")
    print_origin(page, decision, mixed=mixed)
    print_prediction(page, decision)
    if decision.branches is not None:
        print_branches(page, decision.branches, decision.prediction.step_s)
    if decision.passes is not None:
        print_passes(page, decision.passes)
    if decision.batches:
        print_batches(page, decision)
    if decision.micro_batches:
        print_micro_batches(page, decision)
    if decision.pins is not None:
        print_pins(page, decision.pins)
    print_baselines(page, decision)
    print_proof(page, decision)
    if decision.seconds.total > 0:
        page.blank()
        page.paragraph(seconds_text(decision.seconds), style="dim")
