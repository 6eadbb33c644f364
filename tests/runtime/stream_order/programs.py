"""Programs that use parplan as training code does, on the devices of a `Machine`, beside the plain model's numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from parplan.graph.layer_graph import LayerGraph
from parplan.runtime.module import functional
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.module.data_parallel import data_parallel
from parplan.runtime.programs import captures
from parplan.runtime.self_check.check import SelfCheck
from tests.runtime.stream_order.fakes import installed
from tests.runtime.stream_order.machine import Edge, Machine
from tests.runtime.stream_order.training import DATA, TRAININGS, A, B, join, mlp

__all__ = ["PROGRAMS", "plain", "run"]

_CAPTURED: dict[tuple[str, int], LayerGraph] = {}  # graphs are captured once, however often a program runs


def streams_in_turn(machine: Machine | None) -> list[Tensor]:
    """Calls from two streams that have nothing to do with each other."""
    torch.manual_seed(1)
    module = mlp().double()
    inputs = [torch.randn(8, 6, dtype=torch.float64) for _ in range(3)]
    model: nn.Module = module
    own: list[torch.cuda.Stream] = []
    streams: list[Any] = [nullcontext()] * 3
    if machine is not None:
        model = Compiled(module.to(A), DATA, devices=[A, B], check="off")
        inputs, own = [x.to(A) for x in inputs], [torch.cuda.Stream(0) for _ in inputs]
        streams = [torch.cuda.stream(stream) for stream in own]
        for stream in own:
            stream.wait_stream(torch.cuda.current_stream(0))
    found = []
    for x, stream in zip(inputs, streams, strict=True):
        with stream:
            found.append(model(x).detach().square().sum())
    join(own)
    return [torch.tensor([total.item() for total in found])]


def streams_one_after_another(machine: Machine | None) -> list[Tensor]:
    """A stream that goes on where another one has ended, with copies of the weights that were made for that one."""
    torch.manual_seed(1)
    module = mlp().double()
    model: nn.Module = module
    x = torch.randn(8, 6, dtype=torch.float64)
    streams: list[Any] = [nullcontext()] * 2
    if machine is not None:
        model, x = Compiled(module.to(B), DATA, devices=[A, B], check="off"), x.to(A)
        own = [torch.cuda.Stream(0) for _ in streams]
        own[0].wait_stream(torch.cuda.current_stream(0))
        streams = [torch.cuda.stream(stream) for stream in own]
    with torch.no_grad():
        with streams[0]:
            model(x)
        if machine is not None:
            own[1].wait_stream(own[0])
        with streams[1]:
            model(x)
            for parameter in module.parameters():
                parameter.mul_(0.5)
            y = model(x)
            return [y.cpu()]


def refilled_inputs(machine: Machine | None) -> list[Tensor]:
    """Pinned memory that the next batch is written to as soon as a call has returned."""
    torch.manual_seed(1)
    module, x = mlp().double(), torch.randn(8, 6, dtype=torch.float64)
    model: nn.Module = module
    if machine is not None:
        model = Compiled(module.to(A), DATA, devices=["cpu", A], output_device=A, check="off")
        x = x.pin_memory()
    found = []
    with torch.no_grad():
        for _ in range(2):
            found.append(model(x))
            x.mul_(2)
    return [y.cpu() for y in found]


def data_parallel_in_one_call(machine: Machine | None) -> list[Tensor]:
    torch.manual_seed(1)
    module, x = mlp().double(), torch.randn(8, 6, dtype=torch.float64)
    with mock.patch.object(SelfCheck, "wants", return_value=False):
        y = module(x) if machine is None else data_parallel(module.to(A), x.to(A), device_ids=[0, 1])
    y.square().sum().backward()
    return [p.grad.cpu() for p in module.parameters() if p.grad is not None]


def by_hand(machine: Machine | None) -> list[Tensor]:
    """A small parallel program of scatter, broadcast, parallel apply, gather and reduce."""
    torch.manual_seed(1)
    x, w = torch.randn(8, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    if machine is None:
        x, w = x.requires_grad_(), w.requires_grad_()
        (x @ w).tanh().square().sum().backward()
        (w.square().sum() * 2).backward()
    else:
        x, w = x.to(A).requires_grad_(), w.to(A).requires_grad_()
        xs, ws = functional.scatter(x * 1, [A, B]), functional.broadcast(w, [A, B])
        ys = functional.parallel_apply([torch.matmul] * 2, list(zip(xs, ws, strict=True)))
        whole = functional.gather([y.tanh() for y in ys], A)
        total = functional.reduce([w.square().sum() for w in ws], B)
        (whole.square().sum() + total.to(A)).backward()
    assert x.grad is not None
    assert w.grad is not None
    return [x.grad.cpu(), w.grad.cpu()]


@dataclass(frozen=True)
class Program:
    """A program, and whether the devices reach each other's memory."""

    run: Callable[[Machine | None], list[Tensor]]
    peers: bool = True
    exact: bool = True


PROGRAMS: dict[str, Program] = {name: Program(t.run, t.peers, t.exact) for name, t in TRAININGS.items()}
PROGRAMS |= {
    "streams in turn": Program(streams_in_turn),
    "streams one after another": Program(streams_one_after_another),
    "refilled inputs": Program(refilled_inputs),
    "data_parallel": Program(data_parallel_in_one_call),
    "by hand": Program(by_hand),
}


@cache
def plain(name: str) -> list[Tensor]:
    """What the plain model leaves."""
    return PROGRAMS[name].run(None)


@dataclass(frozen=True)
class Outcome:
    """What a program leaves, and what was seen of it."""

    left: list[Tensor]
    races: tuple[str, ...]
    edges: tuple[Edge, ...]
    astray: tuple[str, ...]


@cache
def run(name: str, muted: Edge | None = None) -> Outcome:
    """A program on a machine of its own."""
    machine = Machine(2, PROGRAMS[name].peers, muted)
    gc.collect()
    gc.freeze()  # so that the collection at the end looks at what the program made, and not at all earlier tests
    gc.disable()  # memory in reference cycles is freed at the end, not at random
    try:
        with installed(machine), _captured_once(machine, name):
            found = PROGRAMS[name].run(machine)
            gc.collect()
            machine.sweep()
    finally:
        gc.enable()
    return Outcome(found, tuple(str(race) for race in machine.order.races), tuple(machine.edges), tuple(machine.astray))


@contextmanager
def _captured_once(machine: Machine, name: str) -> Iterator[None]:
    """While a model is captured nothing is recorded."""
    calls = iter(range(100))

    def capture(*args: Any, **kwargs: Any) -> LayerGraph:
        key = (name, next(calls))
        with machine.paused():
            if key not in _CAPTURED:
                _CAPTURED[key] = original(*args, **kwargs)
            return _CAPTURED[key]

    original = vars(captures)["capture"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captures, "capture", capture)
        yield
