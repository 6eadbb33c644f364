"""The verdict: what to use, how fast it is, whether it fits and is proven; then the groups of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parplan.cost_models.costs import Source
from parplan.planner.decision import Baseline, Decision, LayerReport
from parplan.report import units
from parplan.report.page import Page
from parplan.report.sections.layer_groups import StrategyGroup, block_groups
from parplan.report.sections.layer_table import sources, updates
from parplan.report.sections.proof import conditions

__all__ = [
    "VerdictLine",
    "group_line",
    "kind_of_plan",
    "print_groups",
    "print_verdict",
    "second_choice",
    "verdict_lines",
]

LABELS = 8
"""Columns of the labels of the verdict."""
NOTHING = 5e-4
"""Part of a step that rounds to nothing in percent."""
SIMULATED = 1e-3
"""Part of a step by which its simulation and the objective may differ and count as equal."""
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
        joined = ", " if self.label == "Speed" else ": "
        return f"{joined.join(filter(None, (self.value, self.detail)))}."


def print_verdict(page: Page, decision: Decision) -> None:
    """Print what to use, the speed against one device and the best plan by hand, and fit and proof."""
    styles = {True: "bold green", False: "bold red", None: "bold"}
    for line in verdict_lines(decision):
        page.labelled(line.label, line.text, styles[line.good], LABELS)
    if described := second_choice(decision):
        page.blank()
        page.paragraph(described, style="yellow")


def verdict_lines(decision: Decision) -> tuple[VerdictLine, ...]:
    """Advice, speed, fit and proof, a line each, of what is advised where that is not the plan of the report."""
    limits = [device.memory_bytes for device in decision.cluster.devices]
    one = _advised(decision)
    if one is None or one.memory_bytes is None:
        pairs = list(zip(decision.prediction.memory_bytes, limits, strict=False))
        needed, limit = max(pairs, key=lambda pair: pair[0] / pair[1], default=(0, 1))
    else:
        needed, limit = one.memory_bytes, one.limit_bytes or min(limits)
    where = " on the fullest device" if decision.cluster.count > 1 and decision.advised != "one device" else ""
    memory = f"{units.size(needed).text(needed)} of {units.size(limit).text(limit)}{where}"
    memory = f"{memory} ({units.percent(needed / limit)})"
    proven, _, proof = _proof(decision).partition(": ")
    return (
        VerdictLine("Use", _use(decision), good=True),
        VerdictLine("Speed", *_speed(decision)),
        VerdictLine("Fits", "yes" if needed <= limit else "no", memory, needed <= limit),
        VerdictLine("Proven", proven, proof, proven.startswith("yes") or None),
    )


def second_choice(decision: Decision) -> str:
    """A sentence on the plan that the report describes, where that is not what is advised."""
    if not decision.advised or _same_plan(decision):
        return ""
    which = (
        "your plan" if decision.proof.given else f"the best plan found for {units.all_devices(decision.cluster.count)}"
    )
    return f"All that follows describes {which}, {kind_of_plan(decision)}."


def _use(decision: Decision) -> str:
    """The advice, or the kind of this plan where it is advised."""
    if decision.advised:
        return decision.advice.removeprefix("Use ").removesuffix(".")
    used = len({device for strategy in decision.plan.layers.values() for device in strategy.devices})
    where = f" on {used if used < decision.cluster.count else 'all ' + str(used)} devices"
    if used == 1:
        where = " on one device" if decision.cluster.count > 1 else ""
    return f"this plan{where}, {kind_of_plan(decision)}"


def kind_of_plan(decision: Decision) -> str:
    """Data parallel, model parallel, a hybrid, ...: the strategies of the layers that have weights, in words."""
    layers = [layer for layer in decision.layers if layer.parameters] or list(decision.layers)
    ways: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        ways.setdefault(_way(layer), []).append(index)
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
        parts = [f"{next(iter(ways))} of every layer{' with weights' if layers[0].parameters else ''}"]
    if decision.passes is not None and decision.passes.count > 1:
        kind += f" in {decision.passes.count} passes over parts of the batch"
    if decision.branches is not None and decision.branches.phases:
        kind += " with branches at the same time"
    return ": ".join([kind, ", ".join(parts)] if parts else [kind])


def _way(layer: LayerReport) -> str:
    """Replicas and shards of a layer, whatever its axis."""
    strategy = layer.strategy
    parts = [units.counted(strategy.replicas, "replica")] if strategy.replicas > 1 else []
    parts += [units.counted(strategy.shards, "shard")] if strategy.shards > 1 else []
    return " x ".join(parts) or "one device"


def _advised(decision: Decision) -> Baseline | None:
    return next((one for one in decision.baselines if one.name == decision.advised), None)


def _same_plan(decision: Decision) -> bool:
    """Whether what is advised is the plan of the report."""
    one = _advised(decision)
    return one is not None and one.plan is not None and one.plan.layers == decision.plan.layers


def _speed(decision: Decision) -> tuple[str, str]:
    """The step of what is advised; its rate, and the step against one device, the best plan by hand and this plan."""
    one, plan_s, found = _advised(decision), decision.prediction.step_s, sources(decision.layers)
    step_s = plan_s if one is None or one.step_s is None else one.step_s
    scale = units.step(step_s)
    rate = f"{decision.plan.batch / step_s:,.0f} samples/s" if step_s > 0 and decision.plan.batch else ""
    text, step = (
        " ".join(filter(None, (rate, f"({SPEED[found[-1]]})" if found else ""))),
        f"{scale.text(step_s)} a step",
    )
    if decision.cluster.count == 1 or step_s <= 0:
        return step, text
    alone = next((b for b in decision.baselines if b.name == "one device" and b.step_s is not None), None)
    if alone is not None and alone.step_s is not None and decision.advised != "one device":
        text += f"; {alone.step_s / step_s:.2f} x as fast as one device{'' if alone.fits else ' with enough memory'}"
    if one is not None:
        if _same_plan(decision):
            more = f". With batch norm over the whole batch: {scale.text(plan_s)}"
            return step, text + more * (one.batch_norm_s > 0 and scale.text(plan_s) != scale.text(step_s))
        every = f"The best plan found for {units.all_devices(decision.cluster.count)}"
        which = "Your plan" if decision.proof.given else every
        return step, f"{text}. {which} takes {scale.text(plan_s)}"
    by_hand = [b for b in decision.baselines if b.name != "one device" and b.fits and b.step_s is not None]
    best = min(by_hand, key=lambda b: b.step_s or math.inf, default=None)
    if best is None or best.step_s is None:
        return step, f"{text}; no usual plan by hand is legal and fits"
    return step, f"{text}, {best.step_s / step_s:.2f} x as fast as the best plan by hand ({best.name})"


def _proof(decision: Decision) -> str:
    """Yes or no, and the proof in a few words; print_proof has the conditions."""
    proof, pins = decision.proof, " with these pins" if decision.pins else ""
    known, wants = math.isfinite(proof.gap) and proof.bound > 0, conditions(decision)  # 0 bounds any plan
    which = f"{pins} that {' and '.join(wants)}" if 0 < len(wants) <= NAMED else pins
    limited = ", under the conditions below" if len(wants) > NAMED else ""
    # The bound is of the objective of all plans that the proof covers, whatever is advised.
    comparable = abs(decision.prediction.step_s - proof.objective) <= SIMULATED * proof.objective
    one = _advised(decision) if known and comparable and not (proof.given or _same_plan(decision)) else None
    if one is not None and one.step_s is not None:
        bound, less = units.step(one.step_s).text(proof.bound), 1 - proof.bound / one.step_s
        more = f" ({units.percent(less)} less)" if less >= NOTHING else ""
        if proof.status == "OPTIMAL" or not more:
            return f"yes{limited}: no plan{which} takes less than {bound}{more} under these costs"
        return f"no: another plan could take as little as {bound}{more}"
    if proof.status == "OPTIMAL":
        return f"yes{limited}: no plan{which} is faster under these costs"
    if proof.status != "FEASIBLE":
        return "no: nothing is known about other plans"
    if proof.given:
        more = f", and another one is or could be faster by up to {units.percent(proof.gap)}" if known else ""
        return f"no: it is a plan of yours{more}"
    if (simpler := proof.simpler) is not None and proof.fastest_proven:
        more = units.percent(proof.objective / simpler.fastest_s - 1)
        fastest = units.step(proof.objective).text(simpler.fastest_s)
        return f"yes: at most {more} slower than the fastest plan, {fastest}, and simpler"
    if proof.by_simulation:
        return "no: it has the shortest simulated step of the plans compared"
    return (
        f"no: another plan could be faster by up to {units.percent(proof.gap)}" if known else "no: no bound was found"
    )


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
    many = f", {units.counted(group.count, 'layer')}" if group.count > 1 else ""
    return f"{group.ends}{many}: {group.words} on {where}{updates(group.strategy)}"
