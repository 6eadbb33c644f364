"""Processes that compute all of a model for their own samples: their forward is the caller's autograd's, and gradient
sums begin in its backward. Compared with the plain model with the mean of all processes' losses, in float64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parplan.errors import RuntimeFailure
from parplan.lowering import holdings
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.transport.distributed import DistributedTransport
from tests.runtime.helpers import planner, spread
from tests.runtime.ranks import run_case

Loss = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """(N, 6) to (N, 6): three layers, of which one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.first(x).tanh()).sin()
        result: Tensor = self.last(self.middle(h).sigmoid())
        return result


class Pair:
    """A compiled model and the plain one, with each rank's samples."""

    def __init__(self, ranks: int, nbytes: int, net: Callable[[], nn.Module] = Net, **options: Any) -> None:
        self.plain, self.ranks = net(), ranks
        self.model = Compiled(copy.deepcopy(self.plain), planner(spread(ranks, "data"), ranks), **options)
        self.x = torch.randn(ranks, 3, 6, dtype=torch.float64)
        with patch.object(holdings, "FIRST_BUCKET_BYTES", nbytes), patch.object(holdings, "BUCKET_BYTES", nbytes):
            results = self.model(self.x[0])
            (results if isinstance(results, Tensor) else results[0]).sum().backward()
        self.model.zero_grad()
        program = self.model.program
        assert program is not None
        self.buckets = program.buckets

    def compare(self, rank: int, loss: Loss, what: str) -> None:
        """A backward of both, from what `.grad` holds."""
        torch.stack([loss(self.plain, self.x[other]) for other in range(self.ranks)]).mean().backward()
        loss(self.model, self.x[rank]).backward()
        self.same(what)

    def same(self, what: str) -> None:
        """Equal gradients of all parameters."""
        found = dict(self.model.module.named_parameters())
        for name, parameter in self.plain.named_parameters():
            text = partial("{}: {}: {}".format, what, name)
            torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=text)


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """A loss with the gradient of the input's, as of a Wasserstein critic."""
    x = x.clone().requires_grad_()
    result = model(x)
    (slope,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    loss: Tensor = result.mean() + (slope.norm(2, 1) - 1).square().mean()
    return loss


LOSSES: Mapping[str, Loss] = {
    "a mean": lambda model, x: model(x).square().mean(),
    "two calls": lambda model, x: (model(x) * model(x.flip(0)).exp()).sum(),
    "a call of the result of another": lambda model, x: model(model(x)).square().sum(),
    "a checkpoint": lambda model, x: checkpoint(model, x.clone().requires_grad_(), use_reentrant=False).sum(),
    "a checkpoint with reentry": lambda m, x: checkpoint(m, x.clone().requires_grad_(), use_reentrant=True).sum(),
    "a term beside": lambda model, x: model(x).sum() + next(model.parameters()).square().sum(),
    "a part of the samples": lambda model, x: model(x)[1:].square().mean(),
    "a gradient penalty": penalty,
}


def _gradients(rank: int, ranks: int) -> None:
    for nbytes, count in ((1, 6), (400, 3), (1 << 20, 1)):
        torch.manual_seed(3)
        pair = Pair(ranks, nbytes)
        assert len(pair.buckets) == count, pair.buckets
        for what, loss in LOSSES.items():
            for step in ("first", "added"):
                pair.compare(rank, loss, f"{count} buckets, {what}, {step}")
            pair.model.zero_grad()
            pair.plain.zero_grad()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_gradients_are_the_means_of_all_processes(ranks: int) -> None:
    run_case(_gradients, ranks)


class Several(Net):
    """(N, 6) to two results, (N, 6) and (N, 6), with a layer each of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 6).double()

    def forward(self, x: Tensor) -> Any:
        h = self.middle(self.first(x).tanh()).sin()
        return self.last(h), self.other(h), x.exp()


def _note(called: list[str], name: str, gradient: Tensor) -> None:
    assert gradient.isfinite().all()
    called.append(name)


def _several(rank: int, ranks: int) -> None:
    """Losses that leave out results: those of all processes, or of some."""

    def both(model: nn.Module, x: Tensor) -> Tensor:
        first, second, _ = model(x)
        loss: Tensor = first.square().sum() + second.exp().sum()
        return loss

    losses: Mapping[str, Sequence[Loss]] = {
        "both": [both, both],
        "the first": [lambda model, x: model(x)[0].square().sum()] * 2,
        "the second": [lambda model, x: model(x)[1].square().sum()] * 2,
        "one each": [lambda model, x: model(x)[0].square().sum(), lambda model, x: model(x)[1].sin().sum()],
        "one in one, both in the other": [lambda model, x: model(x)[1].square().sum(), both],
        "written in place": [lambda model, x: model(x)[1].mul_(2).sum(), lambda model, x: model(x)[0].exp_().sum()],
        "a checkpoint": [lambda m, x: checkpoint(m, x.clone().requires_grad_(), use_reentrant=False)[1].sum(), both],
        "none with parameters in one": [lambda model, x: model(x)[2].sum(), both],
    }
    for nbytes in (1, 400, 1 << 20):
        torch.manual_seed(3)
        pair = Pair(ranks, nbytes, Several)
        assert type(pair.model(pair.x[rank])[0].grad_fn).__name__ == "_ResultBackward"
        called = list[str]()
        for name, parameter in pair.model.module.named_parameters():
            parameter.register_hook(partial(_note, called, name))
        for what, own in losses.items():
            for step in ("first", "added"):
                xs = pair.x.clone().requires_grad_()
                called.clear()
                torch.stack([loss(pair.plain, x) for loss, x in zip(own, xs, strict=True)]).mean().backward()
                own[rank](pair.model, pair.x[rank].clone().requires_grad_()).backward()
                pair.same(f"{nbytes} bytes, {what}, {step}")
            assert sorted(called) == sorted(n for n, p in pair.plain.named_parameters() if p.grad is not None), what
            pair.model.zero_grad()
            pair.plain.zero_grad()


@pytest.mark.full
def test_losses_that_leave_out_results() -> None:
    run_case(_several, 2)


class Passing(nn.Module):
    """(N, 6) to (N, 6): two weights with the very gradient of their sum, if there is one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.left, self.right = (nn.Parameter(torch.randn(1, 6).double()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last((self.first(x) + self.left + self.right).sin())
        return result


def _alone(rank: int, ranks: int) -> None:
    with patch.object(holdings, "ALONE_BYTES", 1):
        pair = Pair(ranks, 1, Passing)
        pair.x = pair.x[:, :1]
        for step in ("first", "added"):
            pair.compare(rank, LOSSES["a mean"], step)
        assert pair.model.program is not None
        assert len(pair.model.program.buckets) == 6


def test_gradients_that_are_summed_in_their_own_memory() -> None:
    run_case(_alone, 2)


def _without_samples(rank: int, ranks: int) -> None:
    """A process without samples runs the program's own backward: sums begin in the same order there."""
    with patch.object(holdings, "ALONE_BYTES", 300):
        pair = Pair(ranks, 1 << 20)
        samples = [pair.x[0], pair.x[0][:0]]
        for step in ("first", "added"):
            (pair.plain(pair.x[0]).sum() / ranks).backward()
            pair.model(samples[rank]).sum().backward()
            pair.same(step)
        assert len(pair.buckets) == 4  # weights alone, and a bucket of all biases
        torch.manual_seed(3)
        pair = Pair(ranks, 1 << 20, Several)
        for place in (0, 1):
            (pair.plain(samples[0])[place].sum() / ranks).backward()
            pair.model(samples[rank])[place].sum().backward()
            pair.same(f"result {place}")


def test_a_process_without_samples() -> None:
    run_case(_without_samples, 2)


def _sizes(rank: int, ranks: int) -> None:
    """Calls of one backward that have other numbers of samples in some processes alone."""
    torch.manual_seed(12)
    for nbytes in (1, 1 << 20):
        pair = Pair(ranks, nbytes)
        for first, second in (([4, 4], [3, 4]), ([2, 4], [4, 4]), ([1, 3], [3, 1])):
            batches = [[torch.randn(n, 6, dtype=torch.float64) for n in sizes] for sizes in (first, second)]
            terms = [sum(pair.plain(own[r]).square().mean() for own in batches) for r in range(ranks)]
            torch.stack(terms).mean().backward()
            with patch.multiple(holdings, FIRST_BUCKET_BYTES=nbytes, BUCKET_BYTES=nbytes):
                torch.stack([pair.model(own[rank]).square().mean() for own in batches]).sum().backward()
            pair.same(f"{first} and {second}")


@pytest.mark.full
def test_calls_with_other_numbers_of_samples_in_one_backward() -> None:
    run_case(_sizes, 2)


def _again(rank: int, ranks: int) -> None:
    pair = Pair(ranks, 1)
    kept, x = pair.model(pair.x[rank]).square().mean(), pair.x[rank].clone().requires_grad_()
    kept.backward(retain_graph=True)
    once = [p.grad.clone() for p in pair.model.parameters() if p.grad is not None]
    kept.backward()
    for gradient, parameter in zip(once, pair.model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        kept.backward()
    # Some parameters alone, and the input, whose gradient is of the process's own loss.
    wanted = [pair.model.module.get_parameter("middle.bias"), x]
    found = torch.autograd.grad(pair.model(x).square().mean(), wanted)
    torch.testing.assert_close(found[0], once[3])
    own = pair.x[rank].clone().requires_grad_()
    (expected,) = torch.autograd.grad(pair.plain(own).square().mean(), own)
    torch.testing.assert_close(found[1], expected)
    # Frozen ones have no gradient, and no sum.
    for one in (pair.plain, pair.model.module):
        one.zero_grad()
        one.get_submodule("first").requires_grad_(False)
    pair.compare(rank, LOSSES["a mean"], "frozen")
    assert pair.model.module.get_parameter("first.weight").grad is None


def test_a_backward_again_and_of_some_parameters() -> None:
    run_case(_again, 2)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def _refused(rank: int, ranks: int) -> None:
    for nbytes in (1, 1 << 20):
        model = Pair(ranks, nbytes).model
        x = torch.randn(3, 6).double()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
        with pytest.raises(RuntimeFailure, match=r"second derivatives .* are refused .* `module`"):
            sum(gradient.square().sum() for gradient in gradients).backward()  # type: ignore[union-attr]
        several = torch.ones(2, 3, 6).double()
        with pytest.raises(RuntimeFailure, match=r"several gradients at once"):
            torch.autograd.grad(model(x), parameters, several, is_grads_batched=True)


def test_refused_derivatives() -> None:
    run_case(_refused, 2)


class _Log(TorchDispatchMode):
    """Notes products of matrices."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self._events.append("mm")
        return func(*args, **(kwargs or {}))


def _order(rank: int, ranks: int) -> None:
    pair, events = Pair(ranks, 400), list[str]()
    begin = DistributedTransport.reduce

    def noted(transport: DistributedTransport, name: str, *args: Any) -> Any:
        events.append(name.removeprefix("the gradient sum of "))
        return begin(transport, name, *args)

    for _ in range(2):  # the graph of the step before is alive, as a loop's `loss` keeps it
        loss = pair.model(pair.x[rank]).sum()
        with patch.object(DistributedTransport, "reduce", noted), _Log(events):
            loss.backward()
    half = len(events) // 2
    assert events[:half] == events[half:]
    places = [events.index(f"{layer}.bias, {layer}.weight") for layer in ("last", "middle", "first")]
    assert places == sorted(places)
    assert all("mm" in events[begin:end] for begin, end in itertools.pairwise(places)), events


def test_sums_begin_beside_the_backward_of_layers_in_front() -> None:
    run_case(_order, 2)


class Dropped(nn.Module):
    """(N, 6) to (N, 6) with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 6)).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def _draws(rank: int, ranks: int) -> None:
    pair = Pair(ranks, 1 << 20, Dropped, check="off")
    x = torch.ones(4, 6).double()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = pair.model(x)
    after = torch.randn(1)
    torch.set_rng_state(state)
    assert torch.equal(pair.model(x), first), "the same seed draws the same"
    assert torch.equal(torch.randn(1), after)
    transport = pair.model._captures._transport
    found = transport.gather_tensors("comparing", first.detach())
    assert not torch.equal(found[0], found[1]), "processes draw apart"
    torch.set_rng_state(state)
    loss = checkpoint(pair.model, x.requires_grad_(), use_reentrant=False).square().sum()
    torch.testing.assert_close(loss, first.square().sum())
    first.square().sum().backward()
    expected = [p.grad.clone() for p in pair.model.parameters() if p.grad is not None]
    pair.model.zero_grad()
    loss.backward()
    for gradient, parameter in zip(expected, pair.model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_processes_draw_apart() -> None:
    run_case(_draws, 2)


def _changed(rank: int, ranks: int) -> None:
    """A call that repeats the one before is run at once: of anything that changes in between, it has to know."""
    pair = Pair(ranks, 1)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (pair.plain, pair.model)]
    for step in range(6):
        if step == 2:
            for one in (pair.plain, pair.model.module):
                one.get_submodule("last").weight.requires_grad_(False)
        if step == 4:
            values = torch.randn(8, 8).double()
            for one, optimizer in zip((pair.plain, pair.model.module), optimizers, strict=True):
                middle: Any = one.get_submodule("middle")
                middle.weight = nn.Parameter(values.clone())
                optimizer.add_param_group({"params": [middle.weight]})
        pair.x = torch.randn(ranks, 3 + step % 2, 6, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        pair.compare(rank, LOSSES["a mean"], f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(pair.model(pair.x[rank]), pair.plain(pair.x[rank]))


def test_a_training_that_changes_on_the_way() -> None:
    run_case(_changed, 2)


def _given_data(rank: int, ranks: int) -> None:
    for nbytes in (1, 1 << 20):
        pair = Pair(ranks, nbytes)
        for step in range(3):
            # The last step's loss is alive, as a loop keeps it, and with it what that step knew of the parameters.
            kept = pair.model(pair.x[rank]).square().mean()
            values = torch.randn(sum(p.numel() for p in pair.plain.parameters())).double()
            for one in (pair.plain, pair.model.module):
                one.zero_grad()
                if step:
                    vector_to_parameters(values, one.parameters())
                else:
                    one.get_parameter("middle.weight").data = values[:64].view(8, 8).clone()
            torch.testing.assert_close(pair.model(pair.x[rank]), pair.plain(pair.x[rank]))
            pair.compare(rank, LOSSES["a mean"], f"step {step}")
            assert kept.isfinite()


def test_parameters_that_get_other_memory() -> None:
    run_case(_given_data, 2)
