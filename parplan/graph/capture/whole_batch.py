"""Two captures of one model at different batch sizes compared: results that grow with the batch, indices along samples.

A result that grows otherwise than along a dimension which is known to hold the samples can be handed out whole, and to
no process that brought its own samples. One that grows along several (all pairs of samples) is whole in every process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from parplan.graph.axes.sample_indices import SampleIndex, grown_dims, sample_indices
from parplan.graph.axes.table import unknown_ops
from parplan.graph.layer_graph import Constant, Unplaced
from parplan.graph.layers import LayerSet

__all__ = ["WholeBatch", "unplaced", "whole_batch"]


@dataclass(frozen=True)
class WholeBatch:
    """Ops and results that need the whole batch.

    Args:
        indices: ops that take positions along samples from inputs.
        grown: per result (leaf, by number) the dimensions that grow with the batch.
    """

    indices: tuple[SampleIndex, ...] = ()
    grown: Mapping[int, frozenset[int]] = field(default_factory=dict)


def whole_batch(exported: ExportedProgram, twice: ExportedProgram | None, batch: int) -> WholeBatch:
    """Compare two captures at different batch sizes; `twice` is None where there is no other."""
    one, other = exported.graph_module, twice.graph_module if twice is not None else None
    users = [name for name in exported.graph_signature.user_inputs if isinstance(name, str)]
    specs = exported.graph_signature.output_specs
    leaves: Any = one.graph.output_node().args[0]
    twins: Any = other.graph.output_node().args[0] if other is not None else ()
    pairs = zip(specs, leaves, twins if len(twins) == len(leaves) else (None,) * len(leaves), strict=True)
    results = [(leaf, twin) for spec, leaf, twin in pairs if spec.kind is OutputKind.USER_OUTPUT]
    grown = {i: grown_dims(leaf, twin, batch) for i, (leaf, twin) in enumerate(results) if isinstance(leaf, fx.Node)}
    return WholeBatch(sample_indices(one, other, users, batch), grown)


def unplaced(
    results: Sequence[str | Constant],
    grown: Mapping[int, frozenset[int]],
    built: LayerSet,
    flattened: Mapping[str, int],
    counted: Collection[str] = (),
) -> tuple[Unplaced, ...]:
    """Results that grow with the batch otherwise than along one dimension which is known to hold the samples.

    All pairs of samples (texts x images) are no process's own: such a result is whole in every process.

    Args:
        counted: values that count the samples of the whole batch, which are not those of one process.
    """
    found = []
    for number, value in enumerate(results):
        dims = grown.get(number)
        if not dims or not isinstance(value, str):
            continue
        if len(dims) > 1 and value not in built.batch_dims and value not in counted:
            continue
        dim = flattened.get(value, built.batch_dims.get(value))
        if dims != {dim} or value not in built.batch_dims or value in counted:
            maker = built.producer.get(value, value)
            above = nx.ancestors(built.digraph, maker) | {maker} if maker in built.layers else set()
            lost = [name for name in built.layers if name in above and built.layers[name].batch is None]
            unknown = [op for name in lost for op in unknown_ops(built.layers[name].nodes)]
            found.append(Unplaced(number, maker, tuple(dict.fromkeys(unknown))))
    return tuple(found)
