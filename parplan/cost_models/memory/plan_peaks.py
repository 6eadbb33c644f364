"""The peak memory of a whole plan, per device: what its layers hold and what the runtime does between them.

The solver counts layers one by one, and so can only estimate what depends on two of them. Here the plan is known, and
with it what every device holds of a parameter that layers share, and every transfer: the copy that arrives, the
messages that carry it (sent ones are kept until the pass ends, as torch.distributed may still read them), results that
a run of layers holds until its backward is done, and the messages of gradient sums. As the runtime does it with one
process per device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod

from parplan.cost_models.costs import Held
from parplan.cost_models.memory.layer_memory import MemoryModel
from parplan.cost_models.memory.plan_runs import Move, block_on, outside, plan_runs
from parplan.graph.local import LocalLayer, local_shape
from parplan.layout import Layout, Piece, Range, Region, pieces
from parplan.plan import Strategy

__all__ = ["plan_peaks"]


def plan_peaks(model: MemoryModel, strategies: Mapping[str, Strategy], devices: int) -> tuple[int, ...]:
    """Peak bytes on each of `devices`.

    Args:
        model: of the graph, the optimizer and the kind of device.
        strategies: of every layer.
    """
    plan = _Plan(model, strategies, devices)
    return tuple(_peak(list(plan.held(device)), 2 * model.moments.end) for device in range(devices))


def _peak(held: Sequence[Held], end: int) -> int:
    changes = [0] * (end + 1)
    for one in held:
        if one.start < one.end:
            changes[one.start] += one.nbytes
            changes[one.end] -= one.nbytes
    return max(accumulate(changes))


class _Plan:
    """One plan with what the runtime makes of it."""

    def __init__(self, model: MemoryModel, strategies: Mapping[str, Strategy], devices: int) -> None:
        graph = model.graph
        self._model, self._graph, self._strategies, self._devices = model, graph, strategies, devices
        self._moments = model.moments
        self._index = {name: index for index, name in enumerate(graph.layers)}
        self._runs = plan_runs(graph, strategies, devices)
        self._inner = {name: model.own(self._local(name)) for name in graph.layers}

    def _local(self, name: str) -> LocalLayer:
        strategy = self._strategies[name]
        return LocalLayer(self._graph.layers[name], strategy, 0, ceil((self._graph.batch or 1) / strategy.replicas))

    def held(self, device: int) -> Iterator[Held]:
        """Everything on `device` by phase; an entry may be negative where one before counts too much.

        Moment m is phase 2m + 1; in phase 2m what was computed before m travels.
        """
        for name, strategy in self._strategies.items():
            if device in strategy.devices:
                yield from (Held(2 * one.start + 1, 2 * one.end, one.nbytes) for one in self._inner[name])
        for parameter, users in self._model.users.items():
            if len(users) > 1:
                yield from self._shared(parameter, users, device)
        for value in filter(None, self._graph.user_inputs):
            nbytes = self._nbytes(value, outside(self._graph, self._devices, value), device)
            yield Held(0, 2 * self._moments.end, nbytes)
        for value in self._runs.leaving:
            yield from self._leaving(value, device)
        for move in self._runs.moves:
            yield from self._forward(move, device)
            if self._graph.values[move.value].requires_grad and move.value in self._graph.producer:
                yield from self._backward(move, device)
        for value in self._model.delivered(self._graph.producer):
            yield from self._loss(value, device)
        yield from self._messages(device)

    def _shared(self, parameter: str, users: Sequence[str], device: int) -> Iterator[Held]:
        """Layers that use one parameter may cut it differently: `own` counts what the first needs of it, and of its
        gradient what the last needs, but a device holds what all of its layers need."""
        moments, spec, optimizer = self._moments, self._graph.values[parameter], self._model.optimizer
        block = self._runs.holdings[parameter].get(device, (Range(0, 0),))
        real = self._model.allocated(prod(map(len, block)) * spec.dtype.itemsize)
        counted = [self._counted(parameter, name, device) for name in users]
        if all(nbytes == real for nbytes in counted):
            return
        more = real - counted[0]
        yield Held(0, 2 * moments.end, more)
        if not spec.requires_grad:
            return
        yield Held(0, 2 * moments.end, optimizer.states * more)
        time = moments.update(self._index[users[0]]) if self._model.on_cpu else moments.update()
        temporaries = optimizer.one_by_one if self._model.on_cpu else optimizer.together
        yield Held(2 * time + 1, 2 * time + 2, max(0, more) * temporaries)
        # Every layer's term is kept until the first layer's is there, when all are added to zeros.
        added = 2 * moments.backward(self._index[users[0]]) + 1
        yield Held(added, 2 * moments.end, real)
        yield Held(added + 1, 2 * moments.end, -counted[-1])
        for name, nbytes in zip(users[1:-1], counted[1:-1], strict=True):
            yield Held(2 * moments.backward(self._index[name]) + 2, added + 1, nbytes)
        if self._model.adds_apart(parameter):
            yield Held(added, added + 1, -counted[0])

    def _counted(self, parameter: str, layer: str, device: int) -> int:
        """What `own` counts of a parameter for one of its layers."""
        if device not in self._strategies[layer].devices:
            return 0
        shape = local_shape(self._graph, self._local(layer), parameter)
        return self._model.allocated(prod(shape) * self._graph.values[parameter].dtype.itemsize)

    def _leaving(self, value: str, device: int) -> Iterator[Held]:
        """A run holds its results, and their gradients, until its whole backward is done."""
        maker = self._graph.producer.get(value)
        if maker is None or device not in self._strategies[maker].devices:
            return
        spec, index = self._graph.values[value], self._index[maker]
        shape = local_shape(self._graph, self._local(maker), value)
        nbytes = self._model.allocated(spec.dtype.itemsize * prod(shape))
        done = self._moments.backward(self._runs.first[index])
        yield _until(self._model.last_held(value), done, nbytes)
        if spec.requires_grad:
            counted = self._moments.backward(0) if value in self._graph.user_outputs else self._moments.backward(index)
            yield _until(counted, done, nbytes)

    def _forward(self, move: Move, device: int) -> Iterator[Held]:
        """From when the maker's run is done: messages until they are read or the pass ends, the copy until the backward
        of the first run that reads it."""
        layers = len(self._graph.layers)
        moving = self._pieces(move)
        size = self._graph.values[move.value].dtype.itemsize
        start = 2 * (self._run_end(move.value) + 1)
        runs = [self._runs.first[reader] for reader in move.readers if reader < layers]
        # Results are the caller's, who hands them to the loss.
        stop = self._moments.backward(min(runs)) if runs else layers
        arriving = [piece for piece in moving if piece.target == device]
        if any(piece.source != device for piece in arriving) or len(arriving) > 1:
            yield Held(start, 2 * stop + 2, self._nbytes(move.value, move.target, device))
            yield Held(start, 2 * min([*runs, layers]) + 1, size * _received(moving, device))
        sent = _sent(moving, device, self._shape(move.value, move.source, device))
        yield Held(start, 2 * layers + 1, size * sent.copied)

    def _backward(self, move: Move, device: int) -> Iterator[Held]:
        """From when the first reader's run has gone back; where `own` counts the maker's gradient before, corrected."""
        layers, moments = len(self._graph.layers), self._moments
        moving = [piece.reversed() for piece in self._pieces(move)]
        size = self._graph.values[move.value].dtype.itemsize
        source, target = (self._nbytes(move.value, layout, device) for layout in (move.source, move.target))
        delivered = min(move.readers) == layers
        if delivered:
            last, counted = moments.loss, 2 * moments.loss + 1
        else:
            last = moments.backward(self._runs.first[min(move.readers)])
            counted = 2 * moments.backward(max(reader for reader in move.readers if reader < layers)) + 3
        start, end = 2 * (last + 1), 2 * moments.backward(0) + 2
        yield Held(min(start, counted), max(start, counted), source if start < counted else -source)
        sent = _sent(moving, device, self._shape(move.value, move.target, device))
        yield Held(min(start, counted), end if sent.shared else start + 1, target)
        yield Held(start, end, size * sent.copied)
        taken = moments.backward(self._run_end(move.value))
        yield Held(start, 2 * taken + 1, size * _received(moving, device))

    def _pieces(self, move: Move) -> list[Piece]:
        return pieces(self._graph.values[move.value].shape, move.source, move.target)

    def _run_end(self, value: str) -> int:
        """The last layer of the run that makes a value; -1 when the user brings it."""
        maker = self._graph.producer.get(value)
        if maker is None:
            return -1
        first = self._runs.first[self._index[maker]]
        return max(index for index, start in enumerate(self._runs.first) if start == first)

    def _loss(self, value: str, device: int) -> Iterator[Held]:
        """A loss outside holds two tensors like the results; their gradient is kept beside a process's share of it."""
        nbytes = self._nbytes(value, outside(self._graph, self._devices, value), device)
        loss = self._moments.loss
        yield Held(2 * loss + 1, 2 * loss + 2, 2 * nbytes)
        if self._devices > 1:
            yield Held(2 * loss + 2, 2 * self._moments.backward(0) + 2, nbytes)

    def _messages(self, device: int) -> Iterator[Held]:
        values = self._graph.values
        for message in self._runs.messages:
            held = [(values[p].dtype.itemsize, self._runs.holdings[p].get(device)) for p in message]
            if len(message) > 1:
                nbytes = sum(size * prod(map(len, block)) for size, block in held if block is not None)
                launched = self._moments.backward(min(self._index[self._model.users[p][0]] for p in message))
                # The CPU's memory is kept from step to step.
                start, end = (0, self._moments.end) if self._model.on_cpu else (launched, self._moments.update())
                yield Held(2 * start, 2 * end, nbytes)

    def _shape(self, value: str, layout: Layout, device: int) -> tuple[int, ...]:
        if device not in layout.grid.devices:
            return (0,)
        return tuple(len(extent) for extent in block_on(self._graph.values[value].shape, layout, device))

    def _nbytes(self, value: str, layout: Layout, device: int) -> int:
        nbytes = prod(self._shape(value, layout, device)) * self._graph.values[value].dtype.itemsize
        return self._model.allocated(nbytes)


