"""The abstract planning problem: choose one strategy per node. It knows nothing of models.

Why apart: the solver can then be scored on public instances of the same form (IOPDDL), and a plan's time can be
recomputed by `evaluate` without trusting any solver.

The objective. Nodes 0..n-1 run forward in order, then backward from n-1 down to 0. While the backward pass goes on,
the gradient of a node (`reduction_s` seconds) is reduced on the link as soon as the node's backward is done, in that
order. The step therefore ends no earlier than, for every i,

    F + B_i + sum_{j<=i} reduction_j      F  = all `forward_s`
                                          B_i = `backward_s` of the nodes j >= i and of the edges whose target is > i

(the link may be idle until i's gradient is ready, and then has i's and all later reductions to do), nor earlier
than F + B_0 + edges into 0 = F + B, and it ends at the largest of these. With B = all `backward_s`, that is

    T = F + B + exposed,   exposed = max(0, max_i P_i),
    P_i = sum_{j<=i} reduction_j - sum_{j<i} backward_j - sum_{edges with target <= i} backward_e.

Each P_i is linear in the choice, so the overlap is exact in a linear program. T never falls when a cost rises.

`Reduced` is the result of every reduction: a smaller problem with the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parplan.errors import ParplanError

__all__ = [
    "Cause",
    "Edge",
    "Evaluation",
    "FloatArray",
    "Infeasibility",
    "Linear",
    "Mask",
    "Node",
    "Phases",
    "Problem",
    "Reduced",
    "Solution",
    "Status",
    "Usage",
    "evaluate",
    "objective",
    "phases",
    "restrict",
]

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
    """

    resource: int
    start: int
    end: int
    amounts: FloatArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "amounts", np.ceil(_costs(self.amounts, f"usage of memory {self.resource}", 1)))


@dataclass(frozen=True, eq=False)
class Node:
    """One decision: seconds per strategy, shape (strategies,), of the phases of the step (see the module).

    inf forbids a strategy.
    """

    name: str
    forward_s: FloatArray
    backward_s: FloatArray
    reduction_s: FloatArray
    usages: tuple[Usage, ...] = ()

    def __post_init__(self) -> None:
        for field in ("forward_s", "backward_s", "reduction_s"):
            object.__setattr__(self, field, _costs(getattr(self, field), f"node {self.name}", 1))
        arrays = [self.forward_s, self.backward_s, self.reduction_s, *(usage.amounts for usage in self.usages)]
        lengths = set(map(len, arrays))
        if len(lengths) != 1:
            raise ParplanError(f"node {self.name}: costs and usages for {sorted(lengths)} strategies; give one count")

    @property
    def size(self) -> int:
        """The number of strategies."""
        return len(self.forward_s)

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """Which strategies have finite costs, shape (size,)."""
        return np.isfinite(self.forward_s + self.backward_s + self.reduction_s)


@dataclass(frozen=True, eq=False)
class Edge:
    """Seconds per (strategy of source, strategy of target), source < target; inf forbids a pair."""

    source: int
    target: int
    forward_s: FloatArray
    backward_s: FloatArray

    def __post_init__(self) -> None:
        for field in ("forward_s", "backward_s"):
            value = _costs(getattr(self, field), f"edge {self.source}-{self.target}", 2)
            object.__setattr__(self, field, value)
        if not 0 <= self.source < self.target:
            raise ParplanError(f"edge {self.source}-{self.target}: the source must come before the target")


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
    """Nodes in forward order, edges, one limit in bytes per memory, linear constraints; minimise T."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    limits: tuple[float, ...] = ()
    linear: tuple[Linear, ...] = ()
    resource_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = self.sizes
        for edge in self.edges:
            fits = edge.target < len(sizes) and edge.forward_s.shape == (sizes[edge.source], sizes[edge.target])
            if not fits or edge.forward_s.shape != edge.backward_s.shape:
                shapes = f"{edge.forward_s.shape} and {edge.backward_s.shape}"
                raise ParplanError(f"edge {edge.source}-{edge.target}: costs of shape {shapes} do not fit its nodes")
        for row in self.linear:
            if any(node >= len(sizes) or len(values) != sizes[node] for node, values in row.terms.items()):
                raise ParplanError(f"constraint {row.name}: its coefficients do not fit its nodes' strategies")
        for node in self.nodes:
            if any(usage.resource >= len(self.limits) for usage in node.usages):
                raise ParplanError(f"node {node.name}: uses a memory without a limit; {len(self.limits)} are given")

    @property
    def sizes(self) -> list[int]:
        """The number of strategies of each node."""
        return [node.size for node in self.nodes]

    def resource_name(self, resource: int) -> str:
        """Name of a memory in messages."""
        return self.resource_names[resource] if resource < len(self.resource_names) else f"memory {resource}"


@dataclass(frozen=True)
class Evaluation:
    """Costs of a choice: seconds (`objective` is the step), peak bytes per memory, broken constraints.

    It is feasible if it breaks none.
    """

    objective: float
    forward_s: float
    backward_s: float
    exposed_s: float
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
    """

    status: Status
    choice: tuple[int, ...] | None
    objective: float
    bound: float
    gap: float
    seconds: float
    infeasibility: Infeasibility | None = None


