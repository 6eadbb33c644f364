"""Reads a cuda-convnet2 layer file: the network as a torch module, and the pins that its `gpu=` lines mean."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from parplan.convnet2.data import Data, data_layers, examples
from parplan.convnet2.extents import Extent
from parplan.convnet2.ini import IniSection, read_sections
from parplan.convnet2.layer_types import COST, LayerSpec, make
from parplan.convnet2.modules import Conv, FullyConnected
from parplan.convnet2.network import ConvNet, Wire
from parplan.convnet2.placement import devices_of, replica_notes, size_notes
from parplan.convnet2.rates import Rates, rates_of, unused_notes
from parplan.convnet2.wiring import wires_of
from parplan.errors import LayerFileError
from parplan.pins import Pin

__all__ = ["LayerFile", "params_beside", "read"]

# Images on each GPU in the guide's own command lines.
PER_GPU = 128


@dataclass(frozen=True)
class LayerFile:
    """A layer file as read: the network, where its layers are, and how it is trained.

    Args:
        network: the model; called with data and labels it gives costs, with data alone predictions (see `ConvNet`).
        pins: per layer with known devices, where it is and with how many replicas; none without `gpu=`.
        gpus: how many logical devices the pins name, None without pins.
        rates: learning rates and the like per layer with weights, where there is a layer-parameter file.
        notes: what a reader of a plan should know: what cuda-convnet2 would have refused, what has no effect here.
        data: data layers in order of the network's arguments.
        classes: how many a label can be; 0 without a cost.
    """

    path: str
    network: ConvNet
    pins: tuple[Pin, ...]
    gpus: int | None
    rates: Mapping[str, Rates]
    notes: tuple[str, ...]
    data: Mapping[str, Data]
    classes: int

    def example_inputs(self, batch: int | None = None) -> tuple[Tensor, ...]:
        """Images and labels; default: 128 for each replica of the layer with most, as the guide runs these files."""
        most = max((pin.replicas or 1 for pin in self.pins), default=1)
        return examples(self.data, PER_GPU * most if batch is None else batch, max(self.classes, 1))

    @property
    def prediction_pins(self) -> tuple[Pin, ...]:
        """The pins for a network that is only called without labels: costs are not in such a plan."""
        costs = [glob.escape(name) for name in self.network.costs]
        return tuple(pin for pin in self.pins if pin.pattern not in costs)

    def parameter_groups(self, lr_scale: float = 1.0) -> list[dict[str, Any]]:
        """Groups for torch.optim.SGD: each layer's weights and its biases, with the rates of the layer-parameter file.

        Args:
            lr_scale: factor on every learning rate, such as `scaled_lr(1.0, batch)`.

        Raises:
            LayerFileError: a layer with weights has no rates.
        """
        groups: list[dict[str, Any]] = []
        for name, layer in self.network.named_children():
            own = dict(layer.named_parameters())
            if not own:
                continue
            if name not in self.rates:
                raise LayerFileError(f"{name} has weights and no rates; give it a section [{name}] with epsW, epsB, "
                                     "momW and momB in the layer-parameter file")  # fmt: skip
            rate = self.rates[name]
            weights = [parameter for key, parameter in own.items() if key != "bias"]
            for kind, parameters, schedule, momentum, decay in (
                ("weights", weights, rate.weights, rate.momentum, rate.decay),
                ("biases", [own["bias"]], rate.biases, rate.bias_momentum, 0.0),
            ):
                options = {"lr": schedule.base * lr_scale, "momentum": momentum, "weight_decay": decay}
                groups.append({"name": f"{name} {kind}", "params": parameters, **options})
        return groups


def params_beside(path: Path) -> Path | None:
    """`layer-params-X.cfg` for `layers-X.cfg` in the same folder, if it is there."""
    if not path.name.startswith("layers"):
        return None
    beside = path.with_name("layer-params" + path.name.removeprefix("layers"))
    return beside if beside.is_file() else None


def read(
    path: str | Path,
    layer_params: str | Path | None = None,
    shapes: Mapping[int, Sequence[int]] | None = None,
) -> LayerFile:
    """Read a layer file.

    Args:
        layer_params: the layer-parameter file; default: `layer-params-X.cfg` beside `layers-X.cfg`, if there is one.
        shapes: shape of one sample by dataIdx, such as {0: (3, 96, 96)}; default: what `end` of the data layer says,
            else images of 224 x 224 (their channels the first layer says).

    Raises:
        LayerFileError: naming file, section, key and value, and what would be right.
    """
    file = Path(path)
    sections = read_sections(file)
    if not sections:
        raise LayerFileError(f"{file.name} has no layers; a layer is a section [name] with a line type=...")
    wires = wires_of(sections)
    params_file = Path(layer_params) if layer_params is not None else params_beside(file)
    params = read_sections(params_file) if params_file is not None else {}
    for name, section in params.items():
        if name not in sections:
            close = difflib.get_close_matches(name, sections, n=1)
            hint = f"; did you mean [{close[0]}]?" if close else ""
            raise LayerFileError(f"{section.where}: {file.name} has no such layer{hint}")
    data = data_layers(sections, wires, dict(shapes or {}))
    network, gives = _network(sections, params, wires, data)
    devices = devices_of(sections, wires)
    weighted = [name for name, layer in network.named_children() if isinstance(layer, (Conv, FullyConnected))]
    rates = {name: rates_of(params[name]) for name in weighted if name in params and params[name].values}
    costs = [wire for wire in wires if wire.layer in network.costs]
    normalised = [name for name, section in sections.items() if section.text("type") in ("cmrnorm", "rnorm")]
    bare = [name for name in normalised if name not in params]
    functions = [name for name, section in sections.items() if section.has("initWFunc") or section.has("initBFunc")]
    notes = replica_notes(file.name, wires, devices) + size_notes(file.name, sections) + unused_notes(params)
    if bare:
        notes.append(
            f"{file.name}: no layer-parameter file has {', '.join(bare)}; scale 0.0001 and pow 0.75 are taken."
        )
    if functions:
        listed = ", ".join(functions)
        notes.append(f"{file.name}: initWFunc and initBFunc of {listed} are not run, initW and initB count.")
    pins = []  # per layer with known devices
    for wire in (wire for wire in wires if wire.layer in devices):
        name, section = wire.layer, sections[wire.layer]
        kind, neuron = section.text("type"), section.text("neuron", "ident")
        # A layer that computes nothing: a plan has no layer of its name.
        if neuron == "ident" and (kind == "neuron" or (kind in ("pass", "concat") and len(wire.inputs) == 1)):
            continue
        period = rates[name].update_period if name in rates else None
        origin = f"{file.name} [{name}]" + ("" if section.has("gpu") else ", inherited")
        pins.append(
            Pin(glob.escape(name), len(devices[name]), 1, devices=devices[name], update_period=period, origin=origin)
        )
    return LayerFile(
        path=str(path),
        network=network,
        pins=tuple(pins),
        gpus=1 + max(max(own) for own in devices.values()) if devices else None,
        rates=MappingProxyType(rates),
        notes=tuple(notes),
        data=MappingProxyType(data),
        classes=gives[costs[0].inputs[1]].count if costs else 0,
    )


def _network(
    sections: Mapping[str, IniSection],
    params: Mapping[str, IniSection],
    wires: Sequence[Wire],
    data: Mapping[str, Data],
) -> tuple[ConvNet, dict[str, Extent]]:
    """The modules, in the file's order."""
    gives = {name: each.gives or Extent(1) for name, each in data.items()}
    layers: dict[str, nn.Module] = {}
    for wire in wires:
        section = sections[wire.layer]
        own = params.get(wire.layer, IniSection(section.file, wire.layer, {}))
        takers = [sections[other.layer].text("type") for other in wires if wire.layer in other.inputs]
        spec = LayerSpec(section, own, tuple(gives[name] for name in wire.inputs), set(takers) == {COST})
        layers[wire.layer], gives[wire.layer] = make(spec)
    labels = frozenset(name for name, each in data.items() if each.gives is None)
    return ConvNet({name: each.place for name, each in data.items()}, labels, wires, layers), gives
