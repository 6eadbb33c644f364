"""What users of Torch7's DataParallelTable rely on: any dimension, a thread per device, copies only when needed."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from examples.seeds import data_parallel_table as example
from parplan.errors import PlanError
from parplan.graph.capture.capture import capture
from parplan.lowering.holdings import ALONE_BYTES
from parplan.lowering.lower import lower
from parplan.lowering.step_setting import StepSetting
from parplan.runtime.dispatch import Inline, Threads
from parplan.runtime.execution.parameter_store import Store
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.transport.local import LocalTransport
from tests.runtime.helpers import compiled, differences, outcome, planner, spread
from tests.runtime.nets import conv_net, mlp

# Hooks here are meant to see one replica's samples.
pytestmark = pytest.mark.filterwarnings("ignore::parplan.errors.ReplicaHookWarning")

META = torch.device("meta")  # a second memory that every machine has
WAIT_S = 30.0


def images(samples: int = 6) -> Tensor:
    return torch.randn(samples, 3, 8, 8, dtype=torch.float64)


def device_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("parplan-device")}


# --- split on any dimension ------------------------------------------------------------------


class TimeFirst(nn.Module):
    """A recurrent layer on [time, samples, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[time, samples, 4]."""
        result: Tensor = self.out(self.cells(x)[0])
        return result


@pytest.mark.sampled(1)
@pytest.mark.parametrize("samples", [6, 5])
def test_samples_may_lie_along_any_dimension(samples: int) -> None:
    plain = TimeFirst().double()
    model = compiled(plain, spread(3, "data"), 3, dim=1)
    x = torch.randn(4, samples, 6, dtype=torch.float64)
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}
    assert model.plan is not None
    assert model.plan.layers["cells"].replicas == 3


# --- a thread per device ---------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["data", "hybrid", "out-features", "one"])
def test_threads_give_the_plain_models_numbers(kind: str) -> None:
    plain = conv_net()
    model = compiled(plain, spread(3, kind), 3, threads=True)
    for samples in (6, 5, 2):
        x = images(samples)
        assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}


def test_threads_give_the_very_numbers_of_one_thread_dropout_included() -> None:
    plain = nn.Sequential(nn.Linear(6, 32), nn.Dropout(), nn.Linear(32, 4), nn.Dropout(0.2)).double()
    x = torch.randn(12, 6, dtype=torch.float64)
    found = []
    for threads in (False, True, True):
        model = compiled(plain, spread(3, "data"), 3, threads=threads)
        torch.manual_seed(5)
        found.append(outcome(model, model, x).tensors)
    for other in found[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in found[0].items())


def test_every_thread_begins_with_the_users_function() -> None:
    begun: dict[int, str] = {}
    seen: set[str] = set()

    def begin(device: int) -> None:
        begun[device] = threading.current_thread().name

    net = mlp()
    net[2].register_forward_hook(lambda module, args, result: seen.add(threading.current_thread().name))
    model = compiled(net, spread(2, "data"), 2, threads=begin)
    for _ in range(2):
        model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    assert sorted(begun) == [0, 1]
    assert seen == set(begun.values())
    assert len(seen) == 2
    assert threading.current_thread().name not in seen


def test_devices_work_at_the_same_time_forward_and_backward() -> None:
    """Each replica waits within its own work for the other one."""
    net = mlp()
    meet = threading.Barrier(2)

    def wait(*_: object) -> None:
        meet.wait(WAIT_S)

    net[2].register_forward_hook(wait)
    net[2].register_full_backward_hook(wait)
    model = compiled(net, spread(2, "data"), 2, threads=True)
    model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    assert not meet.broken


def failing(module: nn.Module, args: object, result: Tensor) -> None:
    """Fails on the second replica."""
    if result.shape[0] == 1:
        raise ZeroDivisionError("in the second replica")


def test_an_error_in_a_thread_comes_with_its_own_traceback() -> None:
    net = mlp()
    net[0].register_forward_hook(failing)
    model = compiled(net, spread(2, "data"), 2, threads=True)
    with pytest.raises(ZeroDivisionError, match="in the second replica") as caught:
        model(torch.randn(3, 6, dtype=torch.float64))
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert model(torch.randn(4, 6, dtype=torch.float64)).shape == (4, 4)


def test_an_error_in_the_users_function_is_raised_at_once() -> None:
    def begin(device: int) -> None:
        raise OSError(f"no such library on device {device}")

    with pytest.raises(OSError, match="on device 0"):
        compiled(mlp(), spread(2, "data"), 2, threads=begin)


def test_threads_end_with_the_model() -> None:
    before = device_threads()
    model = compiled(mlp(), spread(2, "data"), 2, threads=True)
    model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    started = device_threads() - before
    assert len(started) == 2
    del model
    gc.collect()
    for thread in started:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in started)


def test_threads_have_the_callers_modes() -> None:
    def modes(dispatch: Inline | Threads) -> list[tuple[bool, bool, bool]]:
        found = []

        def look(device: int) -> None:
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
            found.append(modes)

        dispatch.each([0, 1], look, ordered=True)
        return found

    threads = Threads([0, 1])
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            assert modes(threads) == modes(Inline())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_the_errors_of_all_threads_are_told() -> None:
    def fail(device: int) -> None:
        raise ValueError(f"trouble {device}")

    with pytest.raises(ValueError, match="trouble 0") as caught:
        Threads([0, 1, 2]).each([0, 1, 2], fail)
    told = ["device 1 failed as well: ValueError: trouble 1", "device 2 failed as well: ValueError: trouble 2"]
    assert getattr(caught.value, "__notes__", []) == told


def test_threads_are_an_option_of_two_kinds() -> None:
    with pytest.raises(PlanError, match="threads is 4"):
        compiled(mlp(), spread(2, "data"), 2, threads=4)


# --- what travels between memories, and when -------------------------------------------------


class Copies(TorchDispatchMode):
    """Counts tensors that are copied to the other memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One call of an op."""
        named = kwargs or {}
        self.count += func is torch.ops.aten._to_copy.default and named.get("device") == META
        return func(*args, **named)


def two_memories(net: nn.Module) -> Store:
    """What two data-parallel devices in two memories hold of a model."""
    graph = capture(net, (images(4),))
    strategies = planner(spread(2, "data"), 2)(graph).layers
    program = lower(graph, strategies, StepSetting(2, (4,), (0, 1)))
    return Store(net, graph, program, LocalTransport([torch.device("cpu"), META]), sharded=False)


def test_parameters_are_copied_only_when_they_have_changed_and_all_in_one_message() -> None:
    net = conv_net()
    store = two_memories(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    counts = []
    for changed in (True, False, True, False):
        if changed:
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        with Copies() as copies:
            store.refresh()
        counts.append(copies.count)
    # Ten parameters and buffers of one type are one message; nothing changed, nothing travels.
    assert counts == [1, 0, 1, 0]


def test_one_changed_parameter_is_all_that_travels() -> None:
    net = conv_net()
    store = two_memories(net)
    store.refresh()
    with torch.no_grad():
        net.fc2.bias.add_(1.0)
    moved: list[int] = []
    plain_cat = torch.cat

    def cat(tensors: list[Tensor]) -> Tensor:
        moved.extend(tensor.numel() for tensor in tensors)
        return plain_cat(tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", cat)
        store.refresh()
    assert moved == [12]


def test_gradients_travel_in_flat_buckets() -> None:
    """DataParallelTable's flattenParams is for this: one sum for many parameters."""
    graph = capture(conv_net(), (images(4),))
    program = lower(graph, planner(spread(2, "data"), 2)(graph).layers, StepSetting(2, (4,), (0, 1)))
    together = [name for bucket in program.buckets for name in bucket.parameters]
    assert sorted(together) == sorted(graph.parameters)
    assert len(program.buckets) == 1
    sizes = [graph.values[name].elements * 8 for name in together]
    assert max(sizes) < ALONE_BYTES


def test_gradients_are_summed_on_the_models_own_parameters() -> None:
    plain = conv_net()
    model = Compiled(copy.deepcopy(plain), planner(spread(2, "data"), 2), devices=["cpu"] * 2, batch_norm="local")
    halves = [copy.deepcopy(plain), copy.deepcopy(plain)]
    x = images()
    model(x).square().sum().backward()
    for half, part in zip(halves, x.chunk(2), strict=True):
        half(part).square().sum().backward()
    for name, parameter in model.module.named_parameters():
        terms = [dict(half.named_parameters())[name].grad for half in halves]
        assert terms[0] is not None
        assert terms[1] is not None
        torch.testing.assert_close(parameter.grad, terms[0] + terms[1], rtol=1e-9, atol=1e-9)


# --- NCCL ------------------------------------------------------------------------------------


def _over_nccl(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(1)
    plain = mlp().cuda()
    model = Compiled(copy.deepcopy(plain), planner(spread(2, "data"), 2), threads=True)
    whole = torch.randn(8, 6, dtype=torch.float64, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    model(whole.chunk(2)[rank]).square().mean().backward()
    plain(whole).square().mean().backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-9)
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for every process")
def test_nccl_sums_gradients_where_it_is_present(tmp_path: Path) -> None:
    mp.start_processes(_over_nccl, (str(tmp_path),), 2, start_method="spawn")  # type: ignore[attr-defined,no-untyped-call]


@pytest.mark.gpu
def test_threads_launch_on_gpus() -> None:
    plain = conv_net().cuda()
    model = Compiled(copy.deepcopy(plain), planner(spread(2, "data"), 2), devices=["cuda:0", "cpu"], threads=True)
    x = images().cuda()
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}


# --- the example program ---------------------------------------------------------------------


@pytest.mark.full
def test_the_example_program_trains_as_the_plain_model(capsys: pytest.CaptureFixture[str]) -> None:
    example.main([])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:2]) == [f"device {i} has its work dispatched by parplan-device-{i}_0" for i in (0, 1)]
    assert lines[2] == "every layer has 2 replicas"
    assert float(lines[4].rpartition(" ")[2]) < 1e-9


def test_the_example_program_fails_when_numbers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "ROUNDING", -1.0)
    with pytest.raises(SystemExit, match="not the same numbers"):
        example.main([])
