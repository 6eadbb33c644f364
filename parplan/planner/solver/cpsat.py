"""The general engine: the abstract problem as an integer program for CP-SAT, with edge-flow variables.

The only file that imports ortools, and only inside functions. x[v, k] says that node v takes strategy k; y[p, q] that
an edge joins class p of its source and class q of its target, where a class holds the strategies whose lines of the
edge matrix are equal. Row sums of y are x of the source's classes, column sums of the target's: the linear relaxation
is then tight on trees. The overlap is Lindley's recursion between consecutive nodes that reduce, so that every cost is
in one row: waiting[k] >= waiting[k+1] + reduction_s - (backward time in between), waiting >= 0.

Seconds become whole numbers. T moves by at most the sum of the changes of the chosen costs (each is counted at most
once in every overlap row), so rounding shifts T by at most half a unit per chosen cost. The unit keeps that below 1e-8
of T; the returned bound has it subtracted. Whole-number costs (up to 2^50) are not rounded at all.
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
from parplan.planner.solver.elimination import edge_costs, group_lines
from parplan.planner.solver.limits import Row
from parplan.planner.solver.problem import FloatArray, Problem, Status

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


@dataclass(eq=False)
class _Build:
    """A model while it is built."""

    model: cp_model.CpModel
    problem: Problem
    unit: Resolution
    x: list[list[cp_model.IntVar]] = field(default_factory=list)
    cost: list[tuple[object, int]] = field(default_factory=list)
    node_backward: list[list[tuple[object, int]]] = field(default_factory=list)
    edge_backward: list[list[tuple[object, int]]] = field(default_factory=list)
    overlap: list[object] = field(default_factory=list)


def resolution(problem: Problem, target: float) -> Resolution:
    """The integer unit for a problem whose optimum is about `target` seconds."""
    costs = [part for node in problem.nodes for part in (node.forward_s, node.backward_s, node.reduction_s)]
    costs += [part for edge in problem.edges for part in edge_costs(edge)]
    finite = [part[np.isfinite(part)] for part in costs]
    if all((part == np.rint(part)).all() for part in finite) and sum(float(p.max(initial=0)) for p in finite) < 2**50:
        return Resolution(1.0, 0.0)
    rounded = sum(bool(part.any()) for part in finite)
    error = RESOLUTION * max(target, 1e-300)
    return Resolution(2 * error / max(rounded, 1), error)


def search(
    problem: Problem,
    rows: Sequence[Row],
    time_limit_s: float,
    workers: int,
    target: float,
    cutoff: float = np.inf,
    hint: Sequence[int] | None = None,
    on_progress: Progress | None = None,
) -> Found:
    """The best choice with T below about `cutoff`; INFEASIBLE proves there is none.

    `rows` are the limits that count. `target` is a guess of T in seconds (sets the integer unit). The problem must be
    presolved: no forbidden strategies.
    """
    build = _model(problem, rows, resolution(problem, target))
    if np.isfinite(cutoff):
        build.model.add(_sum(build.cost, build.overlap) <= int(np.floor((cutoff + build.unit.error) / build.unit.unit)))
    build.model.minimize(_sum(build.cost, build.overlap))
    _hint(build, hint or ())
    return _run(build, time_limit_s, workers, on_progress)


def least_excess(
    problem: Problem, rows: Sequence[Row], time_limit_s: float, workers: int, hint: Sequence[int] = ()
) -> Found:
    """The choice that exceeds the memory limits by the least bytes, summed over the memories; costs do not count.

    `bound` is in bytes. INFEASIBLE if no choice meets the pairs and linear constraints whatever the limits.
    """
    build = _model(problem, [], Resolution(1.0, 0.0))
    largest = int(sum(usage.amounts.max() for node in problem.nodes for usage in node.usages))
    excess = [build.model.new_int_var(0, largest, f"excess{r}") for r in range(len(problem.limits))]
    for row in rows:
        _add_row(build, row, [] if row.resource is None else [(excess[row.resource], -1)])
    build.model.minimize(_sum([], excess))
    _hint(build, hint)
    return _run(build, time_limit_s, workers, None)


def _sum(terms: Sequence[tuple[object, int]], more: Sequence[object] = ()) -> cp_model.LinearExprT:
    from ortools.sat.python import cp_model

    literals = [literal for literal, _ in terms] + list(more)
    return cp_model.LinearExpr.weighted_sum(literals, [weight for _, weight in terms] + [1] * len(more))


def _model(problem: Problem, rows: Sequence[Row], unit: Resolution) -> _Build:
    """Everything but the objective."""
    from ortools.sat.python import cp_model

    build = _Build(cp_model.CpModel(), problem, unit)
    for v in range(len(problem.nodes)):
        node = build.problem.nodes[v]
        literals = [build.model.new_bool_var(f"x{v}_{k}") for k in range(node.size)]
        build.model.add_exactly_one(literals)
        build.x.append(literals)
        build.cost += _weighted(literals, build.unit.whole(node.forward_s) + build.unit.whole(node.backward_s))
        build.node_backward.append(_weighted(literals, build.unit.whole(node.backward_s)))
        build.edge_backward.append([])
    for edge in range(len(problem.edges)):
        _add_edge(build, edge)
    _add_overlap(build)
    for row in rows:
        _add_row(build, row)
    return build


def _weighted(literals: Sequence[object], weights: Ints) -> list[tuple[object, int]]:
    return [(literal, int(weight)) for literal, weight in zip(literals, weights, strict=True) if weight]


def _add_edge(build: _Build, index: int) -> None:
    edge = build.problem.edges[index]
    forward, backward = edge_costs(edge)
    if np.isfinite(forward).all() and not forward.any() and not backward.any():
        return
    sources = _class_literals(build, edge.source, np.hstack([forward, backward]))
    targets = _class_literals(build, edge.target, np.hstack([forward.T, backward.T]))
    place = np.ix_([k for k, _ in sources], [k for k, _ in targets])
    forward, backward = forward[place], backward[place]
    allowed = np.argwhere(np.isfinite(forward))
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
    costs = [(forward[p, q], backward[p, q]) for p, q in allowed]
    whole = build.unit.whole(np.array(costs).reshape(-1, 2))
    build.cost += _weighted(flow, whole.sum(axis=1))
    build.edge_backward[edge.target] += _weighted(flow, whole[:, 1])


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


def _add_overlap(build: _Build) -> None:
    nodes = build.problem.nodes
    reduced = [v for v, node in enumerate(nodes) if node.reduction_s.any()]
    most = int(build.unit.whole(np.array([node.reduction_s.max() for node in nodes])).sum()) + len(nodes)
    waiting = [build.model.new_int_var(0, most, f"waiting{v}") for v in reduced]
    for place, v in enumerate(reduced):
        first = reduced[place - 1] if place else 0
        terms = _weighted(build.x[v], build.unit.whole(nodes[v].reduction_s))
        hidden = [t for u in range(first, v) for t in build.node_backward[u]]
        hidden += [t for u in range(first + 1, v + 1) for t in build.edge_backward[u]]
        terms += [(literal, -weight) for literal, weight in hidden]
        later = waiting[place + 1 : place + 2]
        build.model.add(waiting[place] >= _sum(terms, later))
    build.overlap = list(waiting[:1])


def _add_row(build: _Build, row: Row, more: Sequence[tuple[object, int]] = ()) -> None:
    """A limit; the least amount of every node goes into the right-hand side, `more` into the sum."""
    base = {v: float(values.min()) for v, values in row.terms.items()}
    terms = [*more]
    terms += [t for v, c in row.terms.items() for t in _weighted(build.x[v], (c - base[v]).astype(np.int64))]
    least = sum(base.values())
    if np.isfinite(row.high):
        build.model.add(_sum(terms) <= int(np.floor(row.high - least)))
    if np.isfinite(row.low):
        build.model.add(_sum(terms) >= int(np.ceil(row.low - least)))


def _run(build: _Build, time_limit_s: float, workers: int, on_progress: Progress | None) -> Found:
    """One worker for a while, as it finishes small problems sooner, then all."""
    deadline = time.monotonic() + time_limit_s
    solver = _solver(time_limit_s, 1)
    if workers > 1:
        solver.parameters.max_deterministic_time = QUICK
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
    bound = max(solver.best_objective_bound * build.unit.unit - build.unit.error, 0.0)
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
