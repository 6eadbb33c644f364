"""Patterns that a second round of training programs found: everyday code that had been wrong without a word."""

# mypy: disable-error-code="operator"
from __future__ import annotations

import copy
import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training import Run
from tests.patterns import nets
from tests.patterns.nets import BATCH, Mlp, sgd, steps
from tests.patterns.pattern import Section

SECTION = Section("Found by a second round of programs")


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)


@SECTION("a target network under no_grad inside the model, AdamW with weight decay over all parameters")
def target_network(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = Mlp()
            self.target = copy.deepcopy(self.online)

        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                wanted = self.target(x)
            return self.online(x) - wanted

    model = run.compile(Net())
    steps(run, model, _adamw(model))


@SECTION("weights used only behind detach()")
def behind_detach(run: Run) -> None:
    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.side = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x))) + self.side(x).detach()

    model = run.compile(Net())
    steps(run, model, _adamw(model))


@SECTION("weights used only in a comparison")
def behind_comparison(run: Run) -> None:
    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.side = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x))) * (self.side(x) > 0)

    model = run.compile(Net())
    steps(run, model, _adamw(model))


@SECTION(
    "gradients kept in one flat buffer (`p.grad = flat[a:b].view_as(p)`)",
    refused={
        "ranks/shards": "is a piece of a larger tensor",
        "ranks/mixed": "is a piece of a larger tensor",
        "ranks/slices": "is a piece of a larger tensor",
    },
    why="let `backward()` make the gradients",
)
def flat_gradients(run: Run) -> None:
    model = run.compile(Mlp())
    parameters = list(model.parameters())
    flat, at = torch.zeros(sum(p.numel() for p in parameters)), 0
    for p in parameters:
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(3):
        flat.zero_()
        loss = F.cross_entropy(model(run.randn(BATCH, 6)), run.randint(4, BATCH))
        loss.backward()
        flat.mul_(0.5)
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION(
    "parameters that are views of one tensor, which the script writes",
    refused={
        "ranks/shards": "is a piece of a larger tensor",
        "ranks/mixed": "is a piece of a larger tensor",
        "ranks/slices": "is a piece of a larger tensor",
    },
    why="write the parameters themselves, under `torch.no_grad()`",
)
def flat_parameters(run: Run) -> None:
    plain = Mlp()
    flat, at = torch.randn(sum(p.numel() for p in plain.parameters())), 0
    for p in plain.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    model = run.compile(plain)
    optimizer = sgd(model)
    for _ in range(3):
        steps(run, model, optimizer, 1)
        flat.mul_(0.9)
    run.state(model)


