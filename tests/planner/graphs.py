"""Small captured models the planner's tests share."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph


class Loss(nn.Module):
    """A small classifier with its loss inside, a residual add and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.mix = nn.Conv2d(12, 12, 3, padding=1)
        self.fc = nn.Linear(12 * 36, 24)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x))
        x = torch.relu(self.mix(x) + x)
        loss: torch.Tensor = self.loss(self.fc(x.flatten(1)), target)
        return loss


class Counted(nn.Module):
    """A batch norm called twice, and how often it has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls = self.norm.num_batches_tracked
        assert calls is not None
        return self.norm(self.norm(x)), calls * 1


@cache
def counted() -> LayerGraph:
    """`Counted` captured at a batch of 12."""
    return capture(Counted(), (torch.randn(12, 12),))


@cache
def classifier() -> LayerGraph:
    """`Loss` captured at a batch of 12."""
    return capture(Loss(), (torch.randn(12, 3, 6, 6), torch.zeros(12, dtype=torch.long)))


@cache
def perceptron(width: int = 24) -> LayerGraph:
    """Three linear layers captured at a batch of 12."""
    net = nn.Sequential(
        nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, 12)
    )
    return capture(net, (torch.randn(12, width),))
