"""The files of `parplan analyze` that show a plan: page, drawings, trace."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from parplan.errors import ParplanError
from parplan.planner.decision import Decision

__all__ = ["Pictures", "picture_paths", "picture_texts"]


@dataclass(frozen=True)
class Pictures:
    """Texts by file, and lines for the end of the report."""

    texts: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


def picture_paths(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """The files that will be written, with the option that asks for each."""
    found: list[tuple[str, str | None]] = [("--html", options.html), ("--svg", options.svg), ("--trace", options.trace)]
    if options.svg:
        from parplan.report.pictures.drawings import step_path

        found.append(("--svg", step_path(options.svg)))
    return found


def picture_texts(options: argparse.Namespace, decision: Decision) -> Pictures:
    """The texts of the files that were asked for; what cannot be drawn is said."""
    found = Pictures()
    if options.html:
        from parplan.report.pictures.page import html

        target = options.target if options.profile_graph is None else f"--profile-graph {options.profile_graph}"
        found.texts[options.html] = html(decision, options.command_line, target)
        found.said.append(f"Page written to {options.html}")
    if options.svg:
        from parplan.report.pictures.drawings import step_path, svg_files

        drawn = svg_files(decision, options.svg)
        found.texts.update(drawn)
        found.said.append(f"Drawings written to {' and '.join(drawn)}")
        if step_path(options.svg) not in drawn:
            found.said.append(f"{step_path(options.svg)} is not written: the step is not simulated")
    if options.trace:
        from parplan.report.pictures.trace import predicted_trace

        try:
            found.texts[options.trace] = predicted_trace(decision)
            found.said.append(f"Trace written to {options.trace}; https://ui.perfetto.dev opens it")
        except ParplanError as error:
            found.said.append(f"{options.trace} is not written: {error}")
    return found
