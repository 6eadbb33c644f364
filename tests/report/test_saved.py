"""Reports that were kept fit the shipped JSON Schema and are read back; what does not fit it is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import ParplanError, PlanError
from parplan.planner.decide import decide
from parplan.planner.decision import Alternative, BatchTried, ConcurrentBranches, DeviceTrack, Phase, Simpler
from parplan.planner.request import PlanRequest
from parplan.report.as_json import to_dict, to_json
from parplan.report.saved import json_schema, load_plan_or_report, load_report, violations
from tests.planner.graphs import classifier
from tests.report.decisions import DATA, DECISIONS, alexnet, on_two_kinds


def everything() -> dict[str, Any]:
    """A report in which nothing optional is left out."""
    decision = on_two_kinds(alexnet())
    tracks = (DeviceTrack(("conv1",), (0,), 0.1), DeviceTrack(("conv2",), (1,), 0.2))
    first, *layers = decision.layers
    first = replace(first, alternatives=(Alternative(DATA, 1e-3, 0.0, -2e-3, fits=False),), refused=("conv1: so (R1)",))
    noted = replace(decision.plan, note="kept", notes={"fc6": "by hand"})
    return to_dict(
        replace(
            decision,
            plan=noted,
            layers=(first, *layers),
            batches=(BatchTried(512, 0.1, 1, 2, True), BatchTried(1024, None, None, None, False)),
            branches=ConcurrentBranches((Phase(tracks, 0.1),), 0.3, 2),
            proof=replace(decision.proof, simpler=Simpler(0.01, 4, 2)),
        )
    )


REPORTS: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: lambda make=make: to_dict(make()) for name, make in DECISIONS.items()},  # type: ignore[misc]
    "everything": everything,
}


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_reports_fit_the_schema(name: str) -> None:
    data = json.loads(json.dumps(REPORTS[name]()))
    assert list(violations(data, json_schema())) == []


@pytest.mark.full
def test_a_decision_fits_the_schema() -> None:
    graph, cluster = classifier(), cluster_preset("k20", 4)
    found = decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest())
    assert list(violations(json.loads(to_json(found)), json_schema())) == []


@pytest.mark.skipif(find_spec("jsonschema") is None, reason="needs jsonschema")
def test_the_schema_is_one_for_other_checkers_too() -> None:
    import jsonschema  # type: ignore[import-untyped, import-not-found, unused-ignore]

    jsonschema.Draft202012Validator.check_schema(json_schema())
    for make in REPORTS.values():
        jsonschema.validate(json.loads(json.dumps(make())), json_schema())


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda d: d.pop("predicted"), "lacks 'predicted'"),
    "unknown": (lambda d: d.update(extra=1), "has an unknown 'extra'"),
    "type": (lambda d: d["layers"][0].update(forward_s="1 ms"), "layers[0].forward_s is '1 ms', not number"),
    "true is no number": (lambda d: d.update(batch=True), "batch is True, not integer"),
    "negative": (lambda d: d["predicted"].update(step_s=-1.0), "predicted.step_s is -1.0, below 0"),
    "choice": (lambda d: d["layers"][0].update(source="guess"), "layers[0].source is 'guess', not 'measured' or"),
    "device": (lambda d: d["layers"][0]["devices"].append(-1), "layers[0].devices[4] is -1, below 0"),
    "null": (lambda d: d.update(proof=None), "proof is None, not object"),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, name: str) -> None:
    change, words = BROKEN[name]
    data = to_dict(alexnet())
    change(data)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ParplanError) as caught:
        load_report(file)
    assert words in str(caught.value)
    assert "write one with `parplan analyze --json`" in str(caught.value)


def test_plans_and_reports_are_told_apart(tmp_path: Path) -> None:
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    plan.write_text(alexnet().plan.to_json())
    report.write_text(to_json(alexnet()))
    assert load_plan_or_report(plan).report is None
    found = load_plan_or_report(report)
    assert found.plan == load_plan_or_report(plan).plan == alexnet().plan
    assert found.report is not None
    with pytest.raises(ParplanError, match="is no report"):
        load_report(plan)
    report.write_text("[1]")
    with pytest.raises(PlanError, match="is not a plan"):
        load_plan_or_report(report)
