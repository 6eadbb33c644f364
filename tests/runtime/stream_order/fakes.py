"""Stand-ins for torch.cuda, torch.accelerator and the operations of CUDA tensors, which tell a `Machine` what happens.

The classes and functions have torch's own signatures (a test compares them), so that a call that torch would
refuse is refused here. Operations are seen by a TorchDispatchMode below autograd, devices and copies by a
TorchFunctionMode above it; both are entered in every thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from parplan.runtime import dispatch
from parplan.runtime.execution.program_function import ProgramFunction
from parplan.runtime.execution.staged_run import _StepWithLoss
from parplan.runtime.module import functional
from parplan.runtime.transport.streams import Streams
from tests.runtime.stream_order.autograd import Engine, label
from tests.runtime.stream_order.machine import CPU, Machine, Role
from tests.runtime.stream_order.order import Clock, Timeline

__all__ = ["FakeEvent", "FakeStream", "accelerator_functions", "fake_functions", "installed"]

Device = torch.device | str | int | None

_POOL = 32  # streams per device that torch hands out, one after another and then again
_WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")


class FakeStream:
    """Stands in for torch.cuda.Stream and torch.Stream."""

    machine: ClassVar[Machine]
    made: ClassVar[dict[int, int]]

    def __init__(self, device: Device = None, priority: int = 0, **kwargs: Any) -> None:
        index = self.machine.local.device if device is None else self.machine.index(self.machine.named(device))
        timeline = kwargs.get("timeline")
        if timeline is None:
            timeline = Timeline(index, 1 + self.made.get(index, 0) % _POOL)
            self.made[index] = self.made.get(index, 0) + 1
        self.timeline: Timeline = timeline
        self.device = torch.device("cuda", index)

    def wait_event(self, event: FakeEvent) -> None:
        if not self.machine.left_out("{} waits for an event", [self.timeline]):
            self.machine.wait(self.timeline, event.mark)

    def wait_stream(self, stream: FakeStream) -> None:
        if not self.machine.left_out("{} waits for {}", [self.timeline, stream.timeline]):
            self.machine.wait(self.timeline, self.machine.mark(stream.timeline))

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = torch.cuda.Event() if event is None else event  # type: ignore[assignment]
        assert isinstance(event, FakeEvent)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.machine.wait(self.machine.host, self.machine.mark(self.timeline))

    @property
    def stream_id(self) -> int:
        return self.timeline.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.timeline == other.timeline

    def __hash__(self) -> int:
        return hash(self.timeline)


class FakeEvent:
    """Stands in for torch.cuda.Event; as in CUDA, waiting for one that was never recorded is no wait."""

    machine: ClassVar[Machine]

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.mark: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        timeline = self.machine.stream(self.machine.local.device) if stream is None else stream.timeline
        self.mark = self.machine.mark(timeline)

    def wait(self, stream: FakeStream | None = None) -> None:
        timeline = self.machine.stream(self.machine.local.device) if stream is None else stream.timeline
        self.machine.wait(timeline, self.mark)

    def synchronize(self) -> None:
        self.machine.wait(self.machine.host, self.mark)


def fake_functions(machine: Machine, stream_class: type[FakeStream]) -> dict[str, Callable[..., Any]]:
    """torch.cuda's functions, by name."""
    local = machine.local

    def number(device: Device) -> int:
        return local.device if device is None else machine.index(machine.named(device))

    def current_stream(device: Device = None) -> FakeStream:
        return stream_class(number(device), timeline=machine.stream(number(device)))

    def default_stream(device: Device = None) -> FakeStream:
        return stream_class(number(device), timeline=Timeline(number(device), 0))

    @contextmanager
    def entered(stream: FakeStream) -> Iterator[None]:
        index = stream.timeline.device or 0
        device, before = local.device, machine.stream(index)
        local.device, local.streams[index] = index, stream.timeline
        try:
            yield
        finally:
            local.device, local.streams[index] = device, before

    def stream(stream: FakeStream | None) -> AbstractContextManager[None]:
        return nullcontext() if stream is None else entered(stream)

    def is_initialized() -> bool:
        return not local.paused

    def can_device_access_peer(device: Device, peer_device: Device) -> bool:
        return machine.peers

    made = (current_stream, default_stream, stream, is_initialized, can_device_access_peer)
    return {function.__name__: function for function in made}


