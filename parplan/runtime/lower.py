"""Lower a graph and a plan to a program: which steps, in which order, moving which pieces.

A pure function of the captured graph, the plan's strategies and the sizes of one step, so that its result can be read
and tested as text.
"""

from __future__ import annotations

from collections.abc import Mapping

from parplan.errors import PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Strategy
from parplan.runtime.holdings import buckets, holdings
from parplan.runtime.ordering import backward, bucket_heads, forward
from parplan.runtime.placing import Placing
from parplan.runtime.program import Program
from parplan.runtime.scalars import spread
from parplan.runtime.segments import Segments
from parplan.runtime.setting import Setting

__all__ = ["lower"]


def lower(graph: LayerGraph, strategies: Mapping[str, Strategy], setting: Setting) -> Program:
    """The program of one step of `graph` under `strategies`.

    Raises:
        PlanError: the plan leaves a layer out, or uses a device that is not there.
    """
    _check(graph, strategies, setting)
    laid = spread(graph, strategies, setting)
    held = holdings(graph, laid.strategies)
    filled = buckets(graph, held, setting.memories)
    placing = Placing(graph, setting, laid.numbers)
    segments = Segments(graph, laid, placing, bucket_heads(graph, filled))
    inputs = [name for name in graph.user_inputs if name is not None]
    for value in inputs:
        placing.add(placing.slot(value, setting.arrival(graph.batch_dims.get(value))), -1)
    for layer in laid.layers.values():
        shared = layer.mixes_batch and laid.strategies[layer.name].replicas > 1 and setting.global_statistics
        segments.add_batch_norm(layer) if shared else segments.add(layer)
    outputs = tuple(placing.deliver(value, len(segments)) for value in graph.user_outputs if isinstance(value, str))
    updates = {buffer: placing.deliver(value, len(segments)) for buffer, value in graph.buffer_updates.items()}
    read = {*outputs, *updates.values(), *(placed.transfer.source for placed in placing.moves), *segments.read}
    steps = segments.steps(read, held, setting.rows)
    return Program(
        slots=placing.slots,
        forward=tuple(forward(steps, placing.moves)),
        backward=tuple(backward(steps, placing.moves, filled)),
        inputs={value: value for value in inputs},
        outputs=outputs,
        updates=updates,
        buckets=filled,
        holdings=held,
    )


def _check(graph: LayerGraph, strategies: Mapping[str, Strategy], setting: Setting) -> None:
    for name in graph.layers:
        if name not in strategies:
            raise PlanError(f"{name}: the plan does not say where it runs; add a strategy for it")
        if max(strategies[name].devices) >= setting.devices:
            raise PlanError(
                f"{name}: runs on devices {strategies[name].devices}, but there are only {setting.devices} (0 to "
                f"{setting.devices - 1}); give more devices or another plan"
            )
