"""What ranks do with sharded parameters that plain training does with plain ones; each case runs on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from parplan.plan import Strategy
from parplan.runtime.compiled import Compiled
from tests.runtime.helpers import Rule, planner

__all__ = ["CASES"]

Change = Callable[[list[nn.Parameter]], object]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def same(found: Any, wanted: Any, what: str) -> None:
    """Refuse what is further off than rounding, or is of another shape."""
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}")


class Net(nn.Module):
    """Layers of even and uneven widths, with a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.third = nn.Linear(8, 8, bias=False)
        self.third.weight = self.second.weight
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8) to (N, 4)."""
        h = torch.tanh(self.first(x))
        result: Tensor = self.last(torch.tanh(self.third(torch.tanh(self.second(h)))))
        return result


def placements(ranks: int) -> Sequence[Mapping[str, Strategy]]:
    """Plans that cut parameters: over all ranks, along both axes, whole on one rank, in replicas."""
    everyone = tuple(range(ranks))
    first, last = Strategy(devices=(0,)), Strategy(devices=(ranks - 1,))
    cut = {axis: Strategy(1, ranks, axis, everyone) for axis in ("out-features", "in-features")}
    names = ("first", "second", "third", "last")
    found = [
        dict.fromkeys(names, cut["out-features"]),
        {**dict.fromkeys(names, cut["in-features"]), "last": Strategy(ranks, 1, None, everyone)},
        {"first": first, "second": last, "third": last, "last": cut["out-features"]},
    ]
    if ranks == 4:
        found.append(dict.fromkeys(names, Strategy(2, 2, "out-features", everyone)))
    return found


class Pair:
    """A compiled model and its plain twin, trained alike."""

    def __init__(
        self, rule: Rule | Mapping[str, Strategy], rank: int, ranks: int, net: nn.Module | None = None
    ) -> None:
        torch.manual_seed(3)
        module = net if net is not None else Net().double()
        self.plain = copy.deepcopy(module)
        self.model = Compiled(module, planner(rule, ranks))
        self.rank, self.ranks = rank, ranks

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        """The two models."""
        return self.model, self.plain

    def backward(self, penalty: Callable[[nn.Module], Tensor] | None = None) -> None:
        """Gradients of one batch on both."""
        x = torch.randn(2 * self.ranks, 8, dtype=torch.float64)
        y = torch.randn(2 * self.ranks, 4, dtype=torch.float64)
        own = slice(2 * self.rank, 2 * self.rank + 2)
        for module, samples in ((self.model, own), (self.plain, slice(None))):
            loss = nn.functional.mse_loss(module(x[samples]), y[samples])
            (loss if penalty is None else loss + penalty(module)).backward()

    def steps(
        self, optimizers: tuple[torch.optim.Optimizer, ...], change: Change | None = None, count: int = 3
    ) -> None:
        """Train both, changing gradients in between, and compare."""
        for _ in range(count):
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.backward()
            for module, optimizer in zip(self.both, optimizers, strict=True):
                torch.manual_seed(7)
                if change is not None:
                    change(list(module.parameters()))
                optimizer.step()
        self.compare()

    def train(self, make: Make, change: Change | None = None, count: int = 3) -> None:
        """Train both with an optimizer of each one's parameters, made before the parameters are cut."""
        self.steps(tuple(make(list(module.parameters())) for module in self.both), change, count)

    def compare(self) -> None:
        """The states agree."""
        state = self.model.state_dict()
        for name, tensor in self.plain.state_dict().items():
            assert type(state[name]) is Tensor
            same(state[name], tensor, name)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def clipped(order: float) -> Change:
    """Clipping by a norm that every step exceeds."""

    def clip(parameters: list[nn.Parameter]) -> None:
        every = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        before = float(torch.linalg.vector_norm(every, order))
        same(float(clip_grad_norm_(parameters, 1e-2, order, error_if_nonfinite=True)), before, f"norm {order}")

    return clip


def scaled_noise(parameters: list[nn.Parameter]) -> None:
    """Noise in proportion to each gradient's norm."""
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.add_(torch.randn_like(parameter) * parameter.grad.norm().item())


def layerwise_rates(parameters: list[nn.Parameter]) -> None:
    """LARS: a gradient's size follows that of its parameter."""
    for parameter in parameters:
        assert parameter.grad is not None
        ratio = parameter.detach().norm() / (parameter.grad.norm() + 1e-8)
        parameter.grad.mul_(torch.where(ratio > 0, ratio, 1.0))


def standardized(parameters: list[nn.Parameter]) -> None:
    """Gradient centralisation: code that looks along one dimension."""
    for parameter in parameters:
        assert parameter.grad is not None
        if parameter.dim() > 1:
            parameter.grad -= parameter.grad.mean(1, keepdim=True)


CHANGES: dict[str, Change] = {
    **{f"norm {order}": clipped(order) for order in (1.0, 2.0, float("inf"))},
    "value": lambda parameters: clip_grad_value_(parameters, 1e-3),
    "noise": scaled_noise,
    "LARS": layerwise_rates,
    "centralised": standardized,
}


def changed_gradients(rank: int, ranks: int) -> None:
    """Clipping, and code that looks across a gradient's elements, under every kind of placement."""
    for rule in placements(ranks):
        for change in CHANGES.values():
            Pair(rule, rank, ranks).train(sgd, change, 2)


OPTIMIZERS: dict[str, Make] = {
    "SGD": sgd,
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": adamw,
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.01),
}


def optimizers(rank: int, ranks: int) -> None:
    """torch's optimizers, by the same numbers, made before the parameters are cut."""
    for rule in placements(ranks)[::2]:
        for make in OPTIMIZERS.values():
            Pair(rule, rank, ranks).train(make)


CASES = {case.__name__: case for case in (changed_gradients, optimizers)}
