"""Problems with maxima of the shapes that plans of a step give: passes, layers on device blocks, branches at once.

They imitate planning a network as `instances.network` does, from the same shapes: for benchmarks and tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.instances import FLOPS, LATENCY_S, LAUNCH_S, Shape
from parplan.planner.solver.problem import Edge, FloatArray, Linear, Maximum, Node, Problem, Row, Usage

__all__ = ["Block", "blocks", "branches", "on_blocks", "passes"]

BIG_S = 1e3
"""More seconds than any step takes: what a row is lowered by where its device is not used."""


@dataclass(frozen=True)
class Block:
    """A layer on devices `first` to `first` + `batch` * `channel` - 1, cut by samples and by channels."""

    first: int
    batch: int
    channel: int

    @property
    def devices(self) -> range:
        """The devices of the block."""
        return range(self.first, self.first + self.batch * self.channel)


def blocks(devices: int) -> list[Block]:
    """All aligned blocks of powers of two devices, cut in all ways."""
    sizes = [2**i for i in range(12) if 2**i <= devices]
    return [
        Block(first, size // channel, channel)
        for size in sizes
        for first in range(0, devices - size + 1, size)
        for channel in sizes
        if channel <= size
    ]


@dataclass(frozen=True, eq=False)
class _Costs:
    """Seconds per node (its options) and per edge, and the bytes a node's weights and activations take per device."""

    forward: list[FloatArray]
    reduction: list[FloatArray]
    update: list[FloatArray]
    edges: list[FloatArray]
    weights: list[FloatArray]
    activations: list[FloatArray]


def _costs(shape: Shape, options: Sequence[Block], bandwidth: float, seed: int) -> _Costs:
    rng = np.random.default_rng(seed)
    parts = np.array([len(block.devices) for block in options], dtype=np.float64)
    copies = np.array([block.batch for block in options], dtype=np.float64)
    found = _Costs([], [], [], [], [], [])
    for held, kept, operations in zip(shape.weights, shape.activations, shape.operations, strict=True):
        noise = rng.uniform(0.95, 1.15) * rng.uniform(0.99, 1.01, len(options))
        found.forward.append(LAUNCH_S + operations / FLOPS / parts**0.9 * noise)
        own = held * copies / parts
        sums = LATENCY_S + 2 * (copies - 1) / copies * own / bandwidth
        found.reduction.append(np.where((copies > 1) & (held > 0), sums, 0.0))
        found.update.append(own / 1e11)
        found.weights.append(3 * own)
        found.activations.append(kept / parts)
    for a, _ in shape.edges:
        cost = np.zeros((len(options), len(options)))
        for i, given in enumerate(options):
            for j, wanted in enumerate(options):
                if given != wanted:
                    here = len(set(given.devices) & set(wanted.devices)) / max(len(given.devices), len(wanted.devices))
                    alike = 1.0 if given.batch == wanted.batch or given.channel == wanted.channel else 0.5
                    moved = shape.activations[a] * (1 - here * alike / 1.5)
                    cost[i, j] = LATENCY_S + moved / bandwidth / min(len(given.devices), len(wanted.devices))
        found.edges.append(cost)
    return found


def _nodes(shape: Shape, costs: _Costs, options: Sequence[Block], devices: int) -> tuple[Node, ...]:
    count = len(shape.weights)
    nodes = []
    for v in range(count):
        usages = []
        for d in range(devices):
            on = np.array([float(d in block.devices) for block in options])
            usages.append(Usage(d, 0, 2 * count, costs.weights[v] * on))
            usages.append(Usage(d, v, 2 * count - v, costs.activations[v] * on))
        nodes.append(Node(f"layer{v}", costs.forward[v], tuple(usages)))
    return tuple(nodes)


