"""The files of `parplan analyze` that show a plan: page, drawings, trace."""

from __future__ import annotations

import argparse

from parplan.errors import ParplanError
from parplan.planner.decision import Decision

__all__ = ["picture_paths", "picture_texts"]


def picture_paths(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """The files that will be written, with the option that asks for each."""
    found: list[tuple[str, str | None]] = [("--html", options.html), ("--svg", options.svg), ("--trace", options.trace)]
    if options.svg:
        from parplan.report.pictures.drawings import step_path

        found.append(("--svg", step_path(options.svg)))
    return found


def picture_texts(options: argparse.Namespace, decision: Decision) -> tuple[dict[str, str], list[str]]:
    """The texts of the files that were asked for, and lines for the end of the report; what cannot be drawn is said."""
    texts, said = dict[str, str](), list[str]()
    if options.html:
        from parplan.report.pictures.page import html

        target = options.target if options.profile_graph is None else f"--profile-graph {options.profile_graph}"
        texts[options.html] = html(decision, options.command_line, target)
        said.append(f"Page written to {options.html}")
    if options.svg:
        from parplan.report.pictures.drawings import step_path, svg_files

        drawn = svg_files(decision, options.svg)
        texts.update(drawn)
        said.append(f"Drawings written to {' and '.join(drawn)}")
        if step_path(options.svg) not in drawn:
            said.append(f"{step_path(options.svg)} is not written: the step is not simulated")
    if options.trace:
        from parplan.report.pictures.trace import predicted_trace

        try:
            texts[options.trace] = predicted_trace(decision)
            said.append(f"Trace written to {options.trace}; https://ui.perfetto.dev opens it")
        except ParplanError as error:
            said.append(f"{options.trace} is not written: {error}")
    return texts, said
