"""Differences of two plans: in groups, with what they cost."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from parplan.plan import Plan, Strategy
from parplan.report.plan_diff import Change, plan_diff, render_diff
from tests.report.decisions import DATA, SHARDED, alexnet


def plan() -> Plan:
    return alexnet().plan


def changed() -> Plan:
    """Its fully-connected layers in replicas, and a note."""
    layers = {name: DATA if name in ("fc6", "relu6", "drop6", "fc8") else own for name, own in plan().layers.items()}
    return replace(plan(), layers=layers, notes={"fc6": "tried"})


def test_adjacent_layers_that_change_alike_are_a_group() -> None:
    found = plan_diff(plan(), changed())
    before, after = "4 shards of out-features on 0-3", "4 replicas on 0-3"
    assert found.layers == (Change(("fc6", "relu6", "drop6"), before, after), Change(("fc8",), before, after))
    assert [change.label for change in found.layers] == ["fc6 .. drop6, 3 layers", "fc8"]
    assert found.notes == (Change(("fc6",), "none", "tried"),)
    assert (found.head, found.runs_alike) == ((), False)


def test_notes_alone_change_nothing_that_runs() -> None:
    found = plan_diff(plan(), replace(plan(), note="looked at"))
    assert found.runs_alike
    assert found.notes == (Change(("the plan",), "none", "looked at"),)


def test_updates_batches_and_layers_of_one_plan_only_are_differences() -> None:
    layers = dict(plan().layers)
    del layers["loss"]
    layers["fc6"] = replace(SHARDED, update_period=2)
    found = plan_diff(plan(), replace(plan(), batch=256, layers={**layers, "head": Strategy()}))
    assert found.head == (Change(("batch",), "512", "256"),)
    assert [(change.layers, change.after) for change in found.layers] == [
        (("fc6",), "4 shards of out-features on 0-3, weights updated every 2 passes"),
        (("loss",), "not in the plan"),
        (("head",), "whole on 0"),
    ]


@pytest.mark.parametrize(
    ("after_s", "words"), [(0.011, "+10 %"), (0.009, "-10 %"), (0.010001, "the same"), (0.010, "the same")]
)
@pytest.mark.parametrize("width", [50, 80, 120])
def test_the_cost_is_said_where_it_is_known(after_s: float, words: str, width: int) -> None:
    stream = io.StringIO()
    names = ("old.json", "new.json")
    render_diff(
        plan_diff(plan(), changed()), names, {"as reported": (0.01, after_s)}, Console(file=stream, width=width)
    )
    lines = stream.getvalue().splitlines()
    assert lines[0] == "old.json -> new.json: 4 layers of 22 changed"
    assert lines[-1].endswith(words)
    assert max(map(len, lines)) <= width


def test_what_is_not_known_is_said() -> None:
    stream = io.StringIO()
    render_diff(plan_diff(plan(), changed()), ("a", "b"), {}, Console(file=stream, width=100))
    assert "What it costs is not known" in stream.getvalue()


def test_differences_print_as_words() -> None:
    assert str(plan_diff(plan(), plan())).startswith("first and second run alike")
    assert str(plan_diff(plan(), changed())).startswith("first -> second: ")
    assert repr(plan_diff(plan(), plan())) == "<PlanDiff: 0 layers changed>"
