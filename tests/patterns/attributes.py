"""Patterns of state outside of parameters: Python attributes, counters, buffers written in the forward, globals."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import Run
from tests.patterns.nets import BATCH, sgd, steps
from tests.patterns.pattern import Section

SECTION = Section("Attributes, buffers and other state")

GLOBAL = {"scale": 1.0}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)


def _each_step(run: Run, model: Any, change: Any, count: int = 5) -> None:
    optimizer = sgd(model)
    for step in range(count):
        change(model, step)
        steps(run, model, optimizer, 1)


@SECTION("an annealed number (`model.temperature = 1 + epoch`)")
def annealed(run: Run) -> None:
    class Net(_Net):
        temperature = 1.0

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x))) / self.temperature

    _each_step(run, run.compile(Net()), lambda m, step: setattr(m, "temperature", 1.0 + step))


@SECTION("an annealed number of an inner module, set by a loop over `modules()`")
def annealed_inside(run: Run) -> None:
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    def change(model: Any, step: int) -> None:
        for module in model.modules():
            if isinstance(module, Scaled):
                module.scale = 0.5**step

    _each_step(run, run.compile(nn.Sequential(Scaled(6, 8), nn.Tanh(), Scaled(8, 4))), change)


@SECTION("a flag that is switched (`model.skip = True`)")
def flag(run: Run) -> None:
    class Net(_Net):
        skip = False

        def forward(self, x: Tensor) -> Any:
            h = self.body(x)
            return self.head(h if self.skip else torch.tanh(h))

    _each_step(run, run.compile(Net()), lambda m, step: setattr(m, "skip", step in (1, 2)))


@SECTION("an entry of a list on a module (`model.scales[0] = 2`)")
def list_entry(run: Run) -> None:
    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [1.0, 0.5]

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x)) * self.scales[0]) * self.scales[1]

    def change(model: Any, step: int) -> None:
        model.scales[0] = 1.0 + step

    _each_step(run, run.compile(Net()), change)


@SECTION("a dictionary on a module (`model.config['scale'] = 2`)")
def dictionary(run: Run) -> None:
    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"scale": 1.0, "inner": {"mode": "tanh"}}

        def forward(self, x: Tensor) -> Any:
            h = self.body(x) * self.config["scale"]
            return self.head(torch.tanh(h) if self.config["inner"]["mode"] == "tanh" else h)  # type: ignore[index]

    def change(model: Any, step: int) -> None:
        model.config["scale"] = 1.0 + step
        model.config["inner"]["mode"] = "tanh" if step < 3 else "none"

    _each_step(run, run.compile(Net()), change)


class Config:
    """Numbers of a model, as an object of the user's."""

    def __init__(self) -> None:
        self.scale = 1.0


@SECTION("an object with settings on a module (`model.config.scale = 2`)")
def config_object(run: Run) -> None:
    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x)) * self.config.scale)

    def change(model: Any, step: int) -> None:
        model.config.scale = 1.0 + step

    _each_step(run, run.compile(Net()), change)


@SECTION("a plain tensor on a module, replaced and written in place")
def plain_tensor(run: Run) -> None:
    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(8)

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x)) * self.mask)

    def change(model: Any, step: int) -> None:
        if step == 1:
            model.mask[3:] = 0
        if step == 3:
            model.mask = torch.full((8,), 2.0)

    _each_step(run, run.compile(Net()), change)


@SECTION("an activation exchanged (`model.act = torch.relu`)")
def exchanged_function(run: Run) -> None:
    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.act = torch.tanh

        def forward(self, x: Tensor) -> Any:
            return self.head(self.act(self.body(x)))

    _each_step(run, run.compile(Net()), lambda m, step: setattr(m, "act", torch.relu if step > 1 else torch.tanh))


@SECTION(
    "a counter that the forward counts and uses (`self.n += 1`)",
    refused={"*": "count in a buffer"},
    why="a captured forward would count once; count in a buffer, or outside of the forward",
)
def own_counter(run: Run) -> None:
    class Net(_Net):
        n = 0

        def forward(self, x: Tensor) -> Any:
            self.n += 1
            return self.head(torch.tanh(self.body(x))) / self.n

    model = run.compile(Net())
    steps(run, model, sgd(model), 4)
    run.same("n", model.n)


@SECTION(
    "a counter that the forward counts and the script reads",
    refused={"*": "count in a buffer"},
    why="a captured forward would count once; count in a buffer, or outside of the forward",
)
def read_counter(run: Run) -> None:
    class Net(_Net):
        calls = 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return self.head(torch.tanh(self.body(x)))

    model = run.compile(Net())
    steps(run, model, sgd(model), 3)
    run.same("calls", model.calls)


