"""The happens-before core: known races are found, ordered accesses pass."""

from __future__ import annotations

import pytest

from tests.runtime.stream_order.order import Memory, Order, Timeline

HOST, A, B, C = Timeline(None, 0), Timeline(0, 0), Timeline(0, 1), Timeline(1, 0)


def run(order: Order, timeline: Timeline, memory: Memory, kind: str) -> None:
    order.enqueue(timeline, HOST)
    (order.read if kind == "read" else order.write)(memory, timeline, kind)


@pytest.mark.parametrize(
    ("first", "second", "races"),
    [("write", "read", 1), ("read", "write", 1), ("write", "write", 1), ("read", "read", 0)],
)
def test_conflicting_accesses_of_two_streams_race_unless_one_waits(first: str, second: str, races: int) -> None:
    for waits in (False, True):
        order = Order()
        memory = order.allocate(A, "an allocation")
        order.join(B, order.clock(A))
        run(order, A, memory, first)
        if waits:
            order.join(B, order.clock(A))
        run(order, B, memory, second)
        assert len(order.races) == (0 if waits else races)


def test_an_event_covers_only_what_was_queued_before_it() -> None:
    order = Order()
    memory = order.allocate(A, "an allocation")
    mark = order.clock(A)
    run(order, A, memory, "write")
    order.join(B, mark)
    run(order, B, memory, "read")
    assert [str(race) for race in order.races] == [f"read on {B} is not ordered after write on {A}"]


def test_waits_reach_through_other_streams_and_the_host() -> None:
    for through in (C, HOST):
        order = Order()
        memory = order.allocate(A, "an allocation")
        run(order, A, memory, "write")
        order.join(through, order.clock(A))
        order.join(B, order.clock(through))
        run(order, B, memory, "write")
        assert not order.races


def test_a_host_that_waited_orders_what_it_queues_later() -> None:
    order = Order()
    memory = order.allocate(A, "an allocation")
    run(order, A, memory, "write")
    order.join(HOST, order.clock(A))
    run(order, B, memory, "write")
    assert not order.races


def test_new_memory_is_not_used_by_a_stream_that_is_behind_its_allocation_stream() -> None:
    order = Order()
    run(order, A, order.allocate(A, "another one"), "write")
    run(order, B, order.allocate(A, "an allocation"), "write")
    assert len(order.races) == 1


@pytest.mark.parametrize(
    "mend", [None, "a wait", "record_stream", "record_stream of one that waits", "a synchronised host"]
)
def test_freed_memory_is_not_reused_before_other_streams_are_done(mend: str | None) -> None:
    order = Order()
    memory = order.allocate(A, "an allocation")
    order.join(B, order.clock(A))
    run(order, B, memory, "read")
    if mend == "a wait":
        order.join(A, order.clock(B))
    elif mend == "record_stream":
        memory.recorded.add(B)
    elif mend == "record_stream of one that waits":
        order.join(C, order.clock(B))
        memory.recorded.add(C)
    elif mend == "a synchronised host":
        order.join(HOST, order.clock(B))
    order.free(memory, HOST)
    assert len(order.races) == (0 if mend else 1)
