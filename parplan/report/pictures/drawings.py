"""Drawings as files of their own, for READMEs and papers."""

from __future__ import annotations

from pathlib import Path

from parplan.errors import ParplanError
from parplan.planner.decision import Decision
from parplan.report.pictures.lanes import device_lanes, drawn_lanes, predicted_timeline
from parplan.report.pictures.net import draw_net
from parplan.report.pictures.timeline import draw_timeline, predicted_title

__all__ = ["step_path", "svg_files"]

MOST_BLOCKS = 1500


def step_path(path: str | Path) -> str:
    """Where the step's drawing goes, beside the net's.

    Raises:
        ParplanError: the name ends as that of another kind of file.

    >>> step_path("alexnet.svg")
    'alexnet-step.svg'
    """
    net = Path(path)
    if net.suffix.lower() not in ("", ".svg"):  # a viewer goes by the ending, and would call the file damaged
        raise ParplanError(
            f"{net}: drawings are SVG, not {net.suffix}; name it {net.stem}.svg and convert it, if need be"
        )
    return str(net.with_name(f"{net.stem}-step{net.suffix}"))


def svg_files(decision: Decision, path: str | Path) -> dict[str, str]:
    """The texts of the drawings by file: the net, and the step where it is simulated.

    Raises:
        ParplanError: the name ends as that of another kind of file.
    """
    beside = step_path(path)
    found = {str(path): draw_net(decision).standalone()}
    timeline = predicted_timeline(decision)
    if timeline is not None:
        lanes = drawn_lanes(device_lanes(timeline), MOST_BLOCKS)
        named = predicted_title(decision.plan.model, timeline.step_s)
        found[beside] = draw_timeline(lanes, timeline.step_s, named).standalone()
    return found