def _until(counted: int, real: int, nbytes: int) -> Held:
    """The correction where something is counted up to one moment and lives up to another."""
    if real >= counted:
        return Held(2 * counted + 2, 2 * real + 2, nbytes)
    return Held(2 * real + 2, 2 * counted + 2, -nbytes)


def _received(moving: Sequence[Piece], device: int) -> int:
    """Elements that `device` gets from others."""
    return sum(piece.elements for piece in moving if piece.target == device and piece.source != device)


@dataclass(frozen=True)
class _Sent:
    """Elements that a device copies to send them, and whether it also sends from a tensor as it lies."""

    copied: int
    shared: bool


def _sent(moving: Sequence[Piece], device: int, shape: tuple[int, ...]) -> _Sent:
    """Copied are several blocks for one other device, and a block with gaps."""
    sending: dict[int, list[Piece]] = defaultdict(list)
    for piece in moving:
        if piece.source == device and piece.target != device:
            sending[piece.target].append(piece)
    copied = [g for g in sending.values() if len(g) > 1 or not _contiguous(g[0].source_region, shape)]
    return _Sent(sum(piece.elements for group in copied for piece in group), len(copied) < len(sending))


def _contiguous(block: Region, shape: tuple[int, ...]) -> bool:
    """Whether a block lies in one piece in memory: before the first cut dimension only single indices."""
    lengths = [len(extent) for extent in block]
    cut = [dim for dim, length in enumerate(lengths) if length != shape[dim]]
    return not cut or (cut == [cut[0]] and prod(lengths[: cut[0]]) == 1)
