"""cuda-convnet2's layers as PyTorch modules; each is one module without children, so a plan has it as one layer.

Images are (N, channels, side, side). What a layer gives and the order of its numbers are cuda-convnet2's: a vector
taken from maps runs over maps, rows, columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.convnet2.extents import Window
from parplan.convnet2.neurons import Neuron

__all__ = ["Activation", "Conv", "CrossMapNorm", "Dropout", "FullyConnected", "Join", "LogisticCost", "Pool",
           "SameMapNorm", "Softmax", "WeightedSum"]  # fmt: skip


class Conv(nn.Module):
    """Convolutions of several inputs, summed, a bias, and the neuron.

    Inputs whose filters go over them in the same way share one weight, one input's filters beside the other's; else
    input i has `weight_i`.

    Args:
        windows, images: per input, how filters go over it and the side of its maps.
        filters: how many maps it gives.
        shared_biases: one bias per map, else one per map and position.
    """

    def __init__(
        self, windows: Sequence[Window], images: Sequence[int], filters: int, shared_biases: bool, neuron: Neuron
    ) -> None:
        super().__init__()
        first, channels = windows[0], sum(way.channels for way in windows)
        alike = {replace(way, channels=0) for way in windows}
        self.ways = tuple((f"weight_{index}", way) for index, way in enumerate(windows))
        if len(windows) == 1 or (len(alike) == len(set(images)) == first.groups == 1):
            self.ways = (("weight", replace(first, channels=channels)),)
        self.neuron = neuron
        for name, way in self.ways:
            shape = (filters, way.channels // way.groups, way.size, way.size)
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        side = first.side(images[0])
        self.bias = nn.Parameter(torch.empty(filters) if shared_biases else torch.empty(filters, side, side))

    def forward(self, *inputs: Tensor) -> Tensor:
        parts = inputs if len(self.ways) == len(inputs) else (torch.cat(inputs, 1),)
        tied = self.bias.dim() == 1
        total = self._convolved(parts[0], 0, self.bias if tied else None)
        for index in range(1, len(parts)):
            total = total + self._convolved(parts[index], index, None)
        return self.neuron(total if tied else total + self.bias)

    def _convolved(self, image: Tensor, index: int, bias: Tensor | None) -> Tensor:
        name, way = self.ways[index]
        border, over = way.padding, way.overhang(int(image.shape[-1]))
        if over:
            image, border = F.pad(image, (border, border + over, border, border + over)), 0
        return F.conv2d(image, self.get_parameter(name), bias, way.stride, border, 1, way.groups)


class FullyConnected(nn.Module):
    """All numbers of all inputs by one matrix (outputs, numbers), a bias, and the neuron: (N, outputs)."""

    def __init__(self, numbers: int, outputs: int, neuron: Neuron) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, numbers))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.neuron = neuron

    def forward(self, *inputs: Tensor) -> Tensor:
        flat = [value.flatten(1) if value.dim() > 2 else value for value in inputs]
        return self.neuron(F.linear(flat[0] if len(flat) == 1 else torch.cat(flat, 1), self.weight, self.bias))


class Pool(nn.Module):
    """Greatest or mean number of every window, map by map; pixels outside the image do not count.

    Windows begin at pixel `start` (it may be negative), and there are `outputs` each way.
    """

    def __init__(self, kind: str, size: int, stride: int, start: int, outputs: int, neuron: Neuron) -> None:
        super().__init__()
        self.kind, self.neuron = kind, neuron
        self.size, self.stride, self.start, self.outputs = size, stride, start, outputs

    def forward(self, x: Tensor) -> Tensor:
        if self.start > 0:
            x = x[:, :, self.start :, self.start :]
        border = max(0, -self.start)
        if self.kind == "max":
            pooled = F.max_pool2d(x, self.size, self.stride, border, ceil_mode=True)
        else:
            pooled = F.avg_pool2d(x, self.size, self.stride, border, ceil_mode=True, count_include_pad=False)
        if pooled.shape[-1] > self.outputs:
            pooled = pooled[:, :, : self.outputs, : self.outputs]
        return self.neuron(pooled)


class CrossMapNorm(nn.Module):
    """Every number by (minDiv + scale / size * squares of the `size` maps around it) to the power `pow`."""

    def __init__(self, size: int, scale: float, power: float, least: float, neuron: Neuron) -> None:
        super().__init__()
        self.size, self.scale, self.power, self.least, self.neuron = size, scale, power, least, neuron

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(F.local_response_norm(x, self.size, self.scale, self.power, self.least))


class SameMapNorm(CrossMapNorm):
    """Every number by (minDiv + scale / size^2 * squares of the size x size around it) to the power `pow`."""

    def forward(self, x: Tensor) -> Tensor:
        before, behind = self.size // 2, (self.size - 1) // 2
        squares = F.pad(x * x, (before, behind, before, behind))
        near = F.avg_pool2d(squares, self.size, 1)  # by size^2, beyond the edges too
        return self.neuron(x / (self.least + self.scale * near) ** self.power)


class Activation(nn.Module):
    """A neuron alone."""

    def __init__(self, neuron: Neuron) -> None:
        super().__init__()
        self.neuron = neuron

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(x)


class Dropout(nn.Module):
    """Keeps a number with probability `keep`.

    `dropout` divides by `keep` what it keeps in training; `dropout2` leaves it, and multiplies by `keep` when it drops
    nothing. `p` is the probability to drop (0 when switched off).
    """

    def __init__(self, keep: float, enabled: bool, kind: str, neuron: Neuron) -> None:
        super().__init__()
        self.keep, self.kind, self.neuron = keep, kind, neuron
        self.p = 1.0 - keep if enabled else 0.0

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.p, self.training)
        return self.neuron(dropped if self.kind == "dropout" else dropped * self.keep)


class Join(nn.Module):
    """Inputs one behind the other: maps where all are maps of one side, else as vectors."""

    def __init__(self, flat: bool, neuron: Neuron) -> None:
        super().__init__()
        self.flat, self.neuron = flat, neuron

    def forward(self, *inputs: Tensor) -> Tensor:
        parts = [value.flatten(1) if self.flat and value.dim() > 2 else value for value in inputs]
        return self.neuron(parts[0] if len(parts) == 1 else torch.cat(parts, 1))


class WeightedSum(nn.Module):
    """Inputs of one shape, each times its coefficient, summed."""

    def __init__(self, coefficients: Sequence[float], neuron: Neuron) -> None:
        super().__init__()
        self.coefficients, self.neuron = tuple(coefficients), neuron

    def forward(self, *inputs: Tensor) -> Tensor:
        terms = [x if c == 1.0 else x * c for x, c in zip(inputs, self.coefficients, strict=True)]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return self.neuron(total)


class Softmax(nn.Module):
    """Probabilities (N, classes); their logarithms where only costs take them, which stays exact for small ones."""

    def __init__(self, logarithms: bool) -> None:
        super().__init__()
        self.logarithms = logarithms

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1) if x.dim() > 2 else x
        return F.log_softmax(flat, 1) if self.logarithms else F.softmax(flat, 1)


class LogisticCost(nn.Module):
    """Minus the logarithm of the label's probability, times `coeff`: labels (N) and logarithms (N, classes) to (N)."""

    def __init__(self, coeff: float) -> None:
        super().__init__()
        self.coeff = coeff

    def forward(self, labels: Tensor, logarithms: Tensor) -> Tensor:
        costs = F.nll_loss(logarithms, labels, reduction="none")
        return costs if self.coeff == 1.0 else costs * self.coeff
