"""`train_step`: updates between passes, against a plain loop that updates at the same moments.

The layers in front are updated at the end of a step and keep samples apart, so the plain loop may run the whole model
on each pass's samples.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.errors import PlanError, RuntimeFailure
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import split_evenly
from parplan.plan import Plan, Scheme, Strategy
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import random_passes
from tests.runtime.nets import RandomNet

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
}


@dataclass(frozen=True)
class Case:
    """A plan with passes."""

    graph: LayerGraph
    plan: Plan

    @property
    def most(self) -> int:
        return max(self.plan.layers[n].replicas for n, layer in self.graph.layers.items() if layer.batch is not None)

    @property
    def passes(self) -> int:
        counts = [self.plan.layers[n].replicas for n, layer in self.graph.layers.items() if layer.batch is not None]
        return self.most // min(counts)

    def samples(self, batch: int) -> list[Tensor]:
        """Per pass, the indices of its samples."""
        own = torch.arange(batch).split(split_evenly(batch, self.most))
        if self.plan.scheme is Scheme.BROADCAST:
            return [torch.cat(own[number :: self.passes]) for number in range(self.passes)]
        return [
            torch.cat([one.split(split_evenly(len(one), self.passes))[number] for one in own])
            for number in range(self.passes)
        ]

    def periods(self) -> dict[str, int]:
        """Passes between updates of the parameters behind, by dotted name."""
        layers = self.graph.layers
        narrow = {n for n in layers if layers[n].batch is not None and self.plan.layers[n].replicas < self.most}
        behind = narrow.union(*(nx.descendants(self.graph.digraph, name) for name in narrow))
        return {
            self.graph.parameters[p]: self.plan.layers[name].update_period or self.passes
            for name in behind
            for p in layers[name].parameters
        }


def plain_step(
    case: Case,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss_fn: Callable[..., Tensor],
    opt: torch.optim.Optimizer,
    samples: list[Tensor] | None = None,
) -> float:
    """The reference: one plain model, updated at the plan's moments; `samples` are the passes', if not those of even
    replicas."""
    opt.zero_grad()
    samples = case.samples(len(x)) if samples is None else samples
    total, shares, periods = 0.0, [len(own) / len(x) for own in samples], case.periods()
    known = dict(model.named_parameters())
    for number, own in enumerate(samples):
        if len(own):
            loss = loss_fn(model(x[own]), y[own]) * shares[number]
            loss.backward()
            total += float(loss.detach())
        ending = {n: k for n, k in periods.items() if k < case.passes and (number + 1) % k == 0}
        scales = {n: sum(shares[number + 1 - k : number + 1]) for n, k in ending.items()}
        step_alone(known, {n: 1 / share for n, share in scales.items() if share}, opt)
    step_alone(known, {n: 1.0 for n in known if periods.get(n, case.passes) == case.passes}, opt)
    return total


def step_alone(known: Mapping[str, nn.Parameter], scales: Mapping[str, float], opt: torch.optim.Optimizer) -> None:
    kept = {name: parameter.grad for name, parameter in known.items() if name not in scales}
    for name, parameter in known.items():
        if name not in scales:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad *= scales[name]
    opt.step()
    for name, parameter in known.items():
        parameter.grad = kept.get(name)


def small() -> nn.Sequential:
    torch.manual_seed(3)
    front = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*front, nn.Linear(128, 12), nn.ReLU(), nn.Linear(12, 8)).double()


def hybrid(devices: int, scheme: Scheme, periods: Mapping[str, int], fewest: int = 1) -> Case:
    """Convolution in replicas, what is behind in `fewest` replicas of shards."""
    graph = capture(small(), (torch.zeros(8, 3, 8, 8, dtype=torch.float64),))
    everyone = tuple(range(devices))
    layers = {}
    for name in graph.layers:
        shards = devices // fewest
        axis = {"4": "out-features", "5": "features", "6": "in-features"}.get(name)
        narrow = Strategy(fewest, shards, axis, everyone) if shards > 1 else Strategy(fewest, devices=everyone[:fewest])
        layers[name] = narrow if axis else Strategy(devices, 1, None, everyone)
        layers[name] = replace(layers[name], update_period=periods.get(name))
    return Case(graph, Plan(graph.model, graph.fingerprint, 8, devices, layers, scheme=scheme))


def trained_alike(case: Case, net: nn.Module, batches: list[int], shape: tuple[int, ...], optimizer: str) -> None:
    """Several steps of both; losses and parameters must agree."""
    other, plain = copy.deepcopy(net), copy.deepcopy(net)
    model = Compiled(other, lambda _: case.plan, devices=["cpu"] * case.plan.devices)
    opts = [OPTIMIZERS[optimizer](m) for m in (model, plain)]
    for batch in batches:
        x = torch.randn(batch, *shape, dtype=torch.float64)
        y = torch.randn_like(net(x).detach())
        loss = model.train_step(x, y, functional.mse_loss, opts[0])
        wanted = plain_step(case, plain, x, y, functional.mse_loss, opts[1])
        assert float(loss) == pytest.approx(wanted, rel=1e-9)
        same_parameters(model.module, plain)


def same_parameters(found: nn.Module, wanted: nn.Module) -> None:
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), parameter, rtol=1e-9, atol=1e-9)


PERIODS = [{}, {"4": 1, "6": 1}, {"4": 2, "6": 2}, {"4": 1, "6": 2}, {"4": 4, "6": 1}, {"6": 2}]


@pytest.mark.full
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("periods", PERIODS, ids=str)
@pytest.mark.parametrize("scheme", [Scheme.BROADCAST, Scheme.INTERLEAVE], ids=lambda scheme: scheme.value)
def test_every_legal_period_updates_as_the_plain_loop(scheme: Scheme, periods: dict[str, int], optimizer: str) -> None:
    trained_alike(hybrid(4, scheme, periods), small(), [8, 8, 6], (3, 8, 8), optimizer)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", [Scheme.BROADCAST, Scheme.INTERLEAVE], ids=lambda scheme: scheme.value)
def test_two_replicas_behind_four(scheme: Scheme) -> None:
    trained_alike(hybrid(4, scheme, {"4": 1, "6": 1}, fewest=2), small(), [8, 8], (3, 8, 8), "momentum")


@pytest.mark.full
def test_one_update_is_the_usual_loop() -> None:
    """Whatever the loss: a sum is no mean over passes, and need not be."""
    case, net = hybrid(2, Scheme.INTERLEAVE, {}), small()
    plain = copy.deepcopy(net)
    model = Compiled(net, lambda _: case.plan, devices=["cpu"] * 2)
    opts = [OPTIMIZERS["momentum"](m) for m in (model, plain)]
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    loss = model.train_step(x, y, lambda out, target: ((out - target) ** 4).sum(), opts[0])
    wanted = ((plain(x) - y) ** 4).sum()
    wanted.backward()
    opts[1].step()
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-9)
    same_parameters(model.module, plain)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(16))
def test_random_nets_and_periods(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net = RandomNet(draw)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    graph = capture(net, (torch.zeros(12, 3, 8, 8, dtype=torch.float64),))
    if len(graph.user_outputs) > 1 or net(torch.zeros(2, 3, 8, 8, dtype=torch.float64)).dim() < 2:
        pytest.skip("results without samples")
    devices = draw.choice((2, 3, 4))
    scheme = draw.choice((Scheme.BROADCAST, Scheme.INTERLEAVE))
    plan = Plan(graph.model, graph.fingerprint, 12, devices, random_passes(graph, devices, draw), scheme=scheme)
    passes = Case(graph, plan).passes
    legal = [None, *(k for k in range(1, passes + 1) if passes % k == 0)]
    layers = {name: replace(s, update_period=draw.choice(legal)) for name, s in plan.layers.items()}
    case = Case(graph, replace(plan, layers=layers))
    trained_alike(case, net, [12, 5], (3, 8, 8), draw.choice(list(OPTIMIZERS)))


class WithLoss(nn.Module):
    """Its result needs all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.net(x), y)


