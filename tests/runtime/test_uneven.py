"""Replicas whose parts of the batch differ by one sample compute the plain model's numbers, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parplan
from parplan.errors import PlanError, RuleError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import split_evenly
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.search_space.verifier import check
from tests.runtime.helpers import differences, outcome, planner, spread, spread_all
from tests.runtime.nets import conv_net, mlp


class Block(nn.Module):
    """A pre-norm transformer block: (N, 5, 12) to (N, 5, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Attention of three heads, then two linear layers, each added to its input."""
        q, k, v = (one.unflatten(-1, (3, 4)).transpose(1, 2) for one in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Loss(nn.Module):
    """Another network's mean squared output beside that output: a loss inside of the model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and what it is of."""
        y = self.net(x)
        return y.square().mean(), y


class Hooked(nn.Module):
    """A hook that sees every sample's gradient, and one that sees all samples' together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Gradients are clipped one by one, then divided by their norm."""
        hidden = self.first(x)
        hidden.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        y: Tensor = self.last(torch.tanh(hidden))
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / gradient.norm())
        return y


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6,)),
    "conv": (conv_net, (3, 8, 8)),
    "block": (Block, (5, 12)),
    "loss": (lambda: Loss(conv_net()), (3, 8, 8)),
    "hooked": (Hooked, (6,)),
}


def build(net: str) -> nn.Module:
    torch.manual_seed(3)
    return NETS[net][0]().double()


def batch(net: str, samples: int) -> Tensor:
    return torch.randn(samples, *NETS[net][1], dtype=torch.float64)


def plan_for(graph: LayerGraph, devices: int, rules: str = "default", scheme: Scheme = Scheme.GATHER) -> Plan:
    """Every layer that keeps samples apart on all devices."""
    found = planner(spread_all(devices), devices, scheme)(graph)
    return Plan(found.model, found.fingerprint, found.batch, devices, found.layers, rules, scheme)


def legal(net: str, x: Tensor, devices: int) -> Plan:
    plan = plan_for(capture(build(net), (x,)), devices)
    check(plan, capture(build(net), (x,)))
    return plan


CASES = [(net, samples, devices) for net in NETS for samples, devices in ((7, 2), (7, 3), (7, 4), (5, 4))]
LARGE = [(net, 256, devices) for net in ("mlp", "conv", "block") for devices in (3, 5, 6, 7)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("net", "samples", "devices"), [*CASES, *LARGE])
def test_a_step_gives_the_plain_models_numbers(net: str, samples: int, devices: int) -> None:
    x = batch(net, samples)
    plan = legal(net, x, devices)
    plain = build(net)
    model = parplan.compile(copy.deepcopy(plain), plan=plan, devices=["cpu"] * devices, check="always")
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}
    assert model.program is not None
    parts = {step.batches for step in model.program.forward if hasattr(step, "batches")}
    assert split_evenly(samples, devices) in parts


def test_a_loss_outside_of_the_model_is_a_mean_over_samples() -> None:
    x, y = batch("conv", 7), torch.randint(12, (7,))
    plain = build("conv")
    model = parplan.compile(copy.deepcopy(plain), plan=legal("conv", x, 3), devices=["cpu"] * 3)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain)]
    for _ in range(3):
        losses = [F.cross_entropy(one(x), y) for one in (model, plain)]
        assert abs(losses[0].item() - losses[1].item()) < 1e-9
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], wanted, rtol=1e-9, atol=1e-9)


def test_a_train_step_updates_as_the_plain_loop() -> None:
    x, y = batch("mlp", 7), torch.randn(7, 4, dtype=torch.float64)
    plain = build("mlp")
    model = parplan.compile(copy.deepcopy(plain), plan=legal("mlp", x, 4), devices=["cpu"] * 4)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    loss = model.train_step(x, y, F.mse_loss, optimizers[0])
    wanted = F.mse_loss(plain(x), y)
    wanted.backward()
    optimizers[1].step()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=1e-9)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)
