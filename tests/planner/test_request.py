"""Options are declared once: keywords, command line and request have the names and defaults of PlanOptions' fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from parplan import api
from parplan.cli.options import parse
from parplan.errors import PinError
from parplan.pins import parse_pin
from parplan.plan import Plan
from parplan.planner.option_fields import chosen
from parplan.planner.request import PlanOptions, PlanRequest

FIELDS = {field.name: field for field in fields(PlanOptions)}
OF_A_MODEL = {"measure", "as_profiled", "precision"}
OF_DEVICES = {"gpus", "gpu", "link", "cluster", "memory_bytes", "measure", "as_profiled"}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        pytest.param(api.analyze, set(FIELDS), id="analyze"),
        pytest.param(api.analyze_profile, set(FIELDS) - OF_A_MODEL, id="analyze_profile"),
        pytest.param(api.compile, set(FIELDS) - OF_DEVICES, id="compile"),
        pytest.param(api.verify, {"plan", "pins"}, id="verify"),
    ],
)
def test_keywords_are_the_fields(function: Callable[..., Any], names: set[str]) -> None:
    keywords = {name: one for name, one in inspect.signature(function).parameters.items() if name in FIELDS}
    assert set(keywords) == names
    for name, keyword in keywords.items():
        assert keyword.kind is inspect.Parameter.KEYWORD_ONLY
        if name not in ("plan", "pins"):  # keywords take them in more spellings
            assert (keyword.annotation, keyword.default) == (FIELDS[name].type, FIELDS[name].default)


def test_the_command_lines_defaults_are_the_fields() -> None:
    given = chosen(PlanOptions, parse(["analyze", "net.py"]))
    assert given == {name: field.default for name, field in FIELDS.items()}


def test_a_plan_and_pins_are_read(tmp_path: Path) -> None:
    plan = Plan("Net", "0", 8, 2, {})
    (tmp_path / "plan.json").write_text(plan.to_json())
    options = PlanOptions.of({"plan": str(tmp_path / "plan.json"), "pins": None, "gpus": 2, "model": "no field"})
    assert (options.plan, options.pins, options.gpus) == (plan, (), 2)
    assert PlanOptions.of({"pins": ["fc=shards:2"]}).pins == (parse_pin("fc=shards:2", "pins"),)
    with pytest.raises(PinError, match="a plan decides every layer"):
        PlanOptions.of({"plan": plan, "pins": ["fc=shards:2"]})


def test_a_request_has_the_options() -> None:
    options = PlanOptions(scheme="gather", time_limit_s=2.0)
    request = options.request(notes=("a note",), price_pins=False)
    assert isinstance(request, PlanRequest)
    assert all(getattr(request, name) == getattr(options, name) for name in FIELDS)
    assert (request.notes, request.price_pins) == (("a note",), False)
