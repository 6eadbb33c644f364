"""Peak memory of a lowered plan, per device: the intervals of its layers' tensors, and of the program's steps between.

The solver counts layers one by one, and so can only estimate what depends on two of them (layer_memory.py: `_around`).
A program says which layers run as one segment, what every device holds of a parameter that layers share, and every
transfer: the copy that arrives, the messages that carry it (sent ones are kept until the pass ends, as
torch.distributed may still read them), and the messages of gradient sums. As the runtime does it with one process per
device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parplan.cost_models.memory.layer_memory import MemoryModel
from parplan.cost_models.memory.lifetimes import Lifetimes, Segmentation, Time
from parplan.cost_models.memory.message_sizes import Messages, messages
from parplan.cost_models.ops.op_calls import op_calls
from parplan.graph.local import LocalLayer
from parplan.layout import Block, Grid, IntArray, block_shapes
from parplan.lowering.holdings import used_blocks
from parplan.lowering.ordering import runs_on_replicas
from parplan.lowering.program import Code, Compute, Program, Slot, Transfer, gathers_beside

__all__ = ["memory_by_layer", "memory_over_step"]


def memory_over_step(model: MemoryModel, program: Program) -> IntArray:
    """Bytes on each device at every point of a step of `program` (cost_models/costs.py: Moments), shape (points,
    devices); peaks are its maxima.

    Args:
        model: of the graph, the optimizer and the kind of device.
        program: in one pass, lowered for as many processes as there are devices.
    """
    return np.cumsum(_Step(model, program).changes, axis=0)[:-1]


def memory_by_layer(
    model: MemoryModel, program: Program, points: Sequence[int], device: int
) -> tuple[list[dict[str, int]], IntArray]:
    """Bytes on one device at some points of a step, by the layer that has them: its tensors, what was moved to it, and
    messages of its parameters; and beside them `memory_over_step`."""
    step = _Step(model, program, points, device)
    return step.shares, np.cumsum(step.changes, axis=0)[:-1]


class _Step:
    """One plan's step: every tensor on the devices from when it is made to when it is freed.

    Attributes:
        changes: of the bytes on each device from point to point.
        shares: bytes of every layer at some points on one device.
    """

    def __init__(self, model: MemoryModel, program: Program, points: Sequence[int] = (), device: int = 0) -> None:
        self._points, self._device = points, device
        self.shares = [dict.fromkeys(model.graph.layers, 0) for _ in points]
        self._layer = ""  # has what is held next
        self._model, self._graph, self._program = model, model.graph, program
        self._moments, self._index = model.moments, model.ops.index
        self.changes = np.zeros((model.moments.end + 1, program.devices), dtype=np.int64)
        # By layer index: the first and the last layer of its segment; by slot: the layers that read it.
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._readers: dict[str, list[int]] = defaultdict(list)
        self._recorded = model.micro_batches == 1 and runs_on_replicas(program)
        segmentation = self._segmentation()
        self._begun_with = gathers_beside(program)
        replayed = [name for name, own in program.strategies.items() if own.saved == "replay"]
        self._lifetimes = Lifetimes(model.ops, segmentation, replayed)
        self._hold_parameters()
        for step in program.computes:
            if step.code is not Code.STATISTICS:
                self._hold_layers(step)
        for one in self._lifetimes.owned[None]:
            self._layer = self._reading(one.value)
            self._hold(one.start[0], one.stop[0] + 1, self._nbytes(program.slots[one.value]))
        self._hold_moved()
        self._hold_delivered()
        self._hold_messages()

    def _hold(self, start: int, end: int, nbytes: IntArray) -> None:
        """Hold bytes on every device at the points [start, end)."""
        if start < end:
            self.changes[start] += nbytes
            self.changes[end] -= nbytes
        for point, shares in zip(self._points, self.shares, strict=True):
            if start <= point < end:
                shares[self._layer] += int(nbytes[self._device])

    def _segmentation(self) -> Segmentation:
        """The number of layers stands for the caller; a stop on the way to slots is read by whoever reads those."""
        graph, program, count = self._graph, self._program, len(self._index)
        slots = dict[tuple[str, str], str]()
        for step in program.computes:
            layers = [self._index[name] for name in step.layers]
            for operand in step.operands:
                reading = [name for name in step.layers if operand.name in graph.layers[name].inputs]
                self._readers[operand.slot] += map(self._index.__getitem__, reading or step.layers)
                slots |= {(name, operand.name): operand.slot for name in reading}
            if step.code is not Code.STATISTICS:
                self._first |= dict.fromkeys(layers, layers[0])
                self._last |= dict.fromkeys(layers, layers[-1])
        for slot in (*program.outputs, *program.updates.values()):
            self._readers[slot].append(count)
        self._stops = {t.source for t in program.transfers} - set(self._readers)
        sent_back = defaultdict[int, list[tuple[str, str]]](list)
        for transfer in reversed(program.transfers):
            readers = self._readers[transfer.target]
            self._readers[transfer.source] += readers
            if transfer.given.requires_grad and transfer.given.value in graph.producer:
                sent_back[self._first.get(min(readers), count)].append((transfer.source, transfer.target))
        wanted = map(program.slots.__getitem__, dict.fromkeys(program.outputs))
        outputs = [slot.name for slot in wanted if slot.requires_grad and slot.value in graph.producer]
        return Segmentation(self._first, self._leaving(), outputs, slots, sent_back)

    def _leaving(self) -> dict[str, Time]:
        """What segments hand on, and until when it is held at least: until transfers begin, the segments that read it
        as it is have gone back, and the caller drops it."""
        gone_back, moments, program = self._model.ops.gone_back, self._moments, self._program
        found = dict[str, Time]()

        def held(name: str, time: Time) -> None:
            found[name] = max(found.get(name, time), time)

        for step in program.computes:
            first = self._index[step.layers[0]]
            for result in step.results:
                held(result.name, (moments.forward(self._last[first]) + 1, 0))
            for operand in step.operands if not self._recorded else ():  # the caller's autograd keeps what ops need
                held(operand.slot, gone_back(first))
        for name in program.outputs:
            held(name, (self._model.callers_until(program.slots[name].value), 0))
        return found

    def _until(self, transfer: Transfer) -> tuple[int, Time]:
        """At which point a value is first read where a transfer brings it, and until when it is held there: until the
        first segment that reads it has gone back; freed weights and stops on the way until they are read."""
        moments, first = self._moments, self._reader(transfer.target)
        read = moments.forward(first)
        if transfer.target in self._program.freed:
            return read, (moments.forward(self._last[first]), 0)
        if transfer.target in self._stops:
            return read, (read - 1, 0)
        if first == len(self._index):
            return read, (self._model.callers_until(transfer.given.value), 0)
        return read, self._model.ops.gone_back(first)

    def _hold_parameters(self) -> None:
        """Parameters and their optimizer state; of gradients what of it begins with which layer's term.

        Layers that share a parameter may cut it differently: then every layer's term is kept until the first layer's
        is there, when all are added to zeros.
        """
        model, graph, moments, strategies = self._model, self._graph, self._moments, self._program.strategies
        self._blocks: dict[str, IntArray] = {}
        self._begun: dict[str, dict[str, IntArray]] = defaultdict(dict)
        owned: dict[str, dict[str, IntArray]] = defaultdict(dict)
        for parameter, users in graph.users.items():
            size, blocks = graph.values[parameter].dtype.itemsize, self._program.holdings[parameter]
            self._layer = users[0]
            held = self._blocks[parameter] = self._block_bytes(size, blocks)
            owned[users[0]][parameter] = model.allocated(held)
            if parameter in self._program.slices:
                if graph.values[parameter].requires_grad:
                    back = moments.backward(self._first[self._index[users[0]]])
                    self._begun[users[0]][parameter] = back * (held > 0)
                    arrive = self._in_slices(back)
                    # Of several micro-batches they are added to those before.
                    self._hold(arrive, moments.end if model.micro_batches == 1 else arrive + 1, model.allocated(held))
                continue
            shares = (used_blocks(graph, strategies, name, parameter) for name in users if len(users) > 1)
            used = [self._block_bytes(size, own) for own in shares] or [held]
            apart = np.any([(own > 0) & (own != held) for own in used], axis=0)
            added, here = moments.backward(self._index[users[0]]), dict(zip(users, used, strict=True))
            seen = np.zeros(len(held), dtype=bool)
            for name in self._lifetimes.adding.get(parameter, ()):
                until = model.begun_until(self._first[self._index[name]])
                last = np.where(apart, added, until * ~seen)
                self._begun[name][parameter] = last * (here[name] > 0)
                seen |= here[name] > 0
            if graph.values[parameter].requires_grad:
                self._hold(added, moments.end, model.allocated(held) * apart)
        for name, sizes in owned.items():
            self._layer = name
            for interval in model.residents(self._index[name], sizes):
                self._hold(*interval)

    def _hold_layers(self, step: Compute) -> None:
        """What the layers of a segment hold, on devices with as many samples that begin the same gradients."""
        for name in step.layers:
            layer, begun, self._layer = self._graph.layers[name], self._begun[name], name
            samples = np.repeat(step.batches, step.grid.shards)
            kinds = np.array([samples, *(last[list(step.grid.devices)] for last in begun.values())]).T
            for kind in set(map(tuple, kinds.tolist())):  # a tenth of the time of np.unique
                here = self._spread(step.grid, (kinds == kind).all(axis=1))
                local = LocalLayer(layer, self._program.strategies[name], 0, max(1, kind[0]))
                self._hold(0, self._moments.end, self._model.taken(local, layer.buffers) * here)
                begins = {parameter: last for parameter, last in zip(begun, kind[1:], strict=True) if last}
                calls = op_calls(self._graph, local)
                for one in self._model.by_ops(local, calls, self._lifetimes, begins, self._recorded):
                    self._hold(one.start, one.end, one.nbytes * here)

    def _hold_moved(self) -> None:
        """User inputs, the copies that transfers make, and their messages both ways."""
        slots, moments, sent = self._program.slots, self._moments, [*self._lifetimes.sent]
        sent_back = {transfer.target: transfer.sent_back for transfer in self._program.transfers}
        for name in self._program.inputs.values():
            self._layer = self._reading(name)
            self._hold(0, moments.end, self._model.micro_batches * self._nbytes(slots[name]))
        kept = dict[str, IntArray]()  # by target: up to which point its gradient is kept to be sent, or taken from
        given = defaultdict[str, list[Slot]](list)  # what is moved, by the value whose memory it is
        until = defaultdict[str, IntArray](lambda: np.zeros(self._program.devices, dtype=np.int64))
        for transfer in self._program.transfers:
            if transfer.given.value in self._graph.values:
                there, back = messages(transfer.given, transfer.wanted)
                self._layer = self._reading(transfer.target)
                ends, root = self._move(transfer, there), self._lifetimes.root(transfer.source)
                if root in self._lifetimes.stops:
                    given[root].append(transfer.given)
                    until[root] = np.maximum(until[root], ends)
                made = transfer.weights or transfer.given.value in self._graph.producer
                if transfer.given.requires_grad and made:
                    kept[transfer.target] = self._move_back(transfer, back)
                if transfer.given.requires_grad and transfer.weights:
                    sent.append(([transfer.target], (moments.backward(self._reader(transfer.target)), 0)))
        for targets, stop in sent:
            self._layer = self._reading(targets[0])
            ends = np.max([kept[target] for target in targets], axis=0)
            self._hold_longer(stop, ends, [sent_back[target] for target in targets])
        for root, moved in given.items():
            self._layer = self._graph.producer[moved[0].value]
            self._hold_longer(self._lifetimes.stops[root], until[root], moved)

    def _hold_longer(self, stop: Time, ends: IntArray, slots: Sequence[Slot]) -> None:
        """Hold the memory of all of these slots beyond `stop` up to a point for each device."""
        nbytes = np.max([self._nbytes(slot) for slot in slots], axis=0)
        for end in set(ends.tolist()):
            self._hold(stop[0] + 1, end, nbytes * (ends == end))

    def _move(self, transfer: Transfer, sizes: Messages) -> IntArray:
        """Messages from when the maker's segment is done, or from a stop when the value is read, which makes the copy,
        until the backward of the first segment that reads it; to which point every device keeps the value itself for
        them, and for what is a view of it."""
        moments, (read, last) = self._moments, self._until(transfer)
        start = read - 1
        if transfer.weights:
            start = moments.forward(self._index[self._begun_with[transfer.target, False].layers[0]]) - 1
        elif _is_home(transfer.given):
            start = moments.forward(self._made(transfer.given)) + 1
        if transfer.target in self._program.freed:
            self._gather_again(transfer, sizes)
        put_together = (sizes.received > 0) | (sizes.pieces > 1)
        made, nbytes = self._spread(transfer.wanted.layout.grid, put_together), self._nbytes(transfer.wanted)
        self._hold(read - 1, read, nbytes)  # the runtime makes room also where nothing has to be put together
        self._hold(read, last[0] + 1, made * nbytes)
        self._hold_sent(transfer.sent, transfer.wanted, sizes, (start, read, moments.delivery))
        self._hold_cast(transfer, start, moments.delivery)
        shared = self._spread(transfer.given.layout.grid, sizes.shared * moments.delivery)
        if not _is_home(transfer.given):
            self._hold(read, moments.delivery, (shared > 0) * self._nbytes(transfer.given))
        own = np.where(put_together, read, last[0] + 1) * sizes.own
        return np.maximum(shared, self._spread(transfer.wanted.layout.grid, own))

    def _gather_again(self, transfer: Transfer, sizes: Messages) -> None:
        """Weights that are gathered before a segment goes back: put together beside their messages, which come while
        the group behind it goes back, then copied to where its graph holds them."""
        moments, first = self._moments, self._reader(transfer.target)
        begin, nbytes = moments.backward(self._last[first]), self._nbytes(transfer.wanted)
        received = transfer.wanted.dtype.itemsize * self._spread(transfer.wanted.layout.grid, sizes.received)
        start = moments.backward(self._index[self._begun_with[transfer.target, True].layers[-1]]) - 1
        self._hold(start, begin - 1, received)
        self._hold_cast(transfer, start, self._in_slices(begin))
        self._hold(begin - 1, begin, nbytes + np.maximum(received, nbytes))
        self._hold(begin, moments.backward(first) + 1, nbytes)

    def _move_back(self, transfer: Transfer, sizes: Messages) -> IntArray:
        """Messages from when the first reader's segment has gone back until the maker's does, from a stop at once; to
        which point every device keeps the gradient itself for them."""
        moments = self._moments
        start = moments.backward(self._reader(transfer.target)) + 1
        taken = moments.backward(self._made(transfer.given)) if _is_home(transfer.given) else start + 1
        end = moments.passed
        if transfer.weights:
            end = taken = self._in_slices(start - 1)
        self._hold_sent(transfer.sent_back, transfer.given, sizes, (start, taken, end))
        shared = self._spread(transfer.wanted.layout.grid, sizes.shared * end)
        return np.maximum(shared, self._spread(transfer.given.layout.grid, sizes.own * taken))

    def _hold_cast(self, transfer: Transfer, start: int, end: int) -> None:
        """Slices in the type that they are sent in, where that is not their own."""
        if transfer.sent is not transfer.given:
            self._hold(start, end, self._nbytes(transfer.sent))

    def _hold_sent(self, source: Slot, target: Slot, sizes: Messages, points: tuple[int, int, int]) -> None:
        """Messages from when they start: those that are received until what they carry is put together, before the
        second point; copies that are sent until the pass ends, the third."""
        (start, taken, end), size = points, source.dtype.itemsize
        self._hold(start, taken, size * self._spread(target.layout.grid, sizes.received))
        self._hold(start, end, size * self._spread(source.layout.grid, sizes.copied))

    def _hold_delivered(self) -> None:
        """A loss outside holds two tensors like the results; their gradient is kept beside a process's share of it."""
        slots, loss = map(self._program.slots.__getitem__, self._program.outputs), self._moments.loss
        outputs = {slot.value: slot for slot in slots}
        for value in self._model.put_together:
            self._layer = self._graph.producer.get(value, self._layer)
            self._hold(0, self._moments.end, self._model.micro_batches * self._nbytes(outputs[value]))
        for value in self._model.delivered(self._graph.producer):
            nbytes, self._layer = self._nbytes(outputs[value]), self._graph.producer[value]
            self._hold(loss, loss + 1, self._model.loss_tensors(value) * nbytes)
            if self._program.devices > 1 and not self._recorded:
                self._hold(loss + 1, self._moments.passed, nbytes)

    def _hold_messages(self) -> None:
        """Messages of gradient sums."""
        moments = self._moments
        for message in (bucket.parameters for bucket in self._program.buckets if len(bucket.parameters) > 1):
            nbytes = np.sum([self._blocks[parameter] for parameter in message], axis=0)
            self._layer = self._graph.users[message[0]][0]
            back = moments.backward(min(self._index[self._graph.users[p][0]] for p in message))
            if self._recorded:  # the message becomes the gradients' memory, beside theirs while it is put together
                self._hold(back + 1, back + 2, nbytes)
                continue
            # The CPU's memory is kept from step to step.
            start, end = (0, moments.end) if self._model.on_cpu else (back - 1, moments.passed)
            self._hold(start, end, nbytes)

    def _in_slices(self, point: int) -> int:
        """When gradients that a segment gave at `point` are summed to slices: after the next one has gone back."""
        moments, first = self._moments, (self._moments.backward(0) - point) // 2
        return moments.backward(self._first[first - 1]) + 1 if first > 0 else moments.passed

    def _reader(self, slot: str) -> int:
        """The first layer of the first segment that reads a slot; behind the last one, where none does."""
        return self._first.get(min(self._readers[slot], default=len(self._index)), len(self._index))

    def _reading(self, slot: str) -> str:
        """The layer that reads a slot first; of results the last one, "" in a model without layers."""
        order = self._model.ops.order
        return order[min(self._reader(slot), len(order) - 1)] if order else ""

    def _made(self, slot: Slot) -> int:
        """The last layer of the segment that makes a value; -1 when the user brings it."""
        maker = self._graph.producer.get(slot.value)
        return -1 if maker is None else self._last[self._index[maker]]

    def _block_bytes(self, size: int, blocks: Mapping[int, Block]) -> IntArray:
        """Bytes of every device's block of a tensor whose elements have this size."""
        distinct = {id(block): block for block in blocks.values()}  # equal ones are mostly one object
        sizes = {key: size * prod(map(len, block)) for key, block in distinct.items()}
        nbytes = np.zeros(self._program.devices, dtype=np.int64)
        nbytes[list(blocks)] = [sizes[id(block)] for block in blocks.values()]
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
