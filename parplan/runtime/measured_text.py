"""A measured step as plain text, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten, wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parplan.runtime.measured import Line, MeasuredStep

__all__ = ["notes", "text", "title"]

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
