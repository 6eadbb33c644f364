"""Steps in micro-batches against the plain model's on the whole batch, in float64: losses, weights, what is alive."""

from __future__ import annotations

import copy
import random
import warnings
import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.errors import PlanError, PlannedMemoryWarning, RuntimeFailure
from parplan.graph.capture.capture import capture
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import planner, random_strategies, spread
from tests.runtime.loss_cases import (
    ELEMENT_LOSSES,
    LANGUAGE,
    Elements,
    Language,
    cut_losses,
    language_batch,
    trained_beside,
)
from tests.runtime.micro_batch_cases import Rows, by_train_step, on_ranks
from tests.runtime.ranks import run_case

INSIDE = [name for name in LANGUAGE if name != "every row"]
NO_MEAN = {"sum": "adds a mean over samples and a sum"}
"""Losses that are no mean and no sum over samples."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [2, 3, 4])
@pytest.mark.parametrize("cut", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("options", INSIDE)
def test_losses_inside_weigh_what_counts(options: str, cut: tuple[int, int], micro_batches: int) -> None:
    """Of the first micro-batch all targets of a sample are ignored; the batch need not divide."""
    torch.manual_seed(0)
    batches = [language_batch(samples, (0, 1)) for samples in (8, 8, 7)]
    trained_beside(Language(**LANGUAGE[options]), cut_losses(*cut), prod(cut), batches, micro_batches)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("loss", ELEMENT_LOSSES)
def test_losses_of_elements(loss: str, replicas: int) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(n, 3, 8).double(), torch.randn(n, 3, 8).double()) for n in (6, 6, 5)]
    net = Elements(ELEMENT_LOSSES[loss])
    if loss in NO_MEAN:
        with pytest.raises(PlanError, match=NO_MEAN[loss]):
            trained_beside(net, cut_losses(replicas, 1), replicas, batches, 2)
    else:
        trained_beside(net, cut_losses(replicas, 1), replicas, batches, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("samples", [12, 7])
@pytest.mark.parametrize("micro_batches", [2, 3, 5, 12])
@pytest.mark.parametrize("kind", ["data", "out-features", "hybrid"])
def test_train_step_is_that_of_the_whole_batch(kind: str, micro_batches: int, samples: int) -> None:
    torch.manual_seed(1)
    by_train_step(spread(2, kind), 2, micro_batches, samples)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(12))
def test_any_plan_keeps_the_numbers(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net, batch = Language(**LANGUAGE[draw.choice(INSIDE)]), language_batch(8, (draw.randrange(8),))
    chosen, count = random_strategies(capture(net, batch), 4, draw), draw.choice((2, 3, 4, 8))
    model = Compiled(copy.deepcopy(net), planner(chosen, 4, micro_batches=count), devices=["cpu"] * 4)
    for own in (model, net):
        (own(*batch) / 3).backward()
    for mine, plain in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-10, atol=1e-12)


class Scored(nn.Module):
    """A loss with the scores that it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Rows().net

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scores = self.net(x)
        return {"loss": functional.mse_loss(scores, y), "scores": scores, "most": scores.detach().abs().sum()}


def scored(micro_batches: int = 4) -> Compiled:
    return Compiled(Scored(), planner(spread(2, "data"), 2, micro_batches=micro_batches), devices=["cpu"] * 2)


def batch_of(samples: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 8).double(), torch.randn(samples, 8).double()


@pytest.mark.full
def test_other_results_are_put_together() -> None:
    torch.manual_seed(0)
    model, batch = scored(), batch_of()
    found, wanted = model(*batch), copy.deepcopy(model.module)(*batch)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=1e-12)
    x = batch[0].clone().requires_grad_()
    y = batch[0].clone().requires_grad_()
    model(x, batch[1])["loss"].backward()
    copy.deepcopy(model.module)(y, batch[1])["loss"].backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-14)


class Twice(nn.Module):
    """A loss over targets, the same without a gradient, and one that counts other targets."""

    def __init__(self, others: bool = False) -> None:
        super().__init__()
        self.net, self.others = Rows().net, others

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scores = self.net(x)
        loss = functional.cross_entropy(scores, y)
        again = functional.cross_entropy(scores, y, ignore_index=1) if self.others else loss
        return 2 * loss, again.detach()


def ignored_batch() -> tuple[Tensor, Tensor]:
    """Nothing counts in the first of four micro-batches, one target in the second."""
    return torch.randn(8, 8).double(), torch.tensor([-100, -100, 1, -100, 2, 3, 4, 5])


