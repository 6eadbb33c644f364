"""The recorded devices behave as torch documents for CUDA: signatures, streams, copies, host reads, backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from parplan.runtime import dispatch
from tests.runtime.stream_order.fakes import (
    FakeEvent,
    FakeStream,
    accelerator_functions,
    fake_functions,
    installed,
)
from tests.runtime.stream_order.machine import Machine

A, B = "cuda:0", "cuda:1"


@pytest.fixture
def machine() -> Iterator[Machine]:
    found = Machine()
    with installed(found):
        yield found


def races(machine: Machine) -> int:
    machine.sweep()
    return len(machine.order.races)


def parameters(function: Callable[..., Any]) -> list[tuple[str, object, object]]:
    found = list(inspect.signature(function).parameters.values())
    return [(p.name, p.kind, p.default) for p in found if p.name not in ("self", "cls")]


@pytest.mark.parametrize(("fake", "real"), [(FakeStream, torch.cuda.Stream), (FakeEvent, torch.cuda.Event)])
def test_fake_classes_have_the_signatures_of_torchs(fake: type, real: type) -> None:
    assert parameters(fake.__init__) == parameters(real.__new__)  # type: ignore[misc]
    methods = [name for name, member in vars(fake).items() if inspect.isfunction(member) and name[0] != "_"]
    assert methods
    for name in methods:
        assert parameters(getattr(fake, name)) == parameters(getattr(real, name)), name


def test_fake_functions_have_the_signatures_of_torchs() -> None:
    for name, fake in fake_functions(Machine(), FakeStream).items():
        assert parameters(fake) == parameters(getattr(torch.cuda, name)), name
    for name, fake in accelerator_functions(Machine(), FakeStream).items():
        assert parameters(fake) == parameters(getattr(torch.accelerator, name)), name


def test_tensors_are_where_they_are_put(machine: Machine) -> None:
    x = torch.zeros(2, device=A)
    assert x.device == torch.device(A)
    assert x.is_cuda
    assert (x + 1).device == torch.zeros_like(x).device == torch.device(A)
    assert x.to(B).device == torch.device(B)
    assert not x.cpu().is_cuda
    assert torch.ops.aten.zeros.default([2], device=torch.device(B)).device == torch.device(B)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.zeros(2, device=B)


@pytest.mark.parametrize("waits", [False, True])
def test_a_side_stream_has_to_wait(machine: Machine, waits: bool) -> None:
    x = torch.ones(2, device=A)
    stream = torch.cuda.Stream(0)
    if waits:
        stream.wait_stream(torch.cuda.current_stream(0))
    with torch.cuda.stream(stream):
        y = x * 2
    torch.cuda.current_stream(0).wait_stream(stream)
    assert races(machine) == (0 if waits else 1)
    assert y.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_another_stream_uses_is_recorded(machine: Machine, recorded: bool) -> None:
    x = torch.ones(2, device=A)
    stream = torch.cuda.Stream(0)
    stream.wait_event(torch.cuda.current_stream(0).record_event())
    with torch.cuda.stream(stream):
        y = x * 2
    if recorded:
        x.record_stream(stream)
    del x
    assert races(machine) == (0 if recorded else 1)
    del y


def test_a_copy_between_devices_is_ordered_on_both(machine: Machine) -> None:
    x = torch.ones(2, device=A)
    y = x.to(B)
    x.mul_(2)  # after the copy, on its own stream
    y.mul_(2)
    assert races(machine) == 0


def test_a_copy_between_devices_runs_on_the_sources_current_stream(machine: Machine) -> None:
    side = torch.cuda.Stream(0)
    with torch.cuda.stream(side):
        x = torch.ones(2, device=A)
    y = x.to(B)
    assert races(machine) == 1
    del y


@pytest.mark.parametrize(("pinned", "found"), [(False, 0), (True, 1)])
def test_pinned_memory_is_read_later(machine: Machine, pinned: bool, found: int) -> None:
    x = torch.ones(2).pin_memory() if pinned else torch.ones(2)
    y = x.to(A, non_blocking=True)
    x.zero_()
    assert races(machine) == found
    del y


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_that_nobody_waits_for_is_not_read_by_the_host(machine: Machine, waits: bool) -> None:
    x = torch.ones(2, device=A).to("cpu", non_blocking=True)
    if waits:
        torch.cuda.current_stream(0).synchronize()
    x.tolist()
    assert races(machine) == (0 if waits else 1)


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, Tensor.cpu, bool, float, None])
def test_a_host_read_is_a_wait_for_the_stream(machine: Machine, read: Callable[[Tensor], object] | None) -> None:
    x = torch.ones((), device=A)
    if read is not None:
        read(x)
    side = torch.cuda.Stream(0)
    x.record_stream(side)
    with torch.cuda.stream(side):
        y = x * 2
    assert races(machine) == (1 if read is None else 0)
    del y


def unordered(machine: Machine) -> list[str]:
    """Races other than memory that is freed too early."""
    machine.sweep()
    return [str(race) for race in machine.order.races if "reuse" not in race.second]


@pytest.mark.parametrize("waits", [False, True])
def test_backward_runs_on_the_streams_of_the_forward(machine: Machine, waits: bool) -> None:
    """As in torch's notes: a backward starts after what the caller did, and the caller may then use gradients."""
    w = torch.ones(2, device=A).requires_grad_()
    side = torch.cuda.Stream(0)
    side.wait_stream(torch.cuda.current_stream(0))
    with torch.cuda.stream(side):
        y = (w * 3).sum()
    if waits:
        torch.cuda.current_stream(0).wait_stream(side)
    (y * 2).backward()
    assert w.grad is not None
    w.grad.mul_(2)
    found = unordered(machine)
    assert len(found) == (0 if waits else 1)  # `y * 2` reads what the side stream writes; the backward is ordered
    assert w.grad.tolist() == [12.0, 12.0]


