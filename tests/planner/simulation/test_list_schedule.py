"""When tasks run, as tables: the list is the program, the clock only follows it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.planner.simulation.list_schedule import NOTHING, Span, Task, schedule

LANE = {"lane": 1.0}

# What tasks there are, and when each starts, ends, and its critical predecessor.
TABLES: dict[str, tuple[list[Task], list[tuple[float, float, int]]]] = {
    "nothing": ([], []),
    "side by side": (
        [Task(2, ("a",)), Task(3, ("b",))],
        [(0, 2, NOTHING), (0, 3, NOTHING)],
    ),
    "one after another": (
        [Task(2, ("a",)), Task(3, ("a",))],
        [(0, 2, NOTHING), (2, 5, 0)],
    ),
    "needs both": (
        [Task(2, ("a",)), Task(3, ("b",)), Task(1, ("c",), after=(0, 1))],
        [(0, 2, NOTHING), (0, 3, NOTHING), (3, 4, 1)],
    ),
    "the first that can run goes first": (
        [Task(1, ("b",)), Task(1, ("a",), after=(0,)), Task(3, ("a",))],
        [(0, 1, NOTHING), (3, 4, 2), (0, 3, NOTHING)],
    ),
    "who waits for one resource keeps the other": (
        [Task(2, ("a",)), Task(1, ("a", "b")), Task(1, ("b",))],
        [(0, 2, NOTHING), (2, 3, 0), (3, 4, 1)],
    ),
    "a moment between": (
        [Task(2, ("a",)), Task(0, after=(0,)), Task(1, ("b",), after=(1,))],
        [(0, 2, NOTHING), (2, 2, 0), (2, 3, 1)],
    ),
    "what comes after no time keeps its place": (
        [Task(1, ("a",)), Task(0, ("a",), after=(0,)), Task(1, ("a", "b"), after=(1,)), Task(1, ("b",), after=(0,))],
        [(0, 1, NOTHING), (1, 1, 0), (1, 2, 1), (2, 3, 2)],
    ),
    "shared": (
        [Task(1, capacity=LANE), Task(3, capacity=LANE)],
        [(0, 2, NOTHING), (0, 4, NOTHING)],
    ),
    "parts that fit": (
        [Task(2, capacity={"lane": 0.5}), Task(3, capacity={"lane": 0.5})],
        [(0, 2, NOTHING), (0, 3, NOTHING)],
    ),
    "the busiest lane sets the pace": (
        [Task(1, capacity={"in": 0.25, "out": 1.0}), Task(1, capacity={"out": 1.0}), Task(2, capacity={"in": 0.75})],
        [(0, 2, NOTHING), (0, 2, NOTHING), (0, 2, NOTHING)],
    ),
    "joins later": (
        [Task(1, ("a",)), Task(2, capacity=LANE), Task(2, capacity=LANE, after=(0,))],
        [(0, 1, NOTHING), (0, 3, NOTHING), (1, 4, 0)],
    ),
    "gives way": (
        [Task(1, ("a",)), Task(3, capacity=LANE, low_priority=True), Task(2, ("a",), LANE, after=(0,))],
        [(0, 1, NOTHING), (0, 5, NOTHING), (1, 3, 0)],
    ),
    "gives way in part": (
        [Task(3, capacity=LANE, low_priority=True), Task(2, capacity={"lane": 0.5})],
        [(0, 4, NOTHING), (0, 2, NOTHING)],
    ),
    "who gives way shares with its like": (
        [Task(1, capacity=LANE, low_priority=True), Task(1, capacity=LANE, low_priority=True)],
        [(0, 2, NOTHING), (0, 2, NOTHING)],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str) -> None:
    tasks, expected = TABLES[name]
    assert schedule(tasks) == tuple(Span(*one) for one in expected)


@pytest.mark.parametrize("after", [0, 1, 7])
def test_tasks_come_after_earlier_ones(after: int) -> None:
    with pytest.raises(ValueError, match=f"come after task {after}"):
        schedule([Task(1.0, after=(after,)), Task(1.0)])


@st.composite
def programs(draw: st.DrawFn) -> list[Task]:
    """Lists of tasks on three resources and two lanes."""
    tasks = []
    for index in range(draw(st.integers(1, 12))):
        exclusive = tuple(draw(st.sets(st.sampled_from("abc"), max_size=2)))
        lanes = draw(st.dictionaries(st.sampled_from("xy"), st.sampled_from([0.25, 0.5, 1.0]), max_size=2))
        after = tuple(draw(st.sets(st.integers(0, index - 1), max_size=3))) if index else ()
        tasks.append(Task(draw(st.integers(0, 5)), exclusive, lanes, after, draw(st.booleans())))
    return tasks


@pytest.mark.full
@given(programs())
def test_every_second_is_accounted_for(tasks: list[Task]) -> None:
    spans = schedule(tasks)
    for task, span in zip(tasks, spans, strict=True):
        assert span.end_s - span.start_s >= task.seconds - 1e-9
        assert all(spans[one].end_s <= span.start_s for one in task.after)
        assert span.start_s == (spans[span.critical_predecessor].end_s if span.critical_predecessor != NOTHING else 0.0)
        assert task.capacity or span.end_s == span.start_s + task.seconds
    for resource in "abc":
        held = sorted((s.start_s, s.end_s) for t, s in zip(tasks, spans, strict=True) if resource in t.exclusive)
        assert all(one[1] <= other[0] for one, other in pairwise(held))
