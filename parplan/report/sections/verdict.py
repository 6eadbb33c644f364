"""The verdict: what to use, how fast it is, whether it fits and is proven; then the groups of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parplan.cost_models.costs import Source
from parplan.plan import SCHEDULES
from parplan.planner.decision import Decision, LayerReport
from parplan.planner.explain.advice import same_plan
from parplan.report import units
from parplan.report.page import Page
from parplan.report.sections.layer_groups import StrategyGroup, block_groups
from parplan.report.sections.layer_table import sources, updates
from parplan.report.sections.proof import proven_words

__all__ = [
    "VerdictLine",
    "group_line",
    "kind_of_plan",
    "print_groups",
    "print_verdict",
    "verdict_lines",
]

LABELS = 8
"""Columns of the labels of the verdict."""
CLOSE = 0.03
"""A gap up to which the proof counts as good."""
SMALL = 1e-3
"""Layers below this part of the step do not tell what kind of plan it is."""
NAMED = 2
"""Up to so many layers of one strategy are named in the verdict."""
MOST_GROUPS = 12
"""Groups of layers that are listed unless everything is."""

SPEED = {
    Source.MEASURED: "measured here",
    Source.SHIPPED: "measured elsewhere",
    Source.INTERPOLATED: "interpolated",
    Source.ESTIMATED: "estimated",
}
"""By the least certain source of the layers' times."""


@dataclass(frozen=True)
class VerdictLine:
    """One line of the verdict, `Fits  yes: 763 MiB of 4.70 GiB`; `good` is None where it is neither good nor bad."""

    label: str
    value: str
    detail: str = ""
    good: bool | None = None

    @property
    def text(self) -> str:
        """The sentence."""
        joined = {"Speed": ", ", "Faster": " "}.get(self.label, ": ")
        return f"{joined.join(filter(None, (self.value, self.detail)))}."


def print_verdict(page: Page, decision: Decision) -> None:
    """Print what to use, the speed against one device and the best plan by hand, and fit and proof."""
    styles = {True: "bold green", False: "bold red", None: "bold"}
    for line in verdict_lines(decision):
        page.labelled(line.label, line.text, styles[line.good], LABELS)


def verdict_lines(decision: Decision) -> tuple[VerdictLine, ...]:
    """Advice, speed, fit and proof of the plan, a line each, and the fastest plan where a simpler one is taken."""
    needed, limit = decision.cluster.fullest(decision.prediction.memory_bytes)
    where = " on the fullest device" if decision.cluster.count > 1 and _used(decision) > 1 else ""
    memory = f"{units.size(needed).text(needed)} of {units.size(limit).text(limit)}{where}"
    memory = f"{memory} ({units.percent(needed / limit)})"
    proven, _, proof = proven_words(decision).partition(": ")
    lines = (
        VerdictLine("Use", _use(decision), good=True),
        VerdictLine("Speed", *_speed(decision)),
        VerdictLine("Fits", "yes" if needed <= limit else "no", memory, needed <= limit),
        VerdictLine("Proven", proven, proof, decision.proof.gap <= CLOSE or None),
    )
    simpler = decision.proof.simpler
    if simpler is None:
        return lines
    gain = units.at_most(1 - simpler.fastest_s / decision.proof.objective)
    how = f"with {simpler.differs}: " if simpler.differs else ""
    return (*lines, VerdictLine("Faster", f"by {gain}", f"{how}`--tolerance 0`"))


def _used(decision: Decision) -> int:
    """Number of devices that layers are on."""
    return len({device for strategy in decision.plan.layers.values() for device in strategy.devices})


def _use(decision: Decision) -> str:
    """The kind of this plan, by its name where people write it by hand; or what is better than one they decided."""
    same = same_plan(decision.plan, decision.baselines)
    needed, limit = decision.cluster.fullest(decision.prediction.memory_bytes)
    if needed > limit or (decision.advised and (same is None or same.name != decision.advised)):
        return decision.advice.removeprefix("Use ").removesuffix(".")
    used, count, kind = _used(decision), decision.cluster.count, kind_of_plan(decision)
    where = f" on {used if used < count else 'all ' + str(used)} devices"
    several = decision.plan.micro_batches
    parts = f" in {several} micro-batches" if several > 1 else ""
    less = ["sharded state"] * bool(decision.plan.sharded) + ["recomputation"] * bool(decision.plan.replayed)
    parts += f" with {' and '.join(less)}" if less else ""
    parts += f" through pipeline stages ({decision.plan.schedule})" * (decision.plan.schedule != SCHEDULES[0])
    if same is None:
        return f"this plan{where if used > 1 else ' on one device' if count > 1 else ''}{parts}, {kind}"
    if used == 1:
        on = f" ({same.on})" if same.on else ""
        more = ", more of them are not faster" if count > 1 and not decision.proof.simpler else ""
        return f"one device{on}{parts}{more}"
    _, colon, ways = kind.partition(": ")
    return f"{same.name.replace('pure', 'plain')}{where}{parts}{colon}{ways}"


