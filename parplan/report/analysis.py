"""A decision that can be written as a page, as drawings and as a trace: what `parplan.analyze` gives."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from parplan.files import write_files
from parplan.planner.decision import Decision

__all__ = ["Analysis"]


@dataclass(frozen=True)
class Analysis(Decision):
    """A decision with ways to write it to files."""

    @staticmethod
    def of(decision: Decision) -> Analysis:
        """The same decision."""
        return Analysis(**{one.name: getattr(decision, one.name) for one in fields(decision)})

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
            ParplanError: a file cannot be written.
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
