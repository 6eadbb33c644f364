"""Tasks of a lowered program's step with their dependencies, in the program's order.

A segment begins when all that it reads is there, and what it makes leaves at its end, as the executor runs it; inside,
its layers follow each other, and backward each layer's gradient sum begins when its backward is done. Weights come from
slices by the links of those sums, one gather group ahead, and a group begins when all of its own are there. Samples
that cross the boundary of passes travel beside the compute of a pass, those of one pass at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from itertools import chain, product
from typing import Any

from parplan.cost_models.communication.traffic import traffic
from parplan.lowering.program import Code, Compute, Reduce, Regather, Split, Staged, Step, Transfer
from parplan.planner.simulation.equal_lanes import EqualLanes
from parplan.planner.simulation.list_schedule import Task
from parplan.planner.simulation.priced_program import Busy, LayerWork, Move, PricedProgram
from parplan.planner.simulation.slots import Slots, Tasks

__all__ = ["Kind", "Lane", "Part", "Resource", "StepTasks", "step_parts"]


class Kind(Enum):
    """Kind of an activity on a device or a lane."""

    FORWARD = "forward"
    BACKWARD = "backward"
    TRANSFER = "transfer"
    REDUCTION = "reduction"
    UPDATE = "update"
    OVERHEAD = "overhead"


class Lane(Enum):
    """The lanes of a device, side by side: compute, sending, receiving, gradient sums."""

    COMPUTE = "compute"
    OUT = "out"
    IN = "in"
    SUMS = "sums"

    __hash__ = object.__hash__  # Enum's own takes most of a simulation's time


@dataclass(frozen=True)
class Resource:
    """One lane of one device."""

    lane: Lane
    device: int


@dataclass(frozen=True)
class Part(Task):
    """Task of a layer or a transfer; without a kind it only says when others may start.

    Args:
        exclusive, capacity: lanes, of equal ones the first.
        devices: all of them, also those whose lanes another's stand for.
        move: the transfer; `reverse` for its gradients, which go from the receivers to the senders.
        fractions: parts of its seconds by kind, where it counts for several tasks; `kind` is that of the largest.
    """

    exclusive: tuple[Resource, ...] = ()
    kind: Kind | None = None
    what: str = ""
    number: int | None = None
    devices: tuple[int, ...] = ()
    move: Move | None = None
    reverse: bool = False
    fractions: tuple[tuple[Kind, float], ...] = ()

    @property
    def kinds(self) -> tuple[tuple[Kind | None, float], ...]:
        """Its kind, or kinds, with their fractions of its seconds."""
        return self.fractions or ((self.kind, 1.0),)

    @property
    def nbytes(self) -> float:
        """Bytes of a transfer on its busiest lane; of one in two parts each has its share."""
        if self.move is None:
            return 0.0
        return self.move.nbytes * self.seconds / (self.move.backward_s if self.reverse else self.move.forward_s)

    @property
    def routes(self) -> list[tuple[int, int]]:
        """The senders of a transfer with their receivers."""
        pairs = traffic(*self.move.layouts).pairs if self.move is not None else []
        return [(receiver, sender) for sender, receiver in pairs] if self.reverse else pairs


NONE: Mapping[Any, float] = {}


@lru_cache(maxsize=4096)
def _lane(lane: Lane, devices: tuple[int, ...]) -> tuple[Resource, ...]:
    return tuple(Resource(lane, device) for device in devices)


@lru_cache(maxsize=4096)
def _ones(devices: tuple[int, ...], first: tuple[int, ...]) -> tuple[int, ...]:
    """The first of all equal ones each; a layer or transfer has all of these or none."""
    return tuple(device for device in devices if first[device] == device)


@lru_cache(maxsize=4096)
def _busy_lanes(sent: Busy, received: Busy, first: tuple[int, ...]) -> Mapping[Any, float]:
    """How much of each lane a transfer needs."""
    sides = ((Lane.OUT, sent), (Lane.IN, received))
    own = ((lane, device, part) for lane, side in sides for device, part in side if first[device] == device)
    return {one: part for lane, device, part in own for one in _lane(lane, (device,))}


@dataclass
class _Gathers:
    """Gathers of weights from slices in one walk.

    Args:
        next: layers whose weights are gathered when the next segment begins.
        tasks: those of each group that has not begun.
        last: those of the last one that has begun: devices take groups in order.
    """

    next: list[str] = field(default_factory=list)
    tasks: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    last: Sequence[int] = ()


class StepTasks:
    """Tasks of a program's entries as they are walked."""

    def __init__(self, priced: PricedProgram, equal: EqualLanes | None) -> None:
        self.priced = priced
        self.equal = equal or EqualLanes.apart(priced.program.devices)
        self.alike: dict[int, tuple[int, ...]] = {}  # devices by the first one that computes as they do
        for device, one in enumerate(self.equal.computing):
            self.alike[one] = (*self.alike.get(one, ()), device)
        self.found: list[Part] = []
        self.begun: Tasks = ()  # barrier: tasks added from here on depend on these
        self.held: dict[int, list[int]] = {device: [] for device in self.alike}  # what a device computes and sums
        self.computed: dict[int, Tasks] = {}  # the last task on its compute lane
        self.values, self.gradients = Slots(), Slots()
        self._of_pass: dict[tuple[Kind, int], list[int]] = defaultdict(list)  # compute of every pass
        self._crossed: dict[tuple[Kind, int], list[int]] = defaultdict(list)  # transfers over the boundary for it
        self.micro_batch: int | None = None  # of pipeline stages

    def all(self) -> tuple[Part, ...]:
        """All tasks of a step, or of one of its micro-batches."""
        priced, staged = self.priced, self.priced.program.staged
        between = any(layer.passes > 1 and layer.period < layer.passes for layer in priced.layers.values())
        one_f_one_b = between if priced.policy.one_f_one_b is None else priced.policy.one_f_one_b
        if one_f_one_b and staged is not None:
            self.pass_by_pass(staged)
        else:
            self.walk(priced.program.forward, Kind.FORWARD)
            self.begun = self.gate(range(len(self.found)))  # the loss needs all results, and gradients need the loss
            self.walk(priced.program.backward, Kind.BACKWARD)
        return self.updates(1)

    def updates(self, micro_batches: int) -> tuple[Part, ...]:
        """All tasks, with what comes behind the last backward."""
        priced = self.priced
        if layers := [own for own in priced.layers.values() if own.cost.update_s or own.cost.post_update_s]:
            self.update(layers)
        for device, held in self.held.items():
            seconds = micro_batches * priced.overhead_s
            self.add(Kind.OVERHEAD, "", seconds, _lane(Lane.COMPUTE, (device,)), held, None, self.alike[device])
        return tuple(self.found)

    def pass_by_pass(self, staged: Staged) -> None:
        """Each pass goes back before the next one begins, and weights may be updated between them."""
        self.walk(staged.before, Kind.FORWARD)
        for number, one in enumerate(staged.passes):
            self.walk(one.forward, Kind.FORWARD)
            results = [task for slot in one.outputs for task in self.values.whole(slot)]
            self.begun = self.gate([*results, *self._of_pass[Kind.FORWARD, number]])
            due = [own for own in self.priced.layers.values() if own.passes > 1 and (number + 1) % own.period == 0]
            self.walk(one.backward, Kind.BACKWARD, frozenset(own.name for own in due))
            due = [own for own in due if number + 1 < own.passes and own.cost.update_s > 0]
            done = self._of_pass[Kind.BACKWARD, number]
            self.begun = self.gate([*done, *(self.update(due) if due else ())])
        self.begun = ()
        self.walk(staged.after, Kind.BACKWARD)

    def add(
        self,
        kind: Kind | None,
        what: str,
        seconds: float,
        exclusive: tuple[Resource, ...] = (),
        after: Iterable[int] = (),
        number: int | None = None,
        devices: tuple[int, ...] = (),
        capacity: Mapping[Any, float] = NONE,
        low_priority: bool = False,
        move: Move | None = None,
        reverse: bool = False,
    ) -> int:
        """List a task; gives its index."""
        needed = tuple(dict.fromkeys((*self.begun, *after)))
        for resource in exclusive:
            if resource.lane in (Lane.COMPUTE, Lane.SUMS):
                self.held[resource.device].append(len(self.found))
                if resource.lane is Lane.COMPUTE:
                    self.computed[resource.device] = (len(self.found),)
        about = kind, what, number, devices, move, reverse
        self.found.append(Part(seconds, exclusive, capacity, needed, low_priority, *about))
        return len(self.found) - 1

    def lane(self, lane: Lane, devices: tuple[int, ...]) -> tuple[Resource, ...]:
        """A lane of these devices, of equal ones the first."""
        return _lane(lane, _ones(devices, self.equal.computing))

    def gate(self, after: Iterable[int]) -> Tasks:
        """A moment that all of `after` lie before, for others to come after."""
        return (self.add(None, "", 0.0, after=after),)

    def walk(self, steps: Sequence[Step], kind: Kind, due: frozenset[str] | None = None) -> None:
        """Forward steps, or backward steps, which take gradients from where values go to where they come from.

        Args:
            due: layers that sum their gradients after these; None: all, in the pass that goes back last.
        """
        ahead = kind is Kind.FORWARD
        slots = self.values if ahead else self.gradients
        gathers = _Gathers()
        for step in steps:
            if isinstance(step, Reduce):
                continue  # with the layers whose gradients they are
            if isinstance(step, Regather) or (isinstance(step, Transfer) and step.weights):
                if ahead or isinstance(step, Regather):
                    given = step.transfer.given if isinstance(step, Regather) else step.given
                    gathers.next.append(self.priced.sliced[given.value])
                continue
            if isinstance(step, Compute):
                ends = step.reads, [result.slot for result in step.results]
                reads, writes = ends if ahead else reversed(ends)
                made = self.segment(step, kind, slots, reads, gathers, due)
                for slot in writes:
                    slots.add(slot, made)
                continue
            move = self.priced.moves.get(step.target) if isinstance(step, Transfer) else None
            if move is not None and (move.forward_s if ahead else move.backward_s) > 0:
                begin, end = (move.given, move.wanted) if ahead else (move.wanted, move.given)
                task = self.transfer(move, kind, slots.whole(begin.name), partial(slots.at, begin.name))
                slots.add(end.name, dict.fromkeys(end.devices, task))
                continue
            targets = step.targets if isinstance(step, Split) else (step.target,)
            for source, target in product(step.reads, targets):
                slots.alias(*((target, source) if ahead else (source, target)))

    def segment(
        self, step: Compute, kind: Kind, slots: Slots, needed: Sequence[str], gathers: _Gathers,
        due: frozenset[str] | None = None,
    ) -> Mapping[int, int]:  # fmt: skip
        """A segment's layers on each device, after what it needs; gives the last tasks by device.

        A batch norm over replicas counts with its normalisation forward, and with its statistics backward.
        """
        number = step.pass_number if self.micro_batch is None else self.micro_batch
        devices = _ones(step.grid.devices, self.equal.computing)
        after = {device: [task for slot in needed for task in slots.at(slot, device)] for device in devices}
        if gathers.next or gathers.tasks or gathers.last:
            arrived = self.gather(gathers, self.priced.layers[step.layers[0]].group, kind, number, after.values())
            after = {device: [*own, *arrived] for device, own in after.items()}
        if step.code is (Code.STATISTICS if kind is Kind.FORWARD else Code.NORMALISE):
            return {device: self.gate(after[device])[0] for device in devices}
        own = dict[int, int]()
        for name in step.layers if kind is Kind.FORWARD else reversed(step.layers):
            layer = self.priced.layers[name]
            cost = layer.cost
            seconds = cost.forward_s if kind is Kind.FORWARD else cost.backward_s
            for device in devices:
                tasks: Iterable[int] = (own[device],) if device in own else after[device]
                if number is not None:  # in the program's order, as a stream serves them
                    tasks = (*tasks, *self.computed.get(device, ()))
                lanes, alike = _lane(Lane.COMPUTE, (device,)), self.alike[device]
                if kind is Kind.BACKWARD and cost.replay_s > 0:
                    tasks = (self.add(Kind.FORWARD, name, cost.replay_s, lanes, tasks, number, alike),)
                own[device] = self.add(kind, name, seconds, lanes, tasks, number, alike)
            if kind is Kind.BACKWARD and (number in (None, 0) if due is None else name in due):
                self.sum(layer, own, number)
        if number is not None:
            self._of_pass[kind, number] += own.values()
        return own

    def gather(
        self, gathers: _Gathers, group: int, kind: Kind, number: int | None, begins: Iterable[Sequence[int]]
    ) -> Sequence[int]:
        """The gathers in front of a segment of a group: those that it waits for, and those of the next group, which
        begin with it; gives the first.

        Args:
            begins: tasks after which its devices begin.
        """
        begun = list(dict.fromkeys(chain.from_iterable(begins)))
        for layer in (self.priced.layers[name] for name in dict.fromkeys(gathers.next)):
            seconds = layer.cost.gather_s if kind is Kind.FORWARD else layer.cost.regather_s
            for device in _ones(layer.devices, self.equal.computing) if seconds else ():
                beside, about = layer.group != group, (number, self.alike[device])
                after = (*begun, *gathers.tasks.get(group, ())) if beside else ()
                if number is not None:  # in the program's order
                    after = (*after, *self.computed.get(device, ()))
                if beside and layer.cost.gather_interference_s > 0:
                    lanes, held_s = _lane(Lane.COMPUTE, (device,)), layer.cost.gather_interference_s
                    self.add(Kind.TRANSFER, layer.name, held_s, lanes, after, *about)
                task = self.add(Kind.TRANSFER, layer.name, seconds, _lane(Lane.SUMS, (device,)), after, *about)
                gathers.tasks[layer.group].append(task)
        gathers.next = []
        if group in gathers.tasks:
            gathers.last = gathers.tasks.pop(group)
        return gathers.last

    def sum(self, layer: LayerWork, own: dict[int, int], number: int | None) -> None:
        """Sum a layer's gradients: what that takes from compute, then the rest beside it."""
        name, held_s, beside_s = layer.name, layer.cost.compute_interference_s, layer.cost.overlappable_s
        if held_s > 0:
            for device in _ones(layer.devices, self.equal.computing):
                exclusive, after = _lane(Lane.COMPUTE, (device,)), (own[device],)
                own[device] = self.add(Kind.REDUCTION, name, held_s, exclusive, after, number, self.alike[device])
        if beside_s > 0:
            exclusive = self.lane(Lane.SUMS, layer.devices)
            self.add(Kind.REDUCTION, name, beside_s, exclusive, own.values(), number, layer.devices)

    def transfer(self, move: Move, kind: Kind, after: Tasks, given: Callable[[int], Tasks]) -> int:
        """A transfer or its way back; what crosses the boundary of passes waits for the pass before.

        Args:
            given: those of `after` on a device.
        """
        forward, number = kind is Kind.FORWARD, move.wanted.pass_number
        # From stage to stage it travels while both compute: what is sent is not waited for, and has been asked for.
        between = self.micro_batch is not None and move.apart
        number, beside = (self.micro_batch, between) if self.micro_batch is not None else (number, move.beside)
        seconds = move.forward_s if forward else move.backward_s
        ends = (move.sent, move.received) if forward else (move.received, move.sent)
        about: dict[str, Any] = {
            "number": number,
            "devices": move.devices,
            "capacity": _busy_lanes(*ends, self.equal.carrying),
            "move": move,
            "reverse": not forward,
        }
        if move.beside and move.inwards is forward and move.wanted.pass_number is not None and number is not None:
            # The pass before it begins: its samples, or gradients, are there, and the pass before that is computed.
            before, computed = ((kind, number - one if forward else number + one) for one in (1, 2))
            after = (*after, *self.gate([*self._of_pass[computed], *self._crossed[before]]))
        hidden_s = self.priced.hidden * seconds if beside else 0.0
        held_s = seconds - hidden_s
        compute = self.lane(Lane.COMPUTE, move.devices)
        if between and held_s:  # it takes that much from the compute of each side: neither waits for the other,
            sides = (tuple(device for device, _ in side) for side in (move.sent, move.received))
            parts = [self.lane(Lane.COMPUTE, side) for side in sides][:: 1 if forward else -1]
            last = dict(self.computed)
            alone = {**about, "capacity": NONE}
            own = [self.add(Kind.TRANSFER, move.value, held_s, (one,), given(one.device), **alone) for one in parts[0]]
            other = [self.add(Kind.TRANSFER, move.value, held_s, (one,), after, **alone) for one in parts[1]]
            self.computed = last  # and what a side computes next does not wait for it
            return self.gate((self.add(Kind.TRANSFER, move.value, hidden_s, (), own, **about), *other))[0]
        if held_s or not beside:  # also where the processor that computes carries
            after = (self.add(Kind.TRANSFER, move.value, held_s, compute, after, **about),)
        if beside and (hidden_s or not held_s):
            after = (self.add(Kind.TRANSFER, move.value, hidden_s, (), after, low_priority=move.beside, **about),)
        if move.beside and move.inwards is forward and number is not None:
            self._crossed[kind, number].append(after[0])
        return after[0]

    def update(self, layers: Sequence[LayerWork]) -> list[int]:
        """Devices update what they hold of these layers, when their compute and sums are done; then come late sums."""
        updated = dict[int, int]()
        for device, held in self.held.items():
            lanes = (*_lane(Lane.COMPUTE, (device,)), *_lane(Lane.SUMS, (device,)))
            seconds = sum(layer.cost.update_s for layer in layers if device in layer.devices)
            updated[device] = self.add(Kind.UPDATE, "", seconds, lanes, held, None, self.alike[device])
        found = list(updated.values())
        for layer in (layer for layer in layers if layer.cost.post_update_s > 0):
            lanes = (*self.lane(Lane.COMPUTE, layer.devices), *self.lane(Lane.SUMS, layer.devices))
            name, seconds = layer.name, layer.cost.post_update_s
            after = [updated[device] for device in _ones(layer.devices, self.equal.computing)]
            found.append(self.add(Kind.REDUCTION, name, seconds, lanes, after, None, layer.devices))
        return found


def step_parts(priced: PricedProgram, equal: EqualLanes | None = None) -> tuple[Part, ...]:
    """Everything there is to do in one training step or micro-batch, in the order of the program.

    Args:
        equal: as for `pipeline_parts`.
    """
    return StepTasks(priced, equal).all()
