"""Guards of an export with a symbolic batch: the numbers of samples for which a captured graph is the model's.

A capture takes every branch of the forward once. Where `if x.shape[0] > 20` decides otherwise for another number of
samples, the graph is that of another model, and nothing in the graph says so. A forward that reads sizes is therefore
exported once more with the samples as a symbol: torch.export records each condition on it as a guard, and the numbers
that follow from it as expressions. Where the model makes a plain number of the symbol (`int(x.shape[0])`), nothing is
known of other numbers of samples: these are captured anew and compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.export import ExportedProgram

from parplan.compat import bent_sizes, guards_of, value_of
from parplan.graph.user_line import source_line

__all__ = ["SizeBranches"]


@dataclass(frozen=True)
class SizeBranches:
    """The conditions of a captured forward on the number of samples.

    Args:
        batch: samples of the capture.
        twin: samples of the other capture, by which a graph's constants grow.
        guards: conditions that hold for the captured graph, with the lines of code that ask.
        bent: numbers that are not linear in the samples, which a capture takes its constants to be.
        unknown: the line that makes a plain number of the samples, or the forward cannot be exported with a symbol
            behind it; empty where there is none.
        not_one: the line that may decide otherwise for a single sample, as torch's own layers do; empty for none.
        ops: a digest of what does not change with the samples, where it `asks_anew`.
    """

    batch: int = 0
    twin: int = 1
    guards: tuple[tuple[Any, str], ...] = ()
    bent: tuple[Any, ...] = ()
    unknown: str = ""
    not_one: str = ""
    ops: str = ""

    @staticmethod
    def of(program: ExportedProgram, batch: int, first_read: str) -> SizeBranches:
        """The conditions of a forward that was exported with a symbol for its `batch` samples.

        Args:
            first_read: a line of the forward that reads a size, for conditions of which the line is not known.
        """
        guards, unknown = dict[Any, str](), ""
        for guard, is_fixed, place in guards_of(program):
            line = source_line(*place) if place is not None else first_read
            unknown = unknown or (line if is_fixed else "")
            guards.setdefault(guard, line)
        return SizeBranches(batch, guards=tuple(guards.items()), bent=tuple(bent_sizes(program)), unknown=unknown)

    @property
    def asks_anew(self) -> bool:
        """Whether another number of samples may have to be captured and compared."""
        return bool(self.bent or self.unknown or self.not_one)

    @property
    def line(self) -> str:
        """A line of the forward with such a condition; empty without one."""
        return next(iter([*(line for _, line in self.guards), self.unknown, self.not_one]), "")

    def turned(self, batch: int) -> str:
        """The line of a branch that is taken otherwise with `batch` samples; empty without one."""
        if batch == self.batch or self.unknown:
            return ""
        return next((line for guard, line in self.guards if value_of(guard, batch) is not True), "")

    def hold(self, batch: int) -> bool | None:
        """Whether the graph is that of a call with `batch` samples; None where that is not known."""
        if batch == self.batch:
            return True
        if self.turned(batch):
            return False
        known = not self.unknown and not (self.not_one and batch == 1)
        return True if known and all(_is_linear(one, self.batch, self.twin, batch) for one in self.bent) else None


def _is_linear(expression: Any, batch: int, twin: int, other: int) -> bool:
    """Whether a number is, for `other` samples, what a graph has in its place that was captured with two numbers."""
    try:
        first, second, found = (float(value_of(expression, samples)) for samples in (batch, twin, other))
    except (ArithmeticError, TypeError):
        return False
    return math.isclose(found, first + (second - first) / (twin - batch) * (other - batch), rel_tol=1e-9)
