"""The plans people write by hand, solved under the same costs: each is a restriction of the strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.planner.decision import Baseline
from parplan.planner.formulate import Formulation, Option
from parplan.planner.problem import Edge, Node, Problem, Solution, evaluate

__all__ = ["baselines"]

Solve = Callable[[Problem], Solution]
Allowed = Callable[[str, Strategy], bool]


@dataclass(frozen=True)
class _Habit:
    """A way to parallelise by hand: which strategies it allows, or why it is not legal here.

    `alone`: the other devices are not used at all, so no results are delivered to them.
    """

    name: str
    allowed: Allowed
    why_not: str = ""
    alone: bool = False


def baselines(graph: LayerGraph, formulation: Formulation, plan: Plan, solve: Solve) -> tuple[Baseline, ...]:
    """One device, pure data parallel, pure model parallel, and cuda-convnet2's hybrid.

    `plan` gives model, batch and devices; its layers are replaced.
    """
    habits = (
        _Habit("one device", lambda name, s: s.devices == (0,), alone=True),
        _data_parallel(graph, formulation, plan),
        _model_parallel(graph, formulation, plan),
        _hybrid(graph, formulation, plan),
    )
    return tuple(
        _baseline(habit, formulation, plan, solve) for habit in habits if plan.devices > 1 or habit is habits[0]
    )


def _data_parallel(graph: LayerGraph, formulation: Formulation, plan: Plan) -> _Habit:
    whole = {n for n, layer in graph.layers.items() if layer.batch is None and not layer.constant}

    def allowed(name: str, s: Strategy) -> bool:
        return s.replicas * s.shards == 1 if name in whole else (s.replicas, s.shards) == (plan.devices, 1)

    return _Habit("pure data parallel", allowed, _indivisible(plan))


def _indivisible(plan: Plan) -> str:
    return f"R1: a batch of {plan.batch} does not divide by {plan.devices}" if plan.batch % plan.devices else ""


def _model_parallel(graph: LayerGraph, formulation: Formulation, plan: Plan) -> _Habit:
    cut = {
        name
        for name, options in zip(formulation.names, formulation.options, strict=False)
        if any(_all_shards(o.strategy, plan) for o in options)
    }

    def allowed(name: str, s: Strategy) -> bool:
        return _all_shards(s, plan) if name in cut else len(s.devices) == 1

    weighted = [name for name in cut if graph.layers[name].parameters]
    return _Habit(
        "pure model parallel", allowed, "" if weighted else f"R5: no layer with weights divides by {plan.devices}"
    )


def _all_shards(strategy: Strategy, plan: Plan) -> bool:
    return (strategy.replicas, strategy.shards) == (1, plan.devices)


def _hybrid(graph: LayerGraph, formulation: Formulation, plan: Plan) -> _Habit:
    """Replicas up to the first fully-connected layer, shards of out-features from there on."""
    linear = {name for name, layer in graph.layers.items() if layer.kind == "linear"}
    after = linear.union(*(nx.descendants(graph.digraph, name) for name in linear)) if linear else set()
    convolutions = [name for name, layer in graph.layers.items() if layer.kind == "conv"]
    data = _data_parallel(graph, formulation, plan)
    model = _model_parallel(graph, formulation, plan)

    def allowed(name: str, s: Strategy) -> bool:
        if name not in after:
            return data.allowed(name, s)
        return model.allowed(name, s) and s.axis in (None, "out-features", "features")

    missing = "" if linear and convolutions else "it is for convolutions followed by fully-connected layers"
    return _Habit("cuda-convnet2's hybrid", allowed, data.why_not or missing)


def _baseline(habit: _Habit, formulation: Formulation, plan: Plan, solve: Solve) -> Baseline:
    if habit.why_not:
        return Baseline(habit.name, None, None, False, habit.why_not)
    kept = _kept(habit, formulation)
    if not all(kept):
        layer = formulation.names[kept.index([])]
        return Baseline(habit.name, None, None, False, f"{layer} cannot be placed that way")
    problem = _without_delivery(formulation.problem) if habit.alone else formulation.problem
    solution = solve(_restricted(problem, kept))
    if solution.choice is None:
        return Baseline(habit.name, None, None, False, "no such plan was found")
    choice = [own[k] for own, k in zip(kept, solution.choice, strict=True)]
    found = evaluate(problem, choice)
    strategies = _strategies(formulation, choice)
    peak = int(max(found.peaks))
    fits = all(peak <= limit for peak, limit in zip(found.peaks, problem.limits, strict=True))
    return Baseline(habit.name, found.objective, peak, fits, plan=replace(plan, layers=strategies, rules="default"))


def _strategies(formulation: Formulation, choice: Sequence[int]) -> Mapping[str, Strategy]:
    return {
        name: options[k].strategy
        for name, options, k in zip(formulation.names, formulation.options, choice, strict=False)
    }


def _kept(habit: _Habit, formulation: Formulation) -> list[list[int]]:
    def own(name: str, options: Sequence[Option]) -> list[int]:
        return [k for k, option in enumerate(options) if habit.allowed(name, option.strategy)]

    layers = [own(name, options) for name, options in zip(formulation.names, formulation.options, strict=False)]
    return layers + [[0]] * (len(formulation.problem.nodes) - len(layers))


def _without_delivery(problem: Problem) -> Problem:
    delivery = len(problem.nodes) - 1
    return replace(problem, edges=tuple(edge for edge in problem.edges if edge.target != delivery))


def _restricted(problem: Problem, kept: Sequence[Sequence[int]]) -> Problem:
    """The problem with fewer strategies per node, no rules and no memory limit."""
    nodes = tuple(
        Node(node.name, node.ahead[own], node.back[own], node.tail[own])
        for node, own in zip(problem.nodes, (list(k) for k in kept), strict=True)
    )
    edges = tuple(
        Edge(e.source, e.target, e.ahead[kept[e.source]][:, kept[e.target]], e.back[kept[e.source]][:, kept[e.target]])
        for e in problem.edges
    )
    return Problem(nodes, edges)
