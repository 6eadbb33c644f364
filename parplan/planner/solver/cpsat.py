"""The general engine: the abstract problem as an integer program for CP-SAT, with edge-flow variables.

The only file that imports ortools, and only inside functions. x[v, k] says that node v takes strategy k; y[p, q] that
an edge joins class p of its source and class q of its target, where a class holds the strategies whose lines of the
edge matrices are equal. Row sums of y are x of the source's classes, column sums of the target's: the linear relaxation
is then tight on trees. A maximum is an integer that is at least each of its rows; one that is used with several factors
is an integer per factor (of the factor times its rows), so that all coefficients of integers are 1.

Seconds become whole numbers: each chosen cost is rounded once in T and once per row on the way to T, which shifts T by
at most half a unit each. The unit keeps the sum of that, over the longest selection of rows, below 1e-8 of T; the
returned bound has it subtracted. Whole-number costs and factors (costs up to 2^50) are not rounded at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from parplan.errors import ParplanError
from parplan.planner.solver.elimination import group_lines
from parplan.planner.solver.limits import LimitRow
from parplan.planner.solver.problem import FloatArray, Problem, Row, Status
from parplan.planner.solver.rows import Terms, row_table

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

__all__ = ["Found", "Progress", "Resolution", "least_excess", "resolution", "search"]

RESOLUTION = 1e-8
"""Largest relative shift of T by rounding."""

QUICK = 4.0
"""Deterministic time (about seconds) given to one worker before all are used: small rests are done by then."""

Progress = Callable[[float, float], None]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Resolution:
    """Seconds of one integer unit, and the most seconds by which rounding can shift T."""

    unit: float
    error: float

    def whole(self, costs: FloatArray) -> Ints:
        """Costs in units; inf must have been taken out."""
        return np.rint(costs / self.unit).astype(np.int64)


@dataclass(frozen=True)
class Found:
    """Result of the search; `bound` in seconds is a true lower bound on T."""

    status: Status
    choice: tuple[int, ...] | None
    bound: float


@dataclass(frozen=True, eq=False)
class _Flow:
    """The literals of an edge, and the first strategies of source and target of the classes that each stands for."""

    literals: list[object]
    source: NDArray[np.intp]
    target: NDArray[np.intp]


@dataclass(eq=False)
class _Build:
    """A model while it is built."""

    model: cp_model.CpModel
    problem: Problem
    unit: Resolution
    x: list[list[cp_model.IntVar]] = field(default_factory=list)
    cost: list[tuple[object, int]] = field(default_factory=list)
    flow: list[_Flow] = field(default_factory=list)
    maxima: list[object] = field(default_factory=list)


def resolution(problem: Problem, target: float) -> Resolution:
    """The integer unit for a problem whose optimum is about `target` seconds."""
    costs = [node.cost_s for node in problem.nodes] + [edge.cost_s for edge in problem.edges]
    base = [part[np.isfinite(part)] for part in costs]
    rounded, size = sum(bool(part.any()) for part in base), sum(float(part.max(initial=0)) for part in base)
    whole = all((part == np.rint(part)).all() for part in base)
    # Per maximum: the most costs that a selection of rows takes from it, and the largest absolute value.
    counts: list[int] = []
    sizes: list[float] = []
    for maximum in problem.maxima:
        of_rows = []
        for row in maximum.rows:
            terms = [*row.nodes.values(), *row.edges.values(), np.array([row.constant_s])]
            whole &= all((part == np.rint(part)).all() for part in (*terms, np.array(list(row.maxima.values()))))
            count = sum(bool(part.any()) for part in terms) + sum(counts[m] for m, f in row.maxima.items() if f > 0)
            largest = sum(float(abs(part).max(initial=0)) for part in terms)
            of_rows.append((count, largest + sum(f * sizes[m] for m, f in row.maxima.items())))
        counts.append(max(count for count, _ in of_rows))
        sizes.append(max(largest for _, largest in of_rows))
        whole &= maximum.weight == round(maximum.weight)
        rounded += counts[-1] * (maximum.weight > 0)
        size += maximum.weight * sizes[-1]
    if whole and size < 2**50:
        return Resolution(1.0, 0.0)
    # Not finer than what sums of these sizes keep in 64 bits.
    unit = max(2 * RESOLUTION * target / max(rounded, 1), size * 2.0**-50)
    return Resolution(unit, unit * rounded / 2)


def search(
    problem: Problem,
    rows: Sequence[LimitRow],
    deadline: float,
    workers: int,
    target: float,
    cutoff: float = np.inf,
    hint: Sequence[int] | None = None,
    on_progress: Progress | None = None,
    effort: float = np.inf,
) -> Found:
    """The best choice with T below about `cutoff`; INFEASIBLE proves there is none.

    `rows` are the limits that count. `target` is a guess of T in seconds (sets the integer unit). The problem must be
    presolved: no forbidden strategies. It ends when `time.monotonic()` passes `deadline`, building the model included,
    or after `effort`, in deterministic time (about seconds, but the same on every machine).
    """
    build = _model(problem, rows, resolution(problem, target), deadline)
    if build is None:
        return Found(Status.UNKNOWN, None, -np.inf)
    if np.isfinite(cutoff):
        build.model.add(_sum(build.cost, build.maxima) <= int(np.floor((cutoff + build.unit.error) / build.unit.unit)))
    build.model.minimize(_sum(build.cost, build.maxima))
    _hint(build, hint or ())
    return _run(build, deadline, workers, on_progress, effort)


def least_excess(
    problem: Problem, rows: Sequence[LimitRow], deadline: float, workers: int, hint: Sequence[int] = ()
) -> Found:
    """The choice whose largest excess over a memory limit is the least: what the limits have to be raised by.

    Costs do not count.

    `bound` is in bytes. INFEASIBLE if no choice meets the pairs and linear constraints whatever the limits.
    """
    build = _model(problem, [], Resolution(1.0, 0.0), deadline)
    if build is None:
        return Found(Status.UNKNOWN, None, -np.inf)
    largest = int(sum(usage.amounts.max() for node in problem.nodes for usage in node.usages))
    excess = build.model.new_int_var(0, largest, "excess")
    for row in rows:
        _add_row(build, row, [] if row.resource is None else [(excess, -1)])
    build.model.minimize(excess)
    _hint(build, hint)
    return _run(build, deadline, workers, None)


def _sum(terms: Sequence[tuple[object, int]], more: Sequence[object] = ()) -> cp_model.LinearExprT:
    from ortools.sat.python import cp_model

    literals = [literal for literal, _ in terms] + list(more)
    return cp_model.LinearExpr.weighted_sum(literals, [weight for _, weight in terms] + [1] * len(more))


def _model(problem: Problem, rows: Sequence[LimitRow], unit: Resolution, deadline: float) -> _Build | None:
    """Everything but the objective; None if the time is up before it is done."""
    from ortools.sat.python import cp_model

    build = _Build(cp_model.CpModel(), problem, unit)
    for v, node in enumerate(problem.nodes):
        literals = [build.model.new_bool_var(f"x{v}_{k}") for k in range(node.size)]
        build.model.add_exactly_one(literals)
        build.x.append(literals)
        build.cost += _weighted(literals, build.unit.whole(node.cost_s))
    for edge, terms in enumerate(row_table(problem).edges):
        if time.monotonic() > deadline:
            return None
        _add_edge(build, edge, terms)
    _add_maxima(build)
    for row in rows:
        _add_row(build, row)
    return build


def _weighted(literals: Sequence[object], weights: Ints) -> list[tuple[object, int]]:
    return [(literal, int(weight)) for literal, weight in zip(literals, weights, strict=True) if weight]


def _add_edge(build: _Build, index: int, terms: Terms) -> None:
    edge = build.problem.edges[index]
    if not edge.cost_s.any() and not len(terms.rows):
        build.flow.append(_Flow([], np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp)))
        return
    matrices = (edge.cost_s, *np.where(np.isfinite(edge.cost_s), terms.seconds, 0.0))
    sources = _class_literals(build, edge.source, np.hstack(matrices))
    targets = _class_literals(build, edge.target, np.hstack([matrix.T for matrix in matrices]))
    first, second = np.array([k for k, _ in sources]), np.array([k for k, _ in targets])
    cost = edge.cost_s[np.ix_(first, second)]
    allowed = np.argwhere(np.isfinite(cost))
    # One literal per allowed pair, tied to both ends.
    outgoing: list[list[object]] = [[] for _ in sources]
    incoming: list[list[object]] = [[] for _ in targets]
    flow: list[object] = []
    for p, q in allowed:
        single = targets[q] if len(sources) == 1 else sources[p] if len(targets) == 1 else None
        literal = build.model.new_bool_var("") if single is None else single[1]
        flow.append(literal)
        outgoing[p].append(literal)
        incoming[q].append(literal)
    for (_, literal), group in [*zip(sources, outgoing, strict=True), *zip(targets, incoming, strict=True)]:
        build.model.add_exactly_one([*group, literal.negated()])  # type: ignore[list-item]
    build.flow.append(_Flow(flow, first[allowed[:, 0]], second[allowed[:, 1]]))
    build.cost += _weighted(flow, build.unit.whole(cost[allowed[:, 0], allowed[:, 1]]))


def _class_literals(build: _Build, v: int, lines: FloatArray) -> list[tuple[int, cp_model.IntVar]]:
    """First strategy and literal of every class of node v, by its lines of an edge matrix."""
    groups = group_lines(lines)
    result = []
    for first in groups.first:
        members = [build.x[v][k] for k in np.flatnonzero(groups.of == groups.of[first])]
        literal = members[0]
        if len(members) > 1:
            literal = build.model.new_bool_var("")
            build.model.add_exactly_one([*members, literal.negated()])
        result.append((int(first), literal))
    return result


def _add_maxima(build: _Build) -> None:
    """An integer for every maximum and every product of weight and factors that it enters T with."""
    maxima = build.problem.maxima
    factors: list[set[float]] = [{maximum.weight} if maximum.weight > 0 else set() for maximum in maxima]
    for place in range(len(maxima) - 1, -1, -1):
        for row in maxima[place].rows:
            for other, factor in row.maxima.items():
                factors[other] |= {scale * factor for scale in factors[place] if factor > 0}
    known: dict[tuple[int, float], tuple[cp_model.IntVar, int, int]] = {}
    for place, maximum in enumerate(maxima):
        for scale in sorted(factors[place]):
            sums = [_scaled(build, row, scale) for row in maximum.rows]
            used = [[known[m, scale * f] for m, f in row.maxima.items() if f > 0] for row in maximum.rows]
            low = max(s.low + sum(least for _, least, _ in below) for s, below in zip(sums, used, strict=True))
            high = max(s.high + sum(most for _, _, most in below) for s, below in zip(sums, used, strict=True))
            variable = build.model.new_int_var(low, high, f"maximum{place}")
            for found, below in zip(sums, used, strict=True):
                build.model.add(variable >= _sum(found.terms, [other for other, _, _ in below]) + found.constant)
            known[place, scale] = variable, low, high
    build.maxima = [known[place, maximum.weight][0] for place, maximum in enumerate(maxima) if maximum.weight > 0]


@dataclass(frozen=True, eq=False)
class _Scaled:
    """A row's own seconds times a scale, in units: weighted literals and a constant; their least and largest sum."""

    terms: list[tuple[object, int]]
    constant: int
    low: int
    high: int


