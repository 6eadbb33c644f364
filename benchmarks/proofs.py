"""Proofs against simulated steps: how far the objective T is off, and which plans beat one that is called OPTIMAL.

    python -m benchmarks.proofs [--seeds N] [--kinds KIND ...] [--json FILE]
    python -m benchmarks.proofs --brute [N] [--kinds KIND ...] [--limit N] [--json FILE]

The first draws plans of small models (benchmarks/proof_cases.py) and compares their T with their simulated steps, class
by class; and T, bound and simulated step of the plan that `decide` chooses at tolerance 0. The second simulates every
plan of each model whose bound from below (benchmarks/proof_plans.py) is not above the chosen plan's simulated step, up
to a limit, above which plans are drawn, and lists those plans called OPTIMAL that another one beats, or whose bound is
above another one's T. Memory suffices for all plans.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from math import inf
from pathlib import Path

from benchmarks.proof_cases import KINDS, Problem, drawn
from benchmarks.proof_plans import CLASSES, EveryPlan, branch_plans, class_of, is_legal, objective_s, simulated_s, words
from parplan.plan import Plan, Scheme
from parplan.planner.decide import decide
from parplan.planner.solver.problem import Status
from tests.planner.random_plans import random_plans

__all__ = ["Beaten", "Compared", "beaten", "chosen", "compared", "problems"]

EACH = 4
"""Plans drawn of each scheme, on the first devices and on any blocks, per model."""

EXACT, OPTIMAL = 1e-6, Status.OPTIMAL.value
TABLES = 2_000_000
"""Most plans of a model of which bounds are tables; of larger models the same one on fewer devices is taken."""

LIMIT = 4_000


@dataclass(frozen=True)
class Compared:
    """T of a plan against its simulated step; the bound and the status where it is the one that was chosen."""

    model: str
    kind: str
    plan: str
    objective_s: float
    simulated_s: float
    bound_s: float | None = None
    status: str = ""

    @property
    def error(self) -> float:
        """T / simulated step - 1."""
        return self.objective_s / self.simulated_s - 1


def problems(kinds: Sequence[str], count: int, choices: float = inf) -> Iterator[Problem]:
    """So many problems, of all kinds in turns, each on fewer devices where it has more choices of strategies."""
    for n in range(count):
        sized = (drawn(kinds[n % len(kinds)], n // len(kinds), devices) for devices in (4, 3, 2))
        yield next(one for one in sized if one.cluster.count == 2 or EveryPlan(one).count <= choices)


def compared(problem: Problem) -> Iterator[Compared]:
    """Plans of all classes, drawn by the problem's name."""
    draw = random.Random(problem.name)
    plans = [
        random_plans(problem.graph, problem.cluster, draw, scheme, everywhere=everywhere)
        for scheme, everywhere in product(Scheme, (False, True))
    ]
    for some in (*plans, branch_plans(problem, draw)):
        for plan in islice(some, EACH):
            yield _compared(plan, problem)


def chosen(problem: Problem) -> tuple[Plan, Compared]:
    """The plan that `decide` chooses at tolerance 0."""
    decision = decide(problem.graph, problem.cluster, problem.costs, problem.request)
    proof = decision.proof
    return decision.plan, replace(_compared(decision.plan, problem), bound_s=proof.bound, status=proof.status)


def _compared(plan: Plan, problem: Problem) -> Compared:
    seconds = objective_s(plan, problem), simulated_s(plan, problem)
    return Compared(problem.name, class_of(plan, problem), words(plan), *seconds)


@dataclass(frozen=True)
class Beaten:
    """The search over all plans of a model against the plan that was chosen.

    Args:
        choices: of strategies, each with a plan in one pass and perhaps one in passes.
        simulated: plans; of the others the bound from below says that they are no faster, if `whole`.
        faster: the fastest plan of each class that beats the chosen one, the fastest first.
        below: a plan of a T below the bound, the one of least T.
    """

    chosen: Compared
    choices: int
    simulated: int
    whole: bool
    faster: tuple[Compared, ...]
    below: Compared | None

    @property
    def gain(self) -> float:
        """The share of the chosen plan's simulated step that the fastest plan saves."""
        return 1 - self.faster[0].simulated_s / self.chosen.simulated_s if self.faster else 0.0


def beaten(problem: Problem, limit: int = LIMIT) -> Beaten:
    """Simulate all plans that may be faster than the chosen one, of each scheme so many at most."""
    plan, own = chosen(problem)
    every, draw = EveryPlan(problem), random.Random(problem.name)
    enough_s = own.simulated_s * (1 - EXACT)
    count, whole, least_s = 0, True, own.bound_s or 0.0
    faster: dict[str, Compared] = {}
    below: Compared | None = None
    for scheme in (Scheme.GATHER, Scheme.INTERLEAVE):
        choices, all_of_them = every.below(enough_s, scheme, limit, draw)
        whole = whole and all_of_them
        for plan in (one for one in (every.plan(index, scheme) for index in choices) if is_legal(one, problem)):
            count += 1
            step_s = simulated_s(plan, problem)
            if step_s >= enough_s:
                continue
            found = _compared(plan, problem)
            if found.kind not in faster or step_s < faster[found.kind].simulated_s:
                faster[found.kind] = found
            if found.objective_s < (least_s if below is None else below.objective_s) * (1 - EXACT):
                below = found
    in_order = sorted(faster.values(), key=lambda one: one.simulated_s)
    return Beaten(own, every.count, count, whole, tuple(in_order), below)


