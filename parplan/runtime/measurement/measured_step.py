"""What training steps took: per layer, per transfer, and the whole, as `Compiled.measure` found it.

Every figure is a median over steps. What is left of the step's median when all others are taken off is the runtime's
own time, so the lines of a record always add up to its step.

`text` prints it in at most 80 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from textwrap import shorten, wrap

from parplan.runtime.measurement.peak_memory import StepPeak
from parplan.runtime.measurement.predicted import Both, Expected

__all__ = [
    "Figure",
    "Line",
    "MeasuredLayer",
    "MeasuredStep",
    "MeasuredTransfer",
    "Part",
    "notes",
    "slowest_of",
    "text",
    "title",
]

WIDTH = 80
NAME = 26
UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
MIB = 2**20


def text(step: MeasuredStep) -> str:
    """The table: predicted and measured, forward and backward, and measured over predicted."""
    unit, size = next((u for u in UNITS if step.step.seconds >= u[1]), UNITS[-1])
    lines = [*wrap(title(step), WIDTH), "", _heading(unit)]
    each = [line for line in step.lines if line.part.value in ("layer", "transfer")]
    wholes = step.lines[len(each) :]
    lines += [_row(line, size) for line in each]
    lines += ["-" * (WIDTH - 1), *(_whole(line, size) for line in wholes)]
    for note in notes(step):
        lines += ["", *wrap(note, WIDTH)]
    return "\n".join(lines)


def title(step: MeasuredStep) -> str:
    """What was measured."""
    devices = f"{step.devices} device{'s' if step.devices > 1 else ''}"
    where = f"{devices} in {step.processes} process{'es' if step.processes > 1 else ''}"
    return f"{step.model}: {step.steps} training steps of {step.batch} samples on {where}, medians"


def notes(step: MeasuredStep) -> list[str]:
    """What a reader has to know to compare the columns."""
    found = []
    if step.expected is None:
        found.append("Nothing was predicted: the plan was not made or priced by parplan.compile.")
    if step.turns:
        found.append(
            f"The {step.devices} devices took turns on one processor, so the step is not the predicted one, in which "
            "they work at once; layers are those of the slowest device."
        )
    if step.runtime_s < 0:
        found.append("The runtime's time is below zero by what went on at once, or by the scatter of medians.")
    if step.processes > 1 and step.slowest_step_s > 1.001 * step.step.seconds:
        found.append(f"The slowest process took {step.slowest_step_s * 1e3:.3f} ms for a step.")
    if step.peak is not None:
        rise, held = step.peak.rise_bytes / MIB, step.peak.held_bytes / MIB
        found.append(f"Peak memory {rise + held:.1f} MiB, of which {rise:.1f} MiB only during the step.")
    return found


def _heading(unit: str) -> str:
    above = f"{f'times in {unit}':<{NAME}}{'forward':>18}{'backward':>20}{'measured/':>15}"
    below = f"{'':<{NAME}}{'predicted':>10}{'measured':>10}{'predicted':>10}{'measured':>10}{'predicted':>13}"
    return f"{above}\n{below}"


def _row(line: Line, size: float) -> str:
    predicted = (line.predicted.forward_s, line.predicted.backward_s) if line.predicted is not None else (None, None)
    measured = (line.measured.forward_s, line.measured.backward_s)
    cells = [_figure(value, size) for pair in zip(predicted, measured, strict=True) for value in pair]
    return _laid(line, cells)


def _whole(line: Line, size: float) -> str:
    """A line without directions, its figures in the last two columns."""
    predicted = line.predicted.forward_s if line.predicted is not None else None
    return _laid(line, ["", "", _figure(predicted, size), _figure(line.measured.forward_s, size)])


def _laid(line: Line, cells: Sequence[str]) -> str:
    name = line.label if len(line.label) < NAME else shorten(line.label, NAME - 1, placeholder="...")
    name = name if len(name) < NAME else f"{line.label[: NAME - 4]}..."
    ratio = f"{line.ratio:.2f}" if line.ratio is not None else "-"
    return f"{name:<{NAME}}{''.join(f'{cell:>10}' for cell in cells)}{ratio:>13}".rstrip()


def _figure(seconds: float | None, size: float) -> str:
    return "-" if seconds is None or seconds == 0 else f"{seconds / size:.3f}"


@dataclass(frozen=True)
class Figure:
    """Median seconds over the steps, and the spread: 1.4826 times the median distance from the median, relative."""

    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer on its slowest device that is here; batch statistics count to it, their exchange does not."""

    name: str
    forward: Figure
    backward: Figure

    @property
    def times(self) -> Both:
        """The medians."""
        return Both(self.forward.seconds, self.backward.seconds)


