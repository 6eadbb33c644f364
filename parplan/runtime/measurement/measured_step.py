"""The measured times of training steps as one table of parts, beside the predicted ones: what `Compiled.measure` gives.

Every figure is a median over steps. Medians of parts need not add up to the median of the step: what they leave of it
is a line of its own, so the lines of a record always add up to its step.

`text` prints the table in at most 80 columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from textwrap import shorten, wrap

from parplan.fields import counted
from parplan.files import write_files
from parplan.runtime.measurement.measured_spans import by_device
from parplan.runtime.measurement.peak_memory import StepPeak
from parplan.runtime.measurement.predicted import BothTimes, Expected
from parplan.runtime.measurement.trace_events import TraceSpan, trace_json

__all__ = [
    "ComparedLine", "Figure", "MeasuredPart", "MeasuredStep", "StepPart", "notes", "slowest_of", "text", "title",
]  # fmt: skip

WIDTH = 80
NAME = 26
UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
MIB = 2**20

# Share of a step that the medians of its parts may be off together, or one may be off its prediction, before a note
# says so.
SCATTER = 0.05
FARTHEST = 3  # lines that such a note names


@dataclass(frozen=True)
class Figure:
    """Median seconds over the steps, and the spread: 1.4826 times the median distance from the median, relative."""

    seconds: float
    spread: float = 0.0


class StepPart(Enum):
    """The parts of a step, in the order of the table."""

    LAYER = "layer"
    TRANSFER = "transfer"
    SENDS = "sends not left at the end"
    REDUCTIONS = "gradient sums"
    LOSS = "loss"
    UPDATE = "update"
    TURNS = "other devices' turns"
    RUNTIME = "runtime"
    UNACCOUNTED = "unaccounted for"
    STEP = "step"


@dataclass(frozen=True)
class MeasuredPart:
    """One row of the table.

    Args:
        part: LAYER: on its slowest device that is here; batch statistics count to it, their exchange does not.
            TRANSFER: a value moved to other layouts: starting it, and waiting for it where it is first read.
            SENDS: waiting at the end for messages that had not left. REDUCTIONS: starting the gradient sums, and
            waiting for them at the end of the backward. LOSS: the loss, forward and backward up to the model's results.
            UPDATE: the optimizer's step, and setting gradients to None. TURNS: the layers on all devices but the
            slowest, where they took turns. RUNTIME: Python and autograd; only where one clock times all devices.
        name: the layer, or the name in the captured graph of the value that moves; else empty.
        label: of a transfer the layer that the value comes from and those that read it, `pool5 -> fc6`.
        forward, backward: the two directions; a part without directions has the first alone.
    """

    part: StepPart
    forward: Figure
    backward: Figure = Figure(0.0)
    name: str = ""
    label: str = ""

    @property
    def times(self) -> BothTimes:
        """The medians."""
        return BothTimes(self.forward.seconds, self.backward.seconds)

    @property
    def spread(self) -> float:
        """That of the two directions, weighed by their times."""
        figures, total = (self.forward, self.backward), self.times.total_s
        return sum(figure.spread * figure.seconds for figure in figures) / total if total > 0 else 0.0


@dataclass(frozen=True)
class ComparedLine:
    """Predicted beside measured. `predicted` is None where nothing was predicted.

    Args:
        label: the layer, the transfer, or the part itself.
        source: where a layer's prediction comes from.
        spread: of the measured sum of both directions, relative.
        comparable: whether the two mean the same; a step whose devices took turns is not the predicted one.
    """

    part: StepPart
    label: str
    predicted: BothTimes | None
    measured: BothTimes
    source: str = ""
    spread: float = 0.0
    comparable: bool = True

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where one of them says nothing."""
        if self.predicted is None or not self.comparable:
            return None
        return self.measured.total_s / self.predicted.total_s if self.predicted.total_s > 0 else None