@SECTION("an auxiliary loss that the forward stores on `self`, added by the script")
def stored_loss(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            self.penalty = h.square().mean()
            return self.head(h)

    model = run.compile(Net())
    steps(run, model, sgd(model), loss_of=lambda scores, c: F.cross_entropy(scores, c) + 0.1 * model.penalty)


@SECTION("a tensor that the forward stores on `self` (`self.last = h`), read by the script")
def stored_tensor(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            self.last = torch.tanh(self.body(x))
            return self.head(self.last)

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(2):
        steps(run, model, optimizer, 1)
        run.rows("last", model.last)


@SECTION(
    "a tensor that one forward stores and the next one uses (memory, detached)",
    refused={"*": "register_buffer"},
    why="make it a buffer, which a compiled model keeps up to date",
)
def memory(run: Run) -> None:
    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            out = self.head(h if self.last is None else h + self.last)
            self.last = h.detach().mean(0)
            return out

    model = run.compile(Net())
    steps(run, model, sgd(model), 4)


@SECTION(
    "features appended to a list on `self`",
    refused={"*": "count in a buffer"},
    why="a captured forward would count once; count in a buffer, or outside of the forward",
)
def appended(run: Run) -> None:
    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            self.kept.append(h.detach())
            return self.head(h)

    model = run.compile(Net())
    steps(run, model, sgd(model), 2)
    run.same("entries", len(model.kept))


class _Counted(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.steps: Tensor


@SECTION("a buffer counted in place and used (`self.steps += 1`)")
def counted_buffer(run: Run) -> None:
    class Net(_Counted):
        def forward(self, x: Tensor) -> Any:
            self.steps += 1
            return self.head(torch.tanh(self.body(x))) / self.steps

    model = run.compile(Net())
    steps(run, model, sgd(model), 4)


@SECTION("a buffer counted in place and used (`.add_(1)`), with batch norm beside it")
def added_buffer(run: Run) -> None:
    class Net(_Counted):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Any:
            self.steps.add_(1)
            return self.head(self.norm(self.body(x))) / self.steps

    model = run.compile(Net())
    optimizer = sgd(model)
    steps(run, model, optimizer, 3)
    model.eval()
    run.rows("scores", model(run.randn(BATCH, 6)))
    run.same("steps", model.steps)


@SECTION("a buffer counted by assignment and used (`self.steps = self.steps + 1`)")
def assigned_buffer(run: Run) -> None:
    class Net(_Counted):
        def forward(self, x: Tensor) -> Any:
            self.steps = self.steps + 1
            return self.head(torch.tanh(self.body(x))) / self.steps

    model = run.compile(Net())
    steps(run, model, sgd(model), 4)


@SECTION("a buffer counted by assignment in a module within the model")
def assigned_buffer_inside(run: Run) -> None:
    class Block(_Counted):
        def forward(self, x: Tensor) -> Any:
            self.steps = self.steps + 1
            return self.head(torch.tanh(self.body(x))) / self.steps

    model = run.compile(nn.Sequential(Block(), nn.Linear(4, 4)))
    steps(run, model, sgd(model), 3)


@SECTION("a buffer used before it is counted, in the same forward")
def used_then_counted(run: Run) -> None:
    class Net(_Counted):
        def forward(self, x: Tensor) -> Any:
            out = self.head(torch.tanh(self.body(x))) * (self.steps + 1)
            self.steps += 2
            return out * self.steps

    model = run.compile(Net())
    steps(run, model, sgd(model), 4)


@SECTION("a running mean of features as a buffer (`lerp_` under `no_grad`), used in the forward")
def running_mean(run: Run) -> None:
    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.mean: Tensor

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(h.mean(0), 0.1)
            return self.head(h - self.mean)

    model = run.compile(Net())
    optimizer = sgd(model)
    steps(run, model, optimizer, 3)
    model.eval()
    run.rows("scores", model(run.randn(BATCH, 6)))


@SECTION("a queue of features as a buffer (MoCo): rows written at a pointer that is a buffer")
def queue(run: Run) -> None:
    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(16, 8))
            self.queue: Tensor

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            out = self.head(h) + (h @ self.queue.clone().T).sum(1, keepdim=True)
            with torch.no_grad():
                self.queue.copy_(torch.cat([h.detach(), self.queue])[:16])
            return out

    model = run.compile(Net())
    steps(run, model, sgd(model), 3)


@SECTION("a buffer that the script sets between steps")
def set_buffer(run: Run) -> None:
    class Net(_Counted):
        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x)) * self.steps)

    def change(model: Any, step: int) -> None:
        if step < 3:
            model.steps.fill_(step + 1.0)
        else:
            model.steps = torch.tensor(0.5 * step)

    _each_step(run, run.compile(Net()), change)


@SECTION(
    "`random.random()` in the forward (stochastic depth)",
    refused={"*": "random numbers from random"},
    why="a captured forward would draw once; draw with torch in the forward, or outside of it",
)
def python_random(run: Run) -> None:
    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            if random.random() < 0.5:
                h = h + self.inner(h)
            return self.head(h)

    model = run.compile(Net())
    random.seed(11)
    steps(run, model, sgd(model), 6)


@SECTION("a branch on `torch.is_grad_enabled()`")
def grad_branch(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = self.body(x)
            return self.head(torch.tanh(h) if torch.is_grad_enabled() else h)

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(2):
        steps(run, model, optimizer, 1)
        with torch.no_grad():
            run.rows("scores", model(run.randn(BATCH, 6)))


@SECTION("a module global that the forward reads and the script changes")
def module_global(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x))) * GLOBAL["scale"]

    def change(model: Any, step: int) -> None:
        GLOBAL["scale"] = 1.0 + step

    _each_step(run, run.compile(Net()), change)


@SECTION("a variable of an enclosing function that the forward reads and the script changes")
def enclosed_variable(run: Run) -> None:
    scale = 1.0

    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x))) * scale

    model = run.compile(Net())
    optimizer = sgd(model)
    for step in range(3):
        scale = 1.0 + step
        steps(run, model, optimizer, 1)


@SECTION("a branch on `self.training`")
def training_branch(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            return self.head(h) if self.training else (self.head(h), h)

    model = run.compile(Net())
    optimizer = sgd(model)
    steps(run, model, optimizer, 2)
    model.eval()
    with torch.no_grad():
        run.rows("hidden", model(run.randn(BATCH, 6))[1])
    model.train()
    steps(run, model, optimizer, 1)
