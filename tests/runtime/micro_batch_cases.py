"""Steps in micro-batches on ranks: losses inside, and outside of the model by `train_step`, beside the plain model."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from parplan.errors import PlanError, RuntimeFailure
from parplan.plan import Scheme
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import Planner, Rule, planner, spread
from tests.runtime.loss_cases import LANGUAGE, Language, cut_losses, language_batch, trained_beside

__all__ = ["Rows", "by_train_step", "on_ranks"]


class Rows(nn.Module):
    """Three layers on [samples, 8], of which the last may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


def by_train_step(rule: Rule, devices: int, micro_batches: int, samples: int, plans: Planner = planner) -> None:
    """Three steps with AdamW: the mean loss of every process's samples, and the weights."""
    net = Rows()
    plain = copy.deepcopy(net)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    places = None if dist.is_initialized() else ["cpu"] * devices
    model = Compiled(net, plans(rule, devices, Scheme.GATHER, micro_batches), devices=places)
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.01) for own in (model, plain)]
    for _ in range(3):
        x, y = torch.randn(samples, 8).double(), torch.randn(samples, 8).double()
        own = [tensor.tensor_split(ranks)[rank] for tensor in (x, y)]
        found = model.train_step(own[0], own[1], functional.mse_loss, optimizers[0])
        optimizers[1].zero_grad()
        wanted = functional.mse_loss(plain(x), y)
        with torch.no_grad():
            expected = functional.mse_loss(plain(own[0]), own[1])
        wanted.backward()
        optimizers[1].step()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        state = model.state_dict()
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9)


class Scaled(nn.Module):
    """A loss of rows times one number."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = Rows(), nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.net(x) * self.scale, y)


def own_losses(rank: int, ranks: int) -> None:
    """Every process's own number, as DistributedDataParallel has it: as in one micro-batch."""
    net, samples = Scaled(), 4 + rank
    own = torch.randn(samples, 8).double() + rank, torch.randn(samples, 8).double()
    found = []
    for count in (1, 3):
        rule = planner(spread(ranks, "data"), ranks, micro_batches=count)
        model = Compiled(copy.deepcopy(net), rule, scalars="per_replica", check="off")
        loss = model(*own)
        (loss / 2).backward()
        found.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
    # What processes count differs, and their gradients are summed before it is known.
    rule = planner(cut_losses(ranks, 1), ranks, micro_batches=2)
    model = Compiled(Language(), rule, scalars="per_replica", check="off")
    try:
        model(*language_batch(4, (0,) if rank else ()))
    except PlanError as error:
        assert 'compile with scalars="whole"' in str(error)  # noqa: PT017
    else:
        raise AssertionError("a loss of each process over targets was summed with one factor")


def on_ranks(rank: int, ranks: int) -> None:
    """Data parallel and cut plans; and a loss that ranks multiply by different numbers is refused on all.

    What a loss weighs by is a matter of the loss, not of how many ranks there are: on four ranks one of them.
    """
    for name in ("padded labels", "weights", "sum") if ranks == 2 else ("padded labels",):
        for cut in ((ranks, 1), (1, ranks)):
            batches = [language_batch(samples) for samples in (4 * ranks, 4 * ranks, 3 * ranks)]
            trained_beside(Language(**LANGUAGE[name]), cut_losses(*cut), ranks, batches, micro_batches=3)
    for kind in ("data", "out-features"):
        by_train_step(spread(ranks, kind), ranks, 3, 5 * ranks)
    model = Compiled(Language(), planner(cut_losses(ranks, 1), ranks, micro_batches=2))
    loss = model(*(tensor.tensor_split(ranks)[rank] for tensor in language_batch(4 * ranks)))
    try:
        (loss * (1 + rank)).backward()
    except RuntimeFailure as error:
        assert "multiply the loss by different numbers (1, 2" in str(error)  # noqa: PT017
    else:
        raise AssertionError("gradients of losses that ranks multiply by different numbers were given")
    own_losses(rank, ranks)  # last: processes draw different numbers from here on
