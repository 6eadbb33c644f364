"""The verdict in three lines: what to use, how fast it is, whether it fits and is proven; then the groups of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from parplan.cost_models.costs import Source
from parplan.planner.decision import Baseline, Decision, LayerReport
from parplan.report import units
from parplan.report.page import Page
from parplan.report.sections.layer_groups import StrategyGroup, block_groups
from parplan.report.sections.layer_table import sources, updates
from parplan.report.sections.proof import conditions

__all__ = ["group_line", "kind_of_plan", "print_groups", "print_verdict"]

NAMED = 3
"""Up to so many layers of one strategy are named in the verdict."""
MOST_GROUPS = 12
"""Groups of layers that are listed unless everything is."""

SPEED = {
    Source.MEASURED: "Speed, from times measured here:",
    Source.SHIPPED: "Speed, from times measured elsewhere:",
    Source.INTERPOLATED: "Speed, from interpolated times:",
    Source.ESTIMATED: "Speed, estimated:",
}
"""By the least certain source of the layers' times."""


def print_verdict(page: Page, decision: Decision) -> None:
    """Print what to use, the speed against one device and the best plan by hand, and fit and proof."""
    text = decision.advice
    if not decision.advised:
        used = len({device for strategy in decision.plan.layers.values() for device in strategy.devices})
        several = decision.cluster.count > 1
        count = f" on {used if used < decision.cluster.count else 'all ' + str(used)} devices" if used > 1 else ""
        text = f"Use this plan{count if several else ' on one device'}: {kind_of_plan(decision)}."
    _print_line(page, text, "bold green")
    found = sources(decision.layers)
    _print_line(page, f"{SPEED[found[-1]] if found else 'Speed:'} {_speed(decision)}.", "bold")
    one = _advised(decision)
    limits = [device.memory_bytes for device in decision.cluster.devices]
    if one is None or one.memory_bytes is None:
        pairs = list(zip(decision.prediction.memory_bytes, limits, strict=False))
        needed, limit = max(pairs, key=lambda pair: pair[0] / pair[1], default=(0, 1))
    else:
        needed, limit = one.memory_bytes, one.limit_bytes or min(limits)
    where = " on the fullest device" if decision.cluster.count > 1 and decision.advised != "one device" else ""
    memory = (
        f"{units.size(needed).text(needed)} of {units.size(limit).text(limit)}{where} ({units.percent(needed / limit)})"
    )
    fits = f"Fits: {memory}." if needed <= limit else f"Does not fit: {memory}."
    _print_line(page, f"{fits} {_proof(decision)}.", "bold" if needed <= limit else "bold red")


def _print_line(page: Page, text: str, style: str) -> None:
    """A line with its first words, up to the colon, in a style."""
    first, colon, rest = text.partition(":")
    page.paragraph(rest, first=f"{first}{colon}", first_style=style)


def kind_of_plan(decision: Decision) -> str:
    """Data parallel, model parallel, a hybrid, ...: the strategies of the layers that have weights, in words."""
    layers = [layer for layer in decision.layers if layer.parameters] or list(decision.layers)
    ways: dict[str, list[str]] = {}
    for layer in layers:
        ways.setdefault(_way(layer), []).append(layer.name)
    places = {layer.strategy.devices for layer in layers}
    most_replicas = max((layer.strategy.replicas for layer in layers), default=1)
    most_shards = max((layer.strategy.shards for layer in layers), default=1)
    kind, parts = "a hybrid", list[str]()
    if most_replicas == most_shards == 1:
        kind = f"whole layers on {len(places)} devices" if len(places) > 1 else "one device"
    elif 1 in (most_replicas, most_shards):
        kind = "data parallel" if most_shards == 1 else "model parallel"
    if len(ways) > 1:
        for way, names in [*ways.items()][:3]:
            parts.append(f"{way} of {', '.join(names) if len(names) <= NAMED else f'{len(names)} layers'}")
        parts += [units.counted(len(ways) - 3, "more way")] * (len(ways) > 3)
    elif most_replicas * most_shards > 1:
        parts = [f"{next(iter(ways))} of every layer{' with weights' if layers[0].parameters else ''}"]
    if decision.passes is not None and decision.passes.count > 1:
        kind += f" in {decision.passes.count} passes"
    if decision.branches is not None and decision.branches.phases:
        kind += " with branches at the same time"
    return ", ".join([kind, "; ".join(parts)] if parts else [kind])


def _way(layer: LayerReport) -> str:
    """Replicas and shards of a layer, whatever its axis."""
    strategy = layer.strategy
    parts = [units.counted(strategy.replicas, "replica")] if strategy.replicas > 1 else []
    parts += [units.counted(strategy.shards, "shard")] if strategy.shards > 1 else []
    return " x ".join(parts) or "one device"


