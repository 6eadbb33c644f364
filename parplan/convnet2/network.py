"""The network of a layer file: every layer a submodule under the file's own name, wired as `inputs` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parplan.convnet2.modules import LogisticCost, Softmax

__all__ = ["ConvNet", "Wire"]


@dataclass(frozen=True)
class Wire:
    """A layer and the layers (or data layers) it takes, in order."""

    layer: str
    inputs: tuple[str, ...]


class ConvNet(nn.Module):
    """A network as cuda-convnet2 describes it.

    Called with all its data it gives the cost of every sample, (N), as training wants it: take the mean and go
    backward. Without the labels it gives the probabilities, (N, classes). With several costs, or none, a tuple in the
    file's order where there is more than one result.

    Args:
        data: data layers, in order of dataIdx; labels come last among the arguments or are left out.
        labels: those of them that only costs take.
        wires: all other layers, in the file's order.
        layers: their modules.
    """

    def __init__(
        self,
        data: Mapping[str, int],
        labels: frozenset[str],
        wires: Sequence[Wire],
        layers: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        self.data, self.labels, self.wires = dict(data), labels, tuple(wires)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.costs = tuple(name for name, layer in layers.items() if isinstance(layer, LogisticCost))
        taken = {name for wire in wires for name in wire.inputs}
        for_costs = {name for wire in wires if wire.layer in self.costs for name in wire.inputs}
        # Inputs of costs beside labels; without costs, layers that no layer takes.
        self.predictions = tuple(
            wire.layer for wire in wires if (wire.layer in for_costs if self.costs else wire.layer not in taken)
        )

    def forward(self, *data: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Costs with labels, predictions without."""
        values = {name: data[place] for name, place in self.data.items() if place < len(data)}
        missing = [name for name in self.data if name not in values and name not in self.labels]
        if missing or len(data) > 1 + max(self.data.values(), default=-1):
            labels = ", ".join(self.labels) or "none"
            raise TypeError(
                f"{len(data)} tensors for the data layers {', '.join(self.data)}; give one for each, in order of "
                f"dataIdx; labels ({labels}) may be left out"
            )
        train = self.labels <= values.keys()
        for wire in self.wires:
            if wire.layer not in self.costs or train:
                values[wire.layer] = self.get_submodule(wire.layer)(*(values[name] for name in wire.inputs))
        if train and self.costs:
            found = tuple(values[name] for name in self.costs)
        else:
            layers = {name: self.get_submodule(name) for name in self.predictions}
            logarithms = {name for name, layer in layers.items() if isinstance(layer, Softmax) and layer.logarithms}
            found = tuple(torch.exp(values[n]) if n in logarithms else values[n] for n in self.predictions)
        return found[0] if len(found) == 1 else found
