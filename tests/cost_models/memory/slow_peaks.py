"""Peak memory of a lowered plan, one device and one message after another: slow, to compare plan_peaks.py with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod

from parplan.cost_models.costs import Held
from parplan.cost_models.memory.layer_memory import MemoryModel
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer, local_shape
from parplan.layout import Piece, Range, Region
from parplan.lowering.program import Code, Compute, Exchange, Program, Slot, Transfer

__all__ = ["slow_peaks"]


def slow_peaks(model: MemoryModel, program: Program) -> tuple[int, ...]:
    """Peak bytes on each device in a step of `program`.

    Args:
        model: of the graph, the optimizer and the kind of device.
        program: in one pass, lowered for as many processes as there are devices.
    """
    step, found = _Step(model, program), list[int]()
    for device in range(program.devices):
        changes = [0] * (2 * model.moments.end + 1)
        for one in step.held(device):
            if one.start < one.end:
                changes[one.start] += one.nbytes
                changes[one.end] -= one.nbytes
        found.append(max(accumulate(changes)))
    return tuple(found)


class _Segments:
    """By layer index: the first and the last layer of its segment; by slot: the layers that read it, in order.

    The number of layers stands for the caller. A stop on the way to other slots is read by whoever reads those.
    """

    def __init__(self, graph: LayerGraph, program: Program) -> None:
        index = {name: number for number, name in enumerate(graph.layers)}
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.readers: dict[str, list[int]] = defaultdict(list)
        self.results: list[str] = []
        for step in program.forward:
            if isinstance(step, Compute):
                layers = [index[name] for name in step.layers]
                for operand in step.operands:
                    reading = [index[n] for n in step.layers if operand.name in graph.layers[n].inputs]
                    self.readers[operand.slot] += reading or layers
                if step.code is not Code.STATISTICS:
                    self.first |= dict.fromkeys(layers, layers[0])
                    self.last |= dict.fromkeys(layers, layers[-1])
                    self.results += [result.slot for result in step.results]
        for slot in (*program.outputs, *program.updates.values()):
            self.readers[slot].append(len(index))
        self.stops = {t.source for t in program.transfers} - set(self.readers)
        for transfer in reversed(program.transfers):
            self.readers[transfer.source] += self.readers[transfer.target]


class _Step:
    """One plan's step, phase by phase."""

    def __init__(self, model: MemoryModel, program: Program) -> None:
        graph = model.graph
        self._model, self._graph, self._program = model, graph, program
        self._strategies, self._moments = program.strategies, model.moments
        self._index = {name: index for index, name in enumerate(graph.layers)}
        self._segments = _Segments(graph, program)
        self._transfers = [t for t in program.transfers if t.given.value in graph.values]
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
        for name in self._program.inputs.values():
            yield Held(0, 2 * self._moments.end, self._nbytes(self._program.slots[name], device))
        for name in self._segments.results:
            yield from self._leaving(self._program.slots[name], device)
        for transfer in self._transfers:
            yield from self._forward(transfer, device)
            if transfer.given.requires_grad and transfer.given.value in self._graph.producer:
                yield from self._backward(transfer, device)
        outputs = {slot.value: slot for slot in map(self._program.slots.__getitem__, self._program.outputs)}
        loss = self._moments.loss
        for value in self._model.delivered(self._graph.producer):
            # A loss outside holds two tensors like the results; their gradient is kept beside a process's share of it.
            nbytes = self._nbytes(outputs[value], device)
            yield Held(2 * loss + 1, 2 * loss + 2, 2 * nbytes)
            if self._program.devices > 1:
                yield Held(2 * loss + 2, 2 * self._moments.backward(0) + 2, nbytes)
        yield from self._messages(device)

    def _shared(self, parameter: str, users: Sequence[str], device: int) -> Iterator[Held]:
        """Layers that use one parameter may cut it differently: `own` counts what the first needs of it, and of its
        gradient what the last needs, but a device holds what all of its layers need."""
        moments, spec, optimizer = self._moments, self._graph.values[parameter], self._model.optimizer
        block = self._program.holdings[parameter].get(device, (Range(0, 0),))
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

    def _leaving(self, slot: Slot, device: int) -> Iterator[Held]:
        """A segment holds its results, and their gradients, until its whole backward is done."""
        index, nbytes = self._index[self._graph.producer[slot.value]], self._nbytes(slot, device)
        done = self._moments.backward(self._segments.first[index])
        yield _until(self._model.last_held(slot.value), done, nbytes)
        if slot.requires_grad:
            delivered = slot.value in self._graph.user_outputs
            yield _until(self._moments.backward(0 if delivered else index), done, nbytes)

    def _forward(self, transfer: Transfer, device: int) -> Iterator[Held]:
        """From when the maker's segment is done, or from a stop when the value is read: messages until then or until
        the pass ends, the copy until the backward of the first segment that reads it."""
        layers, exchange, size = len(self._graph.layers), transfer.exchange, transfer.given.dtype.itemsize
        first = min(self._segments.first.get(reader, layers) for reader in self._segments.readers[transfer.target])
        start = 2 * (self._made(transfer.given) + 1) if _is_home(transfer.given) else 2 * first
        if transfer.target in self._segments.stops:
            end = 2 * first + 1
        else:  # results are the caller's, who hands them to the loss
            end = 2 * (self._moments.backward(first) if first < layers else layers) + 2
        received = exchange.received.get(device, {})
        if received or len(exchange.assemblies[device].pieces if device in exchange.assemblies else ()) > 1:
            yield Held(start, end, self._nbytes(transfer.wanted, device))
            yield Held(start, 2 * first + 1, size * _elements(received.values()))
        yield Held(start, 2 * layers + 1, size * _sent(exchange, device, transfer.given).copied)

    def _backward(self, transfer: Transfer, device: int) -> Iterator[Held]:
        """From when the first reader's segment has gone back (from a stop at once); where `own` counts the maker's
        gradient before, corrected."""
        moments, exchange, size = self._moments, transfer.transposed, transfer.given.dtype.itemsize
        readers = [r for r in self._segments.readers[transfer.target] if r < len(self._graph.layers)]
        source, target = self._nbytes(transfer.given, device), self._nbytes(transfer.wanted, device)
        if len(readers) == len(self._segments.readers[transfer.target]):
            last = moments.backward(self._segments.first[min(readers)])
            counted = 2 * moments.backward(max(readers)) + 3
        else:
            last, counted = moments.loss, 2 * moments.loss + 1
        start, end, taken = 2 * (last + 1), 2 * moments.backward(0) + 2, 2 * last + 3
        made = start if transfer.target in self._segments.stops else min(start, counted)
        if _is_home(transfer.given):
            yield Held(min(start, counted), max(start, counted), source if start < counted else -source)
            taken = 2 * moments.backward(self._made(transfer.given)) + 1
        sent = _sent(exchange, device, transfer.wanted)
        yield Held(made, end if sent.shared else start + 1, target)
        yield Held(start, end, size * sent.copied)
        yield Held(start, taken, size * _elements(exchange.received.get(device, {}).values()))

    def _made(self, slot: Slot) -> int:
        """The last layer of the segment that makes a value; -1 when the user brings it."""
        maker = self._graph.producer.get(slot.value)
        return -1 if maker is None else self._segments.last[self._index[maker]]

    def _messages(self, device: int) -> Iterator[Held]:
        values = self._graph.values
        for message in (bucket.parameters for bucket in self._program.buckets):
            held = [(values[p].dtype.itemsize, self._program.holdings[p].get(device)) for p in message]
            if len(message) > 1:
                nbytes = sum(size * prod(map(len, block)) for size, block in held if block is not None)
                launched = self._moments.backward(min(self._index[self._model.users[p][0]] for p in message))
                # The CPU's memory is kept from step to step.
                start, end = (0, self._moments.end) if self._model.on_cpu else (launched, self._moments.update())
                yield Held(2 * start, 2 * end, nbytes)

    def _nbytes(self, slot: Slot, device: int) -> int:
        """What a device holds of a slot."""
        if device not in slot.devices:
            return 0
        return self._model.allocated(prod(slot.local_shapes[device]) * slot.dtype.itemsize)