@SECTION(
    "two parameters of one memory (`b.weight.data = a.weight.data`)",
    refused={
        "ranks/shards": "two parameters of one memory",
        "ranks/mixed": "two parameters of one memory",
        "ranks/slices": "two parameters of one memory",
    },
    why="tie them as one parameter",
)
def shared_memory(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
            self.b.weight.data = self.a.weight.data

        def forward(self, x: Tensor) -> Any:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    model = run.compile(Net())
    steps(run, model, sgd(model))


@SECTION(
    "weights written through tensors of state_dict()",
    refused={
        "ranks/shards": "through a tensor of state_dict()",
        "ranks/mixed": "through a tensor of state_dict()",
        "ranks/slices": "through a tensor of state_dict()",
    },
    why="give the state to `load_state_dict()`, or write the parameters themselves",
)
def state_dict_writes(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    for _ in range(3):
        steps(run, model, optimizer, 1)
        with torch.no_grad():
            for value in model.state_dict().values():
                value.mul_(0.9)
    run.state(model)


@SECTION("an input shared by all samples with as many rows as the process has samples")
def shared_rows(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor, table: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x))) + (x @ table.T).softmax(-1) @ table[:, :4]

    model = run.compile(Net())
    optimizer = sgd(model)
    table = torch.linspace(-1, 1, 24).view(4, 6)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(run.randn(BATCH, 6), table), run.randint(4, BATCH))
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("inputs given back among the results")
def inputs_returned(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return {"x": x, "y": self.head(torch.tanh(self.body(x)))}

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        found = model(run.randn(BATCH, 6))
        loss = F.cross_entropy(found["y"], run.randint(4, BATCH))
        loss.backward()
        optimizer.step()
        run.rows("x", found["x"])
        run.mean("loss", loss)
    run.state(model)


@SECTION(
    "a forward that returns its number of samples",
    refused={"ranks/*": "depends on the number of samples"},
    why="take the number from the inputs, outside of the model",
)
def returned_size(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x))), x.shape[0]

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        found, size = model(run.randn(BATCH, 6))
        loss = F.cross_entropy(found, run.randint(4, BATCH), reduction="sum") / size
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION(
    "a forward that records its number of samples (`self.last = x.shape[0]`)",
    refused={"ranks/*": "depends on the number of samples"},
    why="take the number from the inputs, outside of the model",
)
def recorded_size(run: Run) -> None:
    class Net(_Net):
        last = 0

        def forward(self, x: Tensor) -> Any:
            self.last = x.shape[0]
            return self.head(torch.tanh(self.body(x)))

    plain = Net()
    model = run.compile(plain)
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        found = model(run.randn(BATCH, 6))
        loss = F.cross_entropy(found, run.randint(4, BATCH), reduction="sum") / plain.last
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION(
    "a full-batch graph network with an [N, N] buffer",
    refused={
        "ranks/*": "cannot be captured",
        "one/replicas": "its samples depend on each other",
        "one/mixed": "its samples depend on each other",
    },
    why="samples depend on each other; every process would bring its own",
)
def full_graph(run: Run) -> None:
    class Net(_Net):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.register_buffer("adjacency", torch.linspace(0, 1, n * n).view(n, n))

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.adjacency @ self.body(x)))

    model = run.compile(Net(BATCH // run.ranks))
    plain_batch = BATCH // run.ranks
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(
            model(torch.linspace(-1, 1, plain_batch * 6).view(plain_batch, 6)), torch.arange(plain_batch) % 4
        )
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("a buffer registered after the first steps")
def late_buffer(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = self.head(torch.tanh(self.body(x)))
            return h * self.scale if hasattr(self, "scale") else h

    plain = Net()
    model = run.compile(plain)
    optimizer = sgd(model)
    steps(run, model, optimizer, 2)
    model.register_buffer("scale", torch.full((4,), 2.0))
    steps(run, model, optimizer, 2)


@SECTION(
    "a parameter registered after the first steps",
    refused={"ranks/*": "was no parameter of its own at the first call"},
    why="register it before the first call",
)
def late_parameter(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = self.head(torch.tanh(self.body(x)))
            return h * self.scale if hasattr(self, "scale") else h

    plain = Net()
    model = run.compile(plain)
    steps(run, model, sgd(model), 2)
    model.register_parameter("scale", nn.Parameter(torch.full((4,), 2.0)))
    steps(run, model, sgd(model), 2)


@SECTION(
    "a module added after the first steps",
    refused={"ranks/*": "was no parameter of its own at the first call"},
    why="add it before the first call",
)
def late_module(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = self.head(torch.tanh(self.body(x)))
            return self.more(h) if hasattr(self, "more") else h

    plain = Net()
    model = run.compile(plain)
    steps(run, model, sgd(model), 2)
    torch.manual_seed(5)
    model.add_module("more", nn.Linear(4, 4))
    steps(run, model, sgd(model), 2)


def _sizes(run: Run, model: Any, *sizes: int) -> None:
    optimizer = sgd(model)
    for size in sizes:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(run.randn(size, 6)), run.randint(4, size))
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION(
    "a buffer that counts samples in place (`self.seen += x.shape[0]`)",
    refused={
        "ranks/replicas": "does not compute what the module computes",
        "ranks/slices": "",
        "ranks/solver": "does not compute what the module computes",
    },
    why="each process counts its own samples",
)
def counted_samples(run: Run) -> None:
    class Net(_Net):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Any:
            self.seen += x.shape[0]
            return self.head(torch.tanh(self.body(x)))

    _sizes(run, run.compile(Net()), 8, 4, 2, 8)


@SECTION(
    "a buffer that counts elements in place (`self.seen.add_(h.numel())`)",
    refused={
        "ranks/replicas": "does not compute what the module computes",
        "ranks/slices": "",
        "ranks/solver": "does not compute what the module computes",
    },
    why="each process counts its own samples",
)
def counted_elements(run: Run) -> None:
    class Net(_Net):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            self.seen.add_(h.numel())
            return self.head(h)

    _sizes(run, run.compile(Net()), 8, 4, 2, 8)


@SECTION("a number calculated from the samples (`math.isqrt(x.shape[0])`)")
def isqrt(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x))) / math.isqrt(x.shape[0])

    _sizes(run, run.compile(Net()), 8, 4, 2, 16)


@SECTION(
    "branches on numbers calculated from the samples (`0.5 * x.shape[0]`, `numel()` of a size, a list of that length)",
)
def size_arithmetic(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = self.head(torch.tanh(self.body(x)))
            if 0.5 * x.shape[0] > 5:
                h = h * 2
            if x.shape.numel() > 80:
                h = h + 1
            if len([0] * x.shape[0]) > 20:
                h = h * 3
            return h

    _sizes(run, run.compile(Net()), 8, 12, 16, 24, 8)


@SECTION(
    "a dictionary that the forward adds to",
    refused={"*": "changes a dict that it is given"},
    why="return the values as results, or let the forward change a copy",
)
def dictionary_added(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor, notes: dict[str, Tensor]) -> Any:
            h = torch.tanh(self.body(x * notes["scale"]))
            notes["h"] = h
            return self.head(h)

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        notes = {"scale": run.randn(BATCH, 1)}
        loss = F.cross_entropy(model(run.randn(BATCH, 6), notes), run.randint(4, BATCH))
        if "h" in notes:
            loss = loss + notes["h"].square().mean()
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION(
    "a list that the forward appends to",
    refused={"*": "changes a list that it is given"},
    why="return the values as results",
)
def list_appended(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor, kept: list[Tensor]) -> Any:
            h = torch.tanh(self.body(x))
            kept.append(h)
            return self.head(h)

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        kept: list[Tensor] = []
        loss = F.cross_entropy(model(run.randn(BATCH, 6), kept), run.randint(4, BATCH))
        loss = loss + sum((h.square().mean() for h in kept), torch.zeros(()))
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION(
    "a dictionary in which the forward replaces an entry",
    refused={"*": "changes a dict that it is given"},
    why="return the values as results, or let the forward change a copy",
)
def dictionary_replaced(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor, notes: dict[str, Tensor]) -> Any:
            notes["scale"] = torch.tanh(notes["scale"])
            return self.head(torch.tanh(self.body(x * notes["scale"])))

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        notes = {"scale": run.randn(BATCH, 1)}
        loss = F.cross_entropy(model(run.randn(BATCH, 6), notes), run.randint(4, BATCH))
        loss.backward()
        optimizer.step()
        run.rows("scale", notes["scale"])
        run.mean("loss", loss)
    run.state(model)


@SECTION(
    "a pre-hook of a submodule that changes keyword arguments (`with_kwargs=True`)",
    refused={
        "one/shards": "cannot be sharded",
        "ranks/shards": "cannot be sharded",
        "*": "constants of the captured model",
    },
    why="let hooks change tensors alone",
)
def hook_kwargs(run: Run) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Scaled(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x, scale=2.0)))

    plain = Net()
    plain.body.register_forward_pre_hook(lambda m, args, kwargs: (args, {"scale": 0.25}), with_kwargs=True)
    model = run.compile(plain)
    steps(run, model, sgd(model))


@SECTION(
    "a pre-hook of a submodule that changes a number",
    refused={"*/shards": "cannot be sharded", "*": "constants of the captured model"},
    why="let hooks change tensors alone",
)
def hook_number(run: Run) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Scaled(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x, 2.0)))

    plain = Net()
    plain.body.register_forward_pre_hook(lambda m, args: (args[0], 0.25))
    model = run.compile(plain)
    steps(run, model, sgd(model))


