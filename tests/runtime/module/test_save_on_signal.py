"""Signals to one process of several, to one alone, twice, and to a training that has ended."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parplan
from parplan.errors import CheckpointError, RuntimeFailure
from parplan.runtime.module import save_on_signal as module
from parplan.runtime.module.compiled import Compiled
from tests.processes import forkserver
from tests.runtime.helpers import planner, spread
from tests.runtime.nets import mlp

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    """A context leaves the handlers as it found them."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


def train(path: Path, act: Callable[[int], object], ran: list[int], **parts: Any) -> None:
    """Five steps; `act` gets the number of each."""
    with parplan.save_on_signal(path, **parts) as saving:
        for step in range(5):
            act(step)
            ran.append(step)
            saving.step(done=step + 1)
        act(5)


def at(step: int, act: Callable[[], object]) -> Callable[[int], object]:
    """Act in one step."""
    return lambda number: act() if number == step else None


def raise_bad_data() -> None:
    """An error of the user's loop, after a signal."""
    signal.raise_signal(signal.SIGTERM)
    raise ValueError("bad data")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_at_the_end_of_the_step_and_exits(tmp_path: Path, number: signal.Signals) -> None:
    layer, ran = nn.Linear(2, 2), list[int]()
    with pytest.raises(SystemExit) as exit:
        train(tmp_path / "run.pt", at(2, lambda: signal.raise_signal(number)), ran, model=layer)
    assert exit.value.code == 128 + number
    assert ran == [0, 1, 2]
    again = nn.Linear(2, 2)
    assert parplan.load_checkpoint(tmp_path / "run.pt", model=again) == {"done": 3}
    torch.testing.assert_close(again.state_dict(), layer.state_dict(), rtol=0, atol=0)


def test_without_a_signal_nothing_is_saved(tmp_path: Path) -> None:
    train(tmp_path / "run.pt", lambda _: None, [], model=nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_no_step_has_answered_is_that_of_the_handler_before(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run.pt", at(5, lambda: signal.raise_signal(signal.SIGINT)), [], model=nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_training_is_not_replaced_by_a_signal(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad data"):
        train(tmp_path / "run.pt", at(2, raise_bad_data), [])


def test_only_the_signals_that_are_asked_for_are_noted(tmp_path: Path) -> None:
    with parplan.save_on_signal(tmp_path / "run.pt", signals=[signal.SIGUSR1], done=3) as saving:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(SystemExit):
            saving.step()
    assert parplan.load_checkpoint(tmp_path / "run.pt") == {"done": 3}


@pytest.mark.parametrize("again_s", [0.0, 3600.0])
def test_a_second_signal_ends_the_process_at_once_unless_it_is_the_same_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again_s: float
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module, "AGAIN_S", again_s)
    monkeypatch.setattr(os, "_exit", ended.append)
    with parplan.save_on_signal(tmp_path / "run.pt", done=1) as saving:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit) as exit:
            saving.step()
    assert exit.value.code == 128 + signal.SIGTERM
    assert ended == ([] if again_s else [128 + signal.SIGINT])


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with parplan.save_on_signal(tmp_path / "missing/run.pt") as saving:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(CheckpointError, match=r"cannot write .*: No such file or directory"):
            saving.step()
        with pytest.raises(CheckpointError, match="cannot write"):  # it is still to be answered
            saving.step()
        saving.noted = None


def test_steps_outside_and_other_threads_are_refused(tmp_path: Path) -> None:
    saving = parplan.save_on_signal(tmp_path / "run.pt")
    with pytest.raises(RuntimeFailure, match="belongs inside of `with"):
        saving.step()
    told: list[str] = []

    def enter() -> None:
        with pytest.raises(RuntimeFailure, match="in the main thread") as refused, saving:
            pass
        told.append(str(refused.value))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(told) == 1


def _train(rank: int, ranks: int, folder: str, kind: str, number: signal.Signals, noted_by: int) -> None:
    """Train until a signal comes to one rank, in the forward of its third step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), rank=rank, world_size=ranks)
    model = Compiled(mlp(), planner(spread(ranks, kind), ranks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if rank == noted_by:
        model.module.get_submodule("2").register_forward_pre_hook(
            _at_the_third_call(lambda: signal.raise_signal(number))
        )
    with parplan.save_on_signal(f"{folder}/run.pt", model=model, optimizer=optimizer) as saving:
        for step in range(50):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(2 * ranks, 6, dtype=torch.float64).chunk(ranks)[rank]).square().mean().backward()
            optimizer.step()
            (Path(folder) / f"{rank}.steps").write_text(f"{step + 1}")
            saving.step(done=step + 1)


def _at_the_third_call(act: Callable[[], object]) -> Callable[..., None]:
    left = [3]

    def hook(*_: object) -> None:
        left[0] -= 1
        if not left[0]:
            act()

    return hook


@pytest.mark.parametrize(
    ("kind", "ranks", "number", "noted_by"),
    [
        ("hybrid", 2, signal.SIGTERM, 1),
        pytest.param("data", 2, signal.SIGINT, 0, marks=pytest.mark.full),
        pytest.param("hybrid", 4, signal.SIGTERM, 3, marks=pytest.mark.full),
    ],
)
def test_a_signal_to_one_rank_ends_all_at_the_same_step(
    tmp_path: Path, kind: str, ranks: int, number: signal.Signals, noted_by: int
) -> None:
    context = forkserver()
    given = (ranks, str(tmp_path), kind, number, noted_by)
    processes = [context.Process(target=_train, args=(rank, *given)) for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        assert [process.exitcode for process in processes] == [128 + number] * ranks
    finally:
        for process in processes:
            process.kill()
            process.join()
    done = parplan.load_checkpoint(tmp_path / "run.pt")["done"]
    assert {(tmp_path / f"{rank}.steps").read_text() for rank in range(ranks)} == {str(done)}
    assert done < 50
