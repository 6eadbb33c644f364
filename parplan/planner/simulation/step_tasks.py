"""Tasks of a plan's step with their dependencies, in the order in which a program takes them.

A layer's forward comes after its inputs, and behind it the transfers that can start then; its backward after the
gradients of its results, and behind it its gradient sum and its inputs' gradients.

Forward: inputs arrive, then every layer; with passes the layers behind the boundary once per pass, the next pass's
samples asked for when a pass begins. Backward: the same from the end. Or each pass goes back before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from parplan.lowering.stages import Stage
from parplan.planner.simulation.list_schedule import Task
from parplan.planner.simulation.step_work import Busy, Crossing, LayerWork, Leg, Move, Work

__all__ = ["Kind", "Lane", "Part", "Parts", "Resource", "step_parts"]


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
    """Task of a layer or a transfer; without a kind it only says when others may start."""

    exclusive: tuple[Resource, ...] = ()
    kind: Kind | None = None
    what: str = ""
    number: int | None = None
    devices: tuple[int, ...] = ()


Tasks = tuple[int, ...]
NONE: Mapping[Any, float] = {}


@lru_cache(maxsize=4096)
def _lane(lane: Lane, devices: tuple[int, ...]) -> tuple[Resource, ...]:
    return tuple(Resource(lane, device) for device in devices)


@lru_cache(maxsize=4096)
def _busy_lanes(sent: Busy, received: Busy) -> Mapping[Any, float]:
    """How much of each lane a transfer needs."""
    sides = ((Lane.OUT, sent), (Lane.IN, received))
    return {one: part for lane, own in sides for device, part in own for one in _lane(lane, (device,))}


class Parts:
    """The parts that any order of a step is made of. Layers that run once count as pass 0."""

    def __init__(self, work: Work) -> None:
        self.work, self.passes = work, work.stages.passes
        self.found: list[Part] = []
        self.begun: Tasks = ()  # barrier: tasks added from here on depend on these
        self._held: list[list[int]] = [[] for _ in range(work.devices)]  # what a device computes and sums
        self._computed: dict[int, Tasks] = {}  # the last task on its compute lane
        self.went: dict[tuple[str, int], Mapping[int, int]] = {}  # tasks of a layer's devices
        self.came: dict[tuple[str, int], Mapping[int, int]] = {}
        self.arrived: dict[tuple[int, int], Tasks] = {}  # the last task of a move's part
        self.given_back: dict[tuple[int, int], Tasks] = {}

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
    ) -> int:
        """List a part; gives its index."""
        needed = tuple(dict.fromkeys((*self.begun, *after)))
        for resource in exclusive:
            if resource.lane in (Lane.COMPUTE, Lane.SUMS):
                self._held[resource.device].append(len(self.found))
                if resource.lane is Lane.COMPUTE:
                    self._computed[resource.device] = (len(self.found),)
        self.found.append(Part(seconds, exclusive, capacity, needed, low_priority, kind, what, number, devices))
        return len(self.found) - 1

    def gate(self, after: Iterable[int]) -> Tasks:
        """A moment that all of `after` lie before, for others to come after."""
        return (self.add(None, "", 0.0, after=after),)

    # -- layers --

    def forward(self, name: str, number: int = 0) -> list[int]:
        """A layer's forward and the transfers behind it; gives its compute."""
        layer, work = self.work.layers[name], self.work
        shown = number if layer.stage is Stage.PASSES and self.passes > 1 else None
        after = {device: self._read(name, number, device) for device in layer.devices}
        own = self._run(Kind.FORWARD, layer, layer.forward_s, after, shown)
        self.went[name, number] = own
        for move in work.out_of.get(name, ()):
            if move.crossing is not Crossing.INWARDS:
                self.forward_transfer(move, number)
        return list(own.values())

    def backward(self, name: str, number: int = 0, last: bool = True) -> list[int]:
        """A layer's backward, its gradient sum if it is the `last` before an update, and its inputs' gradients."""
        layer, work = self.work.layers[name], self.work
        shown = number if layer.stage is Stage.PASSES and self.passes > 1 else None
        after = {device: self._given(name, number, device) for device in layer.devices}
        own = self._run(Kind.BACKWARD, layer, layer.backward_s, after, shown)
        self.came[name, number] = own
        if last:
            self._sum(layer, own, shown)
        for move in work.into.get(name, ()):
            due = last if move.crossing is Crossing.ONCE else move.crossing is not Crossing.OUTWARDS
            if due and name == move.targets[0]:  # the first to read a shared value is the last to give its gradient
                self.backward_transfer(move, number)
        return list(own.values())

    def _run(
        self, kind: Kind, layer: LayerWork, seconds: float, after: Mapping[int, Tasks], number: int | None
    ) -> dict[int, int]:
        if layer.stage is Stage.PASSES and self.passes > 1:  # in the program's order, as a stream serves them
            after = {device: (*tasks, *self._computed.get(device, ())) for device, tasks in after.items()}
        if layer.batch_norm_sync_s > 0:
            everything = [one for tasks in after.values() for one in tasks]
            exclusive, seconds_s = _lane(Lane.COMPUTE, layer.devices), layer.batch_norm_sync_s
            what = f"{layer.name}.statistics"
            shared = self.add(Kind.TRANSFER, what, seconds_s, exclusive, everything, number, layer.devices)
            after = dict.fromkeys(layer.devices, (shared,))
        return {
            device: self.add(kind, layer.name, seconds, _lane(Lane.COMPUTE, (device,)), tasks, number, (device,))
            for device, tasks in after.items()
        }

    def _sum(self, layer: LayerWork, own: dict[int, int], number: int | None) -> None:
        """Sum its gradients: what that takes from compute, then the rest beside it."""
        if layer.compute_interference_s > 0:
            for device in layer.devices:
                exclusive, after, seconds = _lane(Lane.COMPUTE, (device,)), (own[device],), layer.compute_interference_s
                own[device] = self.add(Kind.REDUCTION, layer.name, seconds, exclusive, after, number, (device,))
        if layer.overlappable_s > 0:
            exclusive = _lane(Lane.SUMS, layer.devices)
            self.add(Kind.REDUCTION, layer.name, layer.overlappable_s, exclusive, own.values(), number, layer.devices)

    def _read(self, name: str, number: int, device: int) -> Tasks:
        """Tasks that the layer's forward on `device` comes after."""
        found: list[int] = []
        for move in self.work.into.get(name, ()):
            every = move.crossing is Crossing.OUTWARDS
            for part in range(self.passes) if every else (move.number(number),):
                there = self.arrived.get((move.index, part))
                if there is None and move.source is not None:
                    made = self.went[move.source, 0 if move.crossing is Crossing.INWARDS else part]
                    there = _on(made, device)
                found += there or ()
        return tuple(found)

    def _given(self, name: str, number: int, device: int) -> Tasks:
        """Tasks that the layer's backward on `device` comes after."""
        found: list[int] = []
        for move in self.work.out_of.get(name, ()):
            every = move.crossing is Crossing.INWARDS
            for part in range(self.passes) if every else (move.number(number),):
                if (back := self.given_back.get((move.index, part))) is not None:
                    found += back
                    continue
                # It did not have to move: after the backward of the layers that read it.
                if move.crossing is Crossing.ONCE:
                    known = [own for (reader, _), own in self.came.items() if reader in move.targets]
                else:
                    turn = 0 if move.crossing is Crossing.OUTWARDS else part
                    known = [self.came[reader, turn] for reader in move.targets if reader is not None]
                found += (task for own in known for task in _on(own, device))
        return tuple(found)

    # -- transfers --

    def forward_transfer(self, move: Move, number: int, after: Tasks = ()) -> None:
        """A value's part sets out when it is made, and not before `after`."""
        part = move.number(number)
        if move.source is not None:
            made = self.went[move.source, 0 if move.crossing is Crossing.INWARDS else part]
            after = (*after, *made.values())
        last = after
        for leg in move.legs[part]:
            last = (self._transfer(move, leg, leg.forward_s, leg.sent, leg.received, last, part),)
        if move.legs[part]:
            self.arrived[move.index, part] = last

    def backward_transfer(self, move: Move, number: int, after: Tasks = ()) -> None:
        """Its gradient sets out when all readers have given theirs, and not before `after`."""
        part = move.number(number)
        if move.source is None or not any(leg.backward_s > 0 for leg in move.legs[part]):
            return
        for name in filter(None, move.targets):
            in_passes = self.work.layers[name].stage is Stage.PASSES
            after = (*after, *self.came[name, number if in_passes else 0].values())
        last = after
        for leg in reversed(move.legs[part]):
            last = (self._transfer(move, leg, leg.backward_s, leg.received, leg.sent, last, part),)
        self.given_back[move.index, part] = last

    def _transfer(
        self, move: Move, leg: Leg, seconds: float, sent: Busy, received: Busy, after: Tasks, part: int
    ) -> int:
        lanes = _busy_lanes(sent, received)
        hidden_s = self.work.hidden * seconds if move.beside else 0.0
        held_s = seconds - hidden_s
        compute, number = _lane(Lane.COMPUTE, leg.devices), None if move.crossing is Crossing.ONCE else part
        about = (number, leg.devices, lanes)
        if held_s or not move.beside:  # also where the processor that computes carries
            after = (self.add(Kind.TRANSFER, move.value, held_s, compute, after, *about),)
        if move.beside and (hidden_s or not held_s):
            after = (self.add(Kind.TRANSFER, move.value, hidden_s, (), after, *about, low_priority=True),)
        return after[-1]

    # -- the ends --

    def arrive(self) -> None:
        """Inputs that come once."""
        for move in self.work.out_of.get(None, ()):
            if move.crossing is Crossing.ONCE:
                self.forward_transfer(move, 0)

    def lose(self) -> None:
        """The loss needs all results, and everything that goes back needs the loss."""
        self.begun = self.gate(range(len(self.found)))

    def crossing(self, way: Crossing) -> list[Move]:
        """The moves that go one way over the boundary."""
        return [move for move in self.work.moves if move.crossing is way]

    def run_passes(self, numbers: Sequence[int], way: Crossing, compute: Callable[[int], Iterable[int]]) -> None:
        """`compute` pass after pass, what the next pass needs over the boundary on its way meanwhile.

        Args:
            numbers: the passes in their order.
            way: INWARDS with the forward, OUTWARDS with the backward.
            compute: adds the tasks of a pass; gives those that the next pass comes after.
        """
        moves, computed = self.crossing(way), tuple[int, ...]()
        inwards = way is Crossing.INWARDS
        transfer, arrivals = (
            (self.forward_transfer, self.arrived) if inwards else (self.backward_transfer, self.given_back)
        )
        for move in moves:
            transfer(move, numbers[0])
        for place, number in enumerate(numbers):
            arrived = [task for move in moves for task in arrivals.get((move.index, number), ())]
            gate = self.gate([*computed, *arrived])
            for following in numbers[place + 1 : place + 2]:
                for move in moves:
                    transfer(move, following, gate)
            computed = tuple(compute(number))

    def results_back(self) -> None:
        """Gradients of the results that are not of passes."""
        for move in self.work.into.get(None, ()):
            if move.targets == (None,) and move.crossing is Crossing.ONCE:
                self.backward_transfer(move, 0)

    def update(self, layers: Sequence[LayerWork]) -> list[int]:
        """Devices update what they hold of these layers, when their compute and sums are done; then come late sums."""
        updated = []
        for device in range(self.work.devices):
            lanes = (*_lane(Lane.COMPUTE, (device,)), *_lane(Lane.SUMS, (device,)))
            seconds = sum(layer.update_s for layer in layers if device in layer.devices)
            updated.append(self.add(Kind.UPDATE, "", seconds, lanes, self._held[device], None, (device,)))
        found = list(updated)
        for layer in (layer for layer in layers if layer.post_update_s > 0):
            lanes = (*_lane(Lane.COMPUTE, layer.devices), *_lane(Lane.SUMS, layer.devices))
            after = [updated[device] for device in layer.devices]
            found.append(self.add(Kind.REDUCTION, layer.name, layer.post_update_s, lanes, after, None, layer.devices))
        return found

    def end(self) -> None:
        """Updates, and the runtime's own time."""
        self.update(list(self.work.layers.values()))
        for device in range(self.work.devices):
            exclusive = _lane(Lane.COMPUTE, (device,))
            self.add(Kind.OVERHEAD, "", self.work.overhead_s, exclusive, self._held[device], None, (device,))