def test_gradients_that_several_streams_give_are_added_in_order(machine: Machine) -> None:
    w = torch.ones(2, device=A).requires_grad_()
    inner = w * 1
    streams = [torch.cuda.Stream(0) for _ in range(2)]
    terms = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(0))
        with torch.cuda.stream(stream):
            inner.record_stream(stream)
            terms.append((inner * 2).sum())
    for stream, term in zip(streams, terms, strict=True):
        torch.cuda.current_stream(0).wait_stream(stream)
        term.record_stream(torch.cuda.current_stream(0))
    (terms[0] + terms[1]).backward()
    assert w.grad is not None
    assert w.grad.tolist() == [4.0, 4.0]
    assert unordered(machine) == []


def test_a_gradient_goes_back_between_devices(machine: Machine) -> None:
    w = torch.ones(2, device=A).requires_grad_()
    (w.to(B) * 3).sum().backward()
    assert w.grad is not None
    assert w.grad.device == torch.device(A)
    assert w.grad.tolist() == [3.0, 3.0]
    assert races(machine) == 0


class InAThread(torch.autograd.Function):
    """Its backward waits for another thread's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        def inner() -> Tensor:
            with torch.enable_grad():
                x = gradient.detach().requires_grad_()
                return torch.autograd.grad((x * 2).sum(), x)[0]

        with vars(dispatch)["ThreadPoolExecutor"](1) as pool:
            found: Tensor = pool.submit(inner).result()
            return found


def test_a_backward_that_waits_for_its_own_thread_is_a_deadlock(machine: Machine) -> None:
    """The engine has one thread per device, which runs what every other thread computes there, too."""
    x = torch.ones(2, device=A).requires_grad_()
    with pytest.raises(AssertionError, match="deadlock"):
        InAThread.apply(x).sum().backward()  # type: ignore[no-untyped-call]