@dataclass(frozen=True)
class MeasuredStep:
    """Training steps of a compiled model, as one process saw them.

    Args:
        model: its name.
        batch: samples in a step, over all processes.
        devices, processes: how many logical devices and how many processes.
        turns: several of the devices share one processor and took turns.
        steps: how many were recorded.
        updated: there was an optimizer.
        slowest_step_s: the step of the slowest process.
        parts: layers and transfers in forward order, the other parts, and the step.
        peak: the most memory that a step took here.
        expected: the prediction.
        spans: one of the recorded steps, that of median length, as all processes saw it.
    """

    model: str
    batch: int
    devices: int
    processes: int
    turns: bool
    steps: int
    updated: bool
    slowest_step_s: float
    parts: tuple[MeasuredPart, ...]
    peak: StepPeak | None = None
    expected: Expected | None = None
    spans: tuple[TraceSpan, ...] = field(default=(), repr=False, compare=False)

    def of(self, part: StepPart) -> tuple[MeasuredPart, ...]:
        """The rows of one kind."""
        return tuple(row for row in self.parts if row.part is part)

    def trace(self) -> str:
        """A trace for Perfetto or chrome://tracing: predicted and measured below each other, device by device.

        The predicted step is that of `expected`, the measured one the recorded step of median length. Processes, and
        CUDA devices, count from their own begin of it.
        """
        predicted = self.expected.spans if self.expected is not None else ()
        about = {
            "model": self.model,
            "devices": self.devices,
            "processes": self.processes,
            "predicted_step_s": self.expected.step_s if self.expected is not None else None,
            "measured_step_s": self.step.seconds,
            "measured": f"one of {self.steps} recorded steps, that of median length; figures of a report are medians",
            "notes": notes(self),
        }
        return trace_json(by_device(predicted, self.spans), about)

    def write_trace(self, path: str | Path) -> None:
        """Write `trace()` to a file; under torchrun one rank's has the spans of all.

        Raises:
            ParplanError: the file cannot be written.
        """
        write_files({str(path): self.trace()})

    @property
    def layers(self) -> tuple[MeasuredPart, ...]:
        """The layers, in forward order."""
        return self.of(StepPart.LAYER)

    @property
    def transfers(self) -> tuple[MeasuredPart, ...]:
        """The values that moved, in forward order."""
        return self.of(StepPart.TRANSFER)

    @property
    def step(self) -> Figure:
        """The whole step."""
        return self.of(StepPart.STEP)[0].forward

    @property
    def unaccounted_s(self) -> float:
        """Seconds that the parts leave of the step; below zero where activities went on at once, or medians scatter."""
        return self.step.seconds - sum(row.times.total_s for row in self.parts if row.part is not StepPart.STEP)

    @property
    def lines(self) -> tuple[ComparedLine, ...]:
        """Predicted beside measured: layers, transfers, the rest, and the step, which is the sum of all others."""
        expected, found = self.expected or Expected(), list[ComparedLine]()
        figures = {
            StepPart.REDUCTIONS: expected.reduce_s,
            StepPart.RUNTIME: expected.overhead_s,
            StepPart.STEP: expected.step_s - (0.0 if self.updated else expected.update_s),
        }
        figures |= {StepPart.UPDATE: expected.update_s} if self.updated else {}
        wholes = {part: BothTimes(seconds) for part, seconds in figures.items()} if self.expected is not None else {}
        for row in self.parts:
            layer = expected.layers.get(row.name) if row.part is StepPart.LAYER else None
            if row.part in (StepPart.LAYER, StepPart.TRANSFER):
                predicted = layer.times if layer is not None else expected.transfers.get(row.name)
            else:
                predicted = wholes.get(row.part)
            source, label = layer.source if layer is not None else "", row.label or row.name or row.part.value
            comparable = row.part is not StepPart.STEP or not self.turns
            found.append(ComparedLine(row.part, label, predicted, row.times, source, row.spread, comparable))
        moved = {row.name for row in self.transfers}
        found += [
            ComparedLine(StepPart.TRANSFER, f"{expected.labels.get(value, value)} (not moved)", times, BothTimes())
            for value, times in expected.transfers.items()
            if value not in moved and times.total_s > 0
        ]
        # Without a clock that times all devices, the runtime's time is known as the rest alone.
        part = StepPart.UNACCOUNTED if self.of(StepPart.RUNTIME) else StepPart.RUNTIME
        found.append(ComparedLine(part, part.value, wholes.get(part), BothTimes(self.unaccounted_s)))
        always = (StepPart.LAYER, StepPart.TRANSFER, StepPart.RUNTIME, StepPart.UNACCOUNTED, StepPart.STEP)
        shown = [
            line for line in found
            if line.part in always or line.measured.total_s or (line.predicted and line.predicted.total_s)
        ]  # fmt: skip
        order = list(StepPart)
        return tuple(sorted(shown, key=lambda line: order.index(line.part)))

    def __str__(self) -> str:
        return text(self)


