"""All programs on recorded devices: nothing unordered, the plain model's numbers, and no wait that is needless."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from parplan.runtime.execution.executor import Executor
from parplan.runtime.transport import local
from tests.runtime.stream_order.machine import Edge
from tests.runtime.stream_order.programs import PROGRAMS, plain, run


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_ordered_and_right(name: str) -> None:
    found = run(name)
    assert found.races == ()
    assert found.astray == ()
    if PROGRAMS[name].exact:
        for mine, wanted in zip(found.left, plain(name), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.full
def test_every_wait_and_record_stream_is_needed() -> None:
    """Each is left out by itself, in every program that comes to it until one finds what that breaks."""
    seen: dict[Edge, list[str]] = defaultdict(list)
    for name in PROGRAMS:
        for edge in run(name).edges:
            seen[edge].append(name)
    names = {edge: sorted(found, key=lambda name: len(run(name).edges)) for edge, found in seen.items()}
    needless = {str(edge) for edge in seen if not any(run(name, edge).races for name in names[edge])}
    assert needless == set()
    assert {edge.site[0] for edge in seen} == _written_waits()


def _written_waits() -> set[str]:
    """The functions of parplan's runtime whose text waits or calls record_stream."""
    found = set()
    for path in Path(local.__file__).parents[1].rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                calls = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
                if calls & {"wait_stream", "wait_event", "record_stream"}:
                    found.add(f"{path.name}:{function.name}")
    return found


def test_pinned_inputs_are_read_before_a_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "sent", lambda tensor, place: tensor.to(place, non_blocking=place.type == "cuda"))
    found = run.__wrapped__("refilled inputs")
    assert any("mul_" in race for race in found.races)


def test_a_backward_in_threads_would_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Executor, "backward_dispatch", property(lambda self: self.dispatch, lambda self, value: None), False
    )
    with pytest.raises(AssertionError, match="deadlock"):
        run.__wrapped__("threads")
