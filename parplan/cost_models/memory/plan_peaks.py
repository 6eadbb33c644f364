"""Peak memory of a lowered plan, per device: its layers' tensors and those of the program's steps between them.

The solver counts layers one by one, and so can only estimate what depends on two of them. A program says what every
device holds of a parameter that layers share, and every transfer: the copy that arrives, the messages that carry it
(sent ones are kept until the pass ends, as torch.distributed may still read them), results that a segment holds until
its backward is done, and the messages of gradient sums. As the runtime does it with one process per device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parplan.cost_models.memory.layer_memory import MemoryModel
from parplan.cost_models.memory.message_sizes import Messages, messages
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer, local_shape
from parplan.layout import Grid, IntArray, block_shapes
from parplan.lowering.program import Code, Program, Slot, Transfer

__all__ = ["memory_over_step"]


def memory_over_step(model: MemoryModel, program: Program) -> IntArray:
    """Bytes on each device in every phase of a step of `program`, shape (phases, devices); peaks are its maxima.

    Moment m (cost_models/costs.py: Moments) is phase 2m + 1; in phase 2m what was computed before m travels.

    Args:
        model: of the graph, the optimizer and the kind of device.
        program: in one pass, lowered for as many processes as there are devices.
    """
    changes = np.zeros((2 * model.moments.end + 1, program.devices), dtype=np.int64)
    for one in _Step(model, program).held():
        if one.start < one.end:
            changes[one.start] += one.nbytes
            changes[one.end] -= one.nbytes
    return np.cumsum(changes, axis=0)[:-1]


@dataclass(frozen=True, eq=False)
class _Held:
    """Bytes on every device from phase `start` to `end` (excluded), shape (devices,)."""

    start: int
    end: int
    nbytes: IntArray


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
        for step in program.computes:
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

    def held(self) -> Iterator[_Held]:
        """Everything on the devices by phase; an entry may be negative where one before counts too much.

        Moment m is phase 2m + 1; in phase 2m what was computed before m travels.
        """
        for name, strategy in self._strategies.items():
            here = self._spread(strategy.grid, np.ones(len(strategy.devices), dtype=np.int64))
            yield from (_Held(2 * one.start + 1, 2 * one.end, one.nbytes * here) for one in self._inner[name])
        for parameter, users in self._model.users.items():
            if len(users) > 1:
                yield from self._shared(parameter, users)
        for name in self._program.inputs.values():
            yield _Held(0, 2 * self._moments.end, self._nbytes(self._program.slots[name]))
        for name in self._segments.results:
            yield from self._leaving(self._program.slots[name])
        for transfer in self._transfers:
            there, back = messages(transfer.given, transfer.wanted)
            yield from self._forward(transfer, there)
            if transfer.given.requires_grad and transfer.given.value in self._graph.producer:
                yield from self._backward(transfer, back)
        outputs = {slot.value: slot for slot in map(self._program.slots.__getitem__, self._program.outputs)}
        loss = self._moments.loss
        for value in self._model.delivered(self._graph.producer):
            # A loss outside holds two tensors like the results; their gradient is kept beside a process's share of it.
            nbytes = self._nbytes(outputs[value])
            yield _Held(2 * loss + 1, 2 * loss + 2, 2 * nbytes)
            if self._program.devices > 1:
                yield _Held(2 * loss + 2, 2 * self._moments.backward(0) + 2, nbytes)
        yield from self._messages()

    def _shared(self, parameter: str, users: Sequence[str]) -> Iterator[_Held]:
        """Layers that use one parameter may cut it differently: `own` counts what the first needs of it, and of its
        gradient what the last needs, but a device holds what all of its layers need."""
        moments, spec, optimizer = self._moments, self._graph.values[parameter], self._model.optimizer
        real = self._model.allocated(self._block_bytes(parameter))
        counted = [self._counted(parameter, name) for name in users]
        differs = np.any([nbytes != real for nbytes in counted], axis=0)
        more = differs * (real - counted[0])
        yield _Held(0, 2 * moments.end, more)
        if not spec.requires_grad:
            return
        yield _Held(0, 2 * moments.end, optimizer.states * more)
        time = moments.update(self._index[users[0]]) if self._model.on_cpu else moments.update()
        temporaries = optimizer.one_by_one if self._model.on_cpu else optimizer.together
        yield _Held(2 * time + 1, 2 * time + 2, np.maximum(0, more) * temporaries)
        # Every layer's term is kept until the first layer's is there, when all are added to zeros.
        added = 2 * moments.backward(self._index[users[0]]) + 1
        yield _Held(added, 2 * moments.end, differs * real)
        yield _Held(added + 1, 2 * moments.end, differs * -counted[-1])
        for name, nbytes in zip(users[1:-1], counted[1:-1], strict=True):
            yield _Held(2 * moments.backward(self._index[name]) + 2, added + 1, differs * nbytes)
        if self._model.adds_apart(parameter):
            yield _Held(added, added + 1, differs * -counted[0])

    def _counted(self, parameter: str, layer: str) -> IntArray:
        """What `own` counts of a parameter for one of its layers."""
        grid = self._strategies[layer].grid
        shape = local_shape(self._graph, self._local(layer), parameter)
        nbytes = self._model.allocated(prod(shape) * self._graph.values[parameter].dtype.itemsize)
        return self._spread(grid, np.full(len(grid.devices), nbytes))

    def _leaving(self, slot: Slot) -> Iterator[_Held]:
        """A segment holds its results, and their gradients, until its whole backward is done."""
        index, nbytes = self._index[self._graph.producer[slot.value]], self._nbytes(slot)
        done = self._moments.backward(self._segments.first[index])
        yield _until(self._model.last_held(slot.value), done, nbytes)
        if slot.requires_grad:
            delivered = slot.value in self._graph.user_outputs
            yield _until(self._moments.backward(0 if delivered else index), done, nbytes)

    def _forward(self, transfer: Transfer, sizes: Messages) -> Iterator[_Held]:
        """From when the maker's segment is done, or from a stop when the value is read: messages until then or until
        the pass ends, the copy until the backward of the first segment that reads it."""
        layers, size = len(self._graph.layers), transfer.given.dtype.itemsize
        given, wanted = transfer.given.layout.grid, transfer.wanted.layout.grid
        first = min(self._segments.first.get(reader, layers) for reader in self._segments.readers[transfer.target])
        start = 2 * (self._made(transfer.given) + 1) if _is_home(transfer.given) else 2 * first
        if transfer.target in self._segments.stops:
            end = 2 * first + 1
        else:  # results are the caller's, who hands them to the loss
            end = 2 * (self._moments.backward(first) if first < layers else layers) + 2
        made = self._spread(wanted, (sizes.received > 0) | (sizes.pieces > 1))
        yield _Held(start, end, made * self._nbytes(transfer.wanted))
        yield _Held(start, 2 * first + 1, size * self._spread(wanted, sizes.received))
        yield _Held(start, 2 * layers + 1, size * self._spread(given, sizes.copied))

    def _backward(self, transfer: Transfer, sizes: Messages) -> Iterator[_Held]:
        """From when the first reader's segment has gone back (from a stop at once); where `own` counts the maker's
        gradient before, corrected."""
        moments, size = self._moments, transfer.given.dtype.itemsize
        readers = [r for r in self._segments.readers[transfer.target] if r < len(self._graph.layers)]
        source, target = self._nbytes(transfer.given), self._nbytes(transfer.wanted)
        if len(readers) == len(self._segments.readers[transfer.target]):
            last = moments.backward(self._segments.first[min(readers)])
            counted = 2 * moments.backward(max(readers)) + 3
        else:
            last, counted = moments.loss, 2 * moments.loss + 1
        start, end, taken = 2 * (last + 1), 2 * moments.backward(0) + 2, 2 * last + 3
        made = start if transfer.target in self._segments.stops else min(start, counted)
        if _is_home(transfer.given):
            yield _Held(min(start, counted), max(start, counted), source if start < counted else -source)
            taken = 2 * moments.backward(self._made(transfer.given)) + 1
        grid = transfer.wanted.layout.grid
        shared = self._spread(grid, sizes.shared)
        yield _Held(made, end, target * shared)
        yield _Held(made, start + 1, target * (1 - shared))
        yield _Held(start, end, size * self._spread(grid, sizes.copied))
        yield _Held(start, taken, size * self._spread(transfer.given.layout.grid, sizes.received))

    def _made(self, slot: Slot) -> int:
        """The last layer of the segment that makes a value; -1 when the user brings it."""
        maker = self._graph.producer.get(slot.value)
        return -1 if maker is None else self._segments.last[self._index[maker]]

    def _messages(self) -> Iterator[_Held]:
        for message in (bucket.parameters for bucket in self._program.buckets):
            if len(message) > 1:
                nbytes = np.sum([self._block_bytes(parameter) for parameter in message], axis=0)
                launched = self._moments.backward(min(self._index[self._model.users[p][0]] for p in message))
                # The CPU's memory is kept from step to step.
                start, end = (0, self._moments.end) if self._model.on_cpu else (launched, self._moments.update())
                yield _Held(2 * start, 2 * end, nbytes)

    def _block_bytes(self, parameter: str) -> IntArray:
        """What every device holds of a parameter."""
        held, size = self._program.holdings[parameter], self._graph.values[parameter].dtype.itemsize
        distinct = {id(block): block for block in held.values()}  # equal ones are mostly one object
        sizes = {key: size * prod(map(len, block)) for key, block in distinct.items()}
        nbytes = np.zeros(self._program.devices, dtype=np.int64)
        nbytes[list(held)] = [sizes[id(block)] for block in held.values()]
        return nbytes

    def _nbytes(self, slot: Slot) -> IntArray:
        """What every device holds of a slot."""
        shapes = block_shapes(slot.shape, slot.layout, slot.rows)
        return self._spread(slot.layout.grid, self._model.allocated(shapes.prod(axis=0) * slot.dtype.itemsize))

    def _spread(self, grid: Grid, amounts: NDArray[Any]) -> IntArray:
        """Amounts by place of a grid, on all devices."""
        found = np.zeros(self._program.devices, dtype=np.int64)
        found[list(grid.devices)] = amounts
        return found


def _is_home(slot: Slot) -> bool:
    """Whether a value is there as its maker left it."""
    return slot.name == slot.value


def _until(counted: int, real: int, nbytes: IntArray) -> _Held:
    """The correction where something is counted up to one moment and lives up to another."""
    if real >= counted:
        return _Held(2 * counted + 2, 2 * real + 2, nbytes)
    return _Held(2 * real + 2, 2 * counted + 2, -nbytes)