@pytest.mark.full
def test_a_loss_inside_the_model_cannot_be_taken_pass_by_pass() -> None:
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    net = WithLoss()
    graph = capture(net, (x, y))
    one = hybrid(2, Scheme.BROADCAST, {"4": 1})
    layers = {name: one.plan.layers.get(name.removeprefix("net."), Strategy()) for name in graph.layers}
    plan = Plan(graph.model, graph.fingerprint, 8, 2, layers, scheme=Scheme.BROADCAST)
    model = Compiled(net, lambda _: plan, devices=["cpu"] * 2)
    with pytest.raises(PlanError, match="loss inside the model"):
        model.train_step((x, y), None, lambda out, _: out, OPTIMIZERS["adam"](model))


def test_train_step_trains() -> None:
    case = hybrid(2, Scheme.BROADCAST, {})
    model = Compiled(small(), lambda _: case.plan, devices=["cpu"] * 2).eval()
    with pytest.raises(RuntimeFailure, match="evaluation mode"):
        model.train_step(torch.zeros(8, 3, 8, 8), torch.zeros(8, 8), functional.mse_loss, OPTIMIZERS["adam"](model))


def own_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["adam"](model)


UNTRAINABLE: dict[str, tuple[Callable[[nn.Module], object], object, str]] = {
    "no optimizer": (lambda _: None, functional.mse_loss, "None is no optimizer"),
    "its name": (lambda _: "sgd", functional.mse_loss, "'sgd' is no optimizer"),
    "of another model": (lambda _: own_optimizer(small()), functional.mse_loss, "none of this model's parameters"),
    "no loss": (own_optimizer, "ce", "'ce' is no loss"),
    "a loss that is a float": (own_optimizer, lambda out, target: 1.0, "loss_fn gave 1.0"),
    "a loss per sample": (own_optimizer, lambda out, target: out.mean(1), r"loss_fn gave a tensor of shape \("),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("periods", [{}, {"4": 1}], ids=str)
@pytest.mark.parametrize("name", UNTRAINABLE)
def test_what_cannot_train_is_refused(name: str, periods: dict[str, int]) -> None:
    make, loss_fn, text = UNTRAINABLE[name]
    case = hybrid(2, Scheme.BROADCAST, periods)
    model = Compiled(small(), lambda _: case.plan, devices=["cpu"] * 2)
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    with pytest.raises(RuntimeFailure, match=text):
        model.train_step(x, y, loss_fn, make(model))  # type: ignore[arg-type]


@pytest.mark.full
def test_a_loss_that_takes_the_models_parameters_is_refused_where_passes_are_updated_apart() -> None:
    """A penalty on weights would be counted for some updates and not for others."""
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)

    def penalised(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda out, target: functional.mse_loss(out, target) + model.get_parameter("6.weight").square().sum()

    whole, net = hybrid(2, Scheme.BROADCAST, {}), small()
    plain = copy.deepcopy(net)
    model = Compiled(net, lambda _: whole.plan, devices=["cpu"] * 2)
    opts = [OPTIMIZERS["momentum"](m) for m in (model, plain)]
    model.train_step(x, y, penalised(model), opts[0])
    penalised(plain)(plain(x), y).backward()
    opts[1].step()
    same_parameters(model.module, plain)
    early = Compiled(net, lambda _: hybrid(2, Scheme.BROADCAST, {"4": 1}).plan, devices=["cpu"] * 2)
    with pytest.raises(RuntimeFailure, match=r"the gradient of 6\.weight itself.*weight_decay"):
        early.train_step(x, y, penalised(early), opts[0])
    early.train_step(x, y, functional.mse_loss, opts[0])


def test_hooks_on_whole_batches_are_refused_where_passes_are_updated_apart() -> None:
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    model = Compiled(small(), lambda _: hybrid(2, Scheme.BROADCAST, {"4": 1}).plan, devices=["cpu"] * 2)
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeFailure, match=r"put them on model\.module"):
        model.train_step(x, y, functional.mse_loss, OPTIMIZERS["momentum"](model))
    handle.remove()
    model.train_step(x, y, functional.mse_loss, OPTIMIZERS["momentum"](model))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_refused_where_passes_are_updated_apart(register: str) -> None:
    """They would never be called: what they clip, scale or record would be lost."""
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    model = Compiled(small(), lambda _: hybrid(2, Scheme.BROADCAST, {"4": 1}).plan, devices=["cpu"] * 2)
    handle = getattr(next(model.parameters()), register)(lambda gradient: None)
    with pytest.raises(RuntimeFailure, match=r"0\.weight has a gradient hook"):
        model.train_step(x, y, functional.mse_loss, OPTIMIZERS["momentum"](model))
    handle.remove()
    model.train_step(x, y, functional.mse_loss, OPTIMIZERS["momentum"](model))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("threads", [False, True])