def _scaled(build: _Build, row: Row, scale: float) -> _Scaled:
    constant = low = high = int(build.unit.whole(np.array(scale * row.constant_s)))
    literals: list[tuple[Sequence[object], FloatArray]] = [(build.x[v], seconds) for v, seconds in row.nodes.items()]
    for e, seconds in row.edges.items():
        if seconds.any():
            flow = build.flow[e]
            literals.append((flow.literals, seconds[flow.source, flow.target]))
    terms: list[tuple[object, int]] = []
    for of_term, seconds in literals:
        whole = build.unit.whole(scale * seconds)
        terms += _weighted(of_term, whole)
        low, high = low + int(whole.min()), high + int(whole.max())
    return _Scaled(terms, constant, low, high)


def _add_row(build: _Build, row: LimitRow, more: Sequence[tuple[object, int]] = ()) -> None:
    """A limit; the least amount of every node goes into the right-hand side, `more` into the sum."""
    base = {v: float(values.min()) for v, values in row.terms.items()}
    terms = [*more]
    terms += [t for v, c in row.terms.items() for t in _weighted(build.x[v], (c - base[v]).astype(np.int64))]
    least = sum(base.values())
    if np.isfinite(row.high):
        build.model.add(_sum(terms) <= int(np.floor(row.high - least)))
    if np.isfinite(row.low):
        build.model.add(_sum(terms) >= int(np.ceil(row.low - least)))


