"""A progress display where there is a terminal, nothing at all where there is none."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable

import pytest
from rich.console import Console
from rich.progress import ProgressSample, Task, TaskID

from parplan.report.progress import Progress, _Left

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def run(progress: Progress) -> None:
    """Every callback once."""
    progress.phase("capture")
    progress.phase("costs")
    progress.advance(12, 96)
    progress.phase("solve")
    progress.solver(math.inf, 0.0)
    progress.solver(0.0812, 0.0798)
    progress.phase("words of my own")


def console(terminal: bool, encoding: str = "utf-8") -> tuple[Console, io.BytesIO]:
    """A console and the bytes that are written to it."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, errors="strict", write_through=True)
    return Console(file=stream, force_terminal=terminal, width=120, color_system=None), written


def test_nothing_without_a_terminal() -> None:
    screen, written = console(terminal=False)
    with Progress(screen) as progress:
        run(progress)
    assert written.getvalue() == b""


def test_what_is_done_soon_needs_no_line() -> None:
    screen, written = console(terminal=True)
    with Progress(screen, after_s=60.0) as progress:
        run(progress)
    assert written.getvalue() == b""


def test_what_takes_longer_gets_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal shows the phase, a notebook gets one line, a log nothing."""
    shown: list[str] = []
    monkeypatch.setattr("parplan.report.progress.Timer", _AtOnce)
    monkeypatch.setattr("builtins.print", lambda text, file: shown.append(text))
    screen, written = console(terminal=True)
    with Progress(screen, after_s=3.0) as progress:
        progress.phase("capture")
    assert HIDE_CURSOR.encode() in written.getvalue()
    for notebook in (False, True):
        if notebook:
            monkeypatch.setitem(sys.modules, "ipykernel", sys)
        screen, written = console(terminal=False)
        with Progress(screen, after_s=3.0) as progress:
            progress.phase("capture")
        assert written.getvalue() == b""
        assert len(shown) == notebook


class _AtOnce:
    """A timer whose time is over when it is started."""

    def __init__(self, after_s: float, show: Callable[[], None]) -> None:
        self._show = show

    def start(self) -> None:
        """Show it."""
        self._show()

    def cancel(self) -> None:
        """It is over."""

    def join(self) -> None:
        """It is over."""


def test_nothing_outside_the_context() -> None:
    screen, written = console(terminal=True)
    run(Progress(screen))
    assert written.getvalue() == b""


def states(callback: str, *values: float) -> str:
    """What stands on the terminal after one callback."""
    screen, written = console(terminal=True)
    with Progress(screen) as progress:
        progress.phase("solve" if callback == "solver" else "costs")
        getattr(progress, callback)(*values)
        assert progress._bar is not None
        progress._bar.refresh()
    return written.getvalue().decode()


@pytest.mark.parametrize(
    ("callback", "values", "words"),
    [
        ("advance", (12, 96), "Pricing layers and transfers"),
        ("advance", (12, 96), "12/96"),
        ("solver", (0.0812, 0.0798), "Solving: best 81.20 ms, bound 79.80 ms, gap 1.7 %"),
        ("solver", (0.0812, -math.inf), "Solving: best 81.20 ms "),
        ("solver", (math.inf, 0.01), "Solving: no plan yet"),
    ],
)
def test_a_terminal_shows_where_it_stands(callback: str, values: tuple[float, ...], words: str) -> None:
    assert words in states(callback, *values)


def test_time_left_is_shown_where_it_is_known() -> None:
    clock = iter(range(1000))
    for total, words in ((40, " left"), (None, "")):
        task = Task(TaskID(0), "Measuring", total, 0, _get_time=lambda: float(next(clock)))
        task.start_time = 0.0
        task._progress.extend(ProgressSample(float(at), 1.0) for at in range(1, 11))
        task.completed = 10
        text = _Left(compact=True).render(task).plain
        assert text.endswith(words)
        assert bool(text) == bool(words)


def interrupted(shown: Progress) -> None:
    """Ctrl-C while the display is there."""
    with shown as progress:
        run(progress)
        raise KeyboardInterrupt


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_interrupt_leaves_the_terminal_clean(encoding: str) -> None:
    screen, written = console(terminal=True, encoding=encoding)
    with pytest.raises(KeyboardInterrupt):
        interrupted(Progress(screen))
    text = written.getvalue().decode()
    assert text.index(HIDE_CURSOR) < text.index(SHOW_CURSOR)
    assert text.endswith("\x1b[2K")  # the line is erased
