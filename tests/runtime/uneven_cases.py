"""Networks and ranks' cases for replicas whose parts of the batch differ by one sample."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import parplan
from parplan.graph.capture.capture import capture
from parplan.layout import split_evenly
from parplan.plan import Plan, Scheme, Strategy
from tests.runtime.helpers import planner, spread_all
from tests.runtime.nets import conv_net, mlp

__all__ = ["CASES", "NETS", "batch", "build", "plan_for"]


class Block(nn.Module):
    """A pre-norm transformer block whose linear layers see tokens as rows: (N, 5, 12) to (N, 5, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Attention of three heads, then two linear layers, each added to its input."""
        q, k, v = (one.unflatten(-1, (3, 4)).transpose(1, 2) for one in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x).flatten(0, 1)))).view(x.shape)
        return result


class Loss(nn.Module):
    """A network's mean squared output beside that output: a loss inside of the model."""

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


class Norm1d(nn.Module):
    """Batch norm over samples alone, of which a part may have one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Centred once more, by the number of samples."""
        y: Tensor = self.last(self.norm(self.first(x)))
        return y - y.sum(0) / x.shape[0]


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6,)),
    "conv": (conv_net, (3, 8, 8)),
    "block": (Block, (5, 12)),
    "loss": (lambda: Loss(conv_net()), (3, 8, 8)),
    "hooked": (Hooked, (6,)),
    "norm1d": (Norm1d, (6,)),
}


def build(net: str) -> nn.Module:
    """A network in float64, the same whenever it is asked for."""
    torch.manual_seed(3)
    return NETS[net][0]().double()


def batch(net: str, samples: int) -> Tensor:
    """Random inputs of a network."""
    return torch.randn(samples, *NETS[net][1], dtype=torch.float64)


def plan_for(net: str, samples: int, devices: int, rules: str = "default", scheme: Scheme = Scheme.GATHER) -> Plan:
    """Every layer that can be spread by samples on all devices."""
    graph = capture(build(net), (batch(net, samples),))
    found = planner(spread_all(devices), devices, scheme)(graph)
    return Plan(found.model, found.fingerprint, samples, devices, found.layers, rules, scheme)


# ---- under torchrun --------------------------------------------------------------------------------------------------


def _train(net: str, rank: int, ranks: int) -> None:
    """Two steps on 7 samples, each rank its own, whose losses are weighed by their samples, beside the plain model."""
    plain = build(net)
    model = parplan.compile(copy.deepcopy(plain), plan=plan_for(net, 7, ranks), check="always")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain)]
    sizes = split_evenly(7, ranks)
    start = sum(sizes[:rank])
    for _ in range(2):
        x = batch(net, 7)
        found, wanted = model(x[start : start + sizes[rank]]), plain(x)
        if net == "loss":  # one number, the same on all ranks: the mean over all samples
            losses = [found[0], wanted[0]]
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-9)
        else:
            torch.testing.assert_close(found, wanted[start : start + sizes[rank]], rtol=1e-9, atol=1e-9)
            losses = [found.square().mean() * (sizes[rank] * ranks / 7), wanted.square().mean()]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = model.state_dict()
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name].double(), tensor.double(), rtol=1e-9, atol=1e-9)
    assert dist.get_world_size() == ranks


def _groups(rank: int, ranks: int) -> None:
    """Ranks that bring other numbers of samples than the replicas take: 2 replicas on the first two of 3 ranks."""
    plain, plan = build("conv"), plan_for("conv", 7, ranks)
    fewer = Strategy(2, 1, None, (0, 1))
    model = parplan.compile(copy.deepcopy(plain), plan=plan.with_layers({"fc1": fewer, "fc2": fewer}), check="always")
    x, sizes = batch("conv", 7), {2: (5, 2), 3: (1, 4, 2)}[ranks]
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    found, wanted = model(x[own]), plain(x)
    torch.testing.assert_close(found, wanted[own], rtol=1e-9, atol=1e-9)
    (found.square().sum() * ranks / 7).backward()
    (wanted.square().sum() / 7).backward()
    for (name, mine), its in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-9, atol=1e-9, msg=name)


CASES = {"groups": _groups} | {net: partial(_train, net) for net in NETS}
