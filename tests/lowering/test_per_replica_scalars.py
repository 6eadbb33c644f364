"""Losses per replica against `nn.DataParallel` by hand: the plain module on every chunk, the numbers stacked."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.errors import PlanError
from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import compiled, planner, spread
from tests.runtime.nets import mlp

Loss = Callable[[Tensor, Tensor], Tensor]


class WithLoss(nn.Module):
    """A network that returns its loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net = mlp()
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """One number."""
        return self.loss(self.net(x), y)


class Several(WithLoss):
    """A network with two losses, their weighted sum, its scores and a penalty that no sample reaches."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """The sum reads the other losses."""
        scores = self.net(x)
        first, second = functional.mse_loss(scores, y), functional.l1_loss(scores, y)
        penalty = self.net.get_parameter("0.weight").square().sum()
        return {"first": first, "scores": scores, "sum": first + 0.5 * second + 0.1 * penalty, "penalty": penalty}


def squares(scores: Tensor, y: Tensor) -> Tensor:
    return (scores - y).square().mean(1).sum()


LOSSES: dict[str, Loss] = {"mse": functional.mse_loss, "functional": squares, "smooth": nn.SmoothL1Loss()}


def by_hand(plain: nn.Module, chunks: int, x: Tensor, y: Tensor) -> Tensor:
    pairs = zip(x.tensor_split(chunks), y.tensor_split(chunks), strict=True)
    return torch.stack([plain(*pair) for pair in pairs if len(pair[0])])


def data(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 6, dtype=torch.float64), torch.randn(samples, 4, dtype=torch.float64)


def same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pull", [torch.mean, torch.sum, lambda t: (t * torch.arange(1, len(t) + 1)).sum()])
@pytest.mark.parametrize("samples", [12, 7, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_one_number_per_replica(loss: str, samples: int, pull: Callable[[Tensor], Tensor]) -> None:
    plain = WithLoss(LOSSES[loss])
    model = compiled(plain, spread(3, "data"), 3, scalars="per_replica")
    x, y = data(samples)
    found, wanted = model(x, y), by_hand(plain, 3, x, y)
    assert found.shape == (min(3, samples),)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    pull(found).backward()
    pull(wanted).backward()
    same_gradients(model, plain)


def test_losses_run_with_their_replicas_without_gathering_samples() -> None:
    model = compiled(WithLoss(functional.mse_loss), spread(2, "data"), 2, scalars="per_replica")
    model(*data(4))
    assert model.program is not None
    lines = model.program.text().splitlines()
    assert [line for line in lines if "batch_mean_default" in line] == [
        "  net.0 + net.1 + net.2 + net.3 + net.4 + loss + mean + batch_mean on 2x1 (0,1): x@1, y@1 -> "
        "batch_mean_default",
        "  move batch_mean_default 2x1 (0,1) rows:0 -> batch_mean_default@1 1x1 (0)",
        "  move batch_mean_default@1 back to batch_mean_default",
    ]


def test_several_numbers_and_a_result_with_samples() -> None:
    plain = Several(functional.mse_loss)
    model = compiled(plain, spread(2, "data"), 2, scalars="per_replica")
    x, y = data(6)
    found = model(x, y)
    parts = [plain(*pair) for pair in zip(x.chunk(2), y.chunk(2), strict=True)]
    for name in ("first", "sum", "penalty"):
        torch.testing.assert_close(found[name], torch.stack([p[name] for p in parts]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found["scores"], torch.cat([p["scores"] for p in parts]), rtol=1e-9, atol=1e-9)
    (found["sum"] * torch.tensor([1.0, 3.0])).sum().backward()
    (parts[0]["sum"] + 3 * parts[1]["sum"]).backward()
    same_gradients(model, plain)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["out-features", "in-features"])
def test_shards_are_gathered_for_the_loss_of_their_replica(kind: str) -> None:
    """Two replicas of two shards each feed the loss: two numbers, each on the first device of its replica."""
    plain = WithLoss(functional.mse_loss)
    cut = Strategy(2, 2, kind, (0, 1, 2, 3))
    table = {f"net.{i}": cut if i % 2 == 0 else Strategy(2, 1, None, (0, 2)) for i in range(5)}
    model = compiled(plain, table, 4, scalars="per_replica")
    x, y = data(6)
    found, wanted = model(x, y), by_hand(plain, 2, x, y)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    found.mean().backward()
    wanted.mean().backward()
    same_gradients(model, plain)


@pytest.mark.full
def test_evaluation_and_tokens() -> None:
    """Samples merged with positions, as language models do before their loss."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 8)
            self.head = nn.Linear(8, 7)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            scores = self.head(self.embed(tokens))
            return functional.cross_entropy(scores.view(-1, 7), targets.view(-1))

    plain = Tokens().double()
    model = compiled(plain, spread(2, "data"), 2, scalars="per_replica")
    tokens, targets = torch.randint(7, (4, 5)), torch.randint(7, (4, 5))
    for mode in (True, False):
        wanted = by_hand(plain.train(mode), 2, tokens, targets)
        torch.testing.assert_close(model.train(mode)(tokens, targets), wanted, rtol=1e-9, atol=1e-9)


class Scaled(nn.Module):
    """A number that the scores depend on as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores over their largest, and the largest."""
        largest = x.abs().amax()
        return x / largest, largest


class Counted(nn.Module):
    """A loss that divides by the number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        """A mean, spelled out."""
        return x.square().sum() / x.shape[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("net", "why"), [(Scaled, "other layers read this number too"), (Counted, "use mean\\(\\)")])
def test_what_has_no_number_per_replica_is_refused(net: Callable[[], nn.Module], why: str) -> None:
    model = compiled(nn.Sequential(mlp(), net()), spread(2, "data"), 2, scalars="per_replica")
    with pytest.raises(PlanError, match=why):
        model(data(4)[0])


def test_the_option_is_checked_and_whole_by_default() -> None:
    with pytest.raises(PlanError, match='"whole" or "per_replica"'):
        Compiled(mlp(), planner({}, 1), devices=["cpu"], scalars="vector")
    plain = WithLoss(functional.mse_loss)
    x, y = data(6)
    found = compiled(copy.deepcopy(plain), spread(2, "data"), 2)(x, y)
    torch.testing.assert_close(found, plain(x, y), rtol=1e-9, atol=1e-9)
