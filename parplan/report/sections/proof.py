"""The plan against the baselines that people would write by hand, the advice, the solver's proof, and its time."""

from __future__ import annotations

import math

from parplan.plan import Scheme
from parplan.planner.decision import (
    ANY_BLOCK,
    BRANCHES,
    MESHES,
    NOT_COMPARED,
    SHARDED,
    SOME_BRANCHES,
    STAGES,
    WIDEST,
    Baseline,
    Decision,
    Proof,
    Seconds,
)
from parplan.report import units
from parplan.report.page import Column, Page, Styled, TableRow

LEAST = 1e-3
"""Part of the step below which batch statistics, and a gap of the search, go without saying."""
NAMED = 2
"""Conditions that the verdict names; more are left to the proof."""

__all__ = [
    "baseline_remark", "claim", "compared_plans", "conditions", "heading", "lacking_rows", "print_baselines",
    "print_proof", "proven_words", "seconds_text",
]  # fmt: skip


def print_baselines(page: Page, decision: Decision) -> None:
    """Print the plan and the baselines under the same costs, then the advice."""
    plan_s = decision.prediction.step_s
    rows = compared_plans(decision)
    sizes = units.size([one.memory_bytes for one in rows])
    times = units.step(plan_s)

    def row(one: Baseline) -> TableRow:
        figures = (
            times.text(one.step_s),
            "" if one.step_s is None or plan_s <= 0 else f"{one.step_s / plan_s:.2f} x",
            sizes.text(one.memory_bytes),
        )
        # The devices, where a baseline uses some kinds only.
        name = f"{one.name} ({one.on})" if one.on else one.name
        return TableRow(name, figures, [baseline_remark(decision, one)], "bold" if one is rows[0] else "")

    page.section("Against other plans", "same model, batch and costs; memory on the fullest device")
    lacking = [TableRow(name, figures, [remark]) for name, *figures, remark in lacking_rows(decision)]
    page.table([Column("step"), Column("vs this"), Column("memory")], [*map(row, rows), *lacking])
    page.blank()
    page.paragraph(decision.advice, first="Advice: ", first_style="bold green")


def compared_plans(decision: Decision) -> tuple[Baseline, ...]:
    """This plan and the baselines, with the memory of the device that each leaves the least room on."""
    step, plan = decision.prediction, decision.plan
    used, _ = decision.cluster.fullest(step.memory_bytes)
    return Baseline("this plan", step.step_s, used, True, micro_batches=plan.micro_batches), *decision.baselines


def lacking_rows(decision: Decision) -> list[tuple[str, str, str, str, Styled]]:
    """Name, step, times this plan's step, memory and remark of plans that lack something of the plan's: of meshes
    whether one fits; of this plan with that alone undone whether it fits, and what a GiB costs that is saved so."""
    step_s, found = decision.prediction.step_s, list[tuple[str, str, str, str, Styled]]()
    used, limit = decision.cluster.fullest(decision.prediction.memory_bytes)
    sizes = units.size([one.memory_bytes for one in compared_plans(decision)])
    for one in decision.without:
        name = f"without {one.name}"
        if one.ratio is None:
            found.append((name, "", "", "", Styled("none fits", "red")))
            continue
        ratio = f"{one.ratio:.2f} x"
        if one.memory_bytes is None:
            found.append((name, "", ratio, "", Styled("counted mesh", "dim")))
            continue
        cost_s, saved = (1 - one.ratio) * step_s, (one.memory_bytes - used) / units.GIB
        price = f"{units.time(cost_s / saved).text(cost_s / saved)} per GiB saved" if min(cost_s, saved) > 0 else ""
        excess = "" if one.memory_bytes <= limit else f"does not fit in {units.size(limit).text(limit)}"
        remark = Styled("; ".join(filter(None, (excess, price))), "red" if excess else "dim")
        found.append((name, units.step(step_s).text(one.ratio * step_s), ratio, sizes.text(one.memory_bytes), remark))
    return found


