"""Layers measured elsewhere, as records and as text: enough to plan with, without the model's code.

docs/profile-graph.md describes the text and how to make it of other tools' profiles. text.py reads it,
graph.py plans with it, export.py makes it of a captured model. Times are in seconds on one device,
sizes in bytes of all samples of the profile's batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from parplan.errors import ProfileError

__all__ = [
    "FORMAT", "VERSION", "Cut", "Effect", "LayerProfile", "ProfileEdge", "ProfiledLayer", "Samples", "Times",
    "default_effect", "format_layer_profile",
]  # fmt: skip

FORMAT, VERSION = "parplan-layer-profile", "1"


class Samples(Enum):
    """What a layer does with samples."""

    SPLIT = "split"
    """Each on its own: replicas take their share."""
    TOGETHER = "together"
    """They depend on each other: one replica."""
    NONE = "none"
    """No sample reaches it: any device may do it redundantly, and none is faster for it."""


class Effect(Enum):
    """What cutting a layer along an axis does to the activations around it."""

    OUTPUT = "output"
    """Every shard needs the whole input and makes its part of the output."""
    INPUT = "input"
    """Every shard needs its part of the input and makes a term of a sum."""
    BOTH = "both"
    """Every shard needs its part of the input and makes that part of the output."""


_EFFECTS = {
    "out-features": Effect.OUTPUT, "out-channels": Effect.OUTPUT, "in-features": Effect.INPUT,
    "in-channels": Effect.INPUT, "features": Effect.BOTH, "channels": Effect.BOTH, "heads": Effect.BOTH,
}  # fmt: skip


def default_effect(axis: str) -> Effect | None:
    """What the names that parplan itself gives to axes mean; None for another name."""
    return _EFFECTS.get(axis)


@dataclass(frozen=True)
class Times:
    """Seconds of one layer on one device for `batch` samples."""

    batch: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Cut:
    """An axis along which a layer may be cut.

    Args:
        axis: its name, such as "out-features".
        units: what the number of shards must divide.
        effect: what it does to the activations around the layer.
        takes, gives: the dimension of the input and of the output that is cut, where one is. Dimension 0 is the
            samples; two layers that cut the same dimension of an activation pass their parts on as they are.
    """

    axis: str
    units: int
    effect: Effect
    takes: int = 1
    gives: int = 1


@dataclass(frozen=True)
class ProfiledLayer:
    """One layer's figures.

    Args:
        name: unique, without blanks.
        times: at one or more batches, the smallest first.
        activation_bytes: what it hands on.
        parameter_bytes: its weights; a gradient of the same size comes with them.
        saved_bytes: what it keeps for its backward; None: what it hands on.
        kind: "conv", "linear", ...; "loss" for a loss.
        samples: what it does with samples.
        cuts: the axes it may be cut along.
        update_s: the optimizer's update of its weights, in seconds.
    """

    name: str
    times: tuple[Times, ...]
    activation_bytes: int
    parameter_bytes: int
    saved_bytes: int | None = None
    kind: str = "other"
    samples: Samples = Samples.SPLIT
    cuts: tuple[Cut, ...] = ()
    update_s: float = 0.0


@dataclass(frozen=True)
class ProfileEdge:
    """`target` takes what `source` hands on, or only `activation_bytes` of it."""

    source: str
    target: str
    activation_bytes: int | None = None


@dataclass(frozen=True)
class LayerProfile:
    """A model as somebody measured it.

    Args:
        model: its name.
        batch: samples that all sizes are for.
        device: what it was measured on, in words.
        layers: in any order; edges say who feeds whom.
        edges: a directed graph without cycles.
        precision: what it was measured in, in words; "" when nobody said.
    """

    model: str
    batch: int
    device: str
    layers: tuple[ProfiledLayer, ...]
    edges: tuple[ProfileEdge, ...] = ()
    precision: str = ""


def format_layer_profile(profile: LayerProfile) -> str:
    """The profile as text, which `parse_layer_profile` reads back to an equal profile.

    Raises:
        ProfileError: a name that the text cannot hold.
    """
    return "\n".join(_lines(profile)) + "\n"


def _lines(profile: LayerProfile) -> Iterator[str]:
    yield f"{FORMAT} {VERSION}"
    yield f"model {_words(profile.model, 'model')}"
    yield f"batch {profile.batch}"
    yield f"device {_words(profile.device, 'device')}"
    if profile.precision:
        yield f"precision {_words(profile.precision, 'precision')}"
    yield "per batch"
    yield ""
    for layer in profile.layers:
        yield from _layer_lines(layer, profile.batch)
    if profile.edges:
        yield ""
    for edge in profile.edges:
        size = "" if edge.activation_bytes is None else f" activation-bytes={edge.activation_bytes}"
        yield f"edge {edge.source} {edge.target}{size}"


def _layer_lines(layer: ProfiledLayer, batch: int) -> Iterator[str]:
    whole = next((times for times in layer.times if times.batch == batch), None)
    if whole is None:
        raise ProfileError(f"layer {layer.name} has no times at the profile's batch of {batch}; give it some")
    fields = {
        "forward-s": repr(float(whole.forward_s)),
        "backward-s": repr(float(whole.backward_s)),
        "activation-bytes": str(layer.activation_bytes),
        "parameter-bytes": str(layer.parameter_bytes),
        "saved-bytes": "" if layer.saved_bytes is None else str(layer.saved_bytes),
        "update-s": repr(float(layer.update_s)) if layer.update_s else "",
        "kind": "" if layer.kind == "other" else _word(layer.kind, "kind"),
        "samples": "" if layer.samples is Samples.SPLIT else layer.samples.value,
        "cut": ",".join(_cut(cut) for cut in layer.cuts),
    }
    yield " ".join([f"layer {_word(layer.name, 'layer')}", *(f"{key}={text}" for key, text in fields.items() if text)])
    for times in layer.times:
        if times is not whole:
            seconds = f"forward-s={float(times.forward_s)!r} backward-s={float(times.backward_s)!r}"
            yield f"times {layer.name} batch={times.batch} {seconds}"


def _cut(cut: Cut) -> str:
    if any(character in ":," for character in cut.axis):
        raise ProfileError(f"axis {cut.axis!r} cannot be written: a name has neither ':' nor ','; rename it")
    dims = {
        Effect.OUTPUT: f"@{cut.gives}",
        Effect.INPUT: f"@{cut.takes}",
        Effect.BOTH: f"@{cut.takes}>{cut.gives}",
    }[cut.effect]
    plain = dims in ("@1", "@1>1")
    head = f"{_word(cut.axis, 'cut')}:{cut.units}"
    if plain and cut.effect is default_effect(cut.axis):
        return head
    return f"{head}:{cut.effect.value}{'' if plain else dims}"


def _word(text: str, what: str) -> str:
    if not text.isprintable() or len(text.split()) != 1 or text.split()[0] != text or text.startswith("#"):
        raise ProfileError(f"{what} {text!r} cannot be written: it has to be one word that does not begin with #")
    return text


def _words(text: str, what: str) -> str:
    joined = " ".join(text.split())
    if not joined or joined != text or not text.isprintable() or any(word.startswith("#") for word in text.split()):
        raise ProfileError(f"{what} {text!r} cannot be written: words with one blank between, and none begins with #")
    return text