def _run(build: _Build, deadline: float, workers: int, on_progress: Progress | None, effort: float = np.inf) -> Found:
    """One worker for a while, as it finishes small problems sooner, then all."""
    solver = _solver(deadline - time.monotonic(), 1)
    solver.parameters.max_deterministic_time = min(effort, QUICK) if workers > 1 else effort
    found = _found(build, solver, on_progress)
    if found.status in (Status.OPTIMAL, Status.INFEASIBLE) or workers == 1 or time.monotonic() > deadline:
        return found
    if found.choice is not None:
        build.model.clear_hints()  # type: ignore[no-untyped-call]
        _hint(build, found.choice)
    again = _found(build, _solver(deadline - time.monotonic(), workers), on_progress)
    bound = max(found.bound, again.bound)
    return replace(again if again.choice or again.status is Status.INFEASIBLE else found, bound=bound)


def _hint(build: _Build, choice: Sequence[int]) -> None:
    for v, k in enumerate(choice):
        for strategy, literal in enumerate(build.x[v]):
            build.model.add_hint(literal, int(strategy == k))


def _solver(time_limit_s: float, workers: int) -> cp_model.CpSolver:
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    solver.parameters.num_workers = workers
    solver.parameters.interleave_search = workers > 1  # the same problem gives the same choice
    solver.parameters.cp_model_probing_level = 2 if workers > 1 else 0
    solver.parameters.linearization_level = 2
    solver.parameters.presolve_inclusion_work_limit = 0  # it takes some feasible models for infeasible ones (9.15)
    solver.parameters.random_seed = 0
    solver.parameters.relative_gap_limit = 0.0
    solver.parameters.catch_sigint_signal = False
    return solver