# ---- tables ----------------------------------------------------------------------------------------------------------


def print_compared(rows: Sequence[Compared]) -> None:
    """A line per class and kind of model."""
    print(f"{'':40} {'plans':>6} {'equal':>7} {'least':>8} {'most':>8} {'T > simulated':>14}")
    by_class = [(kind, [one for one in rows if one.kind == kind]) for kind in CLASSES]
    for kind, own in by_class:
        models = sorted({one.model.partition(":")[0] for one in own})
        groups = [(kind, own)] + [(f"  {m}", [one for one in own if one.model.startswith(f"{m}:")]) for m in models]
        for name, some in groups if own else ():
            errors = [one.error for one in some]
            equal, more = (sum(map(test, errors)) / len(some) for test in (_is_equal, _is_more))
            print(
                f"{name:40} {len(some):>6} {equal:>7.1%} {min(errors):>+8.2%} {max(errors):>+8.2%} {more:>14.1%}",
                flush=True,
            )


def _is_equal(error: float) -> bool:
    return abs(error) < EXACT


def _is_more(error: float) -> bool:
    return error > EXACT


def line(own: Compared) -> str:
    """A plan with its seconds."""
    return (
        f"{own.model}: {own.kind}, T {own.objective_s * 1e6:,.2f} us, simulated {own.simulated_s * 1e6:,.2f} us "
        f"({own.error:+.2%}), {own.plan}"
    )


def print_chosen(rows: Sequence[Compared]) -> None:
    """A line per class, then every chosen plan whose T is not its simulated step."""
    print(f"\n{'chosen at tolerance 0':40} {'plans':>6} {'equal':>7} {'least':>8} {'most':>8} {'OPTIMAL':>8}")
    for kind in (one for one in CLASSES if any(row.kind == one for row in rows)):
        own = [one for one in rows if one.kind == kind]
        errors = [one.error for one in own]
        equal, proven = sum(map(_is_equal, errors)) / len(own), sum(one.status == OPTIMAL for one in own) / len(own)
        print(f"{kind:40} {len(own):>6} {equal:>7.1%} {min(errors):>+8.2%} {max(errors):>+8.2%} {proven:>8.1%}")
    for one in (row for row in rows if not _is_equal(row.error)):
        print(f"  {one.status} with bound {(one.bound_s or 0.0) * 1e6:,.2f} us: {line(one)}")


def print_beaten(one: Beaten) -> None:
    """A line per model, and its faster plans."""
    told = "all plans" if one.whole else "plans drawn above the limit"
    print(
        f"{one.chosen.model:14} {one.chosen.status:9} {one.choices:>9,} choices {one.simulated:>6,} simulated, {told}",
        flush=True,
    )
    for faster in one.faster:
        gain = 1 - faster.simulated_s / one.chosen.simulated_s
        print(f"  beaten by {gain:.3%}: {line(faster)}\n    chosen: {line(one.chosen)}", flush=True)
    if one.below is not None:
        print(f"  T below the bound {(one.chosen.bound_s or 0.0) * 1e6:,.2f} us: {line(one.below)}", flush=True)


def brute(kinds: Sequence[str], count: int, limit: int) -> list[Beaten]:
    """All plans of so many models."""
    rows = []
    for problem in problems(kinds, count, TABLES):
        rows.append(beaten(problem, limit))
        print_beaten(rows[-1])
    proven = [one for one in rows if one.chosen.status == OPTIMAL]
    lost = [one for one in proven if one.faster]
    gains = sorted((one.gain for one in lost), reverse=True)
    most = f", by {gains[0]:.2%} at most and {gains[len(gains) // 2]:.2%} in the middle" if gains else ""
    print(f"\n{len(proven)} of {len(rows)} plans are called OPTIMAL; {len(lost)} of them are beaten{most}")
    for kind in CLASSES:
        own = [one for one in lost if one.faster[0].kind == kind]
        if own:
            models = ", ".join(sorted({one.chosen.model.partition(":")[0] for one in own}))
            print(f"  {len(own)} by {kind}, {max(one.gain for one in own):.2%} at most ({models})")
    print(f"  {sum(one.below is not None for one in rows)} with a faster plan of a T below the bound")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300, help="models whose plans are drawn")
    parser.add_argument("--brute", type=int, nargs="?", const=100, help="models of which all plans are compared")
    parser.add_argument("--limit", type=int, default=LIMIT, help="plans of a model and scheme that are simulated")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    figures: object
    if args.brute is not None:
        figures = [asdict(one) for one in brute(args.kinds, args.brute, args.limit)]
    else:
        found = list(problems(args.kinds, args.seeds))
        rows = [one for problem in found for one in compared(problem)]
        print_compared(rows)
        own = [chosen(problem)[1] for problem in found]
        print_chosen(own)
        figures = {"drawn": [asdict(one) for one in rows], "chosen": [asdict(one) for one in own]}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
