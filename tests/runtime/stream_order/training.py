"""Training loops as users write them, on recorded devices or, as the reference, on the plain model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.plan import Plan, Scheme, Strategy
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.programs.captures import Planner
from tests.runtime.helpers import planner, spread, spread_all
from tests.runtime.nets import Towers
from tests.runtime.replay_cases import replaying
from tests.runtime.slice_cases import sharded
from tests.runtime.stream_order.machine import Machine

__all__ = ["DATA", "TRAININGS", "A", "B", "join", "mlp"]

A, B = "cuda:0", "cuda:1"
TWO, FOUR = (A, B), (A, B, A, B)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


class NormedTwice(nn.Module):
    """One batch norm that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.b(self.norm(self.a(x))))
        return y


class NormedBeside(nn.Module):
    """One batch norm in two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 4), nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        y: Tensor = self.norm(a) + self.norm(b)
        return y


class Written(nn.Module):
    """Buffers that a forward writes at its start and at its end, and one that it only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("largest", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("seen").copy_(x.detach().amax(0))
        y: Tensor = self.linear(x) * self.get_buffer("scale")
        self.get_buffer("largest").copy_(y.detach().amax(0))
        return y


class Narrow(nn.Module):
    """Layers that convert their weights to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.last):
            x = torch.tanh(x.bfloat16() @ layer.weight.bfloat16().t()) + layer.bias
        return x


class LossInside(nn.Module):
    """A net that gives its loss where it is given targets: a mean over samples, or over targets that are counted."""

    def __init__(self, counted: bool = False) -> None:
        super().__init__()
        self.net, self.counted = mlp(), counted

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        found: Tensor = self.net(x)
        if y is None:
            return found
        return torch.nn.functional.cross_entropy(found, y.argmax(1)) if self.counted else mean_square(found, y)


@dataclass(frozen=True)
class Training:
    """Two steps of a training loop and an evaluation.

    Args:
        plan: of the model, on logical devices at `devices`.
        net: makes the model.
        home: where the model's tensors are.
        inputs: where the batches are; `pinned` if they are in pinned memory that is filled anew after each call.
        targets: where results are wanted.
        options: of `Compiled`.
        streams: the caller works on streams of its own on these devices, else on the default streams.
        step: what one step does.
        exact: the plain model gives the same numbers.
        peers: the devices reach each other's memory.
        batch: samples of a step.
        fused: the optimizer is fused, which torch does not count as writes.
    """

    plan: Planner
    devices: Sequence[str] = TWO
    net: Callable[[], nn.Module] = mlp
    home: str = A
    inputs: str = A
    pinned: bool = False
    targets: str = A
    options: Mapping[str, Any] = field(default_factory=dict)
    streams: tuple[int, ...] = ()
    step: Callable[..., Tensor] = lambda *given: usual(*given)
    exact: bool = True
    peers: bool = True
    batch: int = 8
    fused: bool = False

    def run(self, machine: Machine | None) -> list[Tensor]:
        """What is left: losses and the model's state; without a machine, the plain model's."""
        torch.manual_seed(1)
        module = self.net().double()
        sizes = (self.batch, 6), (self.batch, 4)
        batches = [tuple(torch.randn(size, dtype=torch.float64) for size in sizes) for _ in range(2)]
        model = module
        with ExitStack() as stack:
            if machine is not None:
                module.to(self.home)
                model = Compiled(module, self.plan, devices=list(self.devices), check="off", **self.options)
                own = [torch.cuda.Stream(index) for index in self.streams]
                for stream in own:
                    stream.wait_stream(torch.cuda.default_stream(stream.device))
                    stack.enter_context(torch.cuda.stream(stream))
                stack.callback(join, own)
                batches = [
                    (x.pin_memory() if self.pinned else x.to(self.inputs), y.to(self.targets)) for x, y in batches
                ]
            losses = self._train(model, batches)
        with torch.no_grad():
            return [*(loss.cpu().clone() for loss in losses), *(v.cpu().clone() for v in module.state_dict().values())]

    def _train(self, model: nn.Module, batches: list[tuple[Tensor, ...]]) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=self.fused)
        losses = []
        while batches:
            x, y = batches.pop(0)
            seen = x.clone() if self.pinned else x
            losses.append(self.step(model, x, y, optimizer))
            if self.pinned:
                x.zero_()
        model.eval()
        with torch.no_grad():
            losses.append(mean_square(model(seen), y))
        return losses


def join(streams: Sequence[torch.cuda.Stream]) -> None:
    for stream in streams:
        torch.cuda.default_stream(stream.device).wait_stream(stream)


def mean_square(y: Tensor, wanted: Tensor) -> Tensor:
    return (y - wanted).square().mean()


def usual(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = mean_square(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def dropped(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """The graph alone holds the inputs, and nobody the gradients once they are used."""
    loss = mean_square(model(x * 2), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def twice(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Two backwards through one graph, with gradients of the inputs, accumulated."""
    x.requires_grad_()
    loss = mean_square(model(x * 2), y)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert x.grad is not None
    return loss.detach() + x.grad.sum().to(loss.device)


def two_calls(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Two graphs are alive at once."""
    optimizer.zero_grad()
    loss = mean_square(model(x * 2), y) + mean_square(model(x * 3), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def recomputed(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """The forward runs again within the backward."""
    optimizer.zero_grad()
    found: Tensor = checkpoint(model, (x * 2).requires_grad_(), use_reentrant=False, determinism_check="none")
    loss = mean_square(found, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def forward_beside(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """The forward on a stream of its own, the rest on the default stream."""
    optimizer.zero_grad()
    own = [torch.cuda.Stream(0)] if isinstance(model, Compiled) else []
    with ExitStack() as stack:
        for stream in own:
            stream.wait_stream(torch.cuda.current_stream(0))
            stack.enter_context(torch.cuda.stream(stream))
        found = model(x)
    join(own)
    loss = mean_square(found, y)
    loss.backward()
    optimizer.step()
    for stream in own:
        found.record_stream(torch.cuda.current_stream(0))
        stream.wait_stream(torch.cuda.current_stream(0))
    return loss.detach()


def inside(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """The model makes the loss."""
    loss: Tensor = model(x * 2, y * 1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def staged(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    assert isinstance(model, Compiled)
    return model.train_step(x * 2, y, mean_square, optimizer)


def passes(scheme: Scheme, devices: int, period: int | None = None) -> Planner:
    """Replicas in front, shards of the last two linear layers behind."""

    def plan(graph: LayerGraph) -> Plan:
        everyone, linear = tuple(range(devices)), [n for n, layer in graph.layers.items() if layer.kind == "linear"]

        def strategy(layer: Layer, name: str) -> Strategy:
            if name in linear[1:]:
                return Strategy(1, devices, "out-features", everyone, update_period=period)
            return Strategy(devices, 1, None, everyone)

        chosen = {name: strategy(layer, name) for name, layer in graph.layers.items()}
        behind = False
        for name in graph.layers:
            behind = behind or name == linear[1]
            if behind and name not in linear:
                chosen[name] = Strategy(1, 1, None, (0,))
        return Plan(graph.model, graph.fingerprint, graph.batch or 1, devices, chosen, scheme=scheme)

    return plan


def towers(graph: LayerGraph) -> Plan:
    chosen = {name: Strategy(1, 1, None, (1 if "b" in name else 0,)) for name in graph.layers}
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, 2, chosen)


def halves(graph: LayerGraph) -> Plan:
    """The first layers on one device, the others on another one."""
    names = list(graph.layers)
    chosen = {name: Strategy(1, 1, None, (1 if number >= 2 else 0,)) for number, name in enumerate(names)}
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, 2, chosen)


def in_micro_batches(plan: Planner, schedule: str) -> Planner:
    """Four of them where the model is trained."""

    def several(graph: LayerGraph) -> Plan:
        return replace(plan(graph), micro_batches=4, schedule=schedule) if graph.training else plan(graph)

    return several


def by_branch(graph: LayerGraph) -> Plan:
    chosen = {name: Strategy(1, 1, None, (1 if name in ("b", "norm@1") else 0,)) for name in graph.layers}
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, 2, chosen)


DATA = planner(spread(2, "data"), 2)

TRAININGS: dict[str, Training] = {
    "replicas": Training(DATA),
    "replicas, what is not needed dropped": Training(DATA, step=dropped),
    "replicas, the caller on streams": Training(DATA, streams=(0, 1), step=dropped),
    "replicas, a model beside the caller": Training(DATA, streams=(0, 1), home=B, step=dropped),
    "replicas, gradients beside the results": Training(
        DATA, (B, A), home=B, streams=(0, 1), options={"output_device": A}, step=dropped
    ),
    "a fused optimizer": Training(DATA, fused=True),
    "a device without samples": Training(planner(spread(4, "data"), 4), FOUR, batch=3, step=twice),
    "two devices on one": Training(DATA, (A, A), step=dropped),
    "four devices on two": Training(planner(spread(4, "data"), 4), FOUR, step=twice),
    "shards of out-features": Training(planner(spread(2, "out-features"), 2), step=twice),
    "shards of in-features": Training(planner(spread(2, "in-features"), 2), step=dropped),
    "shards on one": Training(planner(spread(2, "out-features"), 2), (A, A), step=dropped),
    "gather": Training(passes(Scheme.GATHER, 2), step=dropped),
    "broadcast": Training(passes(Scheme.BROADCAST, 2), step=twice),
    "interleave on one": Training(passes(Scheme.INTERLEAVE, 2), (A, A), step=dropped),
    "interleave, four on two": Training(passes(Scheme.INTERLEAVE, 4), FOUR, step=dropped),
    "towers": Training(towers, net=Towers, step=twice),
    "results elsewhere": Training(DATA, targets=B, options={"output_device": B}, step=twice),
    "results on the CPU": Training(DATA, targets="cpu", options={"output_device": "cpu"}, step=twice),
    "inputs on the CPU": Training(DATA, home="cpu", inputs="cpu"),
    "a CPU between": Training(planner(spread(3, "data"), 3), (A, "cpu", B), step=dropped),
    "pinned inputs": Training(DATA, pinned=True),
    "no peers": Training(DATA, step=dropped, peers=False),
    "global statistics": Training(DATA, net=normed, home="cpu", step=dropped),
    "local statistics": Training(DATA, net=normed, options={"batch_norm": "local"}, exact=False, step=dropped),
    "local statistics on one": Training(
        DATA, (A, A), net=normed, options={"batch_norm": "local"}, exact=False, step=dropped
    ),
    "local statistics, copies": Training(
        DATA, net=normed, home=B, options={"batch_norm": "local"}, exact=False, step=dropped
    ),
    "two calls": Training(DATA, net=normed, home=B, step=two_calls),
    "recomputed": Training(DATA, step=recomputed),
    "recomputed on streams": Training(
        DATA, (B, A), home=B, streams=(0, 1), options={"output_device": A}, step=recomputed
    ),
    "the forward on a stream": Training(DATA, step=forward_beside),
    "one norm on two devices": Training(halves, net=NormedTwice, step=dropped),
    "one norm on two devices, copies": Training(
        halves, (B, A), net=NormedTwice, options={"output_device": A}, step=dropped
    ),
    "one norm beside itself": Training(by_branch, (A, A), net=NormedBeside, step=dropped),
    "one norm on two logical devices": Training(halves, (A, A), net=NormedTwice, step=dropped),
    "a written buffer": Training(DATA, net=Written, home=B),
    "redundant": Training(planner(spread_all(2), 2), net=Written, step=dropped),
    "micro-batches": Training(in_micro_batches(DATA, "serial"), net=LossInside, step=inside),
    "micro-batches, the loss outside": Training(
        in_micro_batches(DATA, "serial"),
        (B, A),
        home=B,
        streams=(0, 1),
        options={"output_device": A},
        exact=False,
        step=staged,
    ),
    "stages": Training(in_micro_batches(halves, "1f1b"), net=LossInside, step=inside),
    "stages, a mean over targets": Training(
        in_micro_batches(halves, "1f1b"), net=partial(LossInside, counted=True), step=inside
    ),
    "stages on one": Training(in_micro_batches(halves, "1f1b"), (A, A), net=LossInside, step=inside),
    "stages, copies": Training(
        in_micro_batches(halves, "gpipe"),
        (B, A),
        net=LossInside,
        home=B,
        streams=(0, 1),
        options={"output_device": A},
        step=inside,
    ),
    "forward again": Training(replaying(spread(2, "data"), 2), step=dropped),
    "forward again, copies": Training(
        replaying(spread(2, "out-features"), 2),
        (B, A),
        home=B,
        streams=(0, 1),
        options={"output_device": A},
        step=two_calls,
    ),
    "forward again, what is gathered": Training(
        replaying(sharded(spread(2, "data"), "gathered"), 2), streams=(0, 1), step=twice
    ),
    "gathered state": Training(planner(sharded(spread(2, "data"), "gathered"), 2), step=twice),
    "sharded state, copies": Training(
        planner(sharded(spread(2, "data")), 2),
        (B, A),
        home=B,
        streams=(0, 1),
        options={"output_device": A},
        step=two_calls,
    ),
    "weights converted before they are gathered": Training(
        planner(sharded(spread(2, "data"), "gathered"), 2), net=Narrow, exact=False, step=twice
    ),
    "forward again, recomputed": Training(replaying(lambda layer: Strategy(), 1), step=recomputed),
    "forward again, threads": Training(
        replaying(spread(4, "data"), 4), FOUR, options={"threads": True}, streams=(0, 1), step=dropped
    ),
    "threads": Training(DATA, options={"threads": True}, step=dropped),
    "threads on streams": Training(DATA, (A, A), options={"threads": True}, streams=(0, 1), step=twice),
    "updates between passes": Training(passes(Scheme.INTERLEAVE, 2, 1), step=staged, exact=False),
    "updates between passes, copies": Training(
        passes(Scheme.BROADCAST, 2, 1), (A, A), home=B, step=staged, exact=False, options={"threads": True}
    ),
}
