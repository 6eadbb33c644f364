"""How numbers are written: one unit and one number of decimals per column, so that a column can be read at a glance.

A figure that is not zero is never printed as zero, and a zero never as a figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parplan.fields import at_most, counted, runs

__all__ = [
    "Scale",
    "all_devices",
    "at_most",
    "counted",
    "devices",
    "number_ranges",
    "percent",
    "size",
    "size_column",
    "step",
    "time",
    "time_column",
    "together",
]

KIB, MIB, GIB = 2**10, 2**20, 2**30
_UNIT = re.compile(r"(?<=\d) (?=(?:%|[mµu]?s\b|[KMG]iB\b|x\b))|(?<=\w) (?=\.\. \w)|(?<=\w \.\.) (?=\w)")


@dataclass(frozen=True)
class Scale:
    """A unit and a number of decimals for the figures of one column."""

    unit: str
    size: float
    decimals: int

    def figure(self, value: float) -> str:
        """The number without its unit: `12.34`, `-` for zero, `<0.01` for what would round to zero."""
        if not math.isfinite(value):
            return "unknown"
        if value == 0:
            return "-"
        text = f"{value / self.size:.{self.decimals}f}"
        if float(text) == 0 and value < 0:
            return "-"  # what is left of a difference of equal floats
        if float(text) == 0:
            return f"<{10**-self.decimals:.{self.decimals}f}"
        return text

    def text(self, value: float | None) -> str:
        """The number with its unit: `12.34 ms`, or in a larger unit that it reaches, `1.50 s`; zero is `0 ms`.

        Empty for None, a figure that is not known.
        """
        if value is None:
            return ""
        own = (time if self.unit.endswith("s") else size)(value)
        if own.size > self.size:
            return own.text(value)
        figure = self.figure(value)
        if figure == "unknown":
            return figure
        return f"{'0' if figure == '-' else figure} {self.unit}"


def _scale(
    values: float | Iterable[float | None], units: Sequence[tuple[str, float, float]], decimals: Sequence[int]
) -> Scale:
    """The first of `units` (name, size, from where on) that the largest reaches; `decimals` below 10, 100, above."""
    listed = (values,) if isinstance(values, int | float) else values
    largest = max((abs(value) for value in listed if value is not None and math.isfinite(value)), default=0.0)
    name, size, _ = next((unit for unit in units if largest >= unit[2]), units[-1])
    shown = largest / size
    return Scale(name, size, decimals[0] if shown < 10 else decimals[1] if shown < 100 else decimals[2])


_TIMES = (("s", 1.0, 1.0), ("ms", 1e-3, 1e-3), ("µs", 1e-6, 0.0))
_SIZES = (("GiB", GIB, GIB), ("MiB", MIB, MIB), ("KiB", KIB, 0.0))
_SIZES_COLUMN = (("GiB", GIB, 10 * GIB), *_SIZES[1:])


def time_column(values: Iterable[float | None]) -> Scale:
    """Scale for a column of times in seconds, None where there is none: small ones keep digits beside large ones."""
    return _scale(values, _TIMES, (3, 2, 2))


def size_column(values: Iterable[float]) -> Scale:
    """Scale for a column of sizes in bytes: small ones keep digits beside large ones."""
    return _scale(values, _SIZES_COLUMN, (2, 1, 1))


def time(values: float | Iterable[float]) -> Scale:
    """Scale for one time in seconds, or for several that are compared: three digits of the largest."""
    return _scale(values, _TIMES, (2, 1, 0))


def step(step_s: float) -> Scale:
    """Scale for every figure that is compared with the time of a step, in seconds."""
    return _scale(step_s, _TIMES, (2, 2, 1))


def size(values: float | Iterable[float | None]) -> Scale:
    """Scale for one size in bytes, or for several that are compared: three digits of the largest."""
    return _scale(values, _SIZES, (2, 1, 0))


def percent(share: float) -> str:
    """A share of 1 in percent: `0.0 %`, `<0.1 %`, `3.2 %`, `85 %`.

    >>> percent(0.0004), percent(0.032), percent(0.85)
    ('<0.1 %', '3.2 %', '85 %')
    """
    if not math.isfinite(share):
        return "unknown"
    if 0.995 <= share < 1:
        return ">99 %"
    if share >= 0.0995:
        return f"{100 * share:.0f} %"
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def all_devices(count: int) -> str:
    """Words for every device.

    >>> all_devices(4), all_devices(1)
    ('all 4 devices', 'the only device')
    """
    return f"all {count} devices" if count > 1 else "the only device"


def together(text: str) -> str:
    """The text with no-break spaces in front of units and around the dots of a range, so that no line ends there.

    >>> together("3 ms for a .. b").replace("\\N{NO-BREAK SPACE}", "_")
    '3_ms for a_.._b'
    """
    return _UNIT.sub("\N{NO-BREAK SPACE}", text)


def number_ranges(numbers: Sequence[int]) -> str:
    """Numbers in their order, ascending neighbours as a range.

    >>> number_ranges([0, 1, 2, 5]), number_ranges([3, 2]), number_ranges([0, 1])
    ('0-2, 5', '3, 2', '0, 1')
    """
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs(numbers))


def devices(numbers: Sequence[int]) -> str:
    """Words for logical devices.

    >>> devices([2]), devices([0, 1, 2, 3])
    ('device 2', 'devices 0-3')
    """
    return f"device{'s' if len(numbers) > 1 else ''} {number_ranges(numbers)}"
