"""The comparison on a page: widths, folding, signs for what is unknown, and the same facts as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import pytest
from rich.console import Console

from parplan.plan import Plan, Strategy
from parplan.planner.decision import LayerReport
from parplan.report.predicted_vs_measured import render_comparison, to_json
from parplan.runtime.measurement.measured_step import ComparedLine, StepPart
from parplan.runtime.measurement.predicted import BothTimes
from tests.report.decisions import DATA, SHARDED, facts, plan_of


@dataclass(frozen=True)
class Found:
    plan: Plan
    layers: tuple[LayerReport, ...]
    lines: tuple[ComparedLine, ...]


def found(names: list[str], strategy: Strategy = DATA) -> Found:
    """Layers that took half as long again as was predicted."""
    layers = tuple(facts(name, "linear", strategy, 2.0, "") for name in names)
    lines = [
        ComparedLine(
            StepPart.LAYER,
            f.name,
            BothTimes(f.forward_s, f.backward_s),
            BothTimes(1.5 * f.forward_s, 1.5 * f.backward_s),
        )
        for f in layers
    ]
    moved = ComparedLine(StepPart.TRANSFER, f"{names[0]} -> {names[-1]}", BothTimes(1e-4, 1e-4), BothTimes(2e-4, 2e-4))
    arrived = ComparedLine(StepPart.TRANSFER, f"(inputs) -> {names[0]}", None, BothTimes(3e-4))
    rest = ComparedLine(StepPart.RUNTIME, "runtime", None, BothTimes(1e-3))
    step = ComparedLine(StepPart.STEP, "step", BothTimes(0.2), BothTimes(0.3), comparable=False)
    return Found(plan_of("Net", 8, layers), layers, (*lines, arrived, moved, rest, step))


LONG = [f"blocks.{block}.{name}" for block in range(24) for name in ("attention", "mlp.wide", "mlp.narrow", "norm")]


def printed(of: Found, width: int, terminal: bool = False, full: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=terminal)
    render_comparison(of.lines, of.layers, "Net: 20 steps", ["A note."], console, full)
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("names", [["conv1", "fc6"], LONG], ids=["short", "long"])
def test_no_line_is_wider_than_the_page(names: list[str], width: int) -> None:
    assert max(map(len, printed(found(names), width).splitlines())) <= width


def test_a_pipe_gets_no_colour_and_a_terminal_does() -> None:
    assert "\x1b" not in printed(found(["a", "b"]), 80)
    assert "\x1b" in printed(found(["a", "b"]), 80, terminal=True)


def test_figures_of_a_layer_stand_side_by_side() -> None:
    lines = printed(found(["conv1", "fc6"]), 80).splitlines()
    row = next(line.split() for line in lines if line.startswith("  conv1"))
    assert row == ["conv1", "2.000", "3.000", "4.000", "6.000", "1.50"]


def test_a_step_of_devices_that_took_turns_has_no_ratio() -> None:
    row = next(line.split() for line in printed(found(["a", "b"]), 80).splitlines() if line.startswith("  step"))
    assert row == ["step", "200.00", "300.00", "-"]


def test_long_models_are_folded_and_their_figures_summed() -> None:
    text = printed(found(LONG, SHARDED), 80)
    assert "96 layers on" in text
    assert len(text.splitlines()) < 60
    assert "72.00" in text  # 24 layers that took 3 ms forward
    assert len(printed(found(LONG), 80, full=True).splitlines()) > 96


def test_json_has_every_line() -> None:
    of = found(["a", "b"])
    read = json.loads(to_json(of.plan, of.lines, "Net", ["A note."]))
    assert read["title"] == "Net"
    assert [line["label"] for line in read["lines"]] == [line.label for line in of.lines]
    assert read["lines"][2]["predicted_forward_s"] is None
    assert read["lines"][0]["ratio"] == pytest.approx(1.5)
    assert Plan.from_json(json.dumps(read["plan"])) == of.plan
