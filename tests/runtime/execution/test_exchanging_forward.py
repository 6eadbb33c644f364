"""Processes that compute all of a model for their own samples and exchange values on the way: losses inside the model,
statistics of batch norm. Compared with the plain model with the samples of all processes, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from parplan.errors import RuntimeFailure
from parplan.lowering import holdings
from parplan.runtime.execution.executor import Executor
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.transport.distributed import DistributedTransport
from tests.runtime.helpers import planner, spread
from tests.runtime.ranks import run_case

Model = Callable[[Tensor, Tensor], Any]
Loss = Callable[[Model, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """(N, 6) and N classes to a loss, scores (N, 5) and features (N, 8); two batch norms, and a layer that only the
    loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.middle = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.second, self.last, self.of_loss = nn.BatchNorm1d(8), nn.Linear(8, 5), nn.Linear(5, 5)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.second(self.middle(self.norm(self.first(x)).tanh()))
        scores = self.last(h)
        return cross_entropy(self.of_loss(scores), y, label_smoothing=0.1), scores, h.sin()


class OnlyLoss(nn.Module):
    """(N, 6) and N classes to a loss that counts some targets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.last(self.norm(self.first(x)).relu()), y, ignore_index=1)


class Pair:
    """A compiled model and the plain one, with each rank's samples."""

    def __init__(self, ranks: int, net: Callable[[], nn.Module], sizes: Sequence[int] = (), nbytes: int = 1) -> None:
        self.plain, self.ranks = net(), ranks
        self.model = Compiled(copy.deepcopy(self.plain), planner(spread(ranks, "data"), ranks))
        self.draw(sizes or [4] * ranks)
        self.buckets = patch.multiple(holdings, FIRST_BUCKET_BYTES=nbytes, BUCKET_BYTES=nbytes)

    def draw(self, sizes: Sequence[int]) -> None:
        """Samples, so many for each rank."""
        self.x = [torch.randn(size, 6, dtype=torch.float64) for size in sizes]
        self.y = [torch.randint(5, (size,)) for size in sizes]

    def step(self, rank: int, losses: Sequence[Loss], what: str) -> None:
        """A backward of both, from what `.grad` holds, of the mean of all processes' losses; equal gradients."""
        whole = self.plain(torch.cat(self.x), torch.cat(self.y))
        parts = [whole] * self.ranks
        if not isinstance(whole, Tensor):  # each sees the whole number, and its own rows
            rows = zip(*(one.split([len(x) for x in self.x]) for one in whole[1:]), strict=True)
            parts = [(whole[0], *(one.clone() for one in own)) for own in rows]
        found = [
            loss(lambda *_, own=own: own, *self.x[:1], *self.y[:1]) for loss, own in zip(losses, parts, strict=True)
        ]
        torch.stack(found).mean().backward()
        with self.buckets:
            losses[rank](self.model, self.x[rank], self.y[rank]).backward()
        self.same(what)

    def same(self, what: str) -> None:
        """Equal gradients of all parameters, and equal buffers."""
        text = partial("{}: {}: {}".format, what)
        found = dict(self.model.module.named_parameters())
        for name, parameter in self.plain.named_parameters():
            torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=partial(text, name))
        buffers = dict(self.model.module.named_buffers())
        for name, buffer in self.plain.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, rtol=1e-9, atol=1e-12, msg=partial(text, name))


