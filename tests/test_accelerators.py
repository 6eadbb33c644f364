"""Accelerators of any type, as torch tells of them: pretended ones, as this machine may have none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parplan.accelerators import (
    DeviceGenerator,
    StreamContext,
    accelerator_count,
    accelerator_name,
    accelerator_type,
    as_current,
    autocast_types,
    default_generator,
    generators_in_use,
    place_of,
)
from parplan.errors import RuntimeFailure
from parplan.runtime.transport import devices
from parplan.runtime.transport.devices import existing
from tests.runtime.stream_order.fakes import installed
from tests.runtime.stream_order.machine import Machine


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Three accelerators of a type that torch's module tells nothing of, and that module."""
    module = SimpleNamespace()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_accelerators_are_numbered_around(pretend: SimpleNamespace) -> None:
    assert (accelerator_type(), accelerator_count()) == ("xpu", 3)
    assert [place_of(number) for number in (0, 2, 4)] == [torch.device("xpu", number) for number in (0, 2, 1)]
    assert "xpu" in autocast_types()
    assert accelerator_name(place_of(1)) == "xpu"  # one type, also where there is no driver's name
    pretend.get_device_name = lambda number: f"Max {number}"
    assert accelerator_name(place_of(1)) == "Max 1"


def test_an_apple_gpu_counts_as_none(pretend: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert (accelerator_type(), accelerator_count(), place_of(0)) == (None, 0, torch.device("cpu"))
    with pytest.raises(RuntimeFailure, match="mps: this machine has no mps device; name others"):
        existing("mps")


def test_devices_that_are_here(pretend: SimpleNamespace) -> None:
    assert [existing(name) for name in ("xpu", "xpu:2", "cpu")] == [
        torch.device("xpu", 0), torch.device("xpu", 2), torch.device("cpu"),
    ]  # fmt: skip
    with pytest.raises(RuntimeFailure, match="xpu:3: this machine has 3 xpu devices; name others"):
        existing("xpu:3")
    with pytest.raises(RuntimeFailure, match="cuda:0: this machine has no cuda device"):
        existing("cuda:0")


def test_a_generator_whose_state_alone_is_known(pretend: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    states: dict[torch.device, Tensor] = {}
    pretend.set_rng_state = lambda state, device: states.update({device: state})
    pretend.get_rng_state = states.__getitem__
    plain = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: plain())
    first, second = default_generator(place_of(0)), default_generator(place_of(1))
    assert first == DeviceGenerator(place_of(0)) != second
    for generator, seed in ((first, 3), (second, 4)):
        generator.manual_seed(seed)
        assert torch.equal(generator.get_state(), plain().manual_seed(seed).get_state())
    first.set_state(second.get_state())
    assert torch.equal(first.get_state(), second.get_state())


@pytest.mark.parametrize("started", [True, False])
def test_generators_of_accelerators_that_nobody_uses_are_let_be(pretend: SimpleNamespace, started: bool) -> None:
    pretend.is_initialized = lambda: started
    pretend.default_generators = tuple(torch.Generator() for _ in range(3))
    assert generators_in_use() == [torch.default_generator, *pretend.default_generators][: 4 if started else 1]


@pytest.mark.parametrize(
    ("backends", "own"),
    [("cpu:gloo,cuda:gloo,xpu:gloo", "cpu"), ("cpu:gloo,xpu:xccl", "xpu:1"), ("cpu:gloo,cuda:nccl", "cpu")],
)
def test_a_process_has_an_accelerator_if_its_group_talks_between_them(
    pretend: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, backends: str, own: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert devices._own_device(None) == torch.device(own)


def test_a_stream_is_current_inside_another_ones_context_and_its_own() -> None:
    with installed(Machine()):
        streams = [torch.Stream(f"cuda:{number}") for number in (0, 1)]
        before = torch.accelerator.current_stream(0), torch.accelerator.current_stream(1)
        with StreamContext(streams[1]):
            with StreamContext(streams[0]), StreamContext(streams[1]), as_current(torch.device("cuda:0")):
                assert torch.accelerator.current_device_index() == 0
                assert torch.accelerator.current_stream(1) == streams[1]
            assert torch.accelerator.current_device_index() == 1
            assert (torch.accelerator.current_stream(0), torch.accelerator.current_stream(1)) == (before[0], streams[1])
        assert torch.accelerator.current_device_index() == 0
        assert torch.accelerator.current_stream(1) == before[1]