def _on(tasks: Mapping[int, int], device: int) -> Tasks:
    """The task of a device, or of all where it has none."""
    return (tasks[device],) if device in tasks else tuple(tasks.values())


def step_parts(work: Work) -> tuple[Part, ...]:
    """Everything there is to do in one training step, in the order of the program."""
    between = any(layer.stage is Stage.PASSES and layer.period < work.stages.passes for layer in work.layers.values())
    one_f_one_b = between if work.policy.one_f_one_b is None else work.policy.one_f_one_b
    pass_by_pass = one_f_one_b and work.stages.passes > 1 and not work.stages.layers(Stage.AFTER)
    return (_OneForwardOneBackward if pass_by_pass else _AllForwardFirst)(work).all()


class _AllForwardFirst(Parts):
    """All passes go forward before any goes back."""

    def all(self) -> tuple[Part, ...]:
        """All parts of a step."""
        when = self.work.stages
        self.arrive()
        for name in when.layers(Stage.BEFORE):
            self.forward(name)
        names = when.layers(Stage.PASSES)
        if self.passes > 1:
            self.run_passes(
                range(self.passes),
                Crossing.INWARDS,
                lambda number: [task for name in names for task in self.forward(name, number)],
            )
        for name in when.layers(Stage.AFTER):
            self.forward(name)
        self.lose()
        self.results_back()
        for name in reversed(when.layers(Stage.AFTER)):
            self.backward(name)
        if self.passes > 1:
            self.run_passes(
                range(self.passes)[::-1],
                Crossing.OUTWARDS,
                lambda number: [task for name in names[::-1] for task in self.backward(name, number, number == 0)],
            )
        for name in reversed(when.layers(Stage.BEFORE)):
            self.backward(name)
        self.end()
        return tuple(self.found)