@dataclass(frozen=True, eq=False)
class Phases:
    """Seconds of one choice: of the whole forward, and per node (shape (nodes,)) of the phases that overlap.

    `arriving_s` is the backward of the edges into a node. With a forbidden strategy or pair `forward_s` is inf, and its
    other phases count 0.
    """

    forward_s: float
    backward_s: FloatArray
    arriving_s: FloatArray
    reduction_s: FloatArray

    @property
    def rows(self) -> FloatArray:
        """P_i of the module, in seconds: > 0 where reductions take longer than the backward pass that hides them."""
        later = np.cumsum(self.backward_s) - self.backward_s
        rows: FloatArray = np.cumsum(self.reduction_s) - later - np.cumsum(self.arriving_s)
        return rows

    @property
    def exposed_s(self) -> float:
        """Seconds of gradient reductions that nothing hides; inf for a forbidden choice."""
        return max(0.0, float(self.rows.max(initial=0.0))) if np.isfinite(self.forward_s) else np.inf


def phases(problem: Problem, choice: Sequence[int]) -> Phases:
    """The seconds of `choice` (one strategy per node), whatever limits it breaks."""
    if len(choice) != len(problem.nodes):
        raise ParplanError(f"a choice for {len(choice)} nodes does not fit a problem of {len(problem.nodes)}")
    chosen = zip(problem.nodes, choice, strict=True)
    picked = [(node.forward_s[k], node.backward_s[k], node.reduction_s[k]) for node, k in chosen]
    table = np.array(picked, dtype=np.float64).reshape(-1, 3)
    allowed = np.isfinite(table).all(axis=1)
    forward, backward, reduction = np.where(allowed, table.T, 0.0)
    edges_s, arriving = 0.0 if allowed.all() else np.inf, np.zeros(len(picked))
    for edge in problem.edges:
        pair = choice[edge.source], choice[edge.target]
        seconds = edge.forward_s[pair], edge.backward_s[pair]
        edges_s += seconds[0] if np.isfinite(sum(seconds)) else np.inf
        arriving[edge.target] += seconds[1] if np.isfinite(sum(seconds)) else 0.0
    return Phases(float(forward.sum() + edges_s), backward, arriving, reduction)


def evaluate(problem: Problem, choice: Sequence[int]) -> Evaluation:
    """Costs and broken constraints of `choice` (one strategy per node); independent of every solver.

    The peak of a memory is its largest sum over all time points, 0 if nothing is ever live.
    """
    found, nodes = phases(problem, choice), problem.nodes
    backward_s = float(found.backward_s.sum() + found.arriving_s.sum())
    broken = [f"{n.name}: strategy {k} is forbidden" for n, k in zip(nodes, choice, strict=True) if not n.allowed[k]]
    for edge in problem.edges:
        pair = choice[edge.source], choice[edge.target]
        if not np.isfinite(edge.forward_s[pair] + edge.backward_s[pair]):
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
    step_s = found.forward_s + backward_s + found.exposed_s
    return Evaluation(step_s, found.forward_s, backward_s, found.exposed_s, peaks, tuple(broken))


def objective(problem: Problem, choice: Sequence[int]) -> float:
    """Seconds of `choice`, whatever limits it breaks; inf where a strategy or a pair is forbidden."""
    found = phases(problem, choice)
    return found.forward_s + float(found.backward_s.sum() + found.arriving_s.sum()) + found.exposed_s


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
    for v, (node, kept) in enumerate(zip(nodes, index, strict=True)):
        if len(kept) < node.size:
            usages = tuple(Usage(u.resource, u.start, u.end, u.amounts[kept]) for u in node.usages)
            nodes[v] = Node(node.name, node.forward_s[kept], node.backward_s[kept], node.reduction_s[kept], usages)
    for e, edge in enumerate(edges):
        if (len(index[edge.source]), len(index[edge.target])) != edge.forward_s.shape:
            pairs = np.ix_(index[edge.source], index[edge.target])
            edges[e] = Edge(edge.source, edge.target, edge.forward_s[pairs], edge.backward_s[pairs])
    linear = tuple(replace(row, terms={v: c[index[v]] for v, c in row.terms.items()}) for row in problem.linear)
    smaller = replace(problem, nodes=tuple(nodes), edges=tuple(edges), linear=linear)
    return Reduced(smaller, lambda choice: [int(kept[k]) for kept, k in zip(index, choice, strict=True)])