def accelerator_functions(machine: Machine, stream_class: type[FakeStream]) -> dict[str, Callable[..., Any]]:
    """torch.accelerator's functions, by name."""
    local = machine.local

    def is_available() -> bool:
        return not local.paused

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return torch.device("cuda")

    def device_count() -> int:
        return 0 if local.paused else machine.devices

    def current_device_index() -> int:
        return local.device

    def set_device_index(device: Device, /) -> None:
        local.device = local.device if device is None else machine.index(machine.named(device))

    def current_stream(device: Device = None, /) -> FakeStream:
        index = local.device if device is None else machine.index(machine.named(device))
        return stream_class(index, timeline=machine.stream(index))

    def set_stream(stream: FakeStream) -> None:
        index = stream.timeline.device or 0
        local.device, local.streams[index] = index, stream.timeline

    @contextmanager
    def device_index(device: int | None, /) -> Iterator[None]:
        before, local.device = local.device, local.device if device is None else device
        try:
            yield
        finally:
            local.device = before

    made = (is_available, current_accelerator, device_count, current_device_index, set_device_index)
    return {function.__name__: function for function in (*made, current_stream, set_stream, device_index)}


class _Devices(TorchFunctionMode):
    """Tensors have the devices that the machine says, factories make them there, and `.to` copies between them."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        local, kwargs = self._machine.local, dict(kwargs or {})
        if local.paused:
            return func(*args, **kwargs)
        before = local.in_handler, local.birth, local.pinned
        local.in_handler = True
        try:
            if func in _OWN:
                result = _OWN[func](self._machine, func, *args, **kwargs)
            else:
                if kwargs.get("device") is not None:
                    local.birth, kwargs["device"] = self._machine.named(kwargs["device"]), CPU
                local.pinned = bool(kwargs.pop("pin_memory", False))
                result = func(*args, **kwargs)
        finally:
            local.in_handler, local.birth, local.pinned = before
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                label(self._machine, tensor)
        return result


def _device(machine: Machine, func: Any, tensor: Tensor) -> torch.device:
    return machine.place(tensor)


def _is_cuda(machine: Machine, func: Any, tensor: Tensor) -> bool:
    return machine.place(tensor).type == "cuda"


def _is_pinned(machine: Machine, func: Any, tensor: Tensor) -> bool:
    return machine.is_pinned(tensor)


def _pin_memory(machine: Machine, func: Any, tensor: Tensor) -> Tensor:
    with machine.paused():
        pinned = tensor.clone()
    machine.born(pinned, CPU, pinned=True)
    return pinned


def _to(machine: Machine, func: Any, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (machine.place(args[0]), args[0].dtype, *args[1:])
    given: Any = torch._C._nn._parse_to(*args, **kwargs)
    place, dtype, non_blocking, _ = given
    here = machine.place(tensor)
    there = here if place is None else machine.named(place)
    if here != there and tensor.requires_grad and torch.is_grad_enabled():
        tensor = _Move.apply(machine, tensor, there, non_blocking)  # type: ignore[no-untyped-call]
    elif here != there:
        tensor = machine.move(tensor, there, non_blocking)
    return tensor.to(tensor.dtype if dtype is None else dtype, copy=copy and here == there)


class _Move(torch.autograd.Function):
    """A copy to another device, whose gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, machine: Machine, tensor: Tensor, place: torch.device, non_blocking: bool) -> Tensor:
        ctx.machine, ctx.place = machine, machine.place(tensor)
        return machine.move(tensor, place, non_blocking)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.machine.move(gradient, ctx.place, False), None, None


def _cpu(machine: Machine, func: Any, tensor: Tensor) -> Tensor:
    return _to(machine, func, tensor, CPU)