@SECTION(
    "the order of a container changed between steps",
    refused={"ranks/shards": "is now the parameter that was", "ranks/mixed": "is now the parameter that was"},
    why="exchange layers before the first call where they are cut",
)
def container_order(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)])
            self.head = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self.head(x)

    plain = Net()
    model = run.compile(plain)
    optimizer = sgd(model)
    steps(run, model, optimizer, 2)
    first, last = plain.layers[0], plain.layers[2]
    plain.layers[0], plain.layers[2] = last, first
    steps(run, model, optimizer, 2)


@SECTION("a class as configuration attribute (`self.cfg = Config`)")
def class_config(run: Run) -> None:
    class Config:
        scale = 1.0

    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.cfg = Config

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x))) * self.cfg.scale

    plain = Net()
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(3):
        Config.scale = 1.0 + step
        steps(run, model, optimizer, 1)


@SECTION("a class attribute changed between steps")
def class_attribute(run: Run) -> None:
    class Net(_Net):
        scale = 1.0

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x))) * self.scale

    model = run.compile(Net())
    optimizer = sgd(model)
    for step in range(3):
        Net.scale = 1.0 + step
        steps(run, model, optimizer, 1)


@SECTION("an attribute of a function, changed between steps")
def function_attribute(run: Run) -> None:
    def scaled(x: Tensor) -> Any:
        return x * scaled.scale  # type: ignore[attr-defined]

    scaled.scale = 1.0  # type: ignore[attr-defined]

    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return scaled(self.head(torch.tanh(self.body(x))))

    model = run.compile(Net())
    optimizer = sgd(model)
    for step in range(3):
        scaled.scale = 1.0 + step  # type: ignore[attr-defined]
        steps(run, model, optimizer, 1)