def _found(build: _Build, solver: cp_model.CpSolver, on_progress: Progress | None) -> Found:
    from ortools.sat.python import cp_model

    code = _interruptible(solver, build.model, _listen(solver, build.unit, on_progress))
    names = {int(getattr(cp_model, s.value)): s for s in (Status.OPTIMAL, Status.FEASIBLE, Status.INFEASIBLE)}
    if code == int(cp_model.MODEL_INVALID):
        raise ParplanError(
            f"the solver refused the problem as invalid: {build.model.validate() or 'no reason given'}; this is a bug "
            "of parplan, please report it with the model and the command"
        )
    status = names.get(code, Status.UNKNOWN)
    if status is Status.INFEASIBLE:
        return Found(status, None, np.inf)
    bound = solver.best_objective_bound * build.unit.unit - build.unit.error
    if status is Status.UNKNOWN:
        return Found(status, None, bound)
    return Found(status, tuple(next(k for k, x in enumerate(row) if solver.boolean_value(x)) for row in build.x), bound)


def _listen(
    solver: cp_model.CpSolver, unit: Resolution, on_progress: Progress | None
) -> cp_model.CpSolverSolutionCallback | None:
    """Report every better choice and bound, in seconds."""
    from ortools.sat.python import cp_model

    if on_progress is None:
        return None
    report, best = on_progress, [np.inf, 0.0]

    class Listener(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            best[0] = self.objective_value * unit.unit + unit.error
            report(best[0], best[1])

    def on_bound(bound: float) -> None:
        best[1] = max(best[1], bound * unit.unit - unit.error)
        report(best[0], best[1])

    solver.best_bound_callback = on_bound
    return Listener()


def _interruptible(
    solver: cp_model.CpSolver, model: cp_model.CpModel, callback: cp_model.CpSolverSolutionCallback | None
) -> int:
    """Solve in a thread, so that Ctrl-C reaches Python; it stops the search and is raised again."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        found = pool.submit(solver.solve, model, callback)
        try:
            while not wait([found], timeout=0.2).done:
                pass
        except KeyboardInterrupt:
            while not wait([found], timeout=0.1).done:
                solver.stop_search()
            raise
        return int(found.result())
