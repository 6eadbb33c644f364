"""Layers that run forward again before their backward: training is the plain model's, in one process and on ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import PlanError, RuntimeFailure
from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import Made, Rule, planner, spread
from tests.runtime.micro_batch_cases import Rows, by_train_step
from tests.runtime.ranks import run_case
from tests.runtime.replay_cases import (
    Decoder,
    Mixed,
    beside_kept,
    both_results,
    checkpointed,
    on_ranks,
    one_result,
    replaying,
    whole,
    words,
)
from tests.runtime.slice_cases import sharded, trained

FOUR = (0, 1, 2, 3)
REPLICAS, CUT = Strategy(4, 1, None, FOUR), Strategy(2, 2, "out-features", FOUR)
RULES: dict[str, tuple[int, Rule]] = {
    "one device": (1, spread(1, "one")),
    "replicas": (2, spread(2, "data")),
    "shards": (2, spread(2, "hybrid")),
    "replicas of shards": (4, lambda layer: CUT if layer.axis("out-features") else REPLICAS),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("state", ["replicated", "sharded", "gathered"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_replicas_in_one_process(devices: int, state: str) -> None:
    """Accumulation, clipping and AdamW, and a layer that is frozen on the way."""
    trained(spread(devices, "data"), devices, state, replaying)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis", ["out-features", "in-features"])
def test_replicas_of_shards_in_one_process(axis: str) -> None:
    cut = Strategy(2, 2, axis, FOUR)
    trained(lambda layer: cut if layer.parameters else REPLICAS, 4, "gathered", replaying)


@pytest.mark.parametrize("state", ["replicated", "gathered"])
def test_micro_batches(state: str) -> None:
    by_train_step(sharded(spread(2, "data"), state), 2, 2, 8, replaying)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(ranks: int) -> None:
    run_case(on_ranks, ranks)


# ---- beside the same plan that keeps everything ----------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("loss", [whole, checkpointed])
@pytest.mark.parametrize("name", ["one device", "replicas", "shards"])
def test_a_decoder_draws_the_same(name: str, loss: object, threads: bool) -> None:
    """Two calls go forward before either goes back; the caller's generator goes on as it did."""
    devices, rule = RULES[name]
    beside_kept(Decoder(), rule, devices, loss, [words(4), words(4)], threads=threads)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize("loss", [one_result, both_results])
@pytest.mark.parametrize("name", RULES)
def test_convolutions(name: str, loss: object) -> None:
    devices, rule = RULES[name]
    batches = [torch.randn(4, 3, 8, 8).double() for _ in range(2)]
    beside_kept(Mixed(), rule, devices, loss, batches)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize("which", [(0,), (1,), (0, 3), (0, 1, 3), (2, 3, 4, 5), (0, 2, 4, 6, 8)])
def test_some_layers_of_a_unit(which: tuple[int, ...]) -> None:
    rule = sharded(spread(2, "data"), "gathered")
    batches = [torch.randn(4, 3, 8, 8).double() for _ in range(2)]
    beside_kept(Mixed(), rule, 2, both_results, batches, which=lambda place: place in which)
    beside_kept(Decoder(), rule, 2, whole, [words(4)], which=lambda place: place % 10 in which)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("state", ["replicated", "gathered"])
def test_a_checkpoint_around_the_model(state: str, use_reentrant: bool) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return checkpointed(model, x.clone().requires_grad_(), use_reentrant).square().mean()

    rule = sharded(spread(2, "data"), state)
    beside_kept(Rows(), rule, 2, loss, [torch.randn(4, 8).double() for _ in range(2)])


@pytest.mark.full
def test_devices_without_samples() -> None:
    beside_kept(Mixed(), spread(3, "data"), 3, both_results, [torch.randn(2, 3, 8, 8).double()])
    beside_kept(Decoder(), spread(3, "data"), 3, whole, [words(2)])


@pytest.mark.full
def test_autocast() -> None:
    """The replay has the casts of its forward, though the backward runs without."""
    net = Rows().float()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result: Tensor = model(x)
        return result.float().square().mean()

    beside_kept(net, spread(2, "data"), 2, loss, [torch.randn(4, 8) for _ in range(2)])


