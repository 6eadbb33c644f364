"""The abstract planning problem: choose one strategy per node. It knows nothing of models.

Why apart: the solver can then be scored on public instances of the same form (IOPDDL), and a plan's time can be
recomputed by `evaluate` without trusting any solver.

The objective. Costs of nodes and of pairs add up; what runs at the same time is the longest of several sums:

    T(x) = sum_v cost_v[x_v] + sum_e cost_e[x_u, x_w] + sum_m weight_m M_m(x)
    M_m(x) = max over rows r of   constant + sum_v a_rv[x_v] + sum_e a_re[x_u, x_w] + sum_k factor_rk M_k(x)

A row is linear in the choice and may use maxima before its own, with factors >= 0: maxima then describe the longest
path through the step (a layer's backward is done; its gradient sum is done). T is the maximum of linear functions, one
for each selection of a row per maximum, so it is exact in an integer program and convex in its relaxation.

`Reduced` is the result of every reduction: a smaller problem with the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from enum import Enum
from math import isfinite

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parplan.errors import ParplanError

__all__ = [
    "Cause", "Edge", "Evaluation", "FloatArray", "Infeasibility", "Linear", "Mask", "Maximum", "Node", "Problem",
    "Reduced", "Row", "Solution", "Status", "Usage", "evaluate", "objective", "objectives_at", "restrict",
    "row_seconds",
]  # fmt: skip

FloatArray = NDArray[np.float64]


def _costs(values: ArrayLike, what: str, dimensions: int) -> FloatArray:
    array = np.array(values, dtype=np.float64)
    if array.ndim != dimensions or array.size == 0:
        raise ParplanError(f"{what}: costs have shape {array.shape}; {dimensions} non-empty dimension(s) are needed")
    if not (array >= 0).all():
        raise ParplanError(f"{what}: costs must be numbers >= 0 (inf forbids), got {array.min()}")
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class Usage:
    """Bytes per strategy that a node holds of one memory, at the time points [start, end).

    Amounts are bytes, rounded up to whole ones, so that float and integer sums agree exactly.

    Args:
        estimated: the node may do without, as other nodes decide: `Problem.relaxed` leaves it out.
    """

    resource: int
    start: int
    end: int
    amounts: FloatArray
    estimated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "amounts", np.ceil(_costs(self.amounts, f"usage of memory {self.resource}", 1)))


@dataclass(frozen=True, eq=False)
class Node:
    """One decision: seconds per strategy, shape (strategies,), that count whatever else is chosen; inf forbids one."""

    name: str
    cost_s: FloatArray
    usages: tuple[Usage, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost_s", _costs(self.cost_s, f"node {self.name}", 1))
        lengths = {len(self.cost_s), *(len(usage.amounts) for usage in self.usages)}
        if len(lengths) != 1:
            raise ParplanError(f"node {self.name}: costs and usages for {sorted(lengths)} strategies; give one count")

    @property
    def size(self) -> int:
        """The number of strategies."""
        return len(self.cost_s)

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """Which strategies have finite costs, shape (size,)."""
        return np.isfinite(self.cost_s)


@dataclass(frozen=True, eq=False)
class Edge:
    """Seconds per (strategy of source, strategy of target), source < target; inf forbids a pair."""

    source: int
    target: int
    cost_s: FloatArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost_s", _costs(self.cost_s, f"edge {self.source}-{self.target}", 2))
        if not 0 <= self.source < self.target:
            raise ParplanError(f"edge {self.source}-{self.target}: the source must come before the target")


@dataclass(frozen=True, eq=False)
class Row:
    """Seconds that are linear in the choice: one of the sums that a maximum compares.

    Args:
        nodes: seconds per strategy of some nodes, shape (strategies,); finite, below 0 where they discount a strategy.
        edges: seconds per pair of some edges, by place in `Problem.edges`, of the edge's shape; finite.
        maxima: factors >= 0 of maxima before its own, by place in `Problem.maxima`.
        constant_s: seconds whatever is chosen.
    """

    nodes: Mapping[int, FloatArray] = dataclass_field(default_factory=dict)
    edges: Mapping[int, FloatArray] = dataclass_field(default_factory=dict)
    maxima: Mapping[int, float] = dataclass_field(default_factory=dict)
    constant_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("nodes", "edges"):
            terms = {key: np.asarray(value, dtype=np.float64) for key, value in sorted(getattr(self, name).items())}
            if not all(isfinite(values.sum()) for values in terms.values()):
                raise ParplanError(
                    "a row of a maximum: seconds must be finite; forbid strategies in their node's costs"
                )
            object.__setattr__(self, name, terms)
        if any(factor < 0 for factor in self.maxima.values()):
            raise ParplanError("a row of a maximum: factors of other maxima must be >= 0")


@dataclass(frozen=True, eq=False)
class Maximum:
    """The longest of several sums of seconds; `weight` (>= 0) is its factor in T, 0 where only later maxima use it."""

    name: str
    rows: tuple[Row, ...]
    weight: float = 0.0

    def __post_init__(self) -> None:
        if not self.rows or self.weight < 0:
            raise ParplanError(
                f"maximum {self.name}: {len(self.rows)} rows and weight {self.weight}; it needs a row, "
                "and a weight >= 0"
            )


@dataclass(frozen=True, eq=False)
class Linear:
    """`low <= sum of terms[node][strategy] <= high`, for a whole-number coefficient per strategy of some nodes.

    An equality has low == high. The name is what an infeasible problem is told by.
    """

    name: str
    terms: Mapping[int, FloatArray]
    low: float = -np.inf
    high: float = np.inf

    def __post_init__(self) -> None:
        terms = {node: np.array(values, dtype=np.float64) for node, values in sorted(self.terms.items())}
        if not all(np.isfinite(v).all() and (v == np.round(v)).all() and abs(v).max() < 2**50 for v in terms.values()):
            raise ParplanError(f"constraint {self.name}: coefficients must be whole numbers; scale them")
        object.__setattr__(self, "terms", terms)


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes in forward order, edges, one limit in bytes per memory, linear constraints, maxima; minimise T."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    limits: tuple[float, ...] = ()
    linear: tuple[Linear, ...] = ()
    resource_names: tuple[str, ...] = ()
    maxima: tuple[Maximum, ...] = ()

    def __post_init__(self) -> None:
        sizes = self.sizes
        for edge in self.edges:
            if edge.target >= len(sizes) or edge.cost_s.shape != (sizes[edge.source], sizes[edge.target]):
                raise ParplanError(
                    f"edge {edge.source}-{edge.target}: costs of shape {edge.cost_s.shape} do not fit its nodes"
                )
        for row in self.linear:
            if any(node >= len(sizes) or len(values) != sizes[node] for node, values in row.terms.items()):
                raise ParplanError(f"constraint {row.name}: its coefficients do not fit its nodes' strategies")
        for node in self.nodes:
            if any(usage.resource >= len(self.limits) for usage in node.usages):
                raise ParplanError(f"node {node.name}: uses a memory without a limit; {len(self.limits)} are given")
        for place, maximum in enumerate(self.maxima):
            for term in maximum.rows:
                fits = all(v < len(sizes) and len(values) == sizes[v] for v, values in term.nodes.items())
                fits &= all(
                    e < len(self.edges) and values.shape == self.edges[e].cost_s.shape
                    for e, values in term.edges.items()
                )
                if not fits or any(other >= place for other in term.maxima):
                    raise ParplanError(
                        f"maximum {maximum.name}: a row does not fit its nodes' strategies or the maxima before its own"
                    )

    @property
    def sizes(self) -> list[int]:
        """The number of strategies of each node."""
        return [node.size for node in self.nodes]

    @property
    def relaxed(self) -> Problem:
        """The problem without what nodes hold by an estimate: whatever fits, fits it."""
        certain = (replace(node, usages=tuple(u for u in node.usages if not u.estimated)) for node in self.nodes)
        return replace(self, nodes=tuple(certain))

    def resource_name(self, resource: int) -> str:
        """Name of a memory in messages."""
        return self.resource_names[resource] if resource < len(self.resource_names) else f"memory {resource}"


@dataclass(frozen=True)
class Evaluation:
    """Costs of a choice: seconds (`objective` is T, `maxima` the value of each), peak bytes per memory, broken limits.

    It is feasible if it breaks none.
    """

    objective: float
    maxima: tuple[float, ...]
    peaks: tuple[float, ...]
    violations: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """Whether nothing is broken."""
        return not self.violations


class Status(Enum):
    """How a solve ended; OPTIMAL means proven."""

    OPTIMAL = "OPTIMAL"
    FEASIBLE = "FEASIBLE"
    INFEASIBLE = "INFEASIBLE"
    UNKNOWN = "UNKNOWN"


class Cause(Enum):
    """Which kind of constraint makes a problem infeasible."""

    STRATEGY = "strategy"
    EDGE = "edge"
    MEMORY = "memory"
    LINEAR = "linear"


@dataclass(frozen=True)
class Infeasibility:
    """The constraint that cannot be met: what to tell the user.

    Attributes:
        names: node names (STRATEGY: that node; EDGE: source and target of each pair, flattened;
            MEMORY: the largest nodes live at `time`) or constraint names (LINEAR).
        amounts: MEMORY: the bytes each of `names` holds; else empty.
        resource: MEMORY: which memory; None if all together are too small.
        time: MEMORY: the time point.
        missing: MEMORY: bytes by which the best choice found exceeds the limit (the least possible unless the search
            was cut short), or, for all memories together, a proven least.
    """

    cause: Cause
    names: tuple[str, ...]
    message: str
    amounts: tuple[float, ...] = ()
    resource: int | None = None
    time: int | None = None
    missing: float = 0.0


@dataclass(frozen=True)
class Solution:
    """A choice with its proof.

    Attributes:
        choice: the strategy of each node, or None.
        objective: seconds, recomputed by `evaluate` in float64 (inf without a choice).
        bound: seconds; no choice costs less (within 1e-9 of it). OPTIMAL means gap <= 1e-6.
        gap: (objective - bound) / objective.
        seconds: wall time of the solve.
        limited: the time limit ended a part of it, so that another machine may find another choice.
        possible: per node, the strategies that a choice below the cutoff may have, where a refutation found them.
    """

    status: Status
    choice: tuple[int, ...] | None
    objective: float
    bound: float
    gap: float
    seconds: float
    infeasibility: Infeasibility | None = None
    limited: bool = False
    possible: tuple[frozenset[int], ...] | None = None


def row_seconds(problem: Problem, row: Row, choice: Sequence[int], maxima: Sequence[float]) -> float:
    """Seconds of a row at `choice`, given the values of the maxima before its own."""
    seconds = row.constant_s + sum(float(values[choice[v]]) for v, values in row.nodes.items())
    for index, values in row.edges.items():
        seconds += float(values[choice[problem.edges[index].source], choice[problem.edges[index].target]])
    return seconds + sum(factor * maxima[other] for other, factor in row.maxima.items())


def objective(problem: Problem, choice: Sequence[int]) -> float:
    """T of `choice` in seconds, whatever limits it breaks; inf where a strategy or a pair is forbidden."""
    return _seconds(problem, choice)[0]


def _seconds(problem: Problem, choice: Sequence[int]) -> tuple[float, tuple[float, ...]]:
    """T, and the value of each maximum."""
    if len(choice) != len(problem.nodes):
        raise ParplanError(f"a choice for {len(choice)} nodes does not fit a problem of {len(problem.nodes)}")
    total = sum(float(node.cost_s[k]) for node, k in zip(problem.nodes, choice, strict=True))
    total += sum(float(edge.cost_s[choice[edge.source], choice[edge.target]]) for edge in problem.edges)
    values: list[float] = []
    for maximum in problem.maxima:
        values.append(max(row_seconds(problem, row, choice, values) for row in maximum.rows))
    total += sum(maximum.weight * value for maximum, value in zip(problem.maxima, values, strict=True))
    return total, tuple(values)


def objectives_at(problem: Problem, choices: Sequence[int | NDArray[np.intp]]) -> FloatArray:
    """T of several choices at once, whatever limits they break: per node one strategy for all, or an array of theirs.

    Shape of the arrays.
    """
    costs: FloatArray = np.zeros(np.broadcast_shapes(*map(np.shape, choices)))
    for node, k in zip(problem.nodes, choices, strict=True):
        costs = costs + node.cost_s[k]
    for edge in problem.edges:
        costs = costs + edge.cost_s[choices[edge.source], choices[edge.target]]
    values: list[FloatArray] = []
    for maximum in problem.maxima:
        sums = []
        for row in maximum.rows:
            seconds: FloatArray = np.array(row.constant_s)
            for v, own in row.nodes.items():
                seconds = seconds + own[choices[v]]
            for index, pairs in row.edges.items():
                edge = problem.edges[index]
                seconds = seconds + pairs[choices[edge.source], choices[edge.target]]
            for other, factor in row.maxima.items():
                seconds = seconds + factor * values[other]
            sums.append(seconds)
        longest = sums[0]
        for seconds in sums[1:]:
            longest = np.maximum(longest, seconds)
        values.append(longest)
        costs = costs + maximum.weight * longest
    return costs


def evaluate(problem: Problem, choice: Sequence[int]) -> Evaluation:
    """Costs and broken constraints of `choice` (one strategy per node); independent of every solver.

    The peak of a memory is its largest sum over all time points, 0 if nothing is ever live.
    """
    (step_s, maxima), nodes = _seconds(problem, choice), problem.nodes
    broken = [f"{n.name}: strategy {k} is forbidden" for n, k in zip(nodes, choice, strict=True) if not n.allowed[k]]
    for edge in problem.edges:
        pair = choice[edge.source], choice[edge.target]
        if not np.isfinite(edge.cost_s[pair]):
            broken.append(f"{nodes[edge.source].name} -> {nodes[edge.target].name}: strategies {pair} cannot meet")
    for row in problem.linear:
        total = float(sum(values[choice[node]] for node, values in row.terms.items()))
        if not row.low <= total <= row.high:
            broken.append(f"{row.name}: {total:g} is not in [{row.low:g}, {row.high:g}]")
    changes: list[dict[int, float]] = [{} for _ in problem.limits]
    for node, strategy in zip(problem.nodes, choice, strict=True):
        for usage in node.usages:
            if usage.start < usage.end:
                events, amount = changes[usage.resource], float(usage.amounts[strategy])
                events[usage.start] = events.get(usage.start, 0.0) + amount
                events[usage.end] = events.get(usage.end, 0.0) - amount
    peaks = tuple(float(np.cumsum([0.0] + [e[t] for t in sorted(e)]).max()) for e in changes)
    for resource, (peak, limit) in enumerate(zip(peaks, problem.limits, strict=True)):
        if peak > limit:
            broken.append(f"{problem.resource_name(resource)}: {peak:.0f} bytes exceed {limit:.0f}")
    return Evaluation(step_s, maxima, peaks, tuple(broken))


Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Reduced:
    """A smaller problem, and what turns a choice for it into a choice for the problem it came from."""

    problem: Problem
    lift: Callable[[Sequence[int]], list[int]] = list

    def then(self, step: Callable[[Problem], Reduced | None]) -> Reduced | None:
        """Reduce further; None (no choice is feasible) passes through."""
        after = step(self.problem)
        if after is None or after.problem is self.problem:
            return after and self
        outer, inner = self.lift, after.lift
        return Reduced(after.problem, lambda choice: outer(inner(choice)))


def restrict(problem: Problem, keep: Sequence[Mask]) -> Reduced:
    """Only the strategies where `keep[node]` is true; at least one per node must be."""
    if all(mask.all() for mask in keep):
        return Reduced(problem)
    index = [np.flatnonzero(mask) for mask in keep]
    nodes, edges = list(problem.nodes), list(problem.edges)
    pairs = [np.ix_(index[edge.source], index[edge.target]) for edge in edges]
    for v, (node, kept) in enumerate(zip(nodes, index, strict=True)):
        if len(kept) < node.size:
            usages = tuple(replace(u, amounts=u.amounts[kept]) for u in node.usages)
            nodes[v] = Node(node.name, node.cost_s[kept], usages)
    for e, edge in enumerate(edges):
        if (len(index[edge.source]), len(index[edge.target])) != edge.cost_s.shape:
            edges[e] = Edge(edge.source, edge.target, edge.cost_s[pairs[e]])
    linear = tuple(replace(row, terms={v: c[index[v]] for v, c in row.terms.items()}) for row in problem.linear)
    fewer = {v for v, mask in enumerate(keep) if not mask.all()}
    near = {e for e, edge in enumerate(edges) if edge.source in fewer or edge.target in fewer}

    def restricted(row: Row) -> Row:
        if fewer.isdisjoint(row.nodes) and near.isdisjoint(row.edges):
            return row
        of_edges = {e: c[pairs[e]] if e in near else c for e, c in row.edges.items()}
        return replace(row, nodes={v: c[index[v]] for v, c in row.nodes.items()}, edges=of_edges)

    maxima = tuple(replace(own, rows=tuple(map(restricted, own.rows))) for own in problem.maxima)
    smaller = replace(problem, nodes=tuple(nodes), edges=tuple(edges), linear=linear, maxima=maxima)
    return Reduced(smaller, lambda choice: [int(kept[k]) for kept, k in zip(index, choice, strict=True)])
