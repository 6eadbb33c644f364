"""New processes that start without importing everything again: they are forked from one that has done nothing else."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.context import ForkServerContext

import pytest

from parplan.runtime.processes import in_processes

__all__ = ["fork_ranks", "forkserver"]

# What tests' processes need most; the names after the first spare them what torch imports at the first capture.
PRELOADED = ["tests.cost_models.store_writers", "parplan.runtime.module.compiled", "torch.export._trace"]


def forkserver() -> ForkServerContext:
    """Starts them; their environment is that of the first test which started one, unless it is handed over."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def fork_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that parplan starts itself be forked, too."""
    forkserver()
    assert in_processes.__kwdefaults__ is not None
    monkeypatch.setitem(in_processes.__kwdefaults__, "start_method", "forkserver")
