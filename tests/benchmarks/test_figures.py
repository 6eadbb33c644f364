"""Figures in documents are found, and told where a command gives others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import CLAIMS, PRINTED, ROOT, SOURCES, differences, main, reports_differ, unchecked

PUBLISHED: dict[str, Any] = {"krizhevsky2014": {"2": 1.9929, "4": 3.9233, "8": 7.1906}}


def test_a_figure_that_the_command_gives_otherwise_is_told() -> None:
    assert differences("published", PUBLISHED) == []
    found = differences("published", {"krizhevsky2014": {**PUBLISHED["krizhevsky2014"], "4": 3.93}})
    assert found == [
        "README.md: not found: 1.99x, 3.93x, 7.19x where 1.95x, 3.74x, 6.25x were measured on 2, 4, 8 GPUs",
        "docs/predictions.md: not found: | 3.74x | 3.93x |",
    ]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.document} {claim.source}")
def test_every_claim_has_a_document_and_a_source(claim: Any) -> None:
    assert (ROOT / claim.document).is_file()
    assert claim.source in SOURCES


def test_a_report_is_compared_line_by_line_without_the_time_it_took() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    report = text[text.index("```text\nUse ") + 8 :].partition("```")[0]
    assert reports_differ(PRINTED["report"], report) == []
    later = report.replace("419 ms", "1.88 s").replace("parplan took ", "parplan took 1")
    assert reports_differ(PRINTED["report"], later) == []
    assert reports_differ(PRINTED["report"], report.replace("23,283", "23,284")) != []
    assert reports_differ(PRINTED["report"], f"{report}one more\n") == ["README.md: not found: one more"]


def test_a_part_of_a_report_is_found_where_it_is_indented() -> None:
    part = PRINTED["pins"]
    text = (ROOT / part.document).read_text(encoding="utf-8")
    block = text[text.index(part.start) :].partition("Each line")[0]
    assert reports_differ(part, f"before\n{block}\nAgainst other plans") == []
    assert reports_differ(part, f"before\n{block.replace('18.10', '18.11')}\nAgainst other plans") != []


def test_commands_whose_figures_nothing_compares_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = unchecked()
    assert {"benchmarks.prediction", "benchmarks.ddp", "benchmarks.fuzz", "examples/train_digits.py"} <= found.keys()
    assert found.keys().isdisjoint({f"benchmarks.{claim.source}" for claim in CLAIMS})
    (tmp_path / "published.json").write_text(json.dumps(PUBLISHED))
    with pytest.raises(SystemExit) as ended:
        main(["published", "--from", str(tmp_path)])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(f"{command}: not checked, needs minutes" in said for command in found)
    assert "memory: not checked this time" in said
    assert "published: not checked" not in said
