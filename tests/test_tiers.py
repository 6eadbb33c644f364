"""The tiers of the tests: plain `pytest` and the command that .ci/run runs after it select every test once."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ["pytest", "pytest -m full"]


def test_ci_runs_both_tiers() -> None:
    steps = re.findall(r"^step .*", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    commands = [command for step in steps for command in re.findall(r"\bpytest\b[^'\"&|;]*", step)]
    # The last runs again what skips before the trainers' libraries are installed.
    assert commands == [*COMMANDS, "pytest tests/integrations"]


@pytest.mark.full
def test_the_tiers_select_every_test_once_and_the_default_tier_some_of_every_module(
    pytestconfig: pytest.Config,
) -> None:
    always = pytestconfig.getini("addopts")
    chosen = [[*always, *shlex.split(command)] for command in COMMANDS]
    marks = [words[len(words) - words[::-1].index("-m")] for words in chosen]
    assert marks == ["not full", "full"]  # of the same tests, which are collected without regard to marks
    whole = [sys.executable, "-m", *shlex.split(COMMANDS[0]), "-n0", "--collect-only", "-q"]
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, check=False)
    counts = re.search(r"(\d+)/(\d+) tests collected", done.stdout)
    assert counts is not None, done.stdout[-3000:] + done.stderr
    nodes = {line for line in done.stdout.splitlines() if "::" in line}
    assert len(nodes) == int(counts[1]) < int(counts[2])
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert modules == {node.partition("::")[0] for node in nodes}


class Item:
    """One case of a test, with the marks of the test."""

    def __init__(self, test: str, case: int, marks: dict[str, pytest.Mark]) -> None:
        self.name = f"{test}[{case}]"
        self.nodeid = f"tests/test_something.py::{self.name}"
        self.marks = marks

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        """The mark of that name."""
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        """Add a mark to this case alone."""
        self.marks = {**self.marks, mark.name: mark.mark}


def left_out(items: list[Item]) -> set[str]:
    """Names of the cases that the default tier leaves out."""
    pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    return {item.name for item in items if "full" in item.marks}


def test_sampled_keeps_so_many_cases_of_each_test() -> None:
    marks = {"sampled": pytest.mark.sampled(3).mark}
    names = left_out([Item(test, case, marks) for test in ("test_a", "test_b") for case in range(10)])
    assert len(names) == 14
    assert len({name for name in names if name.startswith("test_a")}) == 7
    fewer = left_out([Item("test_a", case, marks) for case in range(9)])
    assert fewer <= names  # a case that comes or goes changes the tier of one other at most
    assert left_out([Item("test_a", 0, marks)]) == set()


def test_a_sampled_case_that_is_full_anyhow_takes_no_place() -> None:
    sampled, full = pytest.mark.sampled(1).mark, pytest.mark.full.mark
    items = [Item("test_a", case, {"sampled": sampled} | ({"full": full} if case else {})) for case in range(5)]
    assert left_out(items) == {f"test_a[{case}]" for case in range(1, 5)}
