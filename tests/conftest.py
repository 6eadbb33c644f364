"""What every test gets: one thread, a fixed seed, no deadline, no profile of the developer's own, and a skip where a
GPU is asked for and absent.

Threads are held to one because many tiny operations on two cores spend their time waking threads, and because sums
then have one order. Nothing is asserted about time, so hypothesis has no deadline; it draws the same cases every run.
Garbage is collected of what tests make: importing and collecting leave a million objects that never become any.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import settings

from tests.every_case import seed_all

settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start, pytest's workers among them
gc.disable()  # until the tests are collected
# A shell starts what it puts in the background deaf to Ctrl-C, and the processes that tests interrupt would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for each test, in one of their own: pytest looks through all that it has to number a new one."""
    root = tmp_path_factory.mktemp("caches")
    return (root / str(number) for number in count())


@pytest.fixture(autouse=True)
def own_cache(caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests, and the processes they start, find an empty profile store, and leave the developer's alone."""
    folder = next(caches)
    folder.mkdir()
    monkeypatch.setenv("PARPLAN_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    seed_all()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `sampled` leaves to the full tier; skip `gpu` tests where there is no CUDA device."""
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled and not item.get_closest_marker("full"):
            cases.setdefault((item.nodeid.partition("[")[0], *sampled.args), []).append(item)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    for (_, kept), of_a_test in cases.items():
        # By a hash of the name: no stride that agrees with that of a parameter, and a new case moves one at most.
        for item in sorted(of_a_test, key=lambda item: crc32(item.name.encode()))[kept:]:
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Start garbage collection, which passes over what is there already."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # captures make objects by the ten thousand, hardly any of them in a cycle
    gc.enable()
