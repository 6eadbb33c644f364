"""The prediction of a chosen plan: its step by parts, and a report of every layer."""

from __future__ import annotations

from collections.abc import Sequence

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.fields import size_text
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.stages import Stage
from parplan.plan import Plan
from parplan.planner.decision import Arrival, LayerReport, Prediction
from parplan.planner.search_space.formulation import Formulation
from parplan.planner.search_space.options import Option
from parplan.planner.search_space.step_time.parts import edge_totals, node_totals
from parplan.planner.search_space.verifier import bends
from parplan.planner.solver.problem import evaluate

__all__ = ["layer_reports", "memory_excess", "prediction"]

ROUNDING = 1e-12
"""Part of a step that the sums of its parts may differ by."""


def prediction(formulation: Formulation, choice: Sequence[int], costs: CostModel, devices: int) -> Prediction:
    """The step of a choice by the objective: seconds by part, and peak bytes of every device.

    The parts add up to the step where all layers run once and one after another; of other plans the simulated step has
    them (search/schemes.py). Transfers have the gathers of weights as far as these are waited for.
    """
    step, found, parts = costs.step, evaluate(formulation.problem, choice), formulation.parts
    chosen = enumerate(zip(formulation.options, choice, strict=False))
    once = [(formulation.times(index), options[k]) for index, (options, k) in chosen]
    several = parts.micro_batches
    runs = [(many * several * (parts.shape.passes if own.role is Stage.PASSES else 1), own) for many, own in once]
    forward = sum(many * (own.cost.forward_s + own.cost.replay_s) for many, own in runs)
    backward = sum(many * own.cost.backward_s for many, own in runs)
    update = sum(many * own.cost.update_s for many, own in once)
    unhidden = sum(many * (own.cost.compute_interference_s + own.cost.post_update_s) for many, own in once)
    transfer = sum(
        float(edge_totals(parts, edge)[choice[edge.source], choice[edge.target]]) for edge in parts.edges
    ) + sum(many * (own.own_moves_s - own.cost.gathers_s) for many, own in runs)
    transfer += sum(float(node_totals(parts, reuse.node)[choice[reuse.node]]) for reuse in formulation.reused)
    exposed = found.objective - forward - backward - update - unhidden - transfer - several * step.overhead_s
    exposed = exposed if exposed > ROUNDING * found.objective else 0.0
    # Compute waits for gathers, which wait for sums on the same links: what is waited for is theirs, as far as they go.
    waited = min(exposed, sum(many * own.cost.gathers_s for many, own in runs))
    transfer, exposed = transfer + waited, exposed - waited
    doubt = several * sum(
        many * own.cost.spread * (own.cost.forward_s + own.cost.replay_s + own.cost.backward_s) for many, own in once
    )
    doubt += step.spread * (transfer + exposed + unhidden)
    return Prediction(
        step_s=found.objective,
        forward_s=forward,
        backward_s=backward,
        transfer_s=transfer,
        reduce_s=sum(many * own.cost.reduce_s for many, own in once),
        exposed_reduce_s=exposed + unhidden,
        memory_bytes=costs.peaks(formulation.strategies(choice)) or formulation.device_peaks(choice, devices),
        update_s=update,
        overhead_s=several * step.overhead_s,
        low_s=max(0.0, found.objective - doubt),
        high_s=found.objective + doubt,
        most_hidden=step.most_hidden,
        batch_norm_s=sum(2 * many * own.batch_norm_sync_s for many, own in runs),
    )


def layer_reports(
    graph: LayerGraph, formulation: Formulation, choice: Sequence[int], plan: Plan
) -> tuple[LayerReport, ...]:
    """The predicted figures of every layer; the reasons are added later."""
    moved, several = [0.0] * len(formulation.problem.nodes), formulation.parts.micro_batches
    for edge in formulation.parts.edges:
        moved[edge.counted_at] += float(edge_totals(formulation.parts, edge)[choice[edge.source], choice[edge.target]])
    for reuse in formulation.reused:
        moved[reuse.reader] += float(node_totals(formulation.parts, reuse.node)[choice[reuse.node]])
    # What the last block takes from the one before it stands for what the blocks between take from each other.
    for _, between, last in formulation.fold.alike if formulation.fold is not None else ():
        a, b = formulation.layers[between], formulation.layers[last]
        moved[a] = moved[b] = (moved[a] + moved[b]) / (formulation.times(a) + 1)

    def report(name: str, option: Option, moved_s: float) -> LayerReport:
        layer, strategy = graph.layers[name], plan.layers[name]
        sources = dict.fromkeys(graph.makers(layer))
        return LayerReport(
            name=name,
            kind=layer.kind,
            strategy=strategy,
            forward_s=several * option.cost.forward_s,
            backward_s=several * option.cost.backward_s,
            transfer_s=moved_s + several * option.own_moves_s,
            reduce_s=option.cost.reduce_s,
            memory_bytes=option.memory.resident_bytes + option.memory.saved_bytes,
            source=option.cost.source,
            why="",
            bends=bends(plan, graph, name),
            copies=tuple(
                Arrival(source, plan.layers[source].devices)
                for source in sources
                if plan.layers[source].devices != strategy.devices and not graph.layers[source].constant
            ),
            parameters=sum(graph.values[value].elements for value in layer.parameters),
            inputs=tuple(sources),
        )

    chosen = [options[k] for options, k in zip(formulation.options, choice, strict=False)]
    return tuple(report(name, chosen[index], moved[index]) for name, index in formulation.layers.items())


def memory_excess(cluster: Cluster, step: Prediction) -> list[str]:
    """A sentence on the first device whose peak, transfers included, exceeds its limit; the solver estimates them."""
    for number, (device, needed) in enumerate(zip(cluster.devices, step.memory_bytes, strict=True)):
        if needed > device.memory_bytes:
            return [
                f"device {number} needs {size_text(needed)} with its transfers, {size_text(device.memory_bytes)} are "
                "usable: lower --batch, or leave out --plan (plan=) for one that fits"
            ]
    return []