def test_a_step_that_was_broken_off_leaves_nothing_behind(threads: bool) -> None:
    case, net = hybrid(2, Scheme.INTERLEAVE, {"4": 1, "6": 1}), small()
    plain, model = copy.deepcopy(net), Compiled(net, lambda _: case.plan, devices=["cpu"] * 2, threads=threads)
    opts = [OPTIMIZERS["momentum"](m) for m in (model, plain)]
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)

    def stopped(out: Tensor, target: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.train_step(x, y, stopped, opts[0])
    loss = model.train_step(x, y, functional.mse_loss, opts[0])
    assert float(loss) == pytest.approx(plain_step(case, plain, x, y, functional.mse_loss, opts[1]), rel=1e-9)
    same_parameters(model.module, plain)


class Stops(torch.optim.SGD):
    """An optimizer whose second step fails."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 2:
            raise ZeroDivisionError
        return super().step(closure)


def test_gradients_of_a_learned_loss_outlive_an_optimizer_that_fails() -> None:
    case, net = hybrid(2, Scheme.BROADCAST, {"4": 1, "6": 1}), small()
    model = Compiled(net, lambda _: case.plan, devices=["cpu"] * 2)
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    optimizer = Stops([*model.parameters(), scale], lr=0.1)
    with pytest.raises(ZeroDivisionError):
        model.train_step(x, y, lambda out, target: scale * functional.mse_loss(out, target), optimizer)
    assert scale.grad is not None


def test_a_period_that_does_not_divide_the_passes_is_refused() -> None:
    case = hybrid(4, Scheme.BROADCAST, {"4": 3})
    model = Compiled(small(), lambda _: case.plan, devices=["cpu"] * 4)
    x = torch.zeros(8, 3, 8, 8, dtype=torch.float64)
    with pytest.raises(PlanError, match=r"update period of 3 does not divide 4 passes \(R8\)"):
        model.train_step(x, torch.zeros(8, 8), functional.mse_loss, OPTIMIZERS["adam"](model))


def test_a_learned_loss_is_updated_once_at_the_end() -> None:
    case, net = hybrid(2, Scheme.BROADCAST, {"4": 1, "6": 1}), small()
    model = Compiled(net, lambda _: case.plan, devices=["cpu"] * 2)
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    seen: list[float] = []

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        seen.append(float(scale.detach()))
        return scale * functional.mse_loss(out, target)

    loss = model.train_step(x, y, loss_fn, optimizer)
    assert seen == [1.0, 1.0]
    assert float(scale.detach()) == pytest.approx(1 - 0.1 * float(loss))
