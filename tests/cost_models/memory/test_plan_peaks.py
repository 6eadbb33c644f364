"""The predicted peak of whole steps against the real one: allocations are exact, so nothing here depends on time."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.memory import Case, peaks
from benchmarks.memory_networks import NETWORKS
from tests.runtime.ranks import run_case

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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "plan", "optimizer"),
    [
        ("convnet, batch norm", "data-parallel", "sgd"),
        ("mlp, deep", "sharded", "momentum"),
        ("alexnet-like", "hybrid", "adam"),
        ("tied words", "sharded", "adam"),  # both cut the table, each along its own axis: it stays whole
        ("tied words", "hybrid", "momentum"),
    ],
)
def test_two_processes(name: str, plan: str, optimizer: str) -> None:
    run_case(partial(check, name, plan, optimizer), 2)
