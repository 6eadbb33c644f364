"""What every test gets: one thread, a fixed seed, no deadline, no profile of the developer's own, and a skip where a
GPU is asked for and absent.

Threads are held to one because many tiny operations on two cores spend their time waking threads, and because sums
then have one order. Nothing is asserted about time, so hypothesis has no deadline; it draws the same cases every run.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

SEED = 20140423

settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests, and the processes they start, find an empty profile store, and leave the developer's alone."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PARPLAN_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
