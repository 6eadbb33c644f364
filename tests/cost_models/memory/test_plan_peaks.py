"""The predicted peak of whole steps against the real one: allocations are exact, so nothing here depends on time."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.memory import Case, peaks
from benchmarks.memory_networks import NETWORKS
from tests.runtime.ranks import run_cases

BY_NAME = {network.name: network for network in NETWORKS}


def check(name: str, plan: str, optimizer: str, rank: int = 0, ranks: int = 1) -> None:
    """One step's peak within 5 % of the prediction, which the process that plans has for all."""
    found = peaks(Case(BY_NAME[name], plan, optimizer, ranks))
    if rank == 0:
        assert found.predicted_bytes[rank] == pytest.approx(found.measured_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("mlp, wide", "adam"), ("mlp, many classes", "sgd"), ("convnet, wide", "momentum"), ("transformer", "adam")],
)
def test_one_device(name: str, optimizer: str) -> None:
    check(name, "one device", optimizer)


def test_two_processes(tmp_path: Path) -> None:
    chosen = [
        ("convnet, batch norm", "data-parallel", "sgd"),
        ("mlp, deep", "sharded", "momentum"),
        ("alexnet-like", "hybrid", "adam"),
        ("tied words", "sharded", "adam"),  # both cut the table, each along its own axis: it stays whole
        ("tied words", "hybrid", "momentum"),
    ]
    cases = {f"{name}, {plan}": partial(check, name, plan, optimizer) for name, plan, optimizer in chosen}
    assert run_cases(cases, 2, tmp_path) == dict.fromkeys(cases, "")
