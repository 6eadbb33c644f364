"""Layer types: from a section and what its inputs give to a module and what that gives.

One function per type; the table below names, per type, the keys it reads and those that only steer cuda-convnet2's
kernels or training and are accepted without effect here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from parplan.convnet2.extents import Extent, Window, covering
from parplan.convnet2.ini import IniSection
from parplan.convnet2.modules import (
    Activation,
    Conv,
    CrossMapNorm,
    Dropout,
    FullyConnected,
    Join,
    LogisticCost,
    Pool,
    SameMapNorm,
    Softmax,
    WeightedSum,
)
from parplan.convnet2.neurons import neuron_of

__all__ = ["COST", "LayerSpec", "check_type", "make"]

COST = "cost.logreg"
_DEVIATION = 0.01  # of weights, where no initW is given
_SCALE, _POWER = 1e-4, 0.75  # of normalisation, where no layer-parameter file gives them


@dataclass(frozen=True)
class LayerSpec:
    """IniSection and inputs that a layer is made from.

    Args:
        section: its section in the layer file.
        params: its section in the layer-parameter file, empty without one.
        inputs: what each input gives.
        for_cost: only costs take what it gives.
    """

    section: IniSection
    params: IniSection
    inputs: tuple[Extent, ...]
    for_cost: bool = False


Made = tuple[nn.Module, Extent]
"""A layer's module and what it gives."""


@dataclass(frozen=True)
class _Type:
    """Keys a type reads and keys without effect here, in the layer file and in the layer-parameter file."""

    make: Callable[[LayerSpec], Made]
    keys: str
    params: str = ""
    single: bool = True


def make(spec: LayerSpec) -> Made:
    """The module of one layer; weights are drawn from torch's generator, as deep as `initW` and `initB` say.

    Raises:
        LayerFileError: a key that is not one of the type's, a value that is missing or impossible.
    """
    section, name = spec.section, spec.section.text("type")
    found = _TYPES[name]
    common = "type inputs gpu" if name in (COST, "softmax") else "type inputs gpu neuron"
    section.refuse_unknown(f"{common} {found.keys}".split(), f"a layer of type {name}")
    spec.params.refuse_unknown(found.params.split(), f"a layer of type {name}")
    if found.single and len(spec.inputs) != 1:
        raise section.error("inputs", f"a layer of type {name} takes one input; join several with a layer of type pass")
    return found.make(spec)


def check_type(section: IniSection) -> None:
    """The section has a type that is known.

    Raises:
        LayerFileError: it has none, or another.
    """
    if not section.has("type"):
        raise section.error("type", "it is missing; a layer file has one in every section (and a layer-parameter file "
                            "none: name the layer file)")  # fmt: skip
    if section.text("type") not in ("data", *_TYPES):
        raise section.error("type", f"it is not known here; types are data, {', '.join(_TYPES)}")


