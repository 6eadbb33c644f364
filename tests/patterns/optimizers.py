"""Patterns of optimizers: of one element at a time, across elements, with closures, written by users."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import Run
from tests.patterns.nets import BATCH, Mlp, steps
from tests.patterns.pattern import Section

SECTION = Section("Optimizers")

ELEMENTWISE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW, one parameter at a time": partial(torch.optim.AdamW, lr=0.01, foreach=False),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
}


def _elementwise(run: Run) -> None:
    for name, make in ELEMENTWISE.items():
        torch.manual_seed(1)
        model = run.compile(Mlp())
        optimizer = make(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(run.randn(BATCH, 6)), run.randint(4, BATCH))
            loss.backward()
            optimizer.step()
            run.mean(f"{name} loss", loss)
        run.state(model, f"{name} ")


@SECTION("SGD, Adam, AdamW (`foreach=False`), RMSprop, Adagrad, RAdam")
def elementwise(run: Run) -> None:
    _elementwise(run)


@SECTION("`fused=True` Adam")
def fused_adam(run: Run) -> None:
    model = run.compile(Mlp())
    steps(run, model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True))


class Lars(torch.optim.Optimizer):
    """Learning rates by the ratio of a parameter's norm to its gradient's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / (p.grad.norm() + 1e-6)
                    p.sub_(p.grad * ratio, alpha=group["lr"])


class Lamb(torch.optim.Optimizer):
    """Adam with a trust ratio per parameter, read as Python numbers."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].lerp_(p.grad.square(), 0.01)
                update = state["mean"] / (state["square"].sqrt() + 1e-6)
                ratio = float(p.norm()) / max(float(update.norm()), 1e-6)
                p.add_(update, alpha=-group["lr"] * ratio)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum, by Newton-Schulz iterations on whole matrices."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.ndim == 2:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    update = momentum / (momentum.norm() + 1e-7)
                    for _ in range(3):
                        square = update @ update.T
                        update = 3.4 * update + (-4.8 * square + 2.0 * square @ square) @ update
                p.add_(update, alpha=-group["lr"])


@SECTION("LARS, written by hand: learning rates by norms of parameters and gradients")
def lars(run: Run) -> None:
    model = run.compile(Mlp())
    steps(run, model, Lars(model.parameters(), 0.01), 4)


@SECTION("LAMB, written by hand: norms read as Python numbers")
def lamb(run: Run) -> None:
    model = run.compile(Mlp())
    steps(run, model, Lamb(model.parameters(), 0.01), 4)


@SECTION("Muon, written by hand")
def muon(run: Run) -> None:
    model = run.compile(Mlp())
    steps(run, model, Muon(model.parameters(), 0.02), 4)


@SECTION("`torch.optim.Muon` for matrices, AdamW for the rest")
def torch_muon(run: Run) -> None:
    model = run.compile(Mlp())
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)
    for _ in range(3):
        muon.zero_grad()
        adamw.zero_grad()
        loss = F.cross_entropy(model(run.randn(BATCH, 6)), run.randint(4, BATCH))
        loss.backward()
        muon.step()
        adamw.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("`torch.optim.Adafactor`")
def adafactor(run: Run) -> None:
    model = run.compile(Mlp())
    steps(run, model, torch.optim.Adafactor(model.parameters(), lr=0.05), 4)


@SECTION("noise on gradients, scaled by their norm")
def noise_by_norm(run: Run) -> None:
    model = run.compile(Mlp())

    def noise() -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.full(p.grad.shape, 0.1) * p.grad.norm())

    steps(run, model, torch.optim.SGD(model.parameters(), lr=0.1), before_step=noise)


@SECTION("gradient centralisation: the mean of each row subtracted")
def centralised(run: Run) -> None:
    model = run.compile(Mlp())

    def centre() -> None:
        for p in model.parameters():
            if p.grad is not None and p.ndim == 2:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))

    steps(run, model, torch.optim.SGD(model.parameters(), lr=0.1), before_step=centre)


@SECTION("sharpness-aware minimisation: a step up by the norm of all gradients, and back")
def sharpness_aware(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x, classes = run.randn(BATCH, 6), run.randint(4, BATCH)
        optimizer.zero_grad()
        F.cross_entropy(model(x), classes).backward()
        with torch.no_grad():
            parameters = list(model.parameters())
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            moved = [p.grad * 0.05 / norm for p in parameters]
            for p, by in zip(parameters, moved, strict=True):
                p.add_(by)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), classes)
        loss.backward()
        with torch.no_grad():
            for p, by in zip(parameters, moved, strict=True):
                p.sub_(by)
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("a closure given to SGD's `step`")
def closure(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x, classes = run.randn(BATCH, 6), run.randint(4, BATCH)

        def evaluate(x: Tensor = x, classes: Tensor = classes) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), classes)
            loss.backward()
            return loss

        run.mean("loss", optimizer.step(evaluate))
    run.state(model)


@SECTION("L-BFGS")
def lbfgs(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    for _ in range(2):
        x, wanted = run.randn(BATCH, 6), run.randn(BATCH, 4)

        def evaluate(x: Tensor = x, wanted: Tensor = wanted) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), wanted)
            loss.backward()
            return loss

        optimizer.step(evaluate)
    run.state(model)


@SECTION("parameters as one vector (`parameters_to_vector`, `vector_to_parameters`)")
def one_vector(run: Run) -> None:
    model = run.compile(Mlp())
    steps(run, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    vector = nn.utils.parameters_to_vector(model.parameters())
    run.same("vector", vector)
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    steps(run, model, torch.optim.SGD(model.parameters(), lr=0.1), 2)


@SECTION("numbers read off parameters and gradients for a log: norms, means, extremes, counts")
def statistics(run: Run) -> None:
    model = run.compile(Mlp())

    def log() -> None:
        for name, p in model.named_parameters():
            run.same(f"{name} norm", float(p.norm()))
            run.same(f"{name} mean", p.detach().mean().item())
            run.same(f"{name} largest", p.abs().max().item())
            run.same(f"{name} gradient", float(p.grad.norm()))
            run.same(f"{name} count", p.numel())
            run.same(f"{name} shape", tuple(p.shape))
            run.same(f"{name} positive", int((p > 0).sum()))
            run.same(f"{name} first", p.flatten()[0].item())
            run.same(f"{name} listed", torch.tensor(p.tolist()))

    steps(run, model, torch.optim.SGD(model.parameters(), lr=0.1), before_step=log)
