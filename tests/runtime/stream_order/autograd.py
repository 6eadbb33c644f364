"""How autograd's engine orders streams, by its documented contract ("Stream semantics of backward passes").

A node runs on the stream that was current, on the device of its first result, when its forward op ran; other devices'
current streams are the default ones then, as the engine has a thread of its own per device. A gradient counts as ready
on the stream of the node that made it: the node that takes it waits for that. At the end the caller's current streams
wait for those of the leaves. A node whose results are on the CPU runs in the caller's thread, on its streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tests.runtime.stream_order.machine import Machine
from tests.runtime.stream_order.order import Clock, Timeline

__all__ = ["Engine", "label"]

_KEY = "stream of the forward op"


def label(machine: Machine, tensor: Tensor) -> None:
    """Note the current stream in the nodes that have just been made for `tensor`."""
    stream = _stream_of(machine, tensor)
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or _KEY in node.metadata:
            continue
        leaf = getattr(node, "variable", None)
        node.metadata[_KEY] = stream if leaf is None else _stream_of(machine, leaf)
        waiting += [following for following, _ in node.next_functions]


def _stream_of(machine: Machine, tensor: Tensor) -> Timeline | None:
    place = machine.place(tensor)
    return machine.timeline(place) if place.type == "cuda" else None


@dataclass
class _Buffer:
    """A gradient that is on its way into a node: where it is added to, and from when on it is ready."""

    adding: Timeline
    ready_on: Timeline
    ready: Clock


class Engine:
    """Calls torch's engine, and has the machine wait as the engine would with CUDA streams.

    Args:
        call: torch's own function.
        modes: a context in which operations are recorded, entered if a torch function's handler has left it.
    """

    def __init__(self, machine: Machine, call: Callable[..., Any], modes: Callable[[], Any]) -> None:
        self._machine = machine
        self._call = call
        self._modes = modes
        self._busy: dict[int, int] = {}  # device -> the host thread that stands for its engine thread

    def __call__(
        self, outputs: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None], *args: Any, **kwargs: Any
    ) -> Any:
        if self._machine.local.paused:
            return self._call(outputs, gradients, *args, **kwargs)
        task = _Task(self._machine, self._busy)
        task.begin(outputs, gradients)
        try:
            with task.callers_streams(), self._modes():
                found = self._call(outputs, gradients, *args, **kwargs)
        finally:
            task.remove_hooks()
        task.end()
        return found


class _Task:
    """One backward."""

    def __init__(self, machine: Machine, busy: dict[int, int]) -> None:
        self._machine = machine
        self._busy = busy
        self._streams = dict(machine.local.streams)
        self._device = machine.local.device
        self._caller = [machine.stream(device) for device in range(machine.devices)]
        self._buffers: dict[Any, dict[int, _Buffer]] = {}
        self._leaves: dict[Timeline, None] = {}
        self._nodes: dict[Any, None] = {}
        self._hooks: list[Any] = []
        self._running: Timeline | None = None
        self._held: int | None = None

    @contextmanager
    def callers_streams(self) -> Iterator[None]:
        local = self._machine.local
        accumulations, local.accumulations = local.accumulations, []
        node_place, local.node_place = local.node_place, None
        try:
            yield
        finally:
            self._leave()
            local.streams, local.device, local.accumulations = self._streams, self._device, accumulations
            local.node_place = node_place

    def begin(self, outputs: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]) -> None:
        """The gradients that are given are ready on the current stream of the first one."""
        streams = (_stream_of(self._machine, gradient) for gradient in gradients if gradient is not None)
        root = next((stream for stream in streams if stream is not None), None)
        edges = [one if isinstance(one, GradientEdge) else get_gradient_edge(one) for one in outputs]
        for edge, gradient in zip(edges, gradients, strict=True):
            if gradient is not None:
                self._add(edge.node, edge.output_nr, gradient, root)
        waiting: list[Any] = [edge.node for edge in edges]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in self._nodes:
                self._nodes[node] = None
                waiting += [following for following, _ in node.next_functions]
        for node in self._nodes:
            self._hooks.append(node.register_prehook(lambda gradients, node=node: self._enter(node)))
            if not hasattr(node, "variable"):  # a hook there would keep autograd from taking the gradient as it is
                self._hooks.append(node.register_hook(lambda made, taken, node=node: self._made(node, made)))

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _stream(self, node: Any) -> Timeline | None:
        found: Timeline | None = node.metadata[_KEY]
        return found

    def _enter(self, node: Any) -> None:
        self._leave()
        stream, local = self._stream(node), self._machine.local
        self._arrive(node, stream)
        if stream is None:
            local.streams, local.device = dict(self._streams), self._device
            return
        device, thread = stream.device or 0, threading.get_ident()
        self._held = self._busy.get(device)
        if self._held not in (None, thread):
            raise AssertionError(f"a deadlock: the engine's thread of cuda:{device} waits for this backward to end")
        self._running = stream
        if isinstance(node, BackwardCFunction):  # its code may wait for other threads
            self._busy[device] = thread
        else:
            local.node_place = torch.device("cuda", device)
        local.streams, local.device = {device: stream}, device
        if not node.next_functions:
            self._leaves[stream] = None

    def _leave(self) -> None:
        """The node that ran last is done."""
        self._machine.local.node_place = None
        if self._running is None:
            return
        device, self._running = self._running.device or 0, None
        if self._held is None:
            self._busy.pop(device, None)

    def _arrive(self, node: Any, stream: Timeline | None) -> None:
        for buffer in self._buffers.pop(node, {}).values():
            if stream is not None and buffer.ready_on != stream:
                self._machine.wait(stream, buffer.ready)

    def _made(self, node: Any, gradients: Sequence[Tensor | None]) -> None:
        producer = self._stream(node)
        adding = [
            self._add(following, position, gradient, producer)
            for (following, position), gradient in zip(node.next_functions, gradients, strict=True)
            if following is not None and gradient is not None
        ]
        self._leave()
        self._machine.local.accumulations = [stream for added, stream in adding if added]

    def _add(
        self, node: Any, position: int, gradient: Tensor, producer: Timeline | None
    ) -> tuple[bool, Timeline | None]:
        """Whether a gradient is added to one that is there, and on which stream."""
        machine, place, buffers = self._machine, self._machine.place(gradient), self._buffers.setdefault(node, {})
        leaf = getattr(node, "variable", None)
        if leaf is not None and machine.place(leaf) != place:
            raise AssertionError(f"an invalid gradient: expected on {machine.place(leaf)}, got on {place}")
        if place.type == "cpu":
            known = position in buffers
            buffers.setdefault(position, _Buffer(machine.host, machine.host, {}))
            return known, None
        current = machine.timeline(place)
        producer, consumer = producer or current, self._stream(node) or current
        known = position in buffers
        if not known:
            adding = next((stream for stream in (consumer, producer) if stream.device == place.index), current)
            if consumer.device == place.index and consumer != producer:
                machine.record(gradient, consumer)
            buffers[position] = _Buffer(adding, producer, machine.mark(producer))
            return False, None
        buffer = buffers[position]
        if buffer.adding != producer:
            machine.wait(buffer.adding, machine.mark(producer))
            machine.record(gradient, buffer.adding)
        if buffer.adding != buffer.ready_on:
            machine.wait(buffer.adding, buffer.ready)
        # The addition itself comes after this.
        buffer.ready_on, buffer.ready = buffer.adding, _after(machine, buffer.adding)
        return True, buffer.adding

    def end(self) -> None:
        """Leaves that were asked for are not run, but waited for; then the caller waits for all leaves."""
        for node in list(self._buffers):
            stream = self._stream(node)
            self._arrive(node, stream)
            if stream is not None:
                self._leaves[stream] = None
        for stream in self._leaves:
            caller = self._caller[stream.device or 0]
            if caller != stream:
                self._machine.wait(caller, self._machine.mark(stream))


def _after(machine: Machine, stream: Timeline) -> Clock:
    """A mark behind the next operation of a stream."""
    mark = dict(machine.mark(stream))
    mark[stream] = mark.get(stream, 0) + 1
    return mark