@dataclass(frozen=True)
class MeasuredTransfer:
    """A value moved to other layouts: starting it, and waiting for it where it is first read.

    Args:
        value: its name in the captured graph.
        label: the layer it comes from and those that read it.
    """

    value: str
    label: str
    forward: Figure
    backward: Figure

    @property
    def times(self) -> Both:
        """The medians."""
        return Both(self.forward.seconds, self.backward.seconds)


class Part(Enum):
    """What a line of the comparison is about."""

    LAYER = "layer"
    TRANSFER = "transfer"
    SENDS = "sends not left at the end"
    REDUCTIONS = "gradient sums"
    LOSS = "loss"
    UPDATE = "update"
    TURNS = "other devices' turns"
    RUNTIME = "runtime"
    STEP = "step"


@dataclass(frozen=True)
class Line:
    """Predicted beside measured. `predicted` is None where nothing was predicted.

    Args:
        label: the layer, the transfer, or the part itself.
        source: where a layer's prediction comes from.
        spread: of the measured sum of both directions, relative.
        comparable: whether the two mean the same; a step whose devices took turns is not the predicted one.
    """

    part: Part
    label: str
    predicted: Both | None
    measured: Both
    source: str = ""
    spread: float = 0.0
    comparable: bool = True

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where one of them says nothing."""
        if self.predicted is None or not self.comparable:
            return None
        predicted_s = self.predicted.forward_s + self.predicted.backward_s
        return (self.measured.forward_s + self.measured.backward_s) / predicted_s if predicted_s > 0 else None


@dataclass(frozen=True)
class MeasuredStep:
    """Training steps of a compiled model, as one process saw them.

    Args:
        model: its name.
        batch: samples in a step, over all processes.
        devices, processes: how many logical devices and how many processes.
        turns: several of the devices share one processor and took turns.
        steps: how many were recorded.
        layers, transfers: in forward order.
        sends: waiting at the end for what had not left.
        reductions: starting the gradient sums, and waiting for them at the end of the backward.
        loss: the loss, forward and backward up to the model's results.
        update: the optimizer's step, and setting gradients to None.
        updated: there was an optimizer.
        others: what the layers took on all devices but the slowest, where they took turns.
        step: the whole step.
        slowest_step_s: the step of the slowest process.
        peak: the most memory that a step took here.
        expected: what was predicted.
    """

    model: str
    batch: int
    devices: int
    processes: int
    turns: bool
    steps: int
    layers: tuple[MeasuredLayer, ...]
    transfers: tuple[MeasuredTransfer, ...]
    sends: Figure
    reductions: Figure
    loss: Figure
    update: Figure
    updated: bool
    others: Figure
    step: Figure
    slowest_step_s: float
    peak: StepPeak | None = None
    expected: Expected | None = None

    @property
    def runtime_s(self) -> float:
        """What the step took beside everything that is listed: Python, autograd; less what went on at once."""
        parts = [times.forward_s + times.backward_s for times in self._parts()]
        return self.step.seconds - sum(parts)

    def _parts(self) -> list[Both]:
        wholes = (self.sends, self.reductions, self.loss, self.update, self.others)
        listed = [*(layer.times for layer in self.layers), *(transfer.times for transfer in self.transfers)]
        return [*listed, *(Both(figure.seconds) for figure in wholes)]

    @property
    def lines(self) -> tuple[Line, ...]:
        """Predicted beside measured: layers, transfers, the rest, and the step, which is the sum of all others."""
        return (*self._layer_lines(), *self._transfer_lines(), *self._whole_lines())

    def _layer_lines(self) -> list[Line]:
        known = self.expected.layers if self.expected is not None else {}
        lines = []
        for layer in self.layers:
            expected = known.get(layer.name)
            times, source = (expected.times, expected.source) if expected is not None else (None, "")
            lines.append(Line(Part.LAYER, layer.name, times, layer.times, source, _spread(layer)))
        return lines

    def _transfer_lines(self) -> list[Line]:
        known = dict(self.expected.transfers) if self.expected is not None else {}
        lines = []
        for transfer in self.transfers:
            times = known.pop(transfer.value, None)
            lines.append(Line(Part.TRANSFER, transfer.label, times, transfer.times, spread=_spread(transfer)))
        labels = self.expected.labels if self.expected is not None else {}
        unmoved = [(value, times) for value, times in known.items() if times.forward_s + times.backward_s > 0]
        named = [(f"{labels.get(value, value)} (not moved)", times) for value, times in unmoved]
        return lines + [Line(Part.TRANSFER, label, times, Both()) for label, times in named]

    def _whole_lines(self) -> list[Line]:
        expected = self.expected
        reduce_s = expected.reduce_s if expected is not None else None
        update_s = expected.update_s if expected is not None and self.updated else None
        overhead_s = expected.overhead_s if expected is not None else None
        lines = [
            _line(Part.SENDS, None, self.sends),
            _line(Part.REDUCTIONS, reduce_s, self.reductions),
            _line(Part.LOSS, None, self.loss),
            _line(Part.UPDATE, update_s, self.update),
            _line(Part.TURNS, None, self.others),
        ]
        lines = [line for line in lines if line.measured.forward_s or (line.predicted and line.predicted.forward_s)]
        step = _line(Part.STEP, self.expected_step_s, self.step)
        runtime = _line(Part.RUNTIME, overhead_s, Figure(self.runtime_s))
        return [*lines, runtime, replace(step, comparable=not self.turns)]

    @property
    def expected_step_s(self) -> float | None:
        """The predicted step, without the optimizer where there was none."""
        if self.expected is None:
            return None
        return self.expected.step_s - (0.0 if self.updated else self.expected.update_s)

    def __str__(self) -> str:
        from parplan.runtime.measurement.measured_step import text

        return text(self)


def slowest_of(ranks: Sequence[MeasuredStep]) -> MeasuredStep:
    """The step as all processes saw it.

    Of a layer the slowest process counts. Of a transfer, and of the gradient sums, the one that took least: the others
    waited for those that were still busy with something that is listed itself.
    """
    first = ranks[0]
    names = list(dict.fromkeys(layer.name for rank in ranks for layer in rank.layers))
    values = list(dict.fromkeys(transfer.value for rank in ranks for transfer in rank.transfers))
    layers = [[layer for rank in ranks for layer in rank.layers if layer.name == name] for name in names]
    transfers = [[moved for rank in ranks for moved in rank.transfers if moved.value == value] for value in values]
    peaks = [rank.peak for rank in ranks if rank.peak is not None]
    return replace(
        first,
        layers=tuple(
            MeasuredLayer(own[0].name, _most([x.forward for x in own]), _most([x.backward for x in own]))
            for own in layers
        ),
        transfers=tuple(
            replace(own[0], forward=_least([x.forward for x in own]), backward=_least([x.backward for x in own]))
            for own in transfers
        ),
        sends=_least([rank.sends for rank in ranks]),
        reductions=_least([rank.reductions for rank in ranks]),
        loss=_most([rank.loss for rank in ranks]),
        update=_most([rank.update for rank in ranks]),
        step=_most([rank.step for rank in ranks]),
        peak=max(peaks, key=lambda peak: peak.peak_bytes, default=None),
    )


def _most(figures: Sequence[Figure]) -> Figure:
    return max(figures, key=lambda figure: figure.seconds)


def _least(figures: Sequence[Figure]) -> Figure:
    return min(figures, key=lambda figure: figure.seconds)


def _spread(entry: MeasuredLayer | MeasuredTransfer) -> float:
    """That of the two directions, weighed by their times."""
    total = entry.forward.seconds + entry.backward.seconds
    weighed = entry.forward.spread * entry.forward.seconds + entry.backward.spread * entry.backward.seconds
    return weighed / total if total > 0 else 0.0


def _line(part: Part, predicted_s: float | None, measured: Figure) -> Line:
    predicted = Both(predicted_s) if predicted_s is not None else None
    return Line(part, part.value, predicted, Both(measured.seconds), spread=measured.spread)
