"""A plan without the model: a graph made of a profile that somebody else measured.

The planner sees layers, axes and values as of a captured model, but no ops: a value is so many bytes, of which
dimension 0 stands for the samples and others for what the profile says may be cut. costs.py prices it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import networkx as nx
import torch

from parplan.cluster import Cluster
from parplan.cost_models.layer_profile.records import Effect, LayerProfile, ProfiledLayer, ProfileEdge, Samples
from parplan.graph.layer_graph import Axis, Layer, LayerGraph, TensorSpec

__all__ = ["OF_A_PROFILE", "profile_graph", "profile_notes"]

# Plans say so too, as no model can run them.
OF_A_PROFILE = " (layer profile)"

_ELEMENTS = {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}


def profile_graph(profile: LayerProfile, batch: int | None = None) -> LayerGraph:
    """The profile as a graph of layers, at the profile's batch or another one."""
    batch = profile.batch if batch is None else batch
    digraph = nx.DiGraph()
    digraph.add_nodes_from(layer.name for layer in profile.layers)
    digraph.add_edges_from((edge.source, edge.target, {"values": (_carried(edge),)}) for edge in profile.edges)
    position = {layer.name: index for index, layer in enumerate(profile.layers)}
    order = list(nx.lexicographical_topological_sort(digraph, key=position.__getitem__))
    known = {layer.name: layer for layer in profile.layers}
    producer = {name: name for name in order} | {_carried(edge): edge.source for edge in profile.edges}
    # Outputs of layers, and the parts of them that edges carry.
    sizes = {layer.name: _scaled_bytes(layer, layer.activation_bytes, profile, batch) for layer in profile.layers}
    for edge in profile.edges:
        if edge.activation_bytes is not None:
            sizes[_carried(edge)] = _scaled_bytes(known[edge.source], edge.activation_bytes, profile, batch)
    weighty = [name for name in order if known[name].parameter_bytes]
    element = _ELEMENTS.get(profile.precision.lower(), torch.float32)
    weights = {
        _parameters(name): TensorSpec((known[name].parameter_bytes // element.itemsize,), element, requires_grad=True)
        for name in weighty
    }
    return LayerGraph(
        model=f"{profile.model}{OF_A_PROFILE}",
        digraph=digraph,
        layers=_layers(profile, order, batch),
        values={name: TensorSpec((nbytes, 1), torch.uint8, requires_grad=True) for name, nbytes in sizes.items()}
        | {layer.name: TensorSpec((), torch.float32, requires_grad=True) for layer in profile.layers if _is_loss(layer)}
        | weights,
        producer=producer,
        batch=batch,
        batch_dims={value: 0 for value, source in producer.items() if _has_samples(known[source])},
        user_inputs=(),
        user_outputs=tuple(name for name in order if digraph.out_degree(name) == 0),
        in_spec=None,
        out_spec=None,
        parameters={_parameters(name): f"{name}.parameters" for name in weighty},
        buffers={},
        constants={},
        buffer_updates={},
        counters={},
        training=True,
        profiled={name: repr(replace(layer, name="")) for name, layer in known.items()},
    )


def _carried(edge: ProfileEdge) -> str:
    """The name of what an edge carries: its source's, or one of its own (names of layers have no blanks)."""
    return edge.source if edge.activation_bytes is None else f"{edge.source} {edge.target}"


def _parameters(layer: str) -> str:
    return f"parameters of {layer}"


def _is_loss(layer: ProfiledLayer) -> bool:
    """Whether a layer makes one number of all samples, from which the backward begins."""
    return layer.kind == "loss"


def _has_samples(layer: ProfiledLayer) -> bool:
    """Whether the samples can be told apart in what a layer hands on."""
    return layer.samples is not Samples.NONE and not _is_loss(layer)


def _scaled_bytes(layer: ProfiledLayer, nbytes: int, profile: LayerProfile, batch: int) -> int:
    return -(-nbytes * batch // profile.batch) if _has_samples(layer) else nbytes


def _layers(profile: LayerProfile, order: Sequence[str], batch: int) -> dict[str, Layer]:
    known = {layer.name: layer for layer in profile.layers}
    inputs: dict[str, list[str]] = {name: [] for name in order}
    outputs = {name: [name] for name in order}
    with_samples = {name: [name] if _has_samples(known[name]) else [] for name in order}
    for edge in profile.edges:
        value = _carried(edge)
        inputs[edge.target].append(value)
        if value != edge.source:
            outputs[edge.source].append(value)
        if _has_samples(known[edge.source]):
            with_samples[edge.target].append(value)
            with_samples[edge.source].append(value)
    layers: dict[str, Layer] = {}
    for name, layer in ((name, known[name]) for name in order):
        parameters = (_parameters(name),) if layer.parameter_bytes else ()
        axes = []
        for cut in () if _is_loss(layer) else layer.cuts:
            dims = dict.fromkeys(parameters, 0)
            if cut.effect is not Effect.OUTPUT:
                dims.update(dict.fromkeys(inputs[name], cut.takes))
            if cut.effect is not Effect.INPUT:
                dims.update(dict.fromkeys(outputs[name], cut.gives))
            partial = frozenset(outputs[name] if cut.effect is Effect.INPUT else ())
            axes.append(Axis(cut.axis, cut.units, dims, partial))
        split = layer.samples is Samples.SPLIT
        layers[name] = Layer(
            name=name,
            kind=layer.kind,
            nodes=(),
            inputs=tuple(inputs[name]),
            outputs=tuple(outputs[name]),
            parameters=parameters,
            batch=Axis("batch", batch, dict.fromkeys(with_samples[name], 0)) if split else None,
            reached=layer.samples is not Samples.NONE,
            constant=layer.samples is Samples.NONE,
            axes=tuple(axes),
        )
    return layers


def profile_notes(profile: LayerProfile, where: str, batch: int, cluster: Cluster) -> tuple[str, ...]:
    """Notes on figures that rest on the profile called `where`."""
    split = [layer for layer in profile.layers if layer.samples is not Samples.NONE]
    fewest = ceil(batch / cluster.count)
    scaled_down = [layer for layer in split if layer.samples is Samples.SPLIT and layer.times[0].batch > fewest]
    scaled_up = [layer for layer in split if layer.times[-1].batch < batch]
    fed = {name for edge in profile.edges for name in (edge.source, edge.target)}
    isolated = [layer.name for layer in profile.layers if layer.name not in fed] if len(profile.layers) > 1 else []
    notes = [
        f"Times of layers are from {where}, measured elsewhere: on {profile.device}, batch {profile.batch:,}. "
        f"Of {cluster.device.kind} only memory and links count."
    ]
    if scaled_down:
        notes.append(
            f"{_of(scaled_down, split)} no times for as few samples as {cluster.count} replicas have ({fewest:,}): "
            "below the smallest batch measured they are scaled in proportion, which flatters replicas."
        )
    if scaled_up:
        notes.append(f"{_of(scaled_up, split)} no times for {batch:,} samples: they are scaled in proportion.")
    if isolated:
        listed = ", ".join([*isolated[:4], *["..."] * (len(isolated) > 4)])
        notes.append(f"No edge leads to or from {listed}: nothing is moved there.")
    return tuple(notes)


def _of(some: Sequence[ProfiledLayer], all_of_them: Sequence[ProfiledLayer]) -> str:
    if len(some) == len(all_of_them):
        return "The layers have"
    return f"{len(some)} of {len(all_of_them)} layers {'has' if len(some) == 1 else 'have'}"