def _conv(spec: LayerSpec) -> Made:
    section, count = spec.section, len(spec.inputs)
    images = [_maps(spec, index, depth) for index, depth in enumerate(section.integers("channels", count))]
    pixels = [image.side or 1 for image in images]
    keys = ("filterSize", "stride", "padding", "groups")
    defaults, least = (None, 1, 0, 1), (1, 1, 0, 1)
    found = [section.integers(key, count, d, m) for key, d, m in zip(keys, defaults, least, strict=True)]
    windows = [Window(extent.channels, *rest) for extent, *rest in zip(images, *found, strict=True)]
    # `filters` counts the output maps of one group.
    totals = {own * way.groups for own, way in zip(section.integers("filters", count), windows, strict=True)}
    if len(totals) > 1:
        raise section.error("filters", "filters x groups has to be the same for every input, as they are summed")
    filters = totals.pop()
    for way in windows:
        if way.channels % way.groups:
            raise section.error("groups", f"{way.channels} channels cannot make {way.groups} groups; use a divisor")
    for way, side in zip(windows, pixels, strict=True):
        if way.size > side + 2 * way.padding:
            raise section.error("filterSize", f"filters of {way.size} do not fit on {side} pixels with a border of "
                                f"{way.padding}; use smaller filters or a larger image")  # fmt: skip
    sides = [way.side(side) for way, side in zip(windows, pixels, strict=True)]
    if len(set(sides)) > 1:
        raise section.error("inputs", f"they give {' and '.join(f'{n} x {n}' for n in sides)} positions, which cannot "
                            "be summed; change stride, padding or filterSize")  # fmt: skip
    if section.has("randSparse") and section.flag("randSparse", False):
        raise section.error("randSparse", "filters that see some maps only are not known here; use groups")
    shared = section.flag("sharedBiases", True)
    module = Conv(windows, pixels, filters, shared, neuron_of(section))
    return _drawn(module, section, [way.channels // way.groups for way in windows]), Extent(filters, sides[0])


def _maps(spec: LayerSpec, index: int, channels: int) -> Extent:
    """An input that has to be maps, as many as the section says."""
    extent, name = spec.inputs[index], spec.section.names("inputs")[index]
    if extent.side is None:
        raise spec.section.error("inputs", f"{name} gives {extent.describe()}; this type needs maps")
    if extent.channels != channels:
        raise spec.section.error("channels", f"{name} gives {extent.describe()}; write channels={extent.channels}")
    return extent


def _fully_connected(spec: LayerSpec) -> Made:
    numbers = [extent.count for extent in spec.inputs]
    outputs = spec.section.integer("outputs")
    module = FullyConnected(sum(numbers), outputs, neuron_of(spec.section))
    return _drawn(module, spec.section, numbers), Extent(outputs)


def _drawn(module: nn.Module, section: IniSection, sizes: list[int]) -> nn.Module:
    """Normal weights, deviation `initW` for each input's part (of `sizes`), and biases `initB`."""
    deviations = section.numbers("initW", len(sizes), _DEVIATION)
    weights = [parameter for name, parameter in module.named_parameters() if name != "bias"]
    with torch.no_grad():
        for weight in weights:
            weight.normal_()
        parts = weights[0].split(sizes, 1) if len(weights) == 1 else weights
        for part, deviation in zip(parts, deviations, strict=True):
            part.mul_(deviation)
        module.get_parameter("bias").fill_(section.number("initB", 0.0))
    return module


def _pool(spec: LayerSpec) -> Made:
    section, image = spec.section, _maps(spec, 0, spec.section.integer("channels"))
    side, kind = image.side or 1, section.one_of("pool", ("max", "avg"))
    if section.flag("sum", False):
        raise section.error("sum", "sums over windows are not known here; use pool=avg and scale what follows")
    size, stride, start = section.integer("sizeX"), section.integer("stride"), section.integer("start", 0, -(2**31))
    if stride > size:
        raise section.error("stride", f"windows of {size} would leave pixels out; use a stride up to sizeX={size}")
    if size > side - start:
        raise section.error("sizeX", f"a window of {size} is more than the {side - start} pixels there are from start "
                            f"{start}; use a smaller one")  # fmt: skip
    if 2 * -start > size:
        raise section.error("start", f"half of a window of {size} may lie before the image; use {-(size // 2)} or more")
    most = covering(side - start, size, stride)
    outputs = section.integer("outputsX", 0, 0) or most
    if outputs > most:
        raise section.error("outputsX", f"{most} windows cover the image; use up to {most}, or 0")
    return Pool(kind, size, stride, start, outputs, neuron_of(section)), Extent(image.channels, outputs)


def _norm(spec: LayerSpec) -> Made:
    section, params, image = spec.section, spec.params, _maps(spec, 0, spec.section.integer("channels"))
    across = section.text("type") == "cmrnorm"
    if section.flag("blocked", False):
        raise section.error("blocked", "normalising block by block is not known here; leave it out")
    size, most = section.integer("size"), image.channels if across else image.side or 1
    if size > most:
        raise section.error("size", f"there are {most} {'maps' if across else 'pixels'} only; use up to {most}")
    numbers = (params.number("scale", _SCALE, 0.0), params.number("pow", _POWER), params.number("minDiv", 1.0, 0.0))
    kind = CrossMapNorm if across else SameMapNorm
    return kind(size, *numbers, neuron_of(section)), image


def _neuron(spec: LayerSpec) -> Made:
    if not spec.section.has("neuron"):
        raise spec.section.error("neuron", "it is missing; add a line such as neuron=relu")
    return Activation(neuron_of(spec.section)), spec.inputs[0]


def _dropout(spec: LayerSpec) -> Made:
    keep = spec.params.number("keep", 0.5)
    if not 0.0 < keep <= 1.0:
        raise spec.params.error("keep", "it is a probability; use a number above 0 and up to 1")
    enabled, kind = spec.params.flag("enable", True), spec.section.text("type")
    return Dropout(keep, enabled, kind, neuron_of(spec.section)), spec.inputs[0]


def _join(spec: LayerSpec) -> Made:
    """Maps of one side stay maps."""
    inputs = spec.inputs
    sides = {extent.side for extent in inputs}
    flat = len(sides) > 1
    gives = Extent(sum(extent.count for extent in inputs)) if flat else Extent(sum(e.channels for e in inputs), *sides)
    return Join(flat, neuron_of(spec.section)), gives


def _sum(spec: LayerSpec) -> Made:
    first = spec.inputs[0]
    for extent, name in zip(spec.inputs, spec.section.names("inputs"), strict=True):
        if extent != first:
            raise spec.section.error("inputs", f"{name} gives {extent.describe()}, the first {first.describe()}; all "
                                      "have to give the same")  # fmt: skip
    coefficients = spec.params.numbers("coeffs", len(spec.inputs), 1.0)
    return WeightedSum(coefficients, neuron_of(spec.section)), first


_WEIGHTS = "momW momB wc wball epsW epsB updatePeriod superEps superMom wcNormMin wcNormMax"
_INIT = "initW initB initWFunc initBFunc initCFunc"
_KERNEL = "sumWidth partialSum"  # how cuda-convnet2 sums weight gradients: no effect here
_NORM, _NORM_PARAMS = "channels size blocked", "scale pow minDiv"

_TYPES: Mapping[str, _Type] = {
    "conv": _Type(
        _conv,
        f"channels filters padding stride filterSize groups sharedBiases randSparse {_KERNEL} {_INIT}",
        _WEIGHTS,
        single=False,
    ),
    "fc": _Type(_fully_connected, f"outputs {_INIT}", _WEIGHTS, single=False),
    "pool": _Type(_pool, "channels pool sizeX stride start outputsX sum"),
    "neuron": _Type(_neuron, ""),
    "cmrnorm": _Type(_norm, _NORM, _NORM_PARAMS),
    "rnorm": _Type(_norm, _NORM, _NORM_PARAMS),
    "dropout": _Type(_dropout, "", "enable keep"),
    "dropout2": _Type(_dropout, "", "enable keep"),
    "pass": _Type(_join, "", single=False),
    "concat": _Type(_join, "", single=False),
    "eltsum": _Type(_sum, "", "coeffs", single=False),
    "softmax": _Type(lambda spec: (Softmax(spec.for_cost), Extent(prod(spec.inputs[0].shape))), ""),
    COST: _Type(
        lambda spec: (LogisticCost(spec.params.number("coeff", 1.0)), Extent(1)), "", "coeff topk", single=False
    ),
}
