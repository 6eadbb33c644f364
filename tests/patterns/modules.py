"""Patterns of torch's own modules and hooks: module hooks, weight and spectral norm, parametrizations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import parplan
from benchmarks.training import Run
from tests.patterns.nets import BATCH, Mlp, conv_net, sgd, steps, train
from tests.patterns.pattern import Section

SECTION = Section("Hooks and parametrizations")


@SECTION(
    "forward hooks and pre-hooks that change what goes through, added before and between steps", free=("body", "head")
)
def forward_hooks(run: Run) -> None:
    module = Mlp()
    module.body.register_forward_hook(lambda m, args, out: out * 2)
    model = run.compile(module)
    optimizer = sgd(model)
    steps(run, model, optimizer, 2)
    handle = model.head.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    steps(run, model, optimizer, 2)
    handle.remove()
    steps(run, model, optimizer, 1)


@SECTION("full backward hooks and pre-hooks of modules", free=("body", "head"))
def backward_hooks(run: Run) -> None:
    module = Mlp()
    module.body.register_full_backward_hook(lambda m, grads, outs: None)
    module.head.register_full_backward_hook(_halved)
    module.head.register_full_backward_pre_hook(_doubled)
    model = run.compile(module)
    steps(run, model, sgd(model))


@SECTION(
    "a full backward hook of a module that begins and ends on different devices",
    refused={"ranks/*": "module with backward hooks"},
    why="torch's hook needs both ends in one process; pin the module's layers to the same devices",
)
def backward_hook_apart(run: Run) -> None:
    module = Mlp()
    module.head.register_full_backward_hook(_halved)
    model = run.compile(module, pins=["head.pre_hooks=gpu:0", "head.hooks=gpu:1"])
    steps(run, model, sgd(model))


@SECTION("features kept by a forward hook that is marked for reading: `parplan.whole(hook)`", free=("body",))
def feature_hooks(run: Run) -> None:
    kept: dict[str, Tensor] = {}
    model = run.compile(Mlp())
    model.body.register_forward_hook(parplan.whole(lambda m, args, out: kept.update(features=out.detach())))
    optimizer = sgd(model)
    for _ in range(2):
        steps(run, model, optimizer, 1)
        run.rows("features", kept["features"])


@SECTION("hooks of the compiled model itself")
def outer_hooks(run: Run) -> None:
    model = run.compile(Mlp())
    model.register_forward_hook(lambda m, args, out: out * 2)
    model.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    steps(run, model, sgd(model))


@SECTION(
    "`torch.nn.utils.weight_norm` (old)",
    refused={
        "ranks/shards": "cannot be cut over processes",
        "ranks/mixed": "cannot be cut over processes",
    },
    why="it holds a weight computed before the first call; use `parametrizations.weight_norm`",
    free=("0",),
)
def old_weight_norm(run: Run) -> None:
    with_norm = nn.Sequential(_quiet(lambda: nn.utils.weight_norm(nn.Linear(6, 8))), nn.Tanh(), nn.Linear(8, 4))
    model = run.compile(with_norm)
    steps(run, model, sgd(model))


@SECTION("`torch.nn.utils.spectral_norm` (old), then evaluation", free=("0",))
def old_spectral_norm(run: Run) -> None:
    torch.manual_seed(2)
    model = run.compile(nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = sgd(model)
    steps(run, model, optimizer)
    model.eval()
    run.rows("scores", model(run.randn(BATCH, 6)))


@SECTION("`parametrizations.weight_norm`", free=("0",))
def weight_norm(run: Run) -> None:
    model = run.compile(nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 4)))
    steps(run, model, sgd(model))


@SECTION("`parametrizations.spectral_norm`, then evaluation", free=("0",))
def spectral_norm(run: Run) -> None:
    torch.manual_seed(2)
    net = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    model = run.compile(net)
    steps(run, model, sgd(model), shape=(3, 6, 6))
    model.eval()
    run.rows("scores", model(run.randn(BATCH, 3, 6, 6)))


@SECTION("a parametrization of the user's own (symmetric weights), and one added between steps", free=("0",))
def own_parametrization(run: Run) -> None:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).T

    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    nn.utils.parametrize.register_parametrization(net[0], "weight", Symmetric())
    model = run.compile(net)
    steps(run, model, sgd(model))


@SECTION(
    "pruning (`torch.nn.utils.prune`) between steps",
    refused={
        "ranks/shards": "cut over processes",
        "ranks/slices": "cut over processes",
        "ranks/*": "was no parameter of its own at the first call",
    },
    why="it replaces parameters that processes have been given; prune before `compile`",
)
def pruning(run: Run) -> None:
    from torch.nn.utils import prune

    model = run.compile(Mlp())
    steps(run, model, sgd(model), 2)
    prune.l1_unstructured(model.body, "weight", amount=0.3)
    steps(run, model, sgd(model), 2)


@SECTION("`torch.compile` around a compiled model")
def torch_compile(run: Run) -> None:
    model = run.compile(Mlp())
    outer: Any = torch.compile(model, backend="eager") if run.compiled else model
    train(run, model, sgd(model), lambda: outer(run.randn(BATCH, 6)).square().mean())


@SECTION("`torch.compile` of a layer inside the model")
def torch_compile_inside(run: Run) -> None:
    module = Mlp()
    if run.compiled:
        module.body.compile(backend="eager")
    model = run.compile(module)
    steps(run, model, sgd(model))


@SECTION("modules converted between steps: `model.to(dtype)`, `requires_grad_()`, `share_memory()`")
def converted(run: Run) -> None:
    model = run.compile(conv_net())
    optimizer = sgd(model)
    steps(run, model, optimizer, 1, shape=(3, 6, 6))
    model.to(torch.get_default_dtype())
    model.requires_grad_(True)
    steps(run, model, optimizer, 2, shape=(3, 6, 6))


def _halved(module: nn.Module, grads: Any, outs: Any) -> Any:
    return (grads[0] * 0.5,)


def _doubled(module: nn.Module, outs: Any) -> Any:
    return (outs[0] * 2,)


def _quiet(make: Any) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


@SECTION(
    "a switch (`model.observed = False`) after which another layer reads a weight that one device holds",
    free=("body",),
)
def observed_weight(run: Run) -> None:
    class Net(nn.Module):
        low: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.observed = nn.Linear(6, 8), nn.Linear(8, 4), True
            self.register_buffer("low", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            if self.observed:
                with torch.no_grad():
                    self.low.lerp_(self.body.weight.amin(), 0.1)
            return self.head(torch.tanh(F.linear(x, self.body.weight - self.low, self.body.bias)))

    model = run.compile(Net())
    optimizer = sgd(model)
    for model.observed in (True, False):
        steps(run, model, optimizer, 2)