def kind_of_plan(decision: Decision) -> str:
    """Data parallel, model parallel, a hybrid, ...: the strategies of the layers that have weights, in words."""
    weighted = [layer for layer in decision.layers if layer.parameters] or list(decision.layers)
    layers = [layer for layer in weighted if _seconds(layer) >= SMALL * decision.prediction.step_s] or weighted
    ways: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        ways.setdefault(layer.strategy.ways, []).append(index)
    places = {layer.strategy.devices for layer in layers}
    most_replicas = max((layer.strategy.replicas for layer in layers), default=1)
    most_shards = max((layer.strategy.shards for layer in layers), default=1)
    kind, parts = "a hybrid of data and model parallel", list[str]()
    if most_replicas == most_shards == 1:
        kind = f"whole layers on {len(places)} devices" if len(places) > 1 else "one device"
    elif 1 in (most_replicas, most_shards):
        kind = "data parallel" if most_shards == 1 else "model parallel"
    if len(ways) > 1:
        for way, own in [*ways.items()][:3]:
            names, adjacent = [layers[index].name for index in own], own[-1] - own[0] == len(own) - 1
            several = f"{names[0]} .. {names[-1]}" if adjacent else units.counted(len(names), "layer")
            parts.append(f"{way} of {several if len(names) > NAMED else ' and '.join(names)}")
        parts += [units.counted(len(ways) - 3, "more way")] * (len(ways) > 3)
    elif most_replicas * most_shards > 1:
        which = "small layers aside" if {layer.strategy.ways for layer in weighted} - set(ways) else ""
        every = f"every layer{' with weights' if layers[0].parameters else ''}"
        parts = [f"{next(iter(ways))} of {every}", *[which] * bool(which)]
    if decision.passes is not None and decision.passes.count > 1:
        kind += f" in {decision.passes.count} passes over parts of the batch"
    if decision.branches is not None and decision.branches.phases:
        kind += " with branches at the same time"
    return ": ".join([kind, ", ".join(parts)] if parts else [kind])


def _seconds(layer: LayerReport) -> float:
    """Seconds of a step that are a layer's own."""
    return layer.forward_s + layer.backward_s + layer.transfer_s + layer.reduce_s


def _speed(decision: Decision) -> tuple[str, str]:
    """The step; its rate, and the step against one device and the best plan by hand."""
    step_s, found = decision.prediction.step_s, sources(decision.layers)
    same = same_plan(decision.plan, decision.baselines)
    scale = units.step(step_s)
    rate = f"{decision.plan.batch / step_s:,.0f} samples/s" if step_s > 0 and decision.plan.batch else ""
    text, step = (
        " ".join(filter(None, (rate, f"({SPEED[found[-1]]})" if found else ""))),
        f"{scale.text(step_s)} a step",
    )
    if decision.cluster.count == 1 or step_s <= 0:
        return step, text
    alone = next((b for b in decision.baselines if b.name == "one device" and b.step_s is not None), None)
    if alone is not None and alone.step_s is not None and alone is not same:
        text += f"; {alone.step_s / step_s:.2f} x as fast as one device{'' if alone.fits else ' with enough memory'}"
    if same is not None:
        if same.step_s is None or scale.text(same.step_s) == scale.text(step_s):
            return step, text
        own = "batch norm on each device's own samples, as DistributedDataParallel has it"
        return step, f"{text}. {scale.text(same.step_s)} with {own}"
    by_hand = [b for b in decision.baselines if b.name != "one device" and b.fits and b.step_s is not None]
    best = min(by_hand, key=lambda b: b.whole_s or math.inf, default=None)
    if best is None or best.whole_s is None:
        return step, f"{text}; no usual plan by hand is legal and fits"
    return step, f"{text}, {best.whole_s / step_s:.2f} x as fast as the best plan by hand ({best.name})"


# ---- groups ----------------------------------------------------------------------------------------------------------


def print_groups(page: Page, layers: Sequence[LayerReport], every: bool = False) -> None:
    """Print a line for each group of layers that share replicas, shards and devices; `every`: without a limit."""
    groups = block_groups(layers, figures=False)
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
    many = f", {units.counted(group.count, 'layer')}" if group.count > 1 else ""
    if not group.modules:
        where = units.number_ranges(group.strategy.devices)
        return f"{group.ends}{many}: {group.words} on {where}{updates(group.strategy)}"
    these, places = (" of these blocks", "") if group.again else ("", f"; {group.places()}")
    return f"{group.ends}{these}{many}: {group.words}{updates(group.strategy)}{places}"
