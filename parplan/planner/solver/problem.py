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
    "Problem",
    "Reduced",
    "Solution",
    "Status",
    "Usage",
    "evaluate",
    "objective",
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
        lengths = {
            len(self.forward_s),
            len(self.backward_s),
            len(self.reduction_s),
            *(len(usage.amounts) for usage in self.usages),
        }
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
    """Seconds and peak bytes per memory of a choice, and the constraints that it breaks (none if feasible)."""

    objective: float
    forward_s: float
    backward_s: float
    exposed: float
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


def evaluate(problem: Problem, choice: Sequence[int]) -> Evaluation:
    """Costs and broken constraints of `choice` (one strategy per node); independent of every solver.

    The peak of a memory is its largest sum over all time points, 0 if nothing is ever live.
    """
    picked = _checked(problem, choice)
    forward, backward, exposed = _seconds(problem, picked)
    violations = [*_forbidden(problem, picked), *_broken_linear(problem, picked)]
    peaks = _peaks(problem, picked)
    for resource, (peak, limit) in enumerate(zip(peaks, problem.limits, strict=True)):
        if peak > limit:
            name = problem.resource_name(resource)
            violations.append(f"{name}: {peak:.0f} bytes exceed {limit:.0f}")
    return Evaluation(forward + backward + exposed, forward, backward, exposed, peaks, tuple(violations))


def objective(problem: Problem, choice: Sequence[int]) -> float:
    """Seconds of `choice`, whatever limits it breaks; inf where a strategy or a pair is forbidden."""
    return sum(_seconds(problem, _checked(problem, choice)))


def _checked(problem: Problem, choice: Sequence[int]) -> list[int]:
    if len(choice) != len(problem.nodes):
        raise ParplanError(f"a choice for {len(choice)} nodes does not fit a problem of {len(problem.nodes)}")
    return list(choice)


def _seconds(problem: Problem, picked: Sequence[int]) -> tuple[float, float, float]:
    """Forward, backward and exposed seconds."""
    chosen = list(zip(problem.nodes, picked, strict=True))
    node_forward = np.array([node.forward_s[k] for node, k in chosen])
    node_backward = np.array([node.backward_s[k] for node, k in chosen])
    reduction = np.array([node.reduction_s[k] for node, k in chosen])
    edge_forward, edge_backward = 0.0, np.zeros(len(chosen))
    for edge in problem.edges:
        edge_forward += edge.forward_s[picked[edge.source], picked[edge.target]]
        edge_backward[edge.target] += edge.backward_s[picked[edge.source], picked[edge.target]]
    forward, backward = float(node_forward.sum() + edge_forward), float(node_backward.sum() + edge_backward.sum())
    exposed = (
        _exposed(reduction, node_backward, edge_backward)
        if np.isfinite(forward + backward + reduction.sum())
        else np.inf
    )
    return forward, backward, exposed


def _exposed(reduction: FloatArray, node_backward: FloatArray, edge_backward: FloatArray) -> float:
    rows = np.cumsum(reduction) - (np.cumsum(node_backward) - node_backward) - np.cumsum(edge_backward)
    return max(0.0, float(rows.max(initial=0.0)))


def _forbidden(problem: Problem, choice: list[int]) -> list[str]:
    nodes = problem.nodes
    broken = [f"{n.name}: strategy {k} is forbidden" for n, k in zip(nodes, choice, strict=True) if not n.allowed[k]]
    for edge in problem.edges:
        pair = choice[edge.source], choice[edge.target]
        if not np.isfinite(edge.forward_s[pair] + edge.backward_s[pair]):
            broken.append(f"{nodes[edge.source].name} -> {nodes[edge.target].name}: strategies {pair} cannot meet")
    return broken


def _broken_linear(problem: Problem, choice: list[int]) -> list[str]:
    sums = [(row, float(sum(values[choice[node]] for node, values in row.terms.items()))) for row in problem.linear]
    broken = [(row, total) for row, total in sums if not row.low <= total <= row.high]
    return [f"{row.name}: {total:g} is not in [{row.low:g}, {row.high:g}]" for row, total in broken]


def _peaks(problem: Problem, choice: list[int]) -> tuple[float, ...]:
    changes: list[dict[int, float]] = [{} for _ in problem.limits]
    for node, strategy in zip(problem.nodes, choice, strict=True):
        for usage in node.usages:
            if usage.start < usage.end:
                events, amount = changes[usage.resource], float(usage.amounts[strategy])
                events[usage.start] = events.get(usage.start, 0.0) + amount
                events[usage.end] = events.get(usage.end, 0.0) - amount
    return tuple(float(np.cumsum([0.0] + [e[t] for t in sorted(e)]).max()) for e in changes)


Mask = NDArray[np.bool_]


def _same(choice: Sequence[int]) -> list[int]:
    return list(choice)


@dataclass(frozen=True, eq=False)
class Reduced:
    """A smaller problem, and what turns a choice for it into a choice for the problem it came from."""

    problem: Problem
    lift: Callable[[Sequence[int]], list[int]] = _same

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
    nodes = tuple(_take_node(node, kept) for node, kept in zip(problem.nodes, index, strict=True))
    edges = tuple(_take_edge(edge, index[edge.source], index[edge.target]) for edge in problem.edges)
    linear = tuple(replace(row, terms={v: c[index[v]] for v, c in row.terms.items()}) for row in problem.linear)
    smaller = replace(problem, nodes=nodes, edges=edges, linear=linear)
    return Reduced(smaller, lambda choice: [int(kept[k]) for kept, k in zip(index, choice, strict=True)])


def _take_node(node: Node, kept: NDArray[np.intp]) -> Node:
    if len(kept) == node.size:
        return node
    usages = tuple(Usage(u.resource, u.start, u.end, u.amounts[kept]) for u in node.usages)
    return Node(node.name, node.forward_s[kept], node.backward_s[kept], node.reduction_s[kept], usages)


def _take_edge(edge: Edge, source: NDArray[np.intp], target: NDArray[np.intp]) -> Edge:
    if (len(source), len(target)) == edge.forward_s.shape:
        return edge
    pairs = np.ix_(source, target)
    return Edge(edge.source, edge.target, edge.forward_s[pairs], edge.backward_s[pairs])
