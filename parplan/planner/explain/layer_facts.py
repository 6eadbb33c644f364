"""What a decision says of a chosen plan: its step by parts, and a line of facts per layer."""

from __future__ import annotations

from collections.abc import Sequence

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.planner.decision import Arrival, LayerFacts, Prediction
from parplan.planner.explain.reasons import reason
from parplan.planner.explain.what_if import WhatIf
from parplan.planner.search_space.formulation import Formulation
from parplan.planner.search_space.infeasible_message import size_text
from parplan.planner.search_space.verifier import bends
from parplan.planner.solver.problem import evaluate

__all__ = ["followed", "layer_facts", "overfull", "prediction", "reasons_in_one_pass"]


def prediction(formulation: Formulation, choice: Sequence[int], costs: CostModel) -> Prediction:
    """What a step of a choice takes by the objective."""
    step, found = costs.step, evaluate(formulation.problem, choice)
    chosen = [options[k] for options, k in zip(formulation.options, choice, strict=False)]
    forward = sum(option.cost.forward_s for option in chosen)
    backward = sum(option.cost.backward_s for option in chosen)
    update = sum(option.cost.update_s for option in chosen)
    unhidden = sum(option.compute_interference_s + option.post_update_s for option in chosen)
    transfer = max(0.0, found.forward_s + found.backward_s - forward - backward - update - unhidden - step.overhead_s)
    doubt = sum(option.cost.spread * (option.cost.forward_s + option.cost.backward_s) for option in chosen)
    doubt += step.spread * (transfer + found.exposed_s + unhidden)
    return Prediction(
        step_s=found.objective,
        forward_s=forward,
        backward_s=backward,
        transfer_s=transfer,
        reduce_s=sum(option.reduce_s for option in chosen),
        exposed_reduce_s=found.exposed_s + unhidden,
        memory_bytes=costs.peaks(formulation.strategies(choice)) or tuple(int(peak) for peak in found.peaks),
        update_s=update,
        overhead_s=step.overhead_s,
        low_s=max(0.0, found.objective - doubt),
        high_s=found.objective + doubt,
        most_hidden=step.most_hidden,
    )


def layer_facts(
    graph: LayerGraph, formulation: Formulation, choice: Sequence[int], plan: Plan
) -> tuple[LayerFacts, ...]:
    """The figures of every layer; why it is placed so is still to be said."""
    problem = formulation.problem
    moved = [0.0] * len(problem.nodes)
    for edge in problem.edges:
        pair = choice[edge.source], choice[edge.target]
        moved[edge.target] += float(edge.forward_s[pair] + edge.backward_s[pair])
    chosen = [options[k] for options, k in zip(formulation.options, choice, strict=False)]
    return tuple(
        LayerFacts(
            name=name,
            kind=graph.layers[name].kind,
            strategy=plan.layers[name],
            forward_s=option.cost.forward_s,
            backward_s=option.cost.backward_s,
            transfer_s=option.arrival_s + moved_s + 2 * option.batch_norm_sync_s,
            reduce_s=option.reduce_s,
            memory_bytes=option.memory_bytes,
            source=option.cost.source,
            why="",
            bends=bends(plan, graph, name),
            copies=_copies(graph, plan, name),
        )
        for name, option, moved_s in zip(formulation.names, chosen, moved, strict=False)
    )


def reasons_in_one_pass(
    graph: LayerGraph, formulation: Formulation, choice: Sequence[int], plan: Plan
) -> dict[str, str]:
    """Why every layer is placed as it is, by the objective: what its best alternative would cost."""
    problem = formulation.problem
    what_if = WhatIf(problem, choice)
    return {
        name: reason(graph.layers[name], options, index, choice, problem, what_if, followed(graph, plan, name))
        for index, (name, options) in enumerate(zip(formulation.names, formulation.options, strict=False))
    }


def _copies(graph: LayerGraph, plan: Plan, name: str) -> tuple[Arrival, ...]:
    """The inputs that other layers make on other devices, or on these in another order."""
    sources = dict.fromkeys(graph.producer[value] for value in graph.layers[name].inputs if value in graph.producer)
    own = plan.layers[name].devices
    return tuple(
        Arrival(source, plan.layers[source].devices)
        for source in sources
        if plan.layers[source].devices != own and not graph.layers[source].constant
    )


def followed(graph: LayerGraph, plan: Plan, name: str) -> str | None:
    """The layer whose layout a layer without weights takes over as it is."""
    layer = graph.layers[name]
    source = next((graph.producer[value] for value in layer.inputs if value in graph.producer), None)
    if layer.parameters or source is None:
        return None
    own, other = plan.layers[name], plan.layers[source]
    same = (own.devices, own.replicas, own.shards) == (other.devices, other.replicas, other.shards)
    return source if same else None


def overfull(cluster: Cluster, step: Prediction) -> list[str]:
    """Where transfers, which the solver only estimates, take a device over its limit."""
    over = [
        (number, needed, device.memory_bytes)
        for number, (device, needed) in enumerate(zip(cluster.devices, step.memory_bytes, strict=True))
        if needed > device.memory_bytes
    ]
    return [
        f"device {number} needs {size_text(needed)} with its transfers, {size_text(limit)} are usable: "
        "lower --batch, or plan with a smaller --memory to leave room"
        for number, needed, limit in over[:1]
    ]
