"""Progress of capture, costs and solver: one line on standard error, gone when they are done.

Nothing at all is written where standard error is not a terminal; a notebook gets a line if it takes long.

    with Progress() as progress:
        progress.phase("capture")
        progress.phase("costs")
        progress.advance(12, 96)
        progress.phase("solve")
        progress.solver(0.0812, 0.0798)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from threading import Timer
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Column

from parplan.report import units

if TYPE_CHECKING:
    from rich.progress import Task
    from rich.text import Text

__all__ = ["PHASES", "Progress"]

PHASES = {
    "load": "Loading the model",
    "capture": "Capturing the model",
    "measure": "Measuring layers on this device",
    "costs": "Pricing layers and transfers",
    "solve": "Solving",
    "verify": "Verifying the plan",
    "run": "Running the plan",
}


class _Counted(MofNCompleteColumn):
    """`12/96`, and nothing for a phase that counts nothing."""

    def render(self, task: Task) -> Text:
        """The text for one phase."""
        text = super().render(task)
        return text if task.total is not None else text[:0]


class _Left(TimeRemainingColumn):
    """`0:42 left`, and nothing where that is not known."""

    def render(self, task: Task) -> Text:
        """The text for one phase."""
        text = super().render(task)
        return text.append(" left") if task.time_remaining else text[:0]


class Progress:
    """A context manager with three callbacks, which any thread may call; outside the context they do nothing.

    Args:
        after_s: seconds in which nothing is shown: what is done by then needs no line.
    """

    def __init__(self, console: Console | None = None, after_s: float = 0.0) -> None:
        self._console = console or Console(stderr=True)
        self._after_s = after_s
        self._bar: Bar | None = None
        self._timer: Timer | None = None
        self._name = ""

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            unicode = (self._console.encoding or "").startswith("utf")
            self._bar = Bar(
                SpinnerColumn("dots" if unicode else "line"),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
                BarColumn(bar_width=24),
                _Counted(),
                TimeElapsedColumn(),
                _Left(compact=True),
                console=self._console,
                transient=True,
            )
            if self._after_s > 0:
                self._later(self._bar.start)
            else:
                self._bar.start()
        elif self._after_s > 0 and "ipykernel" in sys.modules:
            self._later(lambda: print(f"parplan: {self._name} ...", file=sys.stderr))
        return self

    def _later(self, show: Callable[[], None]) -> None:
        self._timer = Timer(self._after_s, show)
        self._timer.daemon = True
        self._timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join()  # it may be about to start the line
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def phase(self, name: str) -> None:
        """Begin a phase: one of PHASES, or words of your own."""
        self._name = PHASES.get(name, name)
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(self._name, total=None)

    def advance(self, done: int, total: int) -> None:
        """Say that `done` of `total` parts of the phase are done."""
        self._update(self._name, done, total)

    def solver(self, objective: float, bound: float) -> None:
        """Say the best step time found so far and the proven bound, in seconds; infinite when there is none yet."""
        text = "no plan yet"
        if math.isfinite(objective):
            scale = units.step(objective)
            text = f"best {scale.text(objective)}"
            if math.isfinite(bound) and objective > 0:
                text += f", bound {scale.text(bound)}, gap {units.percent(max(0.0, 1 - bound / objective))}"
        self._update(f"{self._name}: {text}", None, None)

    def _update(self, text: str, done: int | None, total: int | None) -> None:
        bar = self._bar
        if bar is None:
            return
        if not bar.task_ids:
            bar.add_task(text, total=None)
        bar.update(bar.task_ids[-1], description=text, completed=done, total=total)
