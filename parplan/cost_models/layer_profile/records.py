"""Layers measured elsewhere, as records and as text: enough to plan with, without the model's code.

docs/profile-graph.md describes the text and how to make it of other tools' profiles. text.py reads it, graph.py
and costs.py plan with it, examples/export_layer_profile.py makes it of a captured model. Times are in seconds on one
device, sizes in bytes of all samples of the profile's batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["AXIS_EFFECTS", "AxisCut", "Effect", "LayerProfile", "ProfileEdge", "ProfiledLayer", "Samples", "Times"]


class Samples(Enum):
    """Dependence of a layer's samples on each other."""

    SPLIT = "split"
    """Each on its own: replicas take their share."""
    TOGETHER = "together"
    """They depend on each other: one replica."""
    NONE = "none"
    """No sample reaches it: any device may do it redundantly, and none is faster for it."""


class Effect(Enum):
    """Activations that a shard needs and makes where a layer is cut along an axis."""

    OUTPUT = "output"
    """Every shard needs the whole input and makes its part of the output."""
    INPUT = "input"
    """Every shard needs its part of the input and makes a term of a sum."""
    BOTH = "both"
    """Every shard needs its part of the input and makes that part of the output."""


# The axes that parplan itself names; any other axis has to say its effect.
AXIS_EFFECTS = {
    "out-features": Effect.OUTPUT, "out-channels": Effect.OUTPUT, "in-features": Effect.INPUT,
    "in-channels": Effect.INPUT, "features": Effect.BOTH, "channels": Effect.BOTH, "heads": Effect.BOTH,
}  # fmt: skip


@dataclass(frozen=True)
class Times:
    """Seconds of one layer on one device for `batch` samples."""

    batch: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class AxisCut:
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
    cuts: tuple[AxisCut, ...] = ()
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
        layers: in any order; edges say which feeds which.
        edges: a directed graph without cycles.
        precision: what it was measured in, in words; "" when nobody said.
    """

    model: str
    batch: int
    device: str
    layers: tuple[ProfiledLayer, ...]
    edges: tuple[ProfileEdge, ...] = ()
    precision: str = ""
