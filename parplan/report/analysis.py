"""A decision that prints as its report, and is written as a page, drawings or a trace: what `parplan.analyze` gives."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from html import escape
from pathlib import Path

from parplan.files import write_files
from parplan.planner.decision import Decision
from parplan.report.page import Page, printed
from parplan.report.sections.verdict import print_verdict
from parplan.report.terminal import render

__all__ = ["Analysis"]


@dataclass(frozen=True, repr=False)
class Analysis(Decision):
    """A decision with ways to print it and to write it to files; `print(report)` gives the report on the terminal."""

    @staticmethod
    def of(decision: Decision) -> Analysis:
        """The same decision."""
        return Analysis(**{one.name: getattr(decision, one.name) for one in fields(decision)})

    def __str__(self) -> str:
        """The report, 80 columns wide, without colours."""
        return printed(partial(render, self))

    def __repr__(self) -> str:
        """One line: model, devices, predicted step and proof."""
        figures = f"{self.prediction.step_s * 1e3:.3g} ms a step, {self.proof.status}"
        return f"<Analysis of {self.plan.model} on {self.cluster.describe()}: {figures}>"

    def _repr_html_(self) -> str:
        """The page, in a frame of its own: notebooks show it."""
        from parplan.report.pictures.page import html

        return f'<iframe srcdoc="{escape(html(self))}" style="width: 100%; height: 60em; border: 0"></iframe>'

    def summary(self) -> str:
        """The verdict: what to use, speed, fit and proof."""
        return printed(lambda console: print_verdict(Page(console), self))

    def html(self, path: str | Path) -> None:
        """Write the report as one HTML page that needs no network.

        Raises:
            ParplanError: the file cannot be written.
        """
        from parplan.report.pictures.page import html

        write_files({str(path): html(self)})

    def svg(self, path: str | Path) -> None:
        """Write the net against the devices to `path`, and the predicted step beside it, as `NAME-step.svg`.

        Raises:
            ParplanError: a file cannot be written, or its name does not end in `.svg`.
        """
        from parplan.report.pictures.drawings import svg_files

        write_files(svg_files(self, path))

    def trace(self, path: str | Path) -> None:
        """Write the predicted step as JSON that Perfetto and chrome://tracing read.

        Raises:
            ParplanError: the step is not simulated, or the file cannot be written.
        """
        from parplan.report.pictures.trace import predicted_trace

        write_files({str(path): predicted_trace(self)})