def _read_by_host(machine: Machine, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    here = machine.move(tensor, CPU, False) if machine.place(tensor).type == "cuda" else tensor
    machine.run(machine.host, [here], [], "host read")
    return func(tensor, *args, **kwargs)


def _tensor(machine: Machine, func: Any, data: Any, *args: Any, device: Device = None, **kwargs: Any) -> Tensor:
    """Numbers of the host, copied to the device."""
    made: Tensor = func(data, *args, **kwargs)
    place = CPU if device is None else machine.named(device)
    return machine.move(made, place, False) if place.type == "cuda" else made


_OWN: dict[Any, Callable[..., Any]] = {
    torch.tensor: _tensor,
    vars(torch._C.TensorBase)["device"].__get__: _device,
    vars(torch._C.TensorBase)["is_cuda"].__get__: _is_cuda,
    Tensor.is_pinned: _is_pinned,
    Tensor.pin_memory: _pin_memory,
    Tensor.to: _to,
    Tensor.cpu: _cpu,
    Tensor.tolist: _read_by_host,
    Tensor.numpy: _read_by_host,
}


class _Operations(TorchDispatchMode):
    """Every operation that autograd comes down to, in forward and backward, is queued on its stream."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._machine.local.paused:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction(), self._added():
            return self._queue(func, args, kwargs)

    @contextmanager
    def _added(self) -> Iterator[None]:
        """Between nodes, autograd adds gradients up on streams that it has chosen."""
        local = self._machine.local
        stream = local.accumulations.pop(0) if local.accumulations else None
        if stream is None:
            yield
            return
        before, local.streams = local.streams, {**local.streams, stream.device or 0: stream}
        try:
            yield
        finally:
            local.streams = before

    def _queue(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        machine, name = self._machine, func._schema.name
        reads, writes = _operands(func, args, kwargs)
        result = func(*args, **kwargs)
        found = [tensor for tensor in pytree.tree_leaves(result) if isinstance(tensor, Tensor)]
        if not writes and found and all(machine.known(tensor) for tensor in found):
            return result  # views of what is there
        if name == "aten::copy_" and machine.place(args[0]) != machine.place(args[1]):
            machine.copy(args[1], args[0], kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            return result
        place = self._place(name, [*reads, *writes])
        born = [tensor for tensor in found if not machine.known(tensor)]
        for tensor in born:
            machine.born(tensor, machine.local.birth or place, machine.local.pinned)
        place = machine.local.birth or place
        machine.guarded([place], name)
        if name.startswith("aten::empty") or name.startswith("aten::new_empty"):
            return result  # only allocated
        numbers = [tensor for tensor in reads if tensor.dim() == 0 and machine.place(tensor) != place]
        if numbers:
            machine.run(machine.host, numbers, [], name)
        made_like = name.endswith("_like") or name.startswith("aten::new_")
        own = [] if made_like else [tensor for tensor in reads if machine.place(tensor) == place]
        timeline = machine.timeline(place)
        machine.run(timeline, own, [*writes, *born], name)
        if name.startswith("aten::_foreach") and writes:
            increment_version(writes)  # as the kernels of CUDA do
        if name in _WAITING:
            machine.wait(machine.host, machine.mark(timeline))
        return result

    def _place(self, name: str, tensors: Sequence[Tensor]) -> torch.device:
        """Where an operation runs: as in torch, on one device; numbers on the CPU may go with it."""
        places = {self._machine.place(tensor) for tensor in tensors if tensor.dim()}
        places |= {place for place in map(self._machine.place, tensors) if place.type == "cuda"}
        if len(places) > 1:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {places}")
        # The zeros that a node makes for a gradient that it was not given.
        return next(iter(places), CPU if tensors else self._machine.local.node_place or CPU)


def _operands(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if func is torch.ops.aten.native_batch_norm.default and argument.name.startswith("running"):
            written = bool(args[5])  # in training, which its schema does not say
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, Tensor):
                (writes if written else reads).append(leaf)
    return reads, writes


def _pool(machine: Machine) -> type[ThreadPoolExecutor]:
    """A pool whose threads record, and whose jobs come after what started them and before who waits for them."""

    def enter() -> None:
        _Operations(machine).__enter__()  # type: ignore[no-untyped-call]
        _Devices(machine).__enter__()  # type: ignore[no-untyped-call]

    class Pool(ThreadPoolExecutor):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, initializer=enter, **kwargs)

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            start, done = machine.mark(machine.host), list[Clock]()

            def run() -> Any:
                machine.wait(machine.host, start)
                try:
                    return fn(*args, **kwargs)
                finally:
                    done.append(machine.mark(machine.host))

            def joined(wait: Callable[..., Any]) -> Callable[..., Any]:
                def joining(timeout: float | None = None) -> Any:
                    try:
                        return wait(timeout)
                    finally:
                        for mark in done:
                            machine.wait(machine.host, mark)

                return joining

            future = super().submit(run)
            vars(future).update(result=joined(future.result), exception=joined(future.exception))
            return future

    return Pool


@contextmanager
def installed(machine: Machine) -> Iterator[None]:
    """torch and parplan see the machine's devices."""
    bound = {"machine": machine, "made": {}}
    stream_class: type[FakeStream] = type("Stream", (FakeStream,), bound)
    event_class: type[FakeEvent] = type("Event", (FakeEvent,), bound)

    def record_stream(self: Tensor, s: FakeStream) -> None:
        assert machine.place(self).type == "cuda", "record_stream of a tensor that is not on a CUDA device"
        if not machine.left_out("record_stream for {}", [s.timeline]):
            machine.record(self, s.timeline)

    def modes() -> AbstractContextManager[object]:
        if not machine.local.in_handler:
            return nullcontext()
        stack = ExitStack()
        stack.callback(setattr, machine.local, "in_handler", True)
        machine.local.in_handler = False
        stack.enter_context(_Devices(machine))
        return stack

    def labelled(plain_call: Callable[..., Any]) -> Any:
        def call(*args: Any) -> Any:
            results = plain_call(*args)
            for tensor in results:
                if tensor.grad_fn is not None:
                    label(machine, tensor)
            return results

        return staticmethod(call)

    def streams(self: Streams, devices: Sequence[torch.device]) -> None:
        plain_streams(self, devices)
        for role, made in (("compute", self._compute), ("copy", self._copy)):
            for device, stream in made.items():
                machine.roles[vars(stream)["timeline"]] = Role(f"the {role} stream", device)

    def hooks(self: Any, pack_hook: Callable[[Tensor], Any], unpack_hook: Callable[[Any], Tensor]) -> None:
        def pack(tensor: Tensor) -> Any:
            with modes():  # torch's checkpoint notes the devices of what is saved, and compares them as it runs again
                return pack_hook(tensor)

        plain_hooks(self, pack, unpack_hook)

    plain_streams, plain_hooks = Streams.__init__, saved_tensors_hooks.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", stream_class)
        patch.setattr(torch, "Stream", stream_class)
        patch.setattr(torch.cuda, "Event", event_class)
        for name, function in fake_functions(machine, stream_class).items():
            patch.setattr(torch.cuda, name, function)
        for name, function in accelerator_functions(machine, stream_class).items():
            patch.setattr(torch.accelerator, name, function)
        patch.setattr(torch.cuda, "default_generators", tuple(torch.Generator() for _ in range(machine.devices)))
        patch.setattr(
            torch.autograd, "_engine_run_backward", Engine(machine, vars(torch.autograd)["_engine_run_backward"], modes)
        )
        for function_class in (ProgramFunction, _StepWithLoss):
            patch.setattr(function_class, "apply", labelled(function_class.apply), raising=False)
        patch.setattr(Tensor, "record_stream", record_stream)
        patch.setattr(Streams, "__init__", streams)
        patch.setattr(saved_tensors_hooks, "__init__", hooks)
        for module in (dispatch, functional):
            patch.setattr(module, "ThreadPoolExecutor", _pool(machine))
        with _Operations(machine), _Devices(machine):
            yield