def _advised(decision: Decision) -> Baseline | None:
    return next((one for one in decision.baselines if one.name == decision.advised), None)


def _speed(decision: Decision) -> str:
    """The step of what is advised, against one device, the best plan by hand and this plan."""
    one, plan_s = _advised(decision), decision.prediction.step_s
    step_s = plan_s if one is None or one.step_s is None else one.step_s
    scale = units.step(step_s)
    text = scale.text(step_s) + " a step"
    if step_s > 0 and decision.plan.batch:
        text += f", {decision.plan.batch / step_s:,.0f} samples/s"
    if decision.cluster.count == 1 or step_s <= 0:
        return text
    alone = next((b for b in decision.baselines if b.name == "one device" and b.step_s is not None), None)
    if alone is not None and alone.step_s is not None and decision.advised != "one device":
        text += f", {alone.step_s / step_s:.2f} x one device{'' if alone.fits else ' with enough memory'}"
    if one is not None:
        if one.plan is not None and one.plan.layers == decision.plan.layers:
            more = ""
            if one.batch_norm_s > 0 and scale.text(plan_s) != scale.text(step_s):
                more = f", with batch norm over the whole batch, {scale.text(plan_s)}"
            return f"{text}; the plan below is the same{more}"
        kind, ratio = kind_of_plan(decision).partition(",")[0], step_s / plan_s
        return f"{text}; the plan below, {kind}, takes {scale.text(plan_s)}, {ratio:.2f} x as fast"
    by_hand = [b for b in decision.baselines if b.name != "one device" and b.fits and b.step_s is not None]
    best = min(by_hand, key=lambda b: b.step_s or math.inf, default=None)
    if best is None or best.step_s is None:
        return f"{text}; no usual plan by hand is legal and fits"
    return f"{text}, {best.step_s / step_s:.2f} x the best by hand ({best.name})"


def _proof(decision: Decision) -> str:
    """The proof in a few words; print_proof has the conditions."""
    proof, pins = decision.proof, " with these pins" if decision.pins else ""
    known = math.isfinite(proof.gap)
    if proof.status == "OPTIMAL":
        wants = conditions(decision)
        which = f" that {wants[0]}" if len(wants) == 1 else ""
        limited = " under the conditions below" if len(wants) > 1 else ""
        than = " than the one below" if decision.advised else ""
        return f"Proven{limited}: no plan{pins}{which} is faster{than} under these costs"
    if proof.status != "FEASIBLE":
        return "Nothing is proven about other plans"
    if proof.given:
        more = f": another one is or could be faster by up to {units.percent(proof.gap)}" if known else ""
        return f"Not proven, a plan of yours{more}"
    if (simpler := proof.simpler) is not None:
        more = units.percent(proof.objective / simpler.fastest_s - 1)
        proven = proof.fastest_proven
        fastest = units.step(proof.objective).text(simpler.fastest_s)
        if proven:
            return f"Proven within {more} of the fastest plan, {fastest}, and simpler"
        return f"Not proven: within {more} of the fastest plan found, {fastest}, and simpler"
    if proof.by_simulation:
        return "Not proven: the shortest simulated step of the plans compared"
    more = f"another plan could be faster by up to {units.percent(proof.gap)}" if known else "no bound was found"
    return f"Not proven: {more}"


# ---- groups ----------------------------------------------------------------------------------------------------------


def print_groups(page: Page, layers: Sequence[LayerReport], every: bool = False) -> None:
    """Print a line for each group of layers that share replicas, shards and devices; `every`: without a limit."""
    groups = block_groups(layers)
    shown = groups if every or len(groups) <= MOST_GROUPS else groups[: MOST_GROUPS - 1]
    page.section("Groups", "replicas work on different samples, shards hold parts of the weights")
    for group in shown:
        first, colon, rest = group_line(group).partition(": ")
        lines = page.wrap(f"{first}{colon}{rest}", page.width - 4)
        for index, line in enumerate(lines):
            page.line(f"{'    ' if index else '  '}{line}")
    if len(shown) < len(groups):
        left = groups[len(shown) :]
        layers_left = units.counted(sum(group.count for group in left), "layer")
        page.paragraph(
            f"... and {units.counted(len(left), 'more group')}, {layers_left}; `--full` lists them.", 2, "dim"
        )


def group_line(group: StrategyGroup) -> str:
    """`conv1 .. pool5, 13 layers: 4 replicas on 0-3`; of repeated blocks `12 x`, with the layers of all."""
    where = units.number_ranges(group.strategy.devices)
    repeated = f"{group.repeats} x " if group.repeats > 1 else ""
    many = f", {units.counted(group.count, 'layer')}" if group.count > 1 else ""
    return f"{repeated}{group.ends}{many}: {group.words} on {where}{updates(group.strategy)}"