def baseline_remark(decision: Decision, one: Baseline) -> Styled:
    """The remark on a baseline: not legal, too large, its micro-batches or bends, or what its batch norm leaves out."""
    if one.step_s is None:
        return Styled(f"not legal: {one.why_not}" if one.why_not else "not legal", "red")
    several = ""
    if one.micro_batches != decision.plan.micro_batches:
        several = f"in {one.micro_batches} micro-batches" if one.micro_batches > 1 else "in one micro-batch"
    if not one.fits:
        limit = one.limit_bytes or min(decision.cluster.memory_bytes)
        why = f": {one.why_not}" if one.why_not else f" in {units.size(limit).text(limit)}"
        return Styled(", ".join(filter(None, (f"does not fit{why}", several))), "red")
    verdict, style = (f"bends {one.bends}", "yellow") if one.bends else (one.why_not, "red")
    verdict, style = (verdict, style) if verdict or not several else (several, "dim")
    if one.batch_norm_s > LEAST * one.step_s:
        more = units.step(decision.prediction.step_s).text(one.batch_norm_s)
        remark = f"batch norm on each device's samples, as DDP has it; on the whole batch +{more}"
        verdict, style = "; ".join(filter(None, (verdict, remark))), style if verdict else "dim"
    return Styled(verdict, style)


def print_proof(page: Page, decision: Decision) -> None:
    """Print the solver's claim in plain words, and what it rests on: bound, the fastest plan, effort."""
    proof = decision.proof
    style = "bold green" if proof.status == "OPTIMAL" else "bold yellow"
    page.section("Proof")
    page.paragraph(f": {claim(decision)}.", first=heading(proof), first_style=style)
    scale, rows = units.step(proof.objective), list[tuple[str, str, str]]()
    known = math.isfinite(proof.bound) and math.isfinite(proof.gap)
    if known:
        rows.append(("bound", scale.text(proof.bound), "no plan that the proof covers is below it"))
    if (simpler := proof.simpler) is not None:
        changes = f"{units.counted(simpler.changes, 'change')} of layout between layers, this plan {simpler.kept}"
        rows.append(("fastest", scale.text(simpler.fastest_s), f"{changes}; `--tolerance 0` takes it"))
    if proof.seconds > 0:
        rows.append(("solved in", units.time(proof.seconds).text(proof.seconds), ""))
    if rows:
        page.table([Column("")], [TableRow(name, [value], [Styled(text, "dim")]) for name, value, text in rows])


def heading(proof: Proof) -> str:
    """The proof in a word or two: OPTIMAL, WITHIN 0.4 %, or NOT PROVEN."""
    if proof.status == "OPTIMAL":
        return "OPTIMAL"
    return f"WITHIN {units.at_most(proof.gap)}" if _bounded(proof) else "NOT PROVEN"


def _bounded(proof: Proof) -> bool:
    """Whether a bound of all plans is known; 0 bounds any."""
    return math.isfinite(proof.gap) and proof.bound > 0


def proven_words(decision: Decision) -> str:
    """The verdict on the proof: `yes`, `within 0.4 %` of any plan that could be found, or `no`, and of which plans."""
    proof, pins = decision.proof, " with these pins" if decision.pins else ""
    wants = conditions(decision)
    kinds = _open_kinds(proof) if decision.cluster.count > 1 else []
    which = " and".join([pins] * bool(pins) + [f" without {' or '.join(kinds)}"] * bool(kinds))
    which += f" that {' and '.join(wants)}" if 0 < len(wants) <= NAMED else ""
    limited = ", under the conditions below" if len(wants) > NAMED else ""
    if proof.status == "OPTIMAL":
        return f"yes{limited}: no plan{which} is faster under these costs"
    if not _bounded(proof):
        return "no: no bound was found, so nothing is known about other plans"
    return f"within {units.at_most(proof.gap)}{limited}: {_least(decision, which)} under these costs"


def _open_kinds(proof: Proof) -> list[str]:
    """The kinds of plans that the bound is not of, which may be faster."""
    if STAGES in proof.covered or MESHES in proof.covered:
        return []  # the bound is of all plans
    return ["sharded state"] * (SHARDED not in proof.covered and not proof.given) + ["stages"] * bool(proof.stages)


def _least(decision: Decision, which: str) -> str:
    """The bound of a proof with a gap, in words."""
    return f"no plan{which} takes less than {units.step(decision.prediction.step_s).text(decision.proof.bound)}"


