"""What tests of profiles share: a store of their own, and new processes."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from parplan.cost_models.profile.store import ProfileStore
from tests.processes import forkserver


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Iterator[ProfileStore]:
    with ProfileStore(tmp_path / "profiles.sqlite") as store:
        yield store


@pytest.fixture(name="processes", scope="session")
def _processes() -> ForkServerContext:
    """New processes, which start without importing everything again."""
    return forkserver()