def slowest_of(ranks: Sequence[MeasuredStep]) -> MeasuredStep:
    """The step as all processes saw it.

    Of a layer, and of other work, the slowest process counts. Of a transfer, and of the gradient sums, the one that
    took least: the others waited for those that were still busy with something that is listed itself.
    """
    rows: dict[tuple[StepPart, str], list[MeasuredPart]] = defaultdict(list)
    for rank in ranks:
        for row in rank.parts:
            rows[row.part, row.name].append(row)
    waiting = (StepPart.TRANSFER, StepPart.SENDS, StepPart.REDUCTIONS)
    parts = []
    for (part, _), own in rows.items():
        chosen = min if part in waiting else max
        forward = chosen((row.forward for row in own), key=lambda figure: figure.seconds)
        backward = chosen((row.backward for row in own), key=lambda figure: figure.seconds)
        parts.append(replace(own[0], forward=forward, backward=backward))
    peaks = [rank.peak for rank in ranks if rank.peak is not None]
    peak = max(peaks, key=lambda peak: peak.peak_bytes, default=None)
    return replace(ranks[0], parts=tuple(parts), peak=peak)


def text(step: MeasuredStep) -> str:
    """The table: predicted and measured, forward and backward, and measured over predicted."""
    unit, size = next((u for u in UNITS if step.step.seconds >= u[1]), UNITS[-1])
    lines = [
        *wrap(title(step), WIDTH),
        "",
        f"{f'times in {unit}':<{NAME}}{'forward':>18}{'backward':>20}{'measured/':>15}",
        f"{'':<{NAME}}{'predicted':>10}{'measured':>10}{'predicted':>10}{'measured':>10}{'predicted':>13}",
    ]
    ruled = False
    for line in step.lines:
        predicted, measured = line.predicted or BothTimes(), line.measured
        seconds: list[float | None] = [predicted.forward_s, measured.forward_s]
        if line.part in (StepPart.LAYER, StepPart.TRANSFER):
            seconds += [predicted.backward_s, measured.backward_s]
        else:
            seconds = [None, None, *seconds]  # without directions: in the last two columns
            lines += [] if ruled else ["-" * (WIDTH - 1)]
            ruled = True
        name = line.label if len(line.label) < NAME else shorten(line.label, NAME - 1, placeholder="...")
        name = name if len(name) < NAME else f"{line.label[: NAME - 4]}..."
        cells = ["" if value is None else f"{value / size:.3f}" if value else "-" for value in seconds]
        ratio = f"{line.ratio:.2f}" if line.ratio is not None else "-"
        lines.append(f"{name:<{NAME}}{''.join(f'{cell:>10}' for cell in cells)}{ratio:>13}".rstrip())
    for note in notes(step):
        lines += ["", *wrap(note, WIDTH)]
    return "\n".join(lines)


def title(step: MeasuredStep) -> str:
    """The model, the steps, the batch and the devices that were measured."""
    devices, steps = counted(step.devices, "device"), counted(step.steps, "training step")
    where = f"{devices} in {step.processes} process{'es' if step.processes > 1 else ''}"
    return f"{step.model}: {steps} of {counted(step.batch, 'sample')} on {where}, medians"


def notes(step: MeasuredStep) -> list[str]:
    """The facts that a reader has to know to compare the columns."""
    found = []
    if step.expected is None:
        found.append("Nothing was predicted: the plan was not made or priced by parplan.compile.")
    if step.turns:
        found.append(
            f"The {step.devices} devices took turns on one processor, so the step is not the predicted one, in which "
            "they work at once; layers are those of the slowest device."
        )
    if not step.of(StepPart.RUNTIME):
        if step.unaccounted_s < 0:
            found.append("The runtime's time is below zero by what went on at once, or by the scatter of medians.")
    elif abs(step.unaccounted_s) > SCATTER * step.step.seconds:
        found.append(
            f"Medians of the parts leave {step.unaccounted_s * 1e3:.3f} ms of the step's: steps differ much from each "
            "other, or processes do; measure more steps, on an idle machine."
        )
    found += _farthest(step)
    if step.processes > 1 and step.slowest_step_s > 1.001 * step.step.seconds:
        found.append(f"The slowest process took {step.slowest_step_s * 1e3:.3f} ms for a step.")
    if step.peak is not None:
        rise, held = step.peak.rise_bytes / MIB, step.peak.held_bytes / MIB
        found.append(f"Peak memory {rise + held:.1f} MiB, of which {rise:.1f} MiB only during the step.")
    return found


def _farthest(step: MeasuredStep) -> list[str]:
    """The lines that are farthest from their prediction, by time."""
    off = [
        (line.measured.total_s - line.predicted.total_s, line.ratio, line.label)
        for line in step.lines
        if line.part is not StepPart.STEP and line.predicted is not None and line.ratio is not None
    ]
    far = sorted((one for one in off if abs(one[0]) > SCATTER * step.step.seconds), key=lambda one: -abs(one[0]))
    told = [f"{label} by {off_s * 1e3:+.3f} ms ({ratio:.2f} of it)" for off_s, ratio, label in far[:FARTHEST]]
    return [f"Farthest from what was predicted: {'; '.join(told)}."] if told else []
