"""Small models, and the loops that most patterns share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.training import Run

__all__ = ["BATCH", "Mlp", "conv_net", "loader", "sgd", "steps", "total", "train"]

BATCH = 8  # whole batches


class Mlp(nn.Module):
    """Two linear layers, 6 features to 4."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Four scores a sample."""
        scores: Tensor = self.head(torch.tanh(self.body(x)))
        return scores


def conv_net() -> nn.Sequential:
    """A convolution with batch norm and a linear layer: (N, 3, 6, 6) to (N, 4)."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(
    run: Run,
    model: Any,
    optimizer: torch.optim.Optimizer,
    loss_of_step: Callable[[], Tensor],
    count: int = 3,
    *,
    before_step: Callable[[], object] = lambda: None,
) -> None:
    """Train on losses that are computed anew in every step; record each loss, and the state at the end."""
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of_step()
        loss.backward()
        before_step()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


def steps(
    run: Run,
    model: Any,
    optimizer: torch.optim.Optimizer,
    count: int = 3,
    *,
    shape: tuple[int, ...] = (6,),
    loss_of: Callable[[Any, Tensor], Tensor] = F.cross_entropy,
    before_step: Callable[[], object] = lambda: None,
) -> None:
    """Train on a new batch of `shape` in every step."""

    def loss() -> Tensor:
        inputs, classes = run.randn(BATCH, *shape), run.randint(4, BATCH)
        return loss_of(model(inputs), classes)

    train(run, model, optimizer, loss, count, before_step=before_step)


def loader(run: Run, *tensors: Tensor, shuffle: bool = True) -> DataLoader[Any]:
    """A loader over a whole set of samples, of which every process draws its own, as under DistributedDataParallel."""
    dataset = TensorDataset(*tensors)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, run.ranks, run.rank, shuffle=shuffle)
    return DataLoader(dataset, BATCH // run.ranks, sampler=sampler)


def total(run: Run, *values: float) -> Tensor:
    """Sums over processes of what each counted in its own samples."""
    found = torch.tensor(values)
    if run.ranks > 1:
        torch.distributed.all_reduce(found)
    return found
