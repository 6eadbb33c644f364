"""The plan against the baselines that people would write by hand, the advice, the solver's proof, and its time."""

from __future__ import annotations

import math

from parplan.plan import Scheme
from parplan.planner.decision import ANY_BLOCK, BRANCHES, SOME_BRANCHES, Baseline, Decision, Proof, Seconds
from parplan.report import units
from parplan.report.page import Column, Page, Styled, TableRow

LEAST = 1e-3  # part of the step below which batch statistics go without saying

__all__ = ["baseline_remark", "claim", "conditions", "print_baselines", "print_proof", "seconds_text"]


def print_baselines(page: Page, decision: Decision) -> None:
    """Print the plan and the baselines under the same costs, then the advice."""
    plan_s = decision.prediction.step_s
    limits = [device.memory_bytes for device in decision.cluster.devices]
    pairs = zip(decision.prediction.memory_bytes, limits, strict=False)
    used, _ = max(pairs, key=lambda pair: pair[0] / pair[1], default=(0, 0))  # where the least room is left
    rows = (Baseline("this plan", plan_s, used, True), *decision.baselines)
    sizes = units.size([one.memory_bytes for one in rows if one.memory_bytes is not None])
    times = units.step(plan_s)

    def row(one: Baseline) -> TableRow:
        figures = (
            "" if one.step_s is None else times.text(one.step_s),
            "" if one.step_s is None or plan_s <= 0 else f"{one.step_s / plan_s:.2f} x",
            "" if one.memory_bytes is None else sizes.text(one.memory_bytes),
        )
        # The devices, where a baseline uses some kinds only.
        name = f"{one.name} ({one.on})" if one.on else one.name
        return TableRow(name, figures, [baseline_remark(decision, one)], "bold" if one is rows[0] else "")

    page.section("Against other plans", "same model, batch and costs; memory on the fullest device")
    page.table([Column("step"), Column("vs this"), Column("memory")], [row(one) for one in rows])
    if not decision.advised:  # else the verdict begins with it
        page.blank()
        page.paragraph(decision.advice, first="Advice: ", first_style="bold green")


def baseline_remark(decision: Decision, one: Baseline) -> Styled:
    """The remark on a baseline: not legal, too large, its bends, or what its batch norm leaves out."""
    if one.step_s is None:
        return Styled(f"not legal: {one.why_not}" if one.why_not else "not legal", "red")
    if not one.fits:
        limit = one.limit_bytes or min(device.memory_bytes for device in decision.cluster.devices)
        why = f": {one.why_not}" if one.why_not else f" in {units.size(limit).text(limit)}"
        return Styled(f"does not fit{why}", "red")
    verdict, style = (f"bends {one.bends}", "yellow") if one.bends else (one.why_not, "red")
    if one.batch_norm_s > LEAST * one.step_s:
        more = units.step(decision.prediction.step_s).text(one.batch_norm_s)
        remark = f"batch norm on each device's samples, as DDP has it; on the whole batch +{more}"
        verdict, style = "; ".join(filter(None, (verdict, remark))), style if verdict else "dim"
    return Styled(verdict, style)


def print_proof(page: Page, decision: Decision) -> None:
    """Print the solver's claim in plain words, and what it rests on: bound, the fastest plan, effort."""
    proof, step_s = decision.proof, decision.prediction.step_s
    style = "bold green" if proof.status == "OPTIMAL" else "bold yellow"
    page.section("Proof")
    page.paragraph(f": {claim(decision)}.", first=proof.status, first_style=style)
    scale, rows = units.step(proof.objective), list[tuple[str, str, str]]()
    known = math.isfinite(proof.bound) and math.isfinite(proof.gap)
    if abs(step_s - proof.objective) > 1e-3 * step_s or proof.by_simulation:
        rows.append(
            ("objective", scale.text(proof.objective), "this plan's, which adds up layers; its step is simulated")
        )
    if known:
        gap = f"gap {units.percent(proof.gap)}; no plan that the proof covers is below it"
        rows.append(("bound", scale.text(proof.bound), gap))
    if proof.by_simulation:
        rows.append(("", "", "the plan nearest to it has a longer simulated step than this one"))
    if (simpler := proof.simpler) is not None:
        changes = f"{units.counted(simpler.changes, 'change')} of layout between layers, this plan {simpler.kept}"
        rows.append(("fastest", scale.text(simpler.fastest_s), f"{changes}; `--tolerance 0` takes it"))
    if proof.seconds > 0:
        rows.append(("solved in", units.time(proof.seconds).text(proof.seconds), ""))
    if rows:
        page.table([Column("")], [TableRow(name, [value], [Styled(text, "dim")]) for name, value, text in rows])


