"""Patterns of everyday training code: plain training's numbers, or a refusal that says why; nothing in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import pytest
import torch

from benchmarks.workers import Workers
from tests.patterns.cells import PATTERNS, SECTIONS, launched
from tests.patterns.known_wrong import KNOWN_WRONG
from tests.patterns.page import PAGE, page
from tests.patterns.pattern import CELLS, first_match

# One plan of each pattern per launch; `python -m tests.patterns` runs all. Shards are where most can go wrong.
_CUT = ("shards", "mixed", "slices")
PLANS_IN_TURN = {
    "one": ("mixed", "replicas", "shards", "solver"),
    "ranks": (*_CUT, "replicas", *_CUT, "replays", *_CUT, "stages"),
}


def _cells() -> Sequence[object]:
    found: list[object] = []
    for number, name in enumerate(PATTERNS):
        for launch, plans in PLANS_IN_TURN.items():
            cell = f"{launch}/{plans[number % len(plans)]}"
            known = first_match(KNOWN_WRONG.get(name, {}), cell)
            marks = [pytest.mark.xfail(reason=known, strict=True)] if known is not None else []
            found.append(pytest.param(name, cell, marks=marks, id=f"{name}-{cell.replace('/', '-')}"))
    return found


@pytest.fixture(scope="module")
def workers() -> Iterator[Mapping[str, Workers]]:
    """Processes for each launch, started when they are needed."""
    with Workers(1) as one, Workers(2) as ranks:
        yield {"one": one, "ranks": ranks}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "cell"), _cells())
def test_a_pattern_is_right_or_refused(workers: Mapping[str, Workers], name: str, cell: str) -> None:
    trouble = PATTERNS[name].trouble(cell, launched(workers[cell.split("/")[0]], name, cell))
    assert trouble is None, trouble


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in KNOWN_WRONG])
def test_a_pattern_is_right_or_refused_in_float32(workers: Mapping[str, Workers], name: str) -> None:
    """As trained: the self-check has to tell rounding from what is wrong."""
    trouble = PATTERNS[name].trouble("one/mixed", launched(workers["one"], name, "one/mixed", torch.float32))
    assert trouble is None, trouble


def test_the_page_is_what_the_patterns_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.patterns.page"


def test_every_pattern_has_a_name_of_its_own() -> None:
    assert len(PATTERNS) == sum(len(list(section)) for section in SECTIONS)


def test_expectations_name_patterns_and_cells() -> None:
    assert set(KNOWN_WRONG) <= set(PATTERNS)
    named = [*KNOWN_WRONG.values(), *(pattern.refused for pattern in PATTERNS.values())]
    for by_cells in named:
        for cells, text in by_cells.items():
            assert any(fnmatchcase(cell, cells) for cell in CELLS), cells
            assert text or cells == "ranks/slices", cells  # else as replicas
