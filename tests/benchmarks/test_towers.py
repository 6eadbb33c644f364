"""The comparison of towers with the best plan without: its plans, and its figures from two short processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import towers
from parplan.graph.capture.capture import capture
from parplan.planner.search.branches import homes_of
from parplan.planner.search_space.verifier import check


def test_its_plans_differ_in_what_runs_at_the_same_time() -> None:
    graph = capture(towers.Rows(32, 2), (torch.zeros(2, 32),))
    found = towers.plans(32, 2, 2, 2)
    for plan, expected in ((found.beside, 1), (found.in_turn, 0)):
        check(plan, graph)
        devices = {name: strategy.devices for name, strategy in plan.layers.items()}
        assert len(homes_of(graph, devices)) == expected
    assert found.beside_s > 0
    assert found.in_turn_s > 0


@pytest.mark.full
def test_figures_are_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--width", "32", "--depth", "2", "--rounds", "2", "--steps", "1"]
    towers.main([*small, "--json", str(tmp_path / "figures.json")])
    found = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert (found["width"], found["processes"], found["rounds"]) == (32, 2, 2)
    assert found["ratio_lower_quartile"] <= found["ratio"] <= found["ratio_upper_quartile"]
    assert found["beside_s"] > 0
    assert max(map(len, capfd.readouterr().out.splitlines())) <= 80
