"""The comparison of schemes: its plans, and its figures from a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import schemes


def test_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--devices", "2", "--samples", "2", "--shrink", "16", "--rounds", "2", "--steps", "1"]
    schemes.main([*small, "--json", str(tmp_path / "figures.json")])
    found = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert [figures["scheme"] for figures in found] == ["gather", "broadcast", "interleave"]
    assert found[0]["ratio"] == 1
    assert all(figures["step_s"] > figures["waits_s"] > 0 for figures in found)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
