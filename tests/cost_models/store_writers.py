"""What a test has other threads and processes do: write to a store, or change torch's switches for good."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from operator import attrgetter
from pathlib import Path

import torch

from parplan.cost_models.measurement.conditions import switches
from parplan.cost_models.profile.store import ProfileStore
from tests.cost_models.profiles import CPU, link, part

__all__ = [
    "BATCH",
    "WRITERS",
    "open_new_stores",
    "run_threads",
    "tell_switches",
    "write_batches_until_killed",
    "write_some",
]

WRITERS = 8
BATCH = 40


def run_threads(work: Callable[[int], None]) -> None:
    """Run `work` in as many threads as there are writers; what goes wrong in one fails the test."""
    with ThreadPoolExecutor(WRITERS) as pool:
        assert list(pool.map(work, range(WRITERS))) == [None] * WRITERS


def write_some(path: Path, writer: int, count: int) -> None:
    """Put `count` parts and links of one's own, one at a time, and read them back."""
    with ProfileStore(path) as store:
        profile = store.under(CPU)
        for number in range(count):
            entry = part(f"writer {writer} {number}", forward_s=writer + number / 1024)
            profile.put(entry)
            profile.put(link(1000 * writer + number))
            assert profile.get(entry.signature) == store.under(CPU).get(entry.signature) == entry


def open_new_stores(folder: Path, together: Barrier) -> None:
    """Open one store after the other, each at the same moment as other processes do."""
    for number in range(100):
        together.wait(20)
        ProfileStore(folder / f"{number}.sqlite").close()


def write_batches_until_killed(path: Path, round_: int, told: Connection) -> None:
    """Put batches of parts for ever, telling the number of each that is committed."""
    with ProfileStore(path) as store:
        profile, batch = store.under(CPU), 0
        while True:
            profile.put(*(part(f"r{round_}b{batch} {number} {'x' * 500}") for number in range(BATCH)))
            told.send(batch)
            batch += 1


def tell_switches(device: str, setting: str, value: str | bool, told: Connection) -> None:
    """Tell the switches that are not torch's defaults before and after one in torch.backends is changed."""
    before = switches(torch.device(device))
    owner, _, name = setting.rpartition(".")
    setattr(attrgetter(owner)(torch.backends), name, value)
    told.send([before, switches(torch.device(device))])