def inside(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """The model's own loss."""
    found = model(x, y)
    loss: Tensor = found if isinstance(found, Tensor) else found[0]
    return loss


def outside(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """A loss of the scores alone."""
    loss: Tensor = model(x, y)[1].square().sum()
    return loss


def of_features(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """A loss of the features alone, written in place."""
    loss: Tensor = model(x, y)[2].mul_(2).exp().sum()
    return loss


def both(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Terms of the loss and of the scores."""
    loss, scores, _ = model(x, y)
    total: Tensor = 3 * loss + scores.sin().sum()
    return total


def again(model: Model, x: Tensor, y: Tensor, reentrant: bool = False) -> Tensor:
    """The model's own loss, of a forward that the backward computes again."""
    found = checkpoint(model, x.clone().requires_grad_(), y, use_reentrant=reentrant)
    loss: Tensor = found if isinstance(found, Tensor) else found[0]
    return loss


SEVERAL: Mapping[str, Sequence[Loss]] = {
    "inside": [inside, inside],
    "outside": [outside, outside],
    "both": [both, both],
    "one each": [inside, outside],
    "one each, the other way": [of_features, inside],
    "both in one": [outside, both],
    "of features": [of_features, of_features],
}


def _runs_locally(model: Compiled) -> bool:
    """Whether the last program's forward runs in the caller's autograd, with exchanges."""
    assert model._latest is not None
    (found,) = model._latest.executors.values()
    return found.local_forward is not None and bool(found.program.transfers)


def _gradients(rank: int, ranks: int) -> None:
    for nbytes in (1, 1 << 20):
        torch.manual_seed(3)
        pair = Pair(ranks, Net, nbytes=nbytes)
        for what, losses in SEVERAL.items():
            for step in ("first", "added"):
                pair.draw([4] * ranks)
                pair.step(rank, [losses[0], *[losses[1]] * (ranks - 1)], f"{nbytes} bytes, {what}, {step}")
            pair.model.zero_grad()
            pair.plain.zero_grad()
        assert _runs_locally(pair.model)
        only = Pair(ranks, OnlyLoss, nbytes=nbytes)
        for step in ("first", "added"):
            only.step(rank, [inside] * ranks, f"{nbytes} bytes, only a loss, {step}")
        assert _runs_locally(only.model)
        loss = only.model(only.x[rank], only.y[rank])
        found = only.model._captures._transport.gather_tensors("comparing", loss.detach())
        assert all(torch.equal(found[0], other) for other in found), "one number for all"


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_gradients_are_those_of_the_whole_batch(ranks: int) -> None:
    run_case(_gradients, ranks)


def _checkpoints(rank: int, ranks: int) -> None:
    for net in (Net, OnlyLoss):
        torch.manual_seed(4)
        pair, kept = Pair(ranks, net), Pair(ranks, net)
        kept.plain.load_state_dict(pair.plain.state_dict())
        kept.model.module.load_state_dict(pair.plain.state_dict())
        kept.x, kept.y = pair.x, pair.y
        for step in range(4):
            again(pair.model, pair.x[rank], pair.y[rank], reentrant=step > 1).backward()
            inside(kept.model, pair.x[rank], pair.y[rank]).backward()
            for (name, one), other in zip(pair.model.module.named_parameters(), kept.model.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, msg=partial(f"{step}: {name}: {{}}".format))


@pytest.mark.full
def test_a_forward_that_the_backward_computes_again() -> None:
    run_case(_checkpoints, 2)


def _uneven(rank: int, ranks: int) -> None:
    torch.manual_seed(5)
    pair = Pair(ranks, Net)
    for sizes in ((4, 4), (3, 5), (1, 4), (6, 0), (0, 4), (4, 4)):
        for losses in ([inside, inside], [inside, both], [outside, inside], [inside, of_features]):
            pair.draw(sizes)
            pair.step(rank, losses, f"{sizes}")
            pair.model.zero_grad()
            pair.plain.zero_grad()


@pytest.mark.full
def test_uneven_samples() -> None:
    run_case(_uneven, 2)


def _hooks(rank: int, ranks: int) -> None:
    """Hooks of results are called where these have a gradient, as the plain model's are."""
    torch.manual_seed(9)
    pair, called = Pair(ranks, Net), list[str]()
    with nullcontext() if rank else patch.object(Executor, "local_forward", None):
        for used in range(3):
            results = pair.model(pair.x[rank], pair.y[rank])
            for number, result in enumerate(results):
                result.register_hook(lambda gradient, n=number: called.append(f"{n}: {gradient.isfinite().all()}"))
            results[used].sum().backward()
            assert called == [f"{used}: True"]
            called.clear()


@pytest.mark.full
def test_hooks_of_results() -> None:
    run_case(_hooks, 2)


def _unlike(rank: int, ranks: int) -> None:
    """Inputs that differ in more than their number of samples are refused on all processes, and the next call runs."""
    torch.manual_seed(10)
    pair = Pair(ranks, Net)
    pair.step(rank, [inside] * ranks, "before")
    words = r"differ between processes .* 'x' is float64 \[samples, 6\]"
    with pytest.raises(RuntimeFailure, match=words + ", with a gradient on rank 0, .* on rank 1"):
        pair.model(pair.x[rank].clone().requires_grad_(rank == 0), pair.y[rank])
    tokens = Compiled(Tokens(), planner(spread(ranks, "data"), ranks))
    with pytest.raises(RuntimeFailure, match=r"samples, 5\] on rank 0, int64 \[samples, 6\] on rank 1.*pad all to one"):
        tokens(*[torch.randint(10, (4, 5 + rank))] * 2)
    tokens(*[torch.randint(10, (4, 5))] * 2).backward()
    pair.step(rank, [inside] * ranks, "behind")
    each = Compiled(Tokens(), planner(spread(ranks, "data"), ranks), scalars="per_replica")
    each(*[torch.randint(10, (4, 5 + rank))] * 2).backward()  # gradients alone are exchanged


class Tokens(nn.Module):
    """(N, T) tokens and targets to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.last(self.embed(tokens)).flatten(0, 1), targets.flatten())


@pytest.mark.full
def test_inputs_that_are_not_alike() -> None:
    run_case(_unlike, 2)


def _without_gradients(rank: int, ranks: int) -> None:
    torch.manual_seed(6)
    pair = Pair(ranks, Net)
    x, y = torch.cat(pair.x), torch.cat(pair.y)
    for mode in (True, False):
        pair.model.train(mode)
        pair.plain.train(mode)
        with torch.no_grad():
            found, expected = pair.model(pair.x[rank], pair.y[rank]), pair.plain(x, y)
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1][4 * rank : 4 * rank + 4])
        assert not found[0].requires_grad
    pair.same("buffers")


def test_calls_without_gradients() -> None:
    run_case(_without_gradients, 2)


def _again(rank: int, ranks: int) -> None:
    torch.manual_seed(7)
    pair = Pair(ranks, Net)
    loss, scores, _ = pair.model(pair.x[rank], pair.y[rank])
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in pair.model.parameters() if p.grad is not None]
    loss.backward(retain_graph=True)
    for gradient, parameter in zip(once, pair.model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)
    scores.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    # An input's gradient is that of the sum of all processes' losses, of which each depends on it.
    x = pair.x[rank].clone().requires_grad_()
    (found,) = torch.autograd.grad(pair.model(x, pair.y[rank])[0], x)
    whole = torch.cat(pair.x).requires_grad_()
    (expected,) = torch.autograd.grad(pair.plain(whole, torch.cat(pair.y))[0] * ranks, whole)
    torch.testing.assert_close(found, expected[4 * rank : 4 * rank + 4])
    # Second derivatives are refused, also by an input through batch norm alone.
    through = pair.model(x, pair.y[rank])[1]
    (slope,) = torch.autograd.grad(through.sum(), x, create_graph=True)
    with pytest.raises(RuntimeFailure, match=r"second derivatives .* are refused"):
        (slope.norm(2, 1) - 1).square().mean().backward()
    gradients = torch.autograd.grad(pair.model(x, pair.y[rank])[0], list(pair.model.parameters()), create_graph=True)
    with pytest.raises(RuntimeFailure, match=r"second derivatives .* are refused .* `module`"):
        sum(gradient.square().sum() for gradient in gradients).backward()  # type: ignore[union-attr]


def test_a_backward_again_and_of_an_input() -> None:
    run_case(_again, 2)


def _ways(rank: int, ranks: int) -> None:
    """The program's own backward gives the same, also where the processes take different ways."""
    torch.manual_seed(8)
    pair = Pair(ranks, Net)
    with patch.object(Executor, "local_forward", None) if rank else nullcontext():
        for what, losses in SEVERAL.items():
            pair.step(rank, losses, what)
            pair.model.zero_grad()
            pair.plain.zero_grad()


@pytest.mark.full
def test_processes_that_take_different_ways() -> None:
    run_case(_ways, 2)


def _messages(rank: int, ranks: int) -> None:
    """One exchange forward and one backward for a loss inside; none over another process."""
    pair, started = Pair(ranks, OnlyLoss), list[str]()
    pair.plain.norm = pair.model.module.norm = nn.Identity()
    inside(pair.model, pair.x[rank], pair.y[rank]).backward()
    start = DistributedTransport.start

    def noted(transport: DistributedTransport, exchange: Any, tensors: Any) -> Any:
        started.append(exchange.name)
        return start(transport, exchange, tensors)

    with patch.object(DistributedTransport, "start", noted):
        inside(pair.model, pair.x[rank], pair.y[rank]).backward()
    assert len(started) == 2, started
    assert started[1] == f"gradient of {started[0]}"


def test_a_loss_inside_is_one_exchange_each_way() -> None:
    run_case(_messages, 2)
