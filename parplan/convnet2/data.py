"""Inputs of a network: data layers, their sizes, and example inputs.

cuda-convnet2 asks its data provider how large a sample is; a layer file alone says it only by `end`, so images are
taken to be 224 x 224, the crop of its ImageNet files, unless the caller knows better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parplan.convnet2.extents import Extent
from parplan.convnet2.ini import IniSection
from parplan.convnet2.layer_types import COST
from parplan.convnet2.network import Wire
from parplan.errors import LayerFileError

__all__ = ["Data", "data_layers", "examples"]

IMAGE_SIDE = 224
_KEYS = ("type", "dataIdx", "start", "end")


@dataclass(frozen=True)
class Data:
    """One data layer: its place among the arguments, and what it holds; `gives` None for labels."""

    name: str
    place: int
    gives: Extent | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample; labels are single numbers."""
        return () if self.gives is None else self.gives.shape


def data_layers(
    sections: Mapping[str, IniSection], wires: Sequence[Wire], shapes: Mapping[int, Sequence[int]]
) -> dict[str, Data]:
    """The data layers of a file.

    Args:
        shapes: shape of one sample by dataIdx, where the caller knows it.

    Raises:
        LayerFileError: a layer of unknown size, or labels that something else than a cost takes.
    """
    found: dict[str, Data] = {}
    for name, section in sections.items():
        if section.text("type") != "data":
            continue
        section.refuse_unknown(_KEYS, "a layer of type data")
        place = section.integer("dataIdx", least=0)
        if section.integer("start", 0, 0):
            raise section.error("start", "data layers begin with the first number here; leave it out")
        takers = [wire for wire in wires if name in wire.inputs]
        costs = [wire for wire in takers if sections[wire.layer].text("type") == COST and wire.inputs[0] == name]
        if costs and len(costs) < len(takers):
            raise section.error("type", f"{costs[0].layer} takes it as labels, other layers as data; make two of it")
        if not takers:
            raise section.error("type", "no layer takes it; leave it out")
        gives = None if costs else _extent(section, shapes.get(place), sections, takers)
        found[name] = Data(name, place, gives)
    # Labels come last, so that they can be left out.
    ordered = sorted(found.values(), key=lambda data: data.place)
    for wanted, data in enumerate(ordered):
        section = sections[data.name]
        if data.place != wanted:
            raise section.error(
                "dataIdx", f"data layers are arguments, numbered from 0 without a gap; this one is {wanted}"
            )
        if data.gives is not None and any(before.gives is None for before in ordered[:wanted]):
            raise section.error("dataIdx", "labels come last here; give them the highest dataIdx")
    if not ordered:
        raise LayerFileError("no layer has type=data, so there is nothing to compute from; add one")
    return {data.name: data for data in ordered}


def _extent(
    section: IniSection, shape: Sequence[int] | None, sections: Mapping[str, IniSection], takers: Sequence[Wire]
) -> Extent:
    """From the caller, else from `end` and the channels that a layer that takes it says."""
    if shape is not None:
        if len(shape) == 1:
            return Extent(shape[0])
        if len(shape) == 3 and shape[1] == shape[2]:
            return Extent(shape[0], shape[1])
        raise section.error("type", f"a sample of shape {'x'.join(map(str, shape)) or 'one number'} is no square "
                            "image; give channels x side x side, or how many numbers")  # fmt: skip
    end = section.integer("end") if section.has("end") else None
    wire = next((wire for wire in takers if sections[wire.layer].has("channels")), None)
    if wire is None:
        if end is None:
            raise section.error("end", f"{takers[0].layer} does not say how large a sample is; add end=, the numbers "
                                "in one, or give its shape")  # fmt: skip
        return Extent(end)
    channels = sections[wire.layer].integers("channels", len(wire.inputs))[wire.inputs.index(section.name)]
    if end is None:
        return Extent(channels, IMAGE_SIDE)
    side = math.isqrt(end // channels)
    if channels * side * side != end:
        raise section.error("end", f"{end} are no square maps of {channels} channels; use channels x side x side")
    return Extent(channels, side)


def examples(data: Mapping[str, Data], batch: int, classes: int) -> tuple[Tensor, ...]:
    """A batch: one sample's zeros seen `batch` times, and labels 0, 1, 2, ... over the classes."""
    found = []
    for each in data.values():
        if each.gives is None:
            found.append(torch.arange(batch) % classes)
        else:
            found.append(torch.zeros(1, *each.shape).expand(batch, *each.shape))
    return tuple(found)