def test_another_mean_over_the_same_targets_weighs_as_the_loss_does() -> None:
    torch.manual_seed(0)
    net, batch = Twice(), ignored_batch()
    model = Compiled(copy.deepcopy(net), planner(spread(2, "data"), 2, micro_batches=4), devices=["cpu"] * 2)
    for found, wanted in zip(model(*batch), net(*batch), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_another_mean_over_other_targets_is_refused() -> None:
    model = Compiled(Twice(True), planner(spread(2, "data"), 2, micro_batches=4), devices=["cpu"] * 2)
    with pytest.raises(PlanError, match="counts other targets than the loss"):
        model(torch.randn(8, 8).double(), torch.randint(0, 8, (8,)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_train_step_does_not_weigh_by_samples_what_the_model_counts_otherwise(reduction: str) -> None:
    net = Language(reduction=reduction)
    model = Compiled(net, planner(spread(2, "data"), 2, micro_batches=4), devices=["cpu"] * 2)
    tokens, labels = language_batch(8, (0, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="train_step weighs micro-batches by samples"):
        model.train_step((tokens, labels), None, lambda loss, _: loss, optimizer)


def test_gradients_through_another_result_are_refused() -> None:
    model, batch = scored(), batch_of()
    found = model(*batch)
    with pytest.raises(RuntimeFailure, match=r"net\.4 takes part in a loss outside of the model, and 4 micro-batches"):
        (found["loss"] + found["scores"].sum()).backward()


def test_a_second_backward_is_refused() -> None:
    model, batch = scored(), batch_of()
    loss = model(*batch)["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeFailure, match="there for one backward"):
        loss.backward()


def test_gradients_of_two_steps_add_up() -> None:
    torch.manual_seed(0)
    model, (one, other) = scored(), (batch_of(), batch_of(6))
    plain = copy.deepcopy(model.module)
    for own in (model, plain):
        for batch in (one, other):
            own(*batch)["loss"].backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-10, atol=1e-12)


class Losses(Rows):
    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        return result.mean(), result.pow(2).mean()


class Hooked(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_hook(lambda module, args, result: None)


@pytest.mark.parametrize(
    ("net", "options", "words"),
    [
        (Losses, {}, "returns several losses"),
        (Scored, {"scalars": "per_replica"}, "gives a number for each replica"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double(), {}, "takes its statistics of all samples"),
        (Hooked, {}, "has hooks, which would be called for every micro-batch"),
    ],
)
def test_refusals(net: Callable[[], nn.Module], options: dict[str, Any], words: str) -> None:
    model = Compiled(net(), planner(spread(2, "data"), 2, micro_batches=2), devices=["cpu"] * 2, **options)
    with pytest.raises(PlanError, match=words):
        model(*batch_of()[: 2 if net is Scored else 1])


def rows(micro_batches: int = 4) -> Compiled:
    return Compiled(Rows(), planner(spread(2, "data"), 2, micro_batches=micro_batches), devices=["cpu"] * 2)


def test_a_loss_that_is_no_mean_is_refused_before_anything_is_updated() -> None:
    model, (x, y) = rows(), batch_of()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeFailure, match="first two micro-batches together"):
        model.train_step(x, y, lambda a, b: functional.mse_loss(a, b, reduction="sum"), optimizer)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    model.train_step(x, y, functional.mse_loss, optimizer)


def test_what_a_parameter_or_an_input_may_not_have() -> None:
    model, (x, y) = rows(), batch_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeFailure, match="an input needs a gradient"):
        model.train_step(x.requires_grad_(), y, functional.mse_loss, optimizer)
    dict(model.module.named_parameters())["net.0.weight"].register_hook(lambda gradient: gradient)
    with pytest.raises(RuntimeFailure, match=r"net\.0\.weight has a gradient hook"):
        model.train_step(x.detach(), y, functional.mse_loss, optimizer)


def test_a_plain_call_runs_the_whole_batch_and_says_so_once() -> None:
    model, (x, y) = rows(), batch_of()
    with pytest.warns(PlannedMemoryWarning, match="4 micro-batches") as said:
        found = model(x)
    assert said[0].filename == __file__
    functional.mse_loss(found, y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        model.eval()(x)
        with torch.no_grad():
            model.train()(x)


def test_measuring_is_refused() -> None:
    model = rows()
    with pytest.raises(RuntimeFailure, match=r"measure\(\) cannot time a plan in micro-batches"):
        model.measure(batch_of()[0])


class Dropped(nn.Module):
    """A mask on ones, and its mean as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        masked = functional.dropout(x * self.scale, 0.5, self.training)
        return masked.mean(), masked


@pytest.mark.parametrize("kind", ["data", "one"])
def test_every_micro_batch_drops_by_itself(kind: str) -> None:
    model = Compiled(Dropped(), planner(spread(2, kind), 2, micro_batches=4), devices=["cpu"] * 2, check="off")
    _, masked = model(torch.ones(4, 64, dtype=torch.float64))
    assert len({tuple(row.tolist()) for row in masked}) == 4


class Kept:
    """A tensor that autograd saves."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def most_saved(micro_batches: int) -> int:
    """Elements of activations that autograd keeps at most in a step of 60 samples."""
    model, batch, alive = scored(micro_batches), batch_of(60), [0, 0]
    weights = {parameter.numel() for parameter in model.parameters()}  # no activation has as many elements

    def pack(tensor: Tensor) -> Kept:
        kept, size = Kept(tensor), 0 if tensor.numel() in weights else tensor.numel()
        alive[0] += size
        alive[1] = max(alive)
        weakref.finalize(kept, lambda: alive.__setitem__(0, alive[0] - size))
        return kept

    model(*batch)["loss"].backward()  # compared with the plain module
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        model(*batch)["loss"].backward()
    return alive[1]


def test_one_micro_batch_is_alive_at_a_time() -> None:
    whole = most_saved(1)
    assert whole > 0
    assert most_saved(6) * 6 == whole


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(ranks: int) -> None:
    run_case(on_ranks, ranks)
