"""The house itself: what is public, what an import may load, what the README promises, what a file may not hold.

Import directions have a tool of their own (import-linter, contracts in pyproject.toml); here is what it cannot see.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import networkx as nx
import pytest

import parplan
from tests.every_case import every_case
from tests.source_code import functions, imports, modules

ROOT = Path(__file__).resolve().parent.parent

PUBLIC = (
    "Cluster", "ParplanError", "Plan", "PlanSampler", "__version__", "analyze", "compile", "data_parallel",
    "load_checkpoint", "save_checkpoint", "save_on_signal", "shard_dataset", "verify", "whole",
)  # fmt: skip

README_COMMANDS = (
    "pip install -e . && parplan analyze examples/alexnet.py --gpus 4",
    "pip install -e '.[test]' && pytest",
)

# (what is imported, what must stay unloaded)
LIGHT_IMPORTS = (
    ("parplan", ("torch", "ortools", "networkx", "rich", "numpy")),
    ("parplan.runtime", ("ortools", "rich")),
)

MAX_MODULES = 12
"""Of a folder, `__init__` and `__main__` aside."""
MAX_FILE_LINES = 450

# Function lengths in lines, and shares of all functions; the aim is a median of 7 to 10, a p90 of 20 to 35, at most 80
# lines, at most 38 % private, and at most 55 % of those called once.
MAX_FUNCTION_LINES = 80
LEAST_MEDIAN, LEAST_P90 = 7, 20
MAX_PRIVATE = 0.38
MAX_CALLED_ONCE = 0.55

LINKS = ("planner", "runtime", "cost_models")

# In pieces, so that this file does not hold what it looks for.
HOME_FOLDERS = ("home", "root", "work", "farm", "opt", "mnt", "Users")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:" + "|".join(HOME_FOLDERS) + r")/|[A-Z]:\\Users\\")
REGISTRY_HOST = re.compile("|".join(("py" + r"pi\.org", "python" + r"hosted\.org", "download" + r"\.pytorch\.org")))


def project_files() -> list[Path]:
    """Every file that is, or would be, committed; links are left to their targets."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_public_names() -> None:
    assert tuple(sorted(parplan.__all__)) == PUBLIC


@every_case("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(parplan, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(parplan, "no_such" + "_name")


@pytest.mark.full
@every_case(("module", "unloaded"), LIGHT_IMPORTS)
def test_importing_loads_nothing_heavy(module: str, unloaded: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted({set(unloaded)!r} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert loaded.split() == []


@every_case("name", LINKS)
def test_root_links_lead_to_the_packages(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("parplan") / name
    assert (link / "__init__.py").is_file()


@pytest.mark.full
def test_modules_import_each_other_in_no_circle() -> None:
    """Imports in functions and under TYPE_CHECKING count too."""
    edges = [(module.name, name) for module in modules() for name in imports(module) if name != module.name]
    circles = [sorted(found) for found in nx.strongly_connected_components(nx.DiGraph(edges)) if len(found) > 1]
    assert circles == []


def test_no_folder_is_crowded() -> None:
    names = [path for path in (module.path for module in modules()) if not path.endswith("__.py")]
    counts = Counter(str(Path(name).parent) for name in names)
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_no_file_is_long() -> None:
    assert {module.path: module.lines for module in modules() if module.lines > MAX_FILE_LINES} == {}


def test_functions_are_paragraphs() -> None:
    """Neither a page nor a line: lengths, and how many are helpers that one place calls."""
    measured = [one for one in functions() if not one.path.startswith("planner/search/")]  # waits for its redesign
    lengths = sorted(one.lines for one in measured)
    private = [one for one in measured if one.private]
    assert lengths[-1] <= MAX_FUNCTION_LINES
    assert statistics.median(lengths) >= LEAST_MEDIAN
    assert lengths[len(lengths) * 9 // 10] >= LEAST_P90
    assert len(private) / len(measured) <= MAX_PRIVATE
    assert sum(one.uses <= 1 for one in private) / len(private) <= MAX_CALLED_ONCE


@every_case("command", README_COMMANDS)
@every_case("file", ["README.md", ".ci/run"])
def test_ci_runs_what_the_readme_says(command: str, file: str) -> None:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    assert any(command in line for line in lines)


@every_case("pattern", [MACHINE_PATH, REGISTRY_HOST], ids=["machine path", "registry host"])
def test_no_file_names_a_machine(pattern: re.Pattern[str]) -> None:
    files = project_files()
    assert Path(__file__).resolve() in files
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("cd /" + "home/someone/x", True),
        ("see ../" + "work/notes and a/" + "home/b", False),
        ("#!/usr/bin/env bash", False),
    ],
)
def test_the_machine_path_pattern(text: str, matches: bool) -> None:
    assert bool(MACHINE_PATH.search(text)) is matches
