"""Checkpoints in one file: whole or as they were, nothing damaged is loaded, no code is run from the file."""

from __future__ import annotations

import functools
import os
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import parplan
from parplan.errors import CheckpointError
from tests.processes import forkserver


def trained() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """A compiled model, its optimizer and its scheduler after two steps."""
    torch.manual_seed(0)
    x = torch.randn(8, 6, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)).double()
    model = parplan.compile(net, x, devices=["cpu"] * 2, pins=["*=replicas:2"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_a_checkpoint_brings_everything_back(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained()
    path = tmp_path / "run.pt"
    parplan.save_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler, epoch=3, best={"loss": 0.5})
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)).double()
    again = torch.optim.AdamW(net.parameters(), lr=7)
    steps = torch.optim.lr_scheduler.StepLR(again, 1)
    rest = parplan.load_checkpoint(path, scheduler=steps, optimizer=again, model=net)
    assert rest == {"epoch": 3, "best": {"loss": 0.5}}
    assert steps.last_epoch == scheduler.last_epoch
    torch.testing.assert_close(net.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(again.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]


def test_torch_reads_the_file_too(tmp_path: Path) -> None:
    model, _, _ = trained()
    parplan.save_checkpoint(tmp_path / "run.pt", model=model)
    found = torch.load(tmp_path / "run.pt", weights_only=True)
    torch.testing.assert_close(found["model"], dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("keep", "words"),
    [(0, "does not end with a checksum"), (40, "does not end with a checksum"), (-1, "does not end with a checksum")],
)
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int, words: str) -> None:
    path = tmp_path / "run.pt"
    parplan.save_checkpoint(path, weights=torch.arange(1000.0))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=words):
        parplan.load_checkpoint(path)


def test_every_altered_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    parplan.save_checkpoint(path, weights=torch.arange(4.0))
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"is damaged|does not end with a checksum"):
            parplan.load_checkpoint(path)
    path.write_bytes(whole + b"\n")
    with pytest.raises(CheckpointError, match="does not end with a checksum"):
        parplan.load_checkpoint(path)


def test_files_of_torch_save_and_missing_files_are_told_apart(tmp_path: Path) -> None:
    torch.save({"weights": torch.ones(100)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"was not written by save_checkpoint \(what torch.save wrote"):
        parplan.load_checkpoint(tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"cannot read .*none\.pt: No such file"):
        parplan.load_checkpoint(tmp_path / "none.pt")


class _Runs:
    """Its pickle calls `os.mkdir` when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_what_would_run_code_is_neither_saved_nor_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.pt"
    parplan.save_checkpoint(path, epoch=1)
    with pytest.raises(CheckpointError, match=r"rest cannot be saved: loading .*functools.partial.* would run code"):
        parplan.save_checkpoint(path, epoch=2, rest=[functools.partial(int)])
    assert parplan.load_checkpoint(path) == {"epoch": 1}
    monkeypatch.setattr(
        "parplan.runtime.module.checkpoints._unsafe", lambda file: []
    )  # a file that somebody made with other tools
    parplan.save_checkpoint(path, rest=_Runs(str(tmp_path / "made")))
    with pytest.raises(CheckpointError, match="holds more than data, and nothing of it is loaded"):
        parplan.load_checkpoint(path)
    assert not (tmp_path / "made").exists()


def test_parts_are_checked_before_any_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    model, optimizer, _ = trained()
    parplan.save_checkpoint(path, model=nn.Linear(2, 2), epoch=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"holds model, epoch; it has no optimizer"):
        parplan.load_checkpoint(path, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match=r"epoch, of type int, has no load_state_dict"):
        parplan.load_checkpoint(path, model=model, epoch=0)
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        parplan.load_checkpoint(path, model=model)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("place", ["missing/run.pt", "."])
def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, place: str) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write .*: (No such file or directory|there is a folder)"):
        parplan.save_checkpoint(tmp_path / place, epoch=1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    parplan.save_checkpoint(path, epoch=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*run\.pt: File too large"):
            parplan.save_checkpoint(path, epoch=2, weights=torch.ones(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert parplan.load_checkpoint(path) == {"epoch": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]


def _killed_saves(path: Path, moments: tuple[str, ...], told: Connection) -> None:
    """Saves that are ended at these moments, each in a fork: its signal, the files it left, and the checkpoint."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    parplan.save_checkpoint(path, epoch=1)
    for moment in moments:
        child = os.fork()
        if not child:
            if moment == "write":  # the kernel ends the process in the middle of a write
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
            else:
                setattr(os, moment, die)
            parplan.save_checkpoint(path, epoch=2, weights=torch.ones(100_000))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        told.send((moment, os.WTERMSIG(status), len(os.listdir(path.parent)), parplan.load_checkpoint(path)))


def test_a_killed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    killed = {"write": signal.SIGXFSZ, "fsync": signal.SIGKILL, "replace": signal.SIGKILL}
    context = forkserver()
    ours, theirs = context.Pipe()
    process = context.Process(target=_killed_saves, args=(path, tuple(killed), theirs))
    process.start()
    theirs.close()
    for moment, number in killed.items():
        assert ours.recv() == (moment, number, 2, {"epoch": 1})
    process.join()
    ours.close()
    parplan.save_checkpoint(path, epoch=3)  # takes away what the last one left
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