@SECTION("default arguments of a function, changed between steps")
def default_arguments(run: Run) -> None:
    def scaled(x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return scaled(self.head(torch.tanh(self.body(x))))

    model = run.compile(Net())
    optimizer = sgd(model)
    for step in range(3):
        scaled.__defaults__ = (1.0 + step,)
        steps(run, model, optimizer, 1)


@SECTION("a branch on an environment variable")
def environment(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = self.head(torch.tanh(self.body(x)))
            return h * 2 if os.environ.get("PARPLAN_TEST_SCALE") else h

    model = run.compile(Net())
    optimizer = sgd(model)
    try:
        for value in ("", "1", ""):
            os.environ["PARPLAN_TEST_SCALE"] = value
            steps(run, model, optimizer, 1)
    finally:
        del os.environ["PARPLAN_TEST_SCALE"]


@SECTION("a global of another module, changed between steps")
def other_global(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x))) * nets.BATCH

    model = run.compile(Net())
    optimizer, before = sgd(model), nets.BATCH
    try:
        for step in range(3):
            nets.BATCH = 1 + step
            steps_of_eight(run, model, optimizer)
    finally:
        nets.BATCH = before


def steps_of_eight(run: Run, model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(run.randn(8, 6)), run.randint(4, 8))
    loss.backward()
    optimizer.step()
    run.mean("loss", loss)


@SECTION(
    "forward-mode derivatives",
    refused={"*": "forward_ad"},
    why="use the plain model, `module` of the compiled one",
)
def forward_mode(run: Run) -> None:
    import torch.autograd.forward_ad as fwAD

    model = run.compile(Mlp())
    with fwAD.dual_level():
        x = fwAD.make_dual(run.randn(BATCH, 6), run.randn(BATCH, 6))
        tangent = fwAD.unpack_dual(model(x)).tangent
        run.rows("tangent", tangent if tangent is not None else torch.zeros(0))


@SECTION("a module that was given to torch.compile before")
def compiled_before(run: Run) -> None:
    plain = Mlp()
    given = torch.compile(plain, backend="eager")
    model = run.compile(given)  # type: ignore[arg-type]
    steps(run, model, sgd(model))


@SECTION(
    "batched gradients (`is_grads_batched`)",
    refused={"*": "is_grads_batched"},
    why="call `torch.autograd.grad` once for each, or use the plain model",
)
def batched_gradients(run: Run) -> None:
    model = run.compile(Mlp())
    y = model(run.randn(BATCH, 6)).mean(0)
    found = torch.autograd.grad(y, list(model.parameters()), torch.eye(4), is_grads_batched=True)
    for one in found:
        run.same("jacobian", one)


@SECTION(
    "a forward hook that centres features over the batch",
    refused={"*/shards": "pin", "*": "a forward hook mixes samples"},
    why="it would see the samples of one replica",
)
def centring_hook(run: Run) -> None:
    plain = Mlp()
    plain.body.register_forward_hook(lambda m, args, result: result - result.mean(0))
    model = run.compile(plain)
    steps(run, model, sgd(model))


def _centred(gradient: Any) -> Any:
    return None if gradient is None else gradient - gradient.mean(0)


@SECTION(
    "a backward hook that centres gradients over the batch",
    refused={"*/shards": "pin", "*/mixed": "pin", "*": "a backward hook mixes samples"},
    why="it would see the samples of one replica",
)
def centring_backward_hook(run: Run) -> None:
    plain = Mlp()
    plain.head.register_full_backward_hook(lambda _, given, __: tuple(map(_centred, given)))
    model = run.compile(plain)
    steps(run, model, sgd(model))


@SECTION("`vars()` of an object with `__slots__`")
def slots(run: Run) -> None:
    class Config:
        __slots__ = ("scale",)

        def __init__(self) -> None:
            self.scale = 2.0

    class Net(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.cfg = Config()

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x))) * self.cfg.scale

    plain = Net()
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(3):
        plain.cfg.scale = 1.0 + step
        steps(run, model, optimizer, 1)


@SECTION("modules and parameters called `code`, `graph`, `meta`")
def names_of_graphs(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.graph = nn.Linear(6, 8), nn.Linear(8, 8)
            self.meta = nn.Parameter(torch.ones(4))
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.graph(torch.tanh(self.code(x))))) * self.meta

    model = run.compile(Net())
    steps(run, model, sgd(model))
