"""From what a timeline recorded to the figures a person reads: medians per layer and per moved value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.program import Compute, Join, Program
from parplan.runtime.execution.timeline import Activity, Kind, StepTimes
from parplan.runtime.measurement.measured_step import Figure, MeasuredLayer, MeasuredTransfer

__all__ = ["INPUTS", "RESULTS", "Summary", "figure"]

INPUTS, RESULTS = "(inputs)", "(results)"


def figure(seconds: Sequence[float]) -> Figure:
    """Median and relative spread."""
    middle = median(seconds)
    spread = 1.4826 * median(abs(value - middle) for value in seconds) / middle if middle > 0 else 0.0
    return Figure(middle, spread)


@dataclass(frozen=True)
class Summary:
    """Figures of recorded steps of one program."""

    graph: LayerGraph
    program: Program
    steps: Sequence[StepTimes]

    def layers(self) -> tuple[MeasuredLayer, ...]:
        """Layers that ran here, in forward order, each on its slowest device of every step."""
        times = [_by_device(step) for step in self.steps]
        present = {key.layer for step in times for key in step}
        names = [name for name in self.graph.layers if name in present]

        def slowest(name: str, backward: bool) -> Figure:
            return figure([max(step.get(_Pass(name, backward), {0: 0}).values()) / 1e9 for step in times])

        return tuple(MeasuredLayer(name, slowest(name, False), slowest(name, True)) for name in names)

    def others(self) -> Figure:
        """What all layers took on the devices that were not the slowest."""
        return figure(
            [sum(sum(d.values()) - max(d.values()) for d in _by_device(step).values()) / 1e9 for step in self.steps]
        )

    def transfers(self) -> tuple[MeasuredTransfer, ...]:
        """Values that moved, in forward order."""
        slots: dict[str, set[str]] = defaultdict(set)
        for transfer in self.program.transfers:
            slots[self.program.slots[transfer.target].value].add(transfer.target)

        def moved(names: set[str], backward: bool) -> Figure:
            return self.total(lambda a: a.kind is Kind.TRANSFER and a.name in names and a.backward is backward)

        labels = _Labels(self.graph, self.program)
        return tuple(
            MeasuredTransfer(value, labels.of(value), moved(names, False), moved(names, True))
            for value, names in slots.items()
        )

    def total(self, chosen: Callable[[Activity], bool]) -> Figure:
        """What was spent on some activities together."""
        return figure([sum(ns for a, ns in step.spent_ns.items() if chosen(a)) / 1e9 for step in self.steps])

    def of(self, kind: Kind) -> Figure:
        """What was spent on all activities of a kind."""
        return self.total(lambda activity: activity.kind is kind)

    def sends(self) -> Figure:
        """What was spent on waiting for sends at the end."""
        return self.total(lambda activity: activity.kind is Kind.TRANSFER and not activity.name)

    def step(self) -> Figure:
        """The whole step."""
        return figure([step.step_ns / 1e9 for step in self.steps])


@dataclass(frozen=True)
class _Pass:
    """A layer in one direction."""

    layer: str
    backward: bool


def _by_device(step: StepTimes) -> Mapping[_Pass, Mapping[int, int]]:
    """Nanoseconds of every layer and direction by device."""
    found: dict[_Pass, dict[int, int]] = defaultdict(dict)
    for activity, ns in step.spent_ns.items():
        if activity.kind is Kind.LAYER and activity.device is not None:
            found[_Pass(activity.name, activity.backward)][activity.device] = ns
    return found


class _Labels:
    """Words for where a value comes from and who reads it in another layout."""

    def __init__(self, graph: LayerGraph, program: Program) -> None:
        self._graph = graph
        self._slots = program.slots
        self._readers: dict[str, list[str]] = defaultdict(list)
        moved = {transfer.target for transfer in program.transfers}
        joins = [step for step in program.forward if isinstance(step, Join)]
        moved |= {join.target for join in joins if not moved.isdisjoint(join.sources)}
        for step in program.forward:
            if isinstance(step, Compute):
                for operand in step.operands:
                    if operand.slot in moved:
                        self._readers[self._slots[operand.slot].value] += step.layers
        for slot in (*program.outputs, *program.updates.values()):
            if slot in moved:
                self._readers[self._slots[slot].value].append(RESULTS)

    def of(self, value: str) -> str:
        """Such as `pool5 -> fc6`."""
        layers = self._graph.layers
        readers = [name for name in self._readers[value] if name not in layers or self._reads(name, value)]
        return f"{self._source(value)} -> {', '.join(dict.fromkeys(readers))}"

    def _reads(self, layer: str, value: str) -> bool:
        return value in self._graph.layers[layer].inputs or value not in self._graph.values

    def _source(self, value: str) -> str:
        # Statistics of batch norm are no value of the graph: they are named after their layer.
        known: Iterable[str] = self._graph.layers
        named = next((name for name in known if value == f"{name}.statistics"), INPUTS)
        return self._graph.producer.get(value, named)