def on_blocks(
    shape: Shape, devices: int, seed: int, limit: float = 0.7, bandwidth: float = 10e9, numbered: bool = False
) -> Problem:
    """Each layer on any aligned block; each device reduces the gradients of its own layers, in order, then updates.

    Args:
        limit: memory per device over what one device alone would need.
        numbered: whether the first layer is on device 0, and every layer on device d or one from which the first layers
            took all before it: rows of the kind that number equal devices.
    """
    options = blocks(devices)
    costs = _costs(shape, options, bandwidth, seed)
    count, edges = len(shape.weights), shape.edges
    maxima: list[Maximum] = []
    done = -1
    ends = [-1] * devices
    for v in range(count - 1, -1, -1):
        back = {v: 2 * costs.forward[v]}
        arriving = {e: costs.edges[e] for e, (_, target) in enumerate(edges) if target == v + 1}
        maxima.append(Maximum(f"backward{v}", (Row(back, arriving, {done: 1.0} if done >= 0 else {}),)))
        done = len(maxima) - 1
        for d in range(devices):
            on = np.array([d in block.devices for block in options])
            own = np.where(on, costs.reduction[v], 0.0)
            rows = [Row({v: own}, {}, {ends[d]: 1.0})] if ends[d] >= 0 else []
            rows.append(Row({v: np.where(on, own, -BIG_S)}, {}, {done: 1.0}))
            maxima.append(Maximum(f"reduction{v} of {d}", tuple(rows)))
            ends[d] = len(maxima) - 1
    final = [Row(maxima={done: 1.0})]
    for d in range(devices):
        on = np.array([float(d in block.devices) for block in options])
        final.append(Row({v: costs.update[v] * on for v in range(count)}, {}, {ends[d]: 1.0}))
    maxima.append(Maximum("step", tuple(final), 1.0))
    linear = []
    if numbered:
        first = np.array([float(block.first) for block in options])
        last = np.array([float(block.devices[-1] + 1) for block in options])
        linear.append(Linear("starts at 0", {0: first}, 0.0, 0.0))
        for v in range(1, min(count, 2 * devices)):
            linear.append(Linear(f"numbered {v}", {v: first, **dict.fromkeys(range(v), -last)}, -np.inf, 0.0))
    total = float(3 * shape.weights.sum() + shape.activations.sum())
    problem_edges = tuple(Edge(a, b, cost) for (a, b), cost in zip(edges, costs.edges, strict=True))
    nodes = _nodes(shape, costs, options, devices)
    return Problem(nodes, problem_edges, (total * limit,) * devices, tuple(linear), (), tuple(maxima))


def passes(shape: Shape, devices: int, seed: int, limit: float = 0.7, bandwidth: float = 10e9) -> Problem:
    """Layers on the first devices, the later ones (from a boundary that is chosen) in passes of a part of the samples.

    An option is a block and a role: before the boundary on all devices, or inside, on a part of them. Transfers across
    the boundary (X) are hidden behind the layers inside (C): X + C + (P - 1) max(C, X) forward and back.
    """
    options = [block for block in blocks(devices) if block.first == 0]
    costs = _costs(shape, options, bandwidth, seed)
    count, number = len(shape.weights), float(devices)
    inside = np.repeat([0.0, 1.0], len(options))
    wide = np.tile([float(block.batch == devices) for block in options], 2)
    forbidden = np.where((inside == 0) & (wide == 0), np.inf, 0.0)
    ahead = [np.tile(cost, 2) / np.where(inside > 0, number, 1.0) for cost in costs.forward]
    crossing = (inside[:, None] == 0) & (inside[None] == 1)
    moved = [np.tile(cost, (2, 2)) / np.where(crossing, number, 1.0) for cost in costs.edges]
    compute = {v: np.where(inside > 0, seconds, 0.0) for v, seconds in enumerate(ahead)}
    transfer = {e: np.where(crossing, seconds, 0.0) for e, seconds in enumerate(moved)}
    within = {e: np.where((inside[:, None] == 1) & (inside[None] == 1), s, 0.0) for e, s in enumerate(moved)}
    doubled = {v: 2 * seconds for v, seconds in compute.items()}
    forward = (Row(compute, within), Row({}, transfer), Row({0: compute[0]}, within))
    maxima = [
        Maximum("forward of a pass", forward, number - 1),
        Maximum("backward of a pass", (Row(doubled, within), Row({}, transfer))),
    ]
    done, end = 1, -1
    for v in range(count - 1, -1, -1):
        arriving = {e: moved[e] for e, (_, target) in enumerate(shape.edges) if target == v + 1}
        factor = 1.0 if done > 1 else number - 1
        maxima.append(Maximum(f"backward{v}", (Row({v: 2 * ahead[v]}, arriving, {done: factor}),)))
        done = len(maxima) - 1
        own = {v: np.tile(costs.reduction[v], 2)}
        rows = (Row(own, {}, {done: 1.0}), *([Row(own, {}, {end: 1.0})] if end >= 0 else []))
        maxima.append(Maximum(f"reduction{v}", rows))
        end = len(maxima) - 1
    update = {v: np.tile(costs.update[v], 2) for v in range(count)}
    maxima.append(Maximum("step", (Row(update, {}, {done: 1.0}), Row(update, {}, {end: 1.0})), 1.0))
    bars = np.where((inside[:, None] == 1) & (inside[None] == 0), np.inf, 0.0)
    edges = tuple(Edge(a, b, cost + bars) for (a, b), cost in zip(shape.edges, moved, strict=True))
    nodes = []
    for v in range(count):
        held, kept = np.tile(costs.weights[v], 2), np.tile(costs.activations[v], 2)
        usages = (Usage(0, 0, 2 * count, held), Usage(0, v, 2 * count - v, kept))
        nodes.append(Node(f"layer{v}", ahead[v] + forbidden, usages))
    total = float(3 * shape.weights.sum() + shape.activations.sum())
    return Problem(tuple(nodes), edges, (total * limit,), (), (), tuple(maxima))


