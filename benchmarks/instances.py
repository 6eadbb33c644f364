"""Problems of the shape real networks give, and small random ones: for benchmarks and tests, drawn from a seed.

`network` imitates planning a convolutional network: a layout is (batch cut, channel cut, first device); a strategy is
an input and an output layout; transfers cost latency and bytes over bandwidth where layouts differ; gradients of
weights are reduced over the batch cut; weights live throughout, activations from forward to backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from parplan.planner.solver.problem import Edge, FloatArray, Linear, Maximum, Node, Problem, Row, Usage

__all__ = ["EdgePhases", "Layout", "NodePhases", "Shape", "chain", "network", "one_pass", "random_problem", "residual"]

LATENCY_S = 10e-6
FLOPS = 8e12
LAUNCH_S = 8e-6


@dataclass(frozen=True)
class Layout:
    """A tensor cut `batch` ways by samples and `channel` ways by channels, on devices from `first` on."""

    batch: int
    channel: int
    first: int


@dataclass(frozen=True)
class Shape:
    """A network to imitate: its edges, which nodes have weights, the devices, bytes and operations per node."""

    edges: tuple[tuple[int, int], ...]
    weights: FloatArray
    activations: FloatArray
    operations: FloatArray


@dataclass(frozen=True, eq=False)
class NodePhases:
    """Seconds per strategy of a node in one pass: its forward, its backward, and the reduction of its gradient."""

    name: str
    forward_s: FloatArray
    backward_s: FloatArray
    reduction_s: FloatArray
    usages: tuple[Usage, ...] = ()


@dataclass(frozen=True, eq=False)
class EdgePhases:
    """Seconds per pair of strategies of an edge in one pass, forward and backward."""

    source: int
    target: int
    forward_s: FloatArray
    backward_s: FloatArray


def one_pass(
    nodes: Sequence[NodePhases],
    edges: Sequence[EdgePhases] = (),
    limits: tuple[float, ...] = (),
    linear: tuple[Linear, ...] = (),
    names: tuple[str, ...] = (),
) -> Problem:
    """Layers that run forward in order and backward in reverse, beside a link that reduces gradients in that order.

    D_i is when layer i's backward is done, E_i when its gradient is reduced too; forbidden where any phase is inf.
    """
    finite = [np.isfinite(n.forward_s + n.backward_s + n.reduction_s) for n in nodes]
    pairs = [np.isfinite(e.forward_s + e.backward_s) for e in edges]
    parts = tuple(
        Node(n.name, np.where(ok, n.forward_s, np.inf), n.usages) for n, ok in zip(nodes, finite, strict=True)
    )
    joints = tuple(
        Edge(e.source, e.target, np.where(ok, e.forward_s, np.inf)) for e, ok in zip(edges, pairs, strict=True)
    )
    maxima: list[Maximum] = []
    for v in range(len(nodes) - 1, -1, -1):
        # The layer behind, at 2 and 1 places before: D, E, D, E, ...
        behind, later = len(maxima) - 2, len(maxima) - 1
        reduction = {v: np.where(finite[v], nodes[v].reduction_s, 0.0)}
        arriving = {
            e: np.where(ok, edge.backward_s, 0.0)
            for e, (edge, ok) in enumerate(zip(edges, pairs, strict=True))
            if edge.target == v + 1
        }
        done = Row({v: np.where(finite[v], nodes[v].backward_s, 0.0)}, arriving, {behind: 1.0} if maxima else {})
        ends = [Row(reduction, {}, {len(maxima): 1.0}), *([Row(reduction, {}, {later: 1.0})] if maxima else [])]
        maxima += [
            Maximum(f"backward of {nodes[v].name}", (done,)),
            Maximum(f"reduction of {nodes[v].name}", tuple(ends)),
        ]
    into = {
        e: np.where(ok, edge.backward_s, 0.0)
        for e, (edge, ok) in enumerate(zip(edges, pairs, strict=True))
        if edge.target == 0
    }
    count = len(maxima)
    maxima.append(Maximum("step", (Row({}, into, {count - 2: 1.0}), Row({}, {}, {count - 1: 1.0})), 1.0))
    return Problem(parts, joints, limits, linear, names, tuple(maxima))


@dataclass(frozen=True)
class _Strategy:
    source: Layout
    target: Layout


def chain(count: int, seed: int) -> Shape:
    """AlexNet-like: a chain whose last few nodes hold nearly all the weights."""
    rng = np.random.default_rng(seed)
    heavy = np.arange(count) > count * 0.6
    weights = np.where(rng.random(count) < 0.4, np.where(heavy, 1.2e8, 4e6) * rng.uniform(0.2, 1.5, count), 0.0)
    activations = np.where(heavy, 2e6, 8e7) * rng.uniform(0.2, 1.5, count)
    operations = np.where(weights > 0, 4e10, 2e8) * rng.uniform(0.2, 2, count)
    return Shape(tuple(pairwise(range(count))), weights, activations, operations)


def residual(blocks: int, seed: int) -> Shape:
    """ResNet-like: blocks of nine nodes and a skip edge (every fourth through two nodes of its own)."""
    rng = np.random.default_rng(seed)
    edges, last = [(0, 1), (1, 2)], 2
    for block in range(blocks):
        start = last
        skip = start
        if block % 4 == 0:
            edges += [(start, last + 1), (last + 1, last + 2)]
            skip = last = last + 2
        edges += [(start, last + 1), *pairwise(range(last + 1, last + 10)), (skip, last + 8)]
        last += 9
    edges += [(last, last + 1), (last + 1, last + 2)]
    count = last + 3
    depth = np.arange(count) / count
    weights = np.where(np.arange(count) % 3 == 0, 1e5 * 40**depth * rng.uniform(0.3, 2, count), 0.0)
    activations = 1e8 * 0.15**depth * rng.uniform(0.3, 1.5, count)
    operations = np.where(weights > 0, 3e10, 3e8) * rng.uniform(0.5, 1.5, count)
    return Shape(tuple(sorted(edges)), weights, activations, operations)


def network(shape: Shape, devices: int, seed: int, limit: float = 0.7, bandwidth: float = 10e9) -> Problem:
    """The planning problem of a network; `limit` is the memory per device over what one device alone would need."""
    rng = np.random.default_rng(seed)
    layouts = _layouts(devices)
    count = len(shape.weights)
    options = [_options(layouts, shape.weights[v] > 0, rng) for v in range(count)]
    nodes = tuple(_node(v, shape, options[v], bandwidth, rng) for v in range(count))
    edges = tuple(_edge(a, b, shape.activations[a] / bandwidth, options[a], options[b]) for a, b in shape.edges)
    total = 3 * shape.weights.sum() + shape.activations.sum()
    return one_pass(nodes, edges, (float(total) * limit,))


def _layouts(devices: int) -> list[Layout]:
    cuts = [2**i for i in range(10) if devices % 2**i == 0]
    pairs = [(b, c) for b in cuts for c in cuts if b * c <= devices]
    return [Layout(b, c, first) for b, c in pairs for first in sorted({0, devices - b * c})]


def _options(layouts: list[Layout], weighted: bool, rng: np.random.Generator) -> list[_Strategy]:
    options = [_Strategy(layout, layout) for layout in layouts]
    if weighted:
        whole = [_Strategy(Layout(o.batch, 1, o.first), o) for o in layouts if o.channel > 1]
        options += whole + [_Strategy(o.target, o.source) for o in whole if rng.random() < 0.7]
    return options


def _node(v: int, shape: Shape, options: list[_Strategy], bandwidth: float, rng: np.random.Generator) -> NodePhases:
    used = np.array([max(o.source.batch * o.source.channel, o.target.batch * o.target.channel) for o in options])
    copies = np.array([min(o.source.batch, o.target.batch) for o in options])
    noise = rng.uniform(0.95, 1.15, len(options))
    ahead = LAUNCH_S + shape.operations[v] / FLOPS / used**0.9 * noise
    held = shape.weights[v] / (used / copies)
    tail = np.where((copies > 1) & (held > 0), LATENCY_S + 2 * (copies - 1) / copies * held / bandwidth, 0.0)
    last = 2 * len(shape.weights)
    usages = (Usage(0, 0, last, 3 * held), Usage(0, v, last - v, shape.activations[v] / used))
    return NodePhases(f"layer{v}", ahead, 2 * ahead, tail, usages)


def _edge(a: int, b: int, whole_s: float, first: list[_Strategy], second: list[_Strategy]) -> EdgePhases:
    cost = np.array([[_transfer(p.target, q.source, whole_s) for q in second] for p in first])
    return EdgePhases(a, b, cost, cost)


def _transfer(given: Layout, wanted: Layout, whole_s: float) -> float:
    if given == wanted:
        return 0.0
    parts = max(given.batch * given.channel, wanted.batch * wanted.channel)
    common = min(given.batch, wanted.batch) * min(given.channel, wanted.channel) if given.first == wanted.first else 0
    return LATENCY_S + whole_s * (1 - common / parts / 2) / min(given.batch * given.channel, parts)


def random_problem(rng: np.random.Generator, most: int = 6) -> Problem:
    """A small problem with everything in it: tails, two memories, forbidden strategies and pairs, ties, constraints."""
    count = int(rng.integers(1, most + 1))
    sizes = rng.integers(1, 5, count)
    levels = int(rng.choice([3, 1000]))
    nodes = tuple(_random_node(rng, v, int(sizes[v]), levels, count) for v in range(count))
    pairs = [(a, b) for b in range(count) for a in range(b) if rng.random() < 0.5 * (1 if b - a == 1 else 0.5)]
    pairs += pairs[:1] if rng.random() < 0.2 else []
    edges = tuple(_random_edge(rng, a, b, (int(sizes[a]), int(sizes[b])), levels) for a, b in pairs)
    linear = tuple(_random_linear(rng, sizes, i) for i in range(int(rng.integers(0, 3))))
    limits = (float(rng.integers(5, 25)), float(rng.integers(5, 40)))
    problem = one_pass(nodes, edges, limits, linear)
    return replace(problem, maxima=_random_maxima(rng, problem, levels)) if rng.random() < 0.5 else problem


def _random_maxima(rng: np.random.Generator, problem: Problem, levels: int) -> tuple[Maximum, ...]:
    """Maxima with terms of any nodes and edges, also below 0, factors, constants and weights."""
    maxima: list[Maximum] = []
    for m in range(int(rng.integers(0, 6))):
        rows = []
        for _ in range(int(rng.integers(1, 4))):
            nodes = {
                v: rng.integers(-levels // 2, levels, n.size) / levels * rng.choice([1, 3])
                for v, n in enumerate(problem.nodes)
                if rng.random() < 0.5
            }
            edges = {
                e: rng.integers(-levels // 3, levels, edge.cost_s.shape) / levels
                for e, edge in enumerate(problem.edges)
                if rng.random() < 0.3
            }
            used = {k: float(rng.choice([0.0, 0.5, 1.0, 1.0, 1.0, 3.0])) for k in range(m) if rng.random() < 0.6}
            rows.append(Row(nodes, edges, used, float(rng.choice([0, 0, 0.5, -1]))))
        maxima.append(Maximum(f"m{m}", tuple(rows), float(rng.choice([0.0, 0.0, 1.0, 7.0]))))
    return tuple(maxima)


def _random_costs(rng: np.random.Generator, shape: tuple[int, ...], levels: int, forbid: float) -> FloatArray:
    cost = rng.integers(0, levels, shape) / levels * rng.choice([0, 1, 1, 3])
    return np.where(rng.random(shape) < forbid, np.inf, cost)


def _random_node(rng: np.random.Generator, v: int, size: int, levels: int, count: int) -> NodePhases:
    parts = [_random_costs(rng, (size,), levels, 0.03) for _ in range(3)]
    if rng.random() < 0.5:
        parts[2] = np.zeros(size)
    usages = []
    for _ in range(int(rng.integers(0, 3))):
        start = int(rng.integers(0, count))
        end = start + int(rng.integers(0, count + 1))
        usages.append(Usage(int(rng.integers(0, 2)), start, end, rng.integers(0, 8, size).astype(float)))
    return NodePhases(f"n{v}", parts[0], parts[1], parts[2], tuple(usages))


def _random_edge(rng: np.random.Generator, a: int, b: int, shape: tuple[int, int], levels: int) -> EdgePhases:
    lines = rng.integers(0, shape[0], shape[0]) if rng.random() < 0.3 else np.arange(shape[0])
    return EdgePhases(
        a, b, _random_costs(rng, shape, levels, 0.1)[lines], _random_costs(rng, shape, levels, 0.0)[lines]
    )


def _random_linear(rng: np.random.Generator, sizes: np.ndarray[tuple[int], np.dtype[np.int64]], index: int) -> Linear:
    chosen = [v for v in range(len(sizes)) if rng.random() < 0.5]
    terms = {v: rng.integers(-2, 4, sizes[v]).astype(float) for v in chosen}
    low = float(rng.integers(-3, 3)) if rng.random() < 0.6 else -np.inf
    high = max(low, float(rng.integers(0, 8))) if rng.random() < 0.7 else np.inf
    return Linear(f"rule{index}", terms, low, high)