def claim(decision: Decision) -> str:
    """The solver's claim in plain words."""
    proof = decision.proof
    wants = [*conditions(decision), *["keeps the pins"] * bool(decision.pins)]
    which = f" of this model{' that ' + ', '.join(wants[:-1]) if wants else ''}"
    which += f"{' and ' if wants[1:] else ''}{wants[-1]}" if wants else ""
    several, compared = decision.cluster.count > 1, list[str]()
    if several and ANY_BLOCK in proof.covered:
        compared.append("plans in passes were compared on the first devices alone")
    if several and not proof.given:
        sharded = "in doubled numbers of micro-batches alone" if SHARDED in proof.covered else NOT_COMPARED
        kinds = {"with sharded state": sharded}
        kinds |= {"in stages": proof.stages} if proof.stages else {}
        if set(kinds.values()) == {NOT_COMPARED}:
            kinds = {" or ".join(kinds): NOT_COMPARED}
        for kind, how in kinds.items():
            first = "were not compared" if how == NOT_COMPARED else f"were compared {how}"
            compared.append(f"plans {kind} {how if compared else first}")
    if STAGES in proof.covered:
        compared = ["plans in stages were compared by one cut each, and the bound is the least work of all layers"]
    if MESHES in proof.covered:
        compared = [
            "stages, data-parallel copies and tensor groups of equal blocks were counted, and the bound is the least "
            "work of all layers"
        ]
    aside = f"; {', and '.join(compared)}" if compared else ""
    if proof.status == "OPTIMAL":
        return f"no plan{which} is faster under these costs{aside}"
    if not _bounded(proof):
        return "the best plan found in the time; how much faster another one could be is not known"
    known_s = proof.objective if proof.simpler is None else proof.simpler.fastest_s
    longer = "; a longer `--time-limit` may find a faster one or rule it out"
    open_gap = not proof.given and MESHES not in proof.covered and known_s > proof.bound * (1 + LEAST)
    return f"{_least(decision, which)} under these costs{aside}{longer * open_gap}"


def conditions(decision: Decision) -> list[str]:
    """The plans that a proof of optimality is limited to, in words, beside what the user pinned.

    A plan for several devices gives each its own samples' results back, which one device alone need not do.
    """
    proof, wants = decision.proof, list[str]()
    covered = proof.covered
    if STAGES in covered or MESHES in covered:
        return ["has as many micro-batches"] * proof.given  # else the bound is of all plans
    if decision.cluster.count > 1 and ANY_BLOCK not in covered:
        wants.append("has its layers on the first devices")
    if WIDEST in covered:
        wants.append("has every layer on one of them, or on as many as can share it")
    in_passes = any(one.startswith((Scheme.BROADCAST.value, Scheme.INTERLEAVE.value)) for one in covered)
    if in_passes and Scheme.GATHER.value not in covered:
        wants.append("keeps the scheme that was asked for")
    slower = (decision.speedup or 1) < 1 or proof.bound > proof.objective * (1 + 1e-6)
    if slower and decision.cluster.count > 1:
        wants.append(f"hands the model's results to {units.all_devices(decision.cluster.count)}")
    if decision.branches and BRANCHES not in covered:
        some = "runs branches at the same time on blocks of the first devices, or one after another"
        wants.append(some if SOME_BRANCHES in covered else "runs its branches one after another")
    wants += [f"splits its {proof.alike} alike"] * bool(proof.alike)
    step_s = decision.prediction.step_s
    if any(one.batch_norm_s > 0 and (one.step_s or step_s) < step_s for one in decision.baselines):
        wants.append("has batch norm over the whole batch")
    return wants + ["splits the batch evenly"] * proof.equal_parts


def seconds_text(seconds: Seconds) -> str:
    """How long parplan itself took, and for what."""
    parts = {"capture": seconds.capture, "costs": seconds.costs, "solving, baselines and reasons": seconds.solve}
    rest = seconds.total - seconds.start - sum(parts.values())
    listed = [f"{value:.1f} {name}" for name, value in parts.items()]
    listed += [f"{rest:.1f} the rest"] * (rest >= 0.05)
    listed = [f"{seconds.start:.1f} importing torch and loading the model"] * (seconds.start > 0) + listed
    begin = "from the start of the command" if seconds.start else "from the call"
    return f"parplan took {seconds.total:.1f} s {begin} to the plan: {', '.join(listed)}."
