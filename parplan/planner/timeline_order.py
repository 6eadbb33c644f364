"""The order of a step: what there is to do, as a program does it.

Forward: inputs arrive, then every layer; with passes the layers behind the boundary once per pass, the next pass's
samples asked for when a pass begins. Backward: the same from the end. Or each pass goes back before the next begins.
"""

from __future__ import annotations

from parplan.lowering.stages import Stage
from parplan.planner.timeline_tasks import Part, Parts
from parplan.planner.timeline_work import Crossing, LayerWork, Work

__all__ = ["step_parts"]


def step_parts(work: Work) -> tuple[Part, ...]:
    """Everything there is to do in one training step, in the order of the program."""
    between = any(layer.stage is Stage.PASSES and layer.period < work.stages.passes for layer in work.layers.values())
    in_turn = between if work.manner.in_turn is None else work.manner.in_turn
    return (_InTurn if in_turn and not work.stages.layers(Stage.AFTER) else _Plain)(work).all()


class _Plain(Parts):
    """All passes go forward before any goes back."""

    def all(self) -> tuple[Part, ...]:
        """All parts of a step."""
        when = self.work.stages
        self.arrive()
        for name in when.layers(Stage.BEFORE):
            self.forward(name)
        if self.passes > 1:
            self._passes_forward()
        for name in when.layers(Stage.AFTER):
            self.forward(name)
        self.lose()
        self.results_back()
        for name in reversed(when.layers(Stage.AFTER)):
            self.backward(name)
        if self.passes > 1:
            self._passes_backward()
        for name in reversed(when.layers(Stage.BEFORE)):
            self.backward(name)
        self.end()
        return tuple(self.found)

    def _passes_forward(self) -> None:
        inwards, computed = self.crossing(Crossing.INWARDS), list[int]()
        for move in inwards:
            self.there(move, 0)
        for number in range(self.passes):
            arrived = [task for move in inwards for task in self.arrived.get((move.index, number), ())]
            gate = self.gate([*computed, *arrived])
            for move in inwards if number + 1 < self.passes else ():
                self.there(move, number + 1, gate)
            computed = [task for name in self.work.stages.layers(Stage.PASSES) for task in self.forward(name, number)]

    def _passes_backward(self) -> None:
        outwards, computed = self.crossing(Crossing.OUTWARDS), list[int]()
        for move in outwards:
            self.back(move, self.passes - 1)
        for number in reversed(range(self.passes)):
            arrived = [task for move in outwards for task in self.given_back.get((move.index, number), ())]
            gate = self.gate([*computed, *arrived])
            for move in outwards if number > 0 else ():
                self.back(move, number - 1, gate)
            names = reversed(self.work.stages.layers(Stage.PASSES))
            computed = [task for name in names for task in self.backward(name, number, last=number == 0)]


class _InTurn(Parts):
    """Each pass goes back before the next one begins, and weights may be updated between them."""

    def all(self) -> tuple[Part, ...]:
        """All parts of a step."""
        before = self.work.stages.layers(Stage.BEFORE)
        self.arrive()
        for name in before:
            self.forward(name)
        inwards = self.crossing(Crossing.INWARDS)
        for move in inwards:
            self.there(move, 0)
        for number in range(self.passes):
            arrived = [task for move in inwards for task in self.arrived.get((move.index, number), ())]
            gate = self.gate(arrived)
            for move in inwards if number + 1 < self.passes else ():
                self.there(move, number + 1, gate)
            self._pass(number)
        self.begun = ()
        self.results_back()
        for name in reversed(before):
            self.backward(name)
        self.end()
        return tuple(self.found)

    def _pass(self, number: int) -> None:
        names = self.work.stages.layers(Stage.PASSES)
        for name in names:
            self.forward(name, number)
        outwards = self.crossing(Crossing.OUTWARDS)
        results = [task for move in outwards for task in self.arrived.get((move.index, number), ())]
        made = [task for name in names for task in self.went[name, number].values()]
        self.begun = self.gate([*results, *made])
        for move in outwards:
            self.back(move, number)
        done, due = list[int](), list[LayerWork]()
        for name in reversed(names):
            layer = self.work.layers[name]
            last = (number + 1) % layer.period == 0
            done += self.backward(name, number, last)
            due += [layer] if last and number + 1 < self.passes and layer.update_s > 0 else []
        self.begun = self.gate([*done, *(self.update(due) if due else ())])
