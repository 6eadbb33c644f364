"""Cases in one test: each runs, from the same random state, and those that fail are named with their reasons."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.every_case import every_case


def test_cases_that_fail_are_named_and_the_others_run() -> None:
    seen: list[int] = []

    @every_case("number, text", [(1, "a"), (2, "b"), (3, "c"), (4, "d")])
    def check(number: int, text: str) -> None:
        seen.append(number)
        assert number != 2, "two is wrong"
        with pytest.raises(KeyError):
            {"c": 0}[text]

    with pytest.raises(AssertionError) as error:
        check()
    assert seen == [1, 2, 3, 4]
    told = str(error.value).splitlines()
    assert told[0] == "2 of 4 cases failed"
    assert told[1].startswith("number=2, text='b': AssertionError: two is wrong")
    assert any(line.startswith("number=3, text='c': Failed: DID NOT RAISE") for line in told)
    assert error.value.__cause__ is not None


def test_cases_within_cases_are_named_by_both() -> None:
    @every_case("outer", ["a", "b"], ids=lambda outer: f"<{outer}>")
    @every_case("inner", [1, 2], ids=["one", "two"])
    def check(outer: str, inner: int) -> None:
        assert (outer, inner) != ("b", 2)

    with pytest.raises(AssertionError, match=r"(?s)1 of 2 cases failed\n<b>: .*1 of 2 cases failed\ntwo: "):
        check()


DRAWN: list[float] = []


@every_case("case", range(3))
def test_every_case_starts_from_the_same_random_state_and_gets_fixtures(case: int, tmp_path: Path) -> None:
    DRAWN.append(random.random())
    assert tmp_path.is_dir()
    assert [DRAWN[0]] * (case + 1) == DRAWN


def test_a_list_without_cases_is_no_test() -> None:
    with pytest.raises(AssertionError, match="no case to check"):
        every_case("number", [])(lambda number: None)()