class _OneForwardOneBackward(Parts):
    """Each pass goes back before the next one begins, and weights may be updated between them."""

    def all(self) -> tuple[Part, ...]:
        """All parts of a step."""
        before = self.work.stages.layers(Stage.BEFORE)
        self.arrive()
        for name in before:
            self.forward(name)
        self.run_passes(range(self.passes), Crossing.INWARDS, self._pass)
        self.begun = ()
        self.results_back()
        for name in reversed(before):
            self.backward(name)
        self.end()
        return tuple(self.found)

    def _pass(self, number: int) -> Tasks:
        """A pass forward and backward, and the updates after it; gives the barrier that the next one comes after."""
        names = self.work.stages.layers(Stage.PASSES)
        for name in names:
            self.forward(name, number)
        outwards = self.crossing(Crossing.OUTWARDS)
        results = [task for move in outwards for task in self.arrived.get((move.index, number), ())]
        made = [task for name in names for task in self.went[name, number].values()]
        self.begun = self.gate([*results, *made])
        for move in outwards:
            self.backward_transfer(move, number)
        done, due = list[int](), list[LayerWork]()
        for name in reversed(names):
            layer = self.work.layers[name]
            last = (number + 1) % layer.period == 0
            done += self.backward(name, number, last)
            due += [layer] if last and number + 1 < self.passes and layer.update_s > 0 else []
        self.begun = self.gate([*done, *(self.update(due) if due else ())])
        return self.begun