# ---- several backwards -----------------------------------------------------------------------------------------------


def replayed(net: nn.Module, state: str = "replicated") -> tuple[Compiled, nn.Module]:
    """The net on two devices, and a plain one."""
    plain = copy.deepcopy(net)
    return Compiled(net, replaying(sharded(spread(2, "data"), state), 2), devices=["cpu"] * 2), plain


@pytest.mark.sampled(1)
@pytest.mark.parametrize("state", ["replicated", "gathered"])
def test_two_backwards_of_one_forward(state: str) -> None:
    model, plain = replayed(Mixed(), state)
    x = torch.randn(4, 3, 8, 8).double()
    for own in (model, plain):
        first, second = own(x)
        first.square().mean().backward(retain_graph=True)
        (first.mean() + second.square().mean()).backward(retain_graph=True)
        second.mean().backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-12)


def test_parameters_given_other_memory_before_the_backward() -> None:
    """As the plain model, whose backward takes what its forward has read."""
    model, plain = replayed(Rows())
    x = torch.randn(4, 8).double()
    for own in (model, plain):
        loss = own(x).square().mean()
        for parameter in own.parameters():
            parameter.data = parameter.data + 1
        loss.backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-12)


def test_gradients_of_inputs() -> None:
    model, plain = replayed(Rows())
    x = torch.randn(4, 8).double().requires_grad_()
    found, wanted = (torch.autograd.grad(own(x).square().sum(), x)[0] for own in (model, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_evaluation_keeps_nothing_and_replays_nothing() -> None:
    model, plain = replayed(Rows())
    model.eval()
    x = torch.randn(4, 8).double()
    for own in (model, plain):
        own(x).square().mean().backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-12)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("state", ["replicated", "gathered"])
@pytest.mark.parametrize("name", ["net.0.weight", "net.2.bias"])
def test_parameters_written_before_the_backward_are_refused(name: str, state: str) -> None:
    model, _ = replayed(Rows(), state)
    loss = model(torch.randn(4, 8).double()).square().mean()
    with torch.no_grad():
        model.module.get_parameter(name).mul_(2)
    with pytest.raises(RuntimeFailure, match=rf"{name} was written between a forward and its backward"):
        loss.backward()


def test_inputs_written_before_the_backward_are_refused() -> None:
    model, _ = replayed(Rows())
    x = torch.randn(4, 8).double()
    loss = model(x).square().mean()
    x.zero_()
    with pytest.raises(
        RuntimeFailure, match="input 'x' was written between a forward and its backward, for which layers"
    ):
        loss.backward()


def test_a_layer_in_no_unit_is_refused() -> None:
    rule = planner(lambda layer: Strategy(saved="replay"), 1)
    with pytest.raises(PlanError, match=r"net\.4: cannot replay its forward, as it is in no unit"):
        Compiled(Rows(), rule, devices=["cpu"])(torch.randn(4, 8).double())


# ---- memory, and the verifier ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_only_what_the_replay_reads_stays() -> None:
    """Of a unit of wide layers nothing is alive behind its forward but its operand; of a kept one, all is."""
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).double()
    x, forward, backward = torch.randn(16, 8).double(), list[int](), list[int]()
    for plan in (replaying(spread(2, "data"), 2), planner(spread(2, "data"), 2)):
        model = Compiled(copy.deepcopy(net), plan, devices=["cpu"] * 2)
        model(x).sum().backward()
        model.zero_grad()
        with Made() as made:
            loss = model(x).sum()
            forward.append(made.live_bytes)
            loss.backward()
            backward.append(made.live_bytes)
    weights, wide, narrow = sum(p.numel() for p in net.parameters()) * 8, 16 * 64 * 8, 16 * 8 * 8
    # The operands of the unit and of the layer behind it; of the kept unit also its first tanh.
    assert forward == [weights + wide + narrow + 8, weights + 2 * wide + narrow + 8]
    assert backward[0] == backward[1]