def branches(phases: int, wide: int, deep: int, devices: int, seed: int) -> Problem:
    """A trunk of phases of `wide` branches with `deep` layers that run at once: a row per branch and per device."""
    rng = np.random.default_rng(seed)
    options = blocks(devices)
    parts = np.array([len(block.devices) for block in options], dtype=np.float64)
    nodes: list[Node] = []
    edges: list[Edge] = []
    maxima: list[Maximum] = []

    def layer(scale: float) -> FloatArray:
        nodes.append(Node(f"layer{len(nodes)}", np.zeros(len(options))))
        return LAUNCH_S + scale * rng.uniform(0.5, 1.5) * 1e-3 / parts**0.85 * rng.uniform(0.98, 1.02, len(options))

    def joined(a: int, b: int) -> FloatArray:
        size = len(options)
        cost = np.where(np.eye(size) > 0, 0.0, LATENCY_S + 2e-4 * rng.uniform(0.9, 1.1, (size, size)))
        edges.append(Edge(a, b, np.zeros(cost.shape)))
        return cost

    base = {0: layer(1.0)}
    chains: list[tuple[Row, ...]] = []
    last = 0
    for _ in range(phases):
        rows, load, tails = [], [dict[int, FloatArray]() for _ in range(devices)], []
        for _ in range(wide):
            before, own, arriving = last, dict[int, FloatArray](), dict[int, FloatArray]()
            for _ in range(deep):
                own[len(nodes)] = layer(rng.choice([0.3, 1.0, 3.0]))
                arriving[len(edges)] = joined(before, len(nodes) - 1)
                before = len(nodes) - 1
            rows.append(Row(own, arriving))
            tails.append(before)
            for d in range(devices):
                on = np.array([float(d in block.devices) for block in options])
                load[d].update({v: seconds * on for v, seconds in own.items()})
        join = layer(0.5)
        last = len(nodes) - 1
        first = len(edges)
        out = {first + i: joined(tail, last) for i, tail in enumerate(tails)}
        chains.append((*rows, *(Row(per) for per in load)))
        base[last] = join
        maxima.append(Maximum(f"phase{len(chains)}", chains[-1], 3.0))
        maxima.append(Maximum(f"join{len(chains)}", (Row({}, out),), 2.0))
    nodes = [Node(n.name, base.get(v, n.cost_s)) for v, n in enumerate(nodes)]
    return Problem(tuple(nodes), tuple(edges), (), (), (), tuple(maxima))