def claim(decision: Decision) -> str:
    """The solver's claim in plain words."""
    proof = decision.proof
    if proof.status == "OPTIMAL":
        return _optimal(decision)
    if proof.status == "FEASIBLE":
        return _feasible(proof, pins=decision.pins is not None)
    return "the solver makes no claim about other plans"


def conditions(decision: Decision) -> list[str]:
    """The plans that a proof of optimality is limited to, in words, beside what the user pinned.

    A plan for several devices gives each its own samples' results back, which one device alone need not do.
    """
    covered, wants = decision.proof.covered, list[str]()
    if decision.cluster.count > 1 and ANY_BLOCK not in covered:
        wants.append("has its layers on the first devices")
    in_passes = any(one.startswith((Scheme.BROADCAST.value, Scheme.INTERLEAVE.value)) for one in covered)
    if in_passes and Scheme.GATHER.value not in covered:
        wants.append("keeps the scheme that was asked for")
    if decision.speedup is not None and decision.speedup < 1:
        wants.append(f"hands the model's results to {units.all_devices(decision.cluster.count)}")
    if decision.branches and BRANCHES not in covered:
        some = "runs branches at the same time on blocks of the first devices, or one after another"
        wants.append(some if SOME_BRANCHES in covered else "runs its branches one after another")
    wants += [f"splits its {decision.proof.alike} alike"] * bool(decision.proof.alike)
    step_s = decision.prediction.step_s
    if any(one.batch_norm_s > 0 and (one.step_s or step_s) < step_s for one in decision.baselines):
        wants.append("has batch norm over the whole batch")
    return wants + ["splits the batch evenly"] * decision.proof.equal_parts


def _optimal(decision: Decision) -> str:
    """The claim on a plan that is proven the fastest."""
    wants = [*conditions(decision), *["keeps the pins"] * bool(decision.pins)]
    which = f" that {', '.join(wants[:-1])}{' and ' if wants[1:] else ''}{wants[-1]}" if wants else ""
    several = decision.cluster.count > 1 and ANY_BLOCK in decision.proof.covered
    return (
        f"no plan of this model{which} is faster under these costs"
        f"{'; of plans in passes those on the first devices were compared' if several else ''}"
    )


def _feasible(proof: Proof, pins: bool) -> str:
    """The claim on a plan that is not proven the fastest."""
    which = " that keeps the pins" if pins else ""
    if not math.isfinite(proof.gap):
        return "the best plan found in the time; how much faster another one could be is not known"
    if proof.given:
        return f"the plan given; another one is or could be faster by up to {units.percent(proof.gap)}"
    if (simpler := proof.simpler) is not None:
        proven = "proven optimum" if proof.fastest_proven else "fastest plan found"
        more = units.percent(proof.objective / simpler.fastest_s - 1)
        return f"within {more} of the {proven}{which}, and simpler"
    if proof.by_simulation:
        return (
            f"the plan{which} with the shortest simulated step of those compared; the objective of another one is "
            f"lower by up to {units.percent(proof.gap)}"
        )
    return (
        f"the best plan found in the time; another one{which} could be faster by up to {units.percent(proof.gap)}; "
        "a longer `--time-limit` may find it or rule it out"
    )


def seconds_text(seconds: Seconds) -> str:
    """How long parplan itself took, and for what."""
    parts = {"capture": seconds.capture, "costs": seconds.costs, "solving, baselines and reasons": seconds.solve}
    rest = seconds.total - seconds.start - sum(parts.values())
    listed = [f"{value:.1f} {name}" for name, value in parts.items()]
    listed += [f"{rest:.1f} the rest"] * (rest >= 0.05)
    listed = [f"{seconds.start:.1f} importing torch and loading the model"] * (seconds.start > 0) + listed
    begin = "from the start of the command" if seconds.start else "from the call"
    return f"parplan took {seconds.total:.1f} s {begin} to the plan: {', '.join(listed)}."
