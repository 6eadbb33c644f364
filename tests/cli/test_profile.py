"""`parplan profile`: what it measures, keeps, lists, shares and refuses, and what `parplan analyze` makes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from parplan.cli.main import main
from parplan.cost_models.profile.records import EntryGroup
from parplan.cost_models.profile.store import ProfileStore
from tests.cost_models.profiles import CPU, H200, group, link, part
from tests.profiler.prefilled import MODEL, parts_kept, prefill, wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small model's file, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    return "net.py"


@pytest.fixture
def filled(own_cache: Path) -> Path:
    """The user's store, where everything but parts is known; its file."""
    with ProfileStore() as store:
        prefill(store, 2)
        return store.path


def run(line: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """What a command prints."""
    assert main(line.split()) == code
    out, err = capsys.readouterr()
    return str(out if code == 0 else err)


def words(text: str) -> str:
    return " ".join(text.split())


def test_profile_then_plan_on_one_device(model: str, filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(f"profile {model}", capsys)
    with ProfileStore(filled) as store:
        kept = len(parts_kept(store, 1))
    assert first.startswith(f"{kept} parts measured, 0 known before, in ")
    assert f"Kept in {filled}" in first
    assert "Plan with it:  parplan analyze net.py --gpu cpu --gpus 1" in first
    assert run(f"profile {model}", capsys).startswith(f"0 parts measured, {kept} known before, in ")
    report = run(f"analyze {model} --gpu cpu --gpus 1", capsys)
    assert "Costs from the profile of" in report
    assert "Times of layers were measured here." in words(report)
    assert [line for line in report.splitlines() if len(line) > 80] == []
    (runtime,) = (line for line in report.splitlines() if line.startswith("  runtime "))
    assert "Python and autograd" in runtime


@pytest.mark.full
def test_more_devices_than_were_measured_are_said(model: str, filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"profile {model}", capsys)
    report = words(run(f"analyze {model} --gpu cpu --gpus 4", capsys))
    assert "Measured with 2 devices at work, planned for 4: `parplan profile TARGET --devices 4`" in report


def test_autocast_is_not_what_was_measured(model: str, filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"profile {model}", capsys)
    report = words(run(f"analyze {model} --gpu cpu --precision bf16", capsys))
    assert "nothing was measured in bf16" in report
    assert "measured here" not in report


@pytest.mark.full
def test_measuring_on_the_way(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = words(run(f"analyze {model} --gpus 2 --measure --gpu cpu", capsys))
    assert "`parplan profile --devices 2` measures devices that work at once, and their links." in report
    assert "Times of layers were measured here." in report
    assert "Transfers and reductions are computed from the links" in report
    with ProfileStore() as store:
        assert parts_kept(store, 1)


def test_the_time_limit_is_of_the_whole_command(
    model: str, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(f"profile {model} --time-limit 0.001", capsys)
    assert text.startswith("0 parts measured, 0 known before")
    assert "Left after --time-limit 0.001 s, unless known: " in text
    assert "parts, updates of adam, 1 at work, the runtime's own time, 1 at work; run again to go on." in text


def test_listing(capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    empty = run("profile", capsys)
    assert empty.startswith(f"Profile store: {own_cache / 'profiles.sqlite'} (empty)\n")
    assert "`parplan profile TARGET --devices N` measures" in empty
    assert not list(own_cache.iterdir())
    with ProfileStore() as store:
        store.put(CPU, [part("a"), part("b"), link(8)])
        store.put(H200, [part("a", when="2026-02-03T04:05:06Z")])
    listed = run("profile", capsys)
    assert "  AMD EPYC, 1 thread, torch 2.13.0: 2 parts and 1 link, the last on 2025-06-01\n" in listed
    assert "  h200-sxm, torch 2.11.0, cuda 12.8, tf32 matmul: 1 part, the last on 2026-02-03\n" in listed


def test_what_is_exported_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [group(CPU, part("a"), link(8)), group(H200, part("b"))]
    with ProfileStore() as store:
        for one in given:
            store.put(one.conditions, one.entries)
        here = store.groups()
    file = tmp_path / "mine.json"
    assert run(f"profile --export {file}", capsys) == f"3 entries written to {file}\n"
    monkeypatch.setenv("PARPLAN_CACHE", str(tmp_path / "theirs"))
    assert run(f"profile --import {file}", capsys).startswith(f"{file}: ")
    with ProfileStore() as store:
        there = store.groups()
    assert [_entries(one) for one in there] == [_entries(one) for one in here]
    assert "" not in {entry.origin for one in there for entry in one.parts}


def _entries(one: EntryGroup) -> tuple[object, ...]:
    """A group without the origins of its entries."""
    return one.conditions, [replace(entry, origin="") for entry in one.entries]


REFUSED = [
    ("profile --import a.json --export b.json", "--import and --export are both given"),
    ("profile net.py --import a.json", "a model (net.py) is measured, --import and --export need none"),
    ("profile net.py --export a.json", "a model (net.py) is measured, --import and --export need none"),
    ("profile --import missing.json", "missing.json"),
    ("profile --import net.py", "net.py"),
    ("profile --export mine.json", "has nothing to export; run parplan profile first"),
    ("profile --devices 2 --again", "--devices and --again: there is no TARGET to measure"),
    ("profile missing.py", "missing.py: no such file"),
    ("profile net.py --devices 0", "argument --devices: 0 is not a whole number of at least 1"),
    ("profile net.py --optimizer lion", "argument --optimizer: invalid choice: 'lion'"),
    ("profile net.py --time-limit 0", "argument --time-limit: 0 is not a number above 0"),
    ("profile branch.py", "branch.py"),
]
BRANCH = """
import torch
class Branch(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x
model, example_inputs = Branch(), torch.randn(4, 4)
"""


@pytest.mark.parametrize(("line", "says"), REFUSED)
def test_what_cannot_be_done_is_one_message(
    model: str, capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    Path("branch.py").write_text(BRANCH)
    err = run(line, capsys, code=2)
    (message,) = (text for text in err.splitlines() if text.startswith("parplan: "))
    assert message.startswith("parplan: error: ")
    assert says in message or line == "profile branch.py"
    assert "Traceback" not in err


# ---- several processes, as a process --------------------------------------------------------------------------------


def started(line: str) -> subprocess.Popen[str]:
    """A command in a process and group of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "parplan", *line.split()]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def group_members(leader: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, members = status.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(members) == leader and state != "Z":
            found.append(int(status.parent.name))
    return found


def all_gone(leader: int, timeout_s: float = 60.0) -> bool:
    begin = time.monotonic()
    while group_members(leader) and time.monotonic() - begin < timeout_s:
        time.sleep(0.1)
    return not group_members(leader)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_two_processes_that_are_interrupted_lose_nothing_and_leave_nobody(model: str, filled: Path) -> None:
    devices = 2
    first = started(f"profile {model} --devices {devices}")
    wait_until(filled, devices, 0)
    assert len(group_members(first.pid)) > devices
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does
    out, err = first.communicate(timeout=100)
    assert (first.returncode, out) == (130, "")
    assert "What was measured is kept; the same command goes on from there." in err
    assert "Traceback" not in err
    assert all_gone(first.pid)
    with ProfileStore(filled) as store:
        kept = parts_kept(store, devices)
    assert kept

    second = started(f"profile {model} --devices {devices}")
    wait_until(filled, devices, len(kept))
    second.kill()  # not even a chance to end the others
    second.communicate(timeout=100)
    assert all_gone(second.pid)
    with ProfileStore(filled) as store:
        more = parts_kept(store, devices)
    assert kept.items() < more.items()

    third = started(f"profile {model} --devices {devices}")
    out, err = third.communicate(timeout=200)
    assert third.returncode == 0, err
    with ProfileStore(filled) as store:
        everything = parts_kept(store, devices)
    assert more.items() <= everything.items()
    assert out.startswith(f"{len(everything) - len(more)} parts measured, {len(more)} known before, in ")
    assert "2 at once" in out
    assert "Not measured" not in out
