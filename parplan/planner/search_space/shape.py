"""Shapes of plans: scheme, passes and devices followed one by one, each an abstract problem of its own.

Inside a shape the solver chooses a strategy and a role (before, in or behind the passes) for every layer. Between
shapes the driver chooses (planner/search/select.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from parplan.graph.layer_graph import Layer, LayerGraph, once_per_graph
from parplan.lowering.holdings import slices
from parplan.lowering.stages import Stage, keeps_apart
from parplan.plan import STATES, Scheme, Strategy
from parplan.planner.decision import ANY_BLOCK, BRANCHES, SOME_BRANCHES
from parplan.planner.search_space.strategies import strategies
from parplan.planner.solver.problem import Linear

__all__ = ["ONE_PASS", "Choice", "Placement", "Shape", "choices", "role_rows"]


Placement = tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
"""Branches of a phase, each the names of its layers in forward order, with the devices that all of them use."""


@dataclass(frozen=True)
class Shape:
    """The parts of a plan that are fixed while the solver chooses strategies.

    Args:
        scheme: how samples get into the passes; with gather every layer runs once.
        max_replicas, min_replicas: of the layers that keep samples apart, both in use, where layers run in passes.
        homes: where branches may run at the same time: the placements of every phase, each a block of devices per
            branch, which all of its layers use. Blocks of a placement are equal or disjoint; the first and last may
            have all devices of the others.
        placed: every phase has one of its placements; otherwise its branches may also run one after another.
        average: follow no device but the mean of all, which bounds from below the step of plans on any blocks, and with
            the branches in `homes` on any blocks at the same time.
        inside: layers of branches inside those of `homes`, counted by their share of the devices only.
        uneven: replicas may have parts of the batch that differ by one sample.
        anywhere: layers may lie on any aligned block of devices.
        lanes: devices whose gradient sums and updates are followed one by one. One is enough where every layer lies on
            the first devices: the first device then has all of them.
    """

    scheme: Scheme = Scheme.GATHER
    max_replicas: int = 1
    min_replicas: int = 1
    lanes: tuple[int, ...] = (0,)
    homes: tuple[tuple[Placement, ...], ...] = ()
    placed: bool = False
    average: bool = False
    inside: frozenset[str] = frozenset()
    anywhere: bool = False
    uneven: bool = False

    @property
    def by_device(self) -> bool:
        """Whether gradient sums and updates count on the devices that have them."""
        return self.average or len(self.lanes) > 1

    @property
    def passes(self) -> int:
        """Trips through the layers in passes."""
        return 1 if self.scheme is Scheme.GATHER else self.max_replicas // self.min_replicas

    def describe(self) -> str:
        """Words for a report: `interleave, 8 to 1 replicas`."""
        if self.homes and not self.average:
            return BRANCHES if self.anywhere else SOME_BRANCHES
        if self.anywhere:
            return ANY_BLOCK
        passes = f", {self.max_replicas} to {self.min_replicas} replicas" if self.passes > 1 else ""
        return f"{self.scheme.value}{passes}"


ONE_PASS = Shape()


@dataclass(frozen=True)
class Choice:
    """A strategy of a layer in a role, and the placement of its phase that it belongs to; None: one after another."""

    strategy: Strategy
    role: Stage = Stage.BEFORE
    placement: int | None = None


def choices(graph: LayerGraph, layer: Layer, strategies_: Sequence[Strategy], shape: Shape) -> tuple[Choice, ...]:
    """The strategies of a layer in every role that it can have in a plan of this shape (lowering/stages.py)."""
    if shape.passes == 1:
        if shape.scheme is not Scheme.GATHER and keeps_apart(layer):  # without passes: one replica count for all layers
            strategies_ = [strategy for strategy in strategies_ if strategy.replicas == shape.max_replicas]
        homes = () if shape.average else shape.homes
        phase = next((own for own in homes if any(layer.name in branch for branch, _ in own[0])), ())
        serial = [] if phase and shape.placed else [Choice(strategy) for strategy in strategies_]
        ways = list(dict.fromkeys((one.state, one.saved) for one in strategies_))
        for number, placement in enumerate(phase):
            block = next(block for branch, block in placement if layer.name in branch)
            for one, (state, saved) in product(strategies(layer, graph.batch or 1, [block]), ways):
                strategy = replace(one, state=state, saved=saved)
                if state == STATES[0] or strategy in strategies_ or slices(graph, layer, strategy):
                    serial.append(Choice(strategy, placement=number))
        return tuple(serial)
    apart, found = keeps_apart(layer), list[Choice]()
    for strategy in strategies_:
        if strategy.state != "replicated" or strategy.saved != "keep":
            continue  # weights are gathered, and layers replayed, for one pass
        if apart and not shape.min_replicas <= strategy.replicas <= shape.max_replicas:
            continue
        roles = [Stage.BEFORE] if not apart or strategy.replicas == shape.max_replicas else []
        roles += [Stage.PASSES] if apart and not layer.mixes_batch else []
        roles += [Stage.AFTER] if layer.name in behind_passes(graph) else []
        found += [Choice(strategy, role) for role in roles]
    return tuple(found)


@once_per_graph
def behind_passes(graph: LayerGraph) -> frozenset[str]:
    """Layers that some plan runs behind its passes: those fed that mix samples, and all behind them."""
    found: set[str] = set()
    for name, layer in graph.layers.items():
        feeders = set(graph.makers(layer))
        if feeders & found or (feeders and not keeps_apart(layer)):
            found.add(name)
    return frozenset(found)


def role_rows(
    graph: LayerGraph,
    names: Sequence[str],
    position: Mapping[str, int],
    options: Sequence[Sequence[Choice]],
    shape: Shape,
) -> list[Linear]:
    """Rows that make roles those of lowering/stages.py, and the shape's replica counts appear.

    A layer is in the passes because it has fewer replicas or is fed from there, behind them because it is fed from
    behind them, or needs all samples and is fed from the passes.

    Args:
        names: of the nodes.
        position: the node of every layer, or of the one that stands for it.
    """
    if shape.passes == 1:
        return []
    counted = {
        position[name]: np.array([one.strategy.replicas for one in options[position[name]]])
        for name in names
        if keeps_apart(graph.layers[name])
    }
    rows = [
        Linear(
            f"some layer has {count} replicas",
            {v: (replicas == count).astype(float) for v, replicas in counted.items()},
            low=1.0,
        )
        for count in (shape.max_replicas, shape.min_replicas)
    ]
    for name in names:
        layer, own = graph.layers[name], options[position[name]]
        feeders = sorted({position[maker] for maker in graph.makers(layer)})
        for role in (Stage.PASSES, Stage.AFTER):
            wide = role is Stage.PASSES
            needs = [one.role is role and (not wide or one.strategy.replicas == shape.max_replicas) for one in own]
            if not any(needs):
                continue
            because = (role,) if keeps_apart(layer) else (Stage.PASSES, Stage.AFTER)
            terms: dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]] = {
                v: np.array([float(one.role in because) for one in options[v]]) for v in feeders
            }
            terms[position[name]] = -np.array(needs, dtype=np.float64)
            rows.append(Linear(f"{name} runs {role.value} because of a layer that feeds it", terms, low=0.0))
    return rows
