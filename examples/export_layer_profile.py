"""A captured model and its costs as a layer profile, for other planners, other people and other days.

What the text cannot say is left out: buffers, the exchange of batch statistics, and axes that cut the inputs of a layer
unlike each other or a part of its parameters only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from parplan.cost_models.costs import CostModel
from parplan.cost_models.layer_profile.graph import OF_A_PROFILE
from parplan.cost_models.layer_profile.records import (
    AXIS_EFFECTS,
    AxisCut,
    Effect,
    LayerProfile,
    ProfiledLayer,
    ProfileEdge,
    Samples,
    Times,
)
from parplan.cost_models.layer_profile.text import FORMAT, VERSION
from parplan.errors import ProfileError
from parplan.files import write_files
from parplan.graph.layer_graph import Axis, Layer, LayerGraph
from parplan.plan import Strategy

__all__ = ["format_layer_profile", "layer_profile_of", "write_layer_profile"]


def write_layer_profile(path: str | Path, profile: LayerProfile) -> None:
    """Write a profile as text that `parplan analyze --profile-graph` reads.

    Raises:
        ProfileError: a name that the text cannot hold.
        ParplanError: the file cannot be written.
    """
    write_files({str(path): format_layer_profile(profile)})


def layer_profile_of(
    graph: LayerGraph, costs: CostModel, device: str, replicas: Sequence[int] = (1,), precision: str = ""
) -> LayerProfile:
    """The layers of `graph` with what `costs` says of each on one device.

    Args:
        device: what the times are of, in words; say so if nothing was measured.
        replicas: times are given for the share of each of so many replicas, at most as many as the costs have devices;
            1, the whole batch, is always there.
        precision: what was computed in, in words.

    Raises:
        ProfileError: no input of the model has samples.
    """
    if graph.batch is None:
        raise ProfileError(f"{graph.model}: no input has samples, so there is no batch that times could be for")
    shares = sorted({count for count in (1, *replicas) if 1 <= count <= graph.batch})
    edges = []
    for source, target, values in graph.digraph.edges(data="values"):
        nbytes = _nbytes(graph, values)
        whole = nbytes == _nbytes(graph, _handed_on(graph, graph.layers[source]))
        edges.append(ProfileEdge(source, target, None if whole else nbytes))
    layers = tuple(_layer(graph, layer, costs, shares) for layer in graph.layers.values())
    return LayerProfile(graph.model.removesuffix(OF_A_PROFILE), graph.batch, device, layers, tuple(edges), precision)


def _handed_on(graph: LayerGraph, layer: Layer) -> tuple[str, ...]:
    """Outputs of a layer, none twice: a layer that comes from a profile lists parts beside the whole."""
    return layer.outputs if layer.nodes else (layer.name,)


def _nbytes(graph: LayerGraph, values: Sequence[str]) -> int:
    return sum(graph.values[value].nbytes for value in values)


def _layer(graph: LayerGraph, layer: Layer, costs: CostModel, shares: Sequence[int]) -> ProfiledLayer:
    memory = costs.memory(layer, Strategy())
    # Parameters without a gradient that no layer before this one uses.
    users = {graph.parameters[n]: other.name for other in reversed([*graph.layers.values()]) for n in other.parameters}
    frozen = [name for name in layer.parameters if not graph.values[name].requires_grad]
    frozen_bytes = _nbytes(graph, [name for name in frozen if users[graph.parameters[name]] == layer.name])
    times: dict[int, Times] = {}
    for count in shares if layer.batch is not None else (1,):
        cost = costs.layer(layer, Strategy(count, devices=tuple(range(count))))
        batch = ceil((graph.batch or 1) / count)
        times[batch] = Times(batch, cost.forward_s, cost.backward_s)
    return ProfiledLayer(
        name=layer.name,
        times=tuple(times[batch] for batch in sorted(times)),
        activation_bytes=_nbytes(graph, _handed_on(graph, layer)),
        parameter_bytes=memory.gradients_bytes + frozen_bytes,
        saved_bytes=memory.saved_bytes,
        # In a profile a loss is the number it comes to; what it has of every sample is a layer like others.
        kind="loss_rows" if layer.is_loss and layer.batch is not None else layer.kind,
        samples=Samples.NONE if layer.constant else Samples.TOGETHER if layer.batch is None else Samples.SPLIT,
        cuts=tuple(cut for axis in layer.axes if (cut := _cut(graph, layer, axis)) is not None),
        update_s=costs.layer(layer, Strategy()).update_s,
    )


def _cut(graph: LayerGraph, layer: Layer, axis: Axis) -> AxisCut | None:
    """The axis, if the text can say it."""
    if any(name not in axis.dims and name not in axis.first_only for name in layer.parameters):
        return None
    made = [name for name in layer.inputs if name in graph.producer] or list(layer.inputs)
    takes = {_dimension(graph, axis, name) for name in made} or {0}
    gives = {_dimension(graph, axis, name) for name in layer.outputs if name not in axis.partial}
    if len(takes) != 1 or len(gives) > 1 or (gives and axis.partial):
        return None
    taken, given = takes.pop(), gives.pop() if gives else 0
    taken = 1 if axis.partial and not layer.inputs else taken  # what its input would be, in a graph that lists none
    if given and taken:
        return AxisCut(axis.name, axis.units, Effect.BOTH, taken, given)
    if given:
        return AxisCut(axis.name, axis.units, Effect.OUTPUT, gives=given)
    return AxisCut(axis.name, axis.units, Effect.INPUT, takes=taken) if taken and axis.partial else None


def _dimension(graph: LayerGraph, axis: Axis, value: str) -> int:
    """Which dimension of a value the axis cuts, counted with the samples in front; 0 for none."""
    dim, samples = axis.dims.get(value), graph.batch_dims.get(value)
    if dim is None or value in axis.partial:
        return 0
    return dim if samples is not None and samples < dim else dim + 1


def format_layer_profile(profile: LayerProfile) -> str:
    """The profile as text, which `parse_layer_profile` reads back to an equal profile.

    Raises:
        ProfileError: a name that the text cannot hold; a layer without times at the profile's batch.
    """
    header = {"model": profile.model, "device": profile.device, "precision": profile.precision}
    lines = [f"{FORMAT} {VERSION}", f"batch {profile.batch}", "per batch"]
    for name, words in header.items():
        if words or name != "precision":
            lines.append(f"{name} {_writable(words, name, several=True)}")
    lines.append("")
    for layer in profile.layers:
        whole = next((times for times in layer.times if times.batch == profile.batch), None)
        if whole is None:
            batch = profile.batch
            raise ProfileError(f"layer {layer.name} has no times at the profile's batch of {batch}; give it some")
        fields = {
            "activation-bytes": str(layer.activation_bytes),
            "parameter-bytes": str(layer.parameter_bytes),
            "saved-bytes": "" if layer.saved_bytes is None else str(layer.saved_bytes),
            "update-s": repr(float(layer.update_s)) if layer.update_s else "",
            "kind": "" if layer.kind == "other" else _writable(layer.kind, "kind"),
            "samples": "" if layer.samples is Samples.SPLIT else layer.samples.value,
            "cut": ",".join(_cut_text(cut) for cut in layer.cuts),
        }
        given = [f"{key}={value}" for key, value in fields.items() if value]
        lines.append(" ".join(["layer", _writable(layer.name, "layer"), _seconds_text(whole), *given]))
        others = (times for times in layer.times if times is not whole)
        lines += [f"times {layer.name} batch={times.batch} {_seconds_text(times)}" for times in others]
    lines += [""] * bool(profile.edges)
    for edge in profile.edges:
        size = "" if edge.activation_bytes is None else f" activation-bytes={edge.activation_bytes}"
        lines.append(f"edge {edge.source} {edge.target}{size}")
    return "\n".join(lines) + "\n"


def _seconds_text(times: Times) -> str:
    return f"forward-s={float(times.forward_s)!r} backward-s={float(times.backward_s)!r}"


def _cut_text(cut: AxisCut) -> str:
    if any(character in ":," for character in cut.axis):
        raise ProfileError(f"axis {cut.axis!r} cannot be written: a name has neither ':' nor ','; rename it")
    dims = {Effect.OUTPUT: f"{cut.gives}", Effect.INPUT: f"{cut.takes}", Effect.BOTH: f"{cut.takes}>{cut.gives}"}
    at = "" if dims[cut.effect] in ("1", "1>1") else f"@{dims[cut.effect]}"
    effect = "" if not at and cut.effect is AXIS_EFFECTS.get(cut.axis) else f":{cut.effect.value}{at}"
    return f"{_writable(cut.axis, 'cut')}:{cut.units}{effect}"


def _writable(name: str, noun: str, several: bool = False) -> str:
    """`name`, if it is one word (or `several` with one blank between) that reading does not take for a comment."""
    words = name.split()
    comment = any(word.startswith("#") for word in words)
    if not words or " ".join(words) != name or not name.isprintable() or comment or (len(words) > 1 and not several):
        form = (
            "words with one blank between, and none begins" if several else "it has to be one word that does not begin"
        )
        raise ProfileError(f"{noun} {name!r} cannot be written: {form} with #")
    return name
