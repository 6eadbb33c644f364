"""The batches tried: a line each, the chosen one marked, and what does not fit said."""

from __future__ import annotations

import json
from dataclasses import replace

from parplan.planner.decision import BatchTried, Decision
from parplan.report.as_json import to_json
from tests.report.decisions import alexnet
from tests.report.golden import printed

GIB = 2**30
TRIED = (
    BatchTried(64, 2.0, GIB // 4, 15 * GIB, True),
    BatchTried(512, 0.1234, 7 * GIB, 15 * GIB, True),
    BatchTried(1024, 0.2, 16 * GIB, 15 * GIB, False),
    BatchTried(2048, None, None, None, False),
)


def tried(*rows: BatchTried) -> Decision:
    """AlexNet's decision (at batch 512) with the batches it was chosen from."""
    return replace(alexnet(), batches=rows)


def section(decision: Decision) -> str:
    text = printed(decision, 80)
    return text[text.index("\nBatches") + 1 : text.index("\nAgainst other plans")]


def test_a_line_for_every_batch() -> None:
    lines = section(tried(*TRIED)).splitlines()
    rows = {line.split()[0]: line for line in lines[3 : 3 + len(TRIED)]}
    assert [*rows] == ["64", "512", "1,024", "2,048"]
    assert rows["64"].split()[3:] == ["32", "0.2", "GiB"]
    assert rows["512"].endswith("chosen")
    assert rows["512"].split()[3] == "4,149"
    assert rows["1,024"].endswith("16.0 GiB  does not fit")
    assert rows["2,048"].split() == ["2,048", "does", "not", "fit"]


def test_it_says_which_plans_the_lines_are_of() -> None:
    assert "Plans in one pass; for the chosen batch those in passes and side by side too." in section(tried(*TRIED))


def test_it_says_why_no_larger_one_was_tried() -> None:
    assert "two doublings in a row brought less than 1%" in section(tried(*TRIED[:2]))
    assert "two doublings" not in section(tried(*TRIED))


def test_a_given_batch_has_no_table() -> None:
    assert "Batches" not in printed(alexnet(), 80)
    assert json.loads(to_json(alexnet()))["batches"] == []


def test_json_has_them() -> None:
    found = json.loads(to_json(tried(*TRIED)))["batches"]
    assert [one["batch"] for one in found] == [64, 512, 1024, 2048]
    assert found[1] == {
        "batch": 512, "step_s": 0.1234, "samples_per_s": 512 / 0.1234, "memory_bytes": 7 * GIB,
        "limit_bytes": 15 * GIB, "fits": True,
    }  # fmt: skip
    assert found[3] == {"batch": 2048, "step_s": None, "samples_per_s": None, "memory_bytes": None,
                        "limit_bytes": None, "fits": False}  # fmt: skip