def _is_home(slot: Slot) -> bool:
    """Whether a value is there as its maker left it."""
    return slot.name == slot.value


def _until(counted: int, real: int, nbytes: int) -> Held:
    """The correction where something is counted up to one moment and lives up to another."""
    if real >= counted:
        return Held(2 * counted + 2, 2 * real + 2, nbytes)
    return Held(2 * real + 2, 2 * counted + 2, -nbytes)


def _elements(messages: Iterable[Sequence[Piece]]) -> int:
    return sum(piece.elements for message in messages for piece in message)


@dataclass(frozen=True)
class _Sent:
    """Elements that a device copies to send them, and whether it also sends from a tensor as it lies."""

    copied: int
    shared: bool


def _sent(exchange: Exchange, device: int, slot: Slot) -> _Sent:
    """Copied are several blocks for one other device, and a block with gaps."""
    sending = exchange.sent.get(device, {}).values()
    copied = [m for m in sending if len(m) > 1 or not _contiguous(m[0].source_region, slot.local_shapes[device])]
    return _Sent(_elements(copied), len(copied) < len(sending))


def _contiguous(block: Region, shape: tuple[int, ...]) -> bool:
    """Whether a block lies in one piece in memory: before the first cut dimension only single indices."""
    lengths = [len(extent) for extent in block]
    cut = [dim for dim, length in enumerate(lengths) if length != shape[dim]]
    return not cut or (cut == [cut[0]] and prod(lengths[: cut[0]]) == 1)
