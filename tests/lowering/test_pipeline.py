"""Orders of pipeline stages: tables, and walks through them with sends that wait; stages that a plan's devices make."""

from __future__ import annotations

from collections import deque
from itertools import product

import pytest

from parplan.graph.capture.capture import capture
from parplan.lowering.pipeline.orders import Action, merged, most_in_flight, orders
from parplan.lowering.pipeline.stages import stage_numbers
from parplan.plan import Strategy
from tests.runtime.pipeline_cases import Staging, Tower, tokens

CASES = [
    (schedule, groups, rounds * groups, count)
    for schedule, groups, rounds, count in product(("1f1b", "gpipe"), (1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 8, 12))
]


def table(schedule: str, groups: int, stages: int, micro_batches: int) -> list[str]:
    """The orders as text; stages beyond the first round as letters, F0 of stage 2 of 2 groups being F0'."""
    return [
        " ".join(f"{action}{chr(39) * (action.stage // groups)}" for action in own)
        for own in orders(schedule, groups, stages, micro_batches)
    ]


def test_tables() -> None:
    assert table("1f1b", 3, 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert table("gpipe", 2, 2, 3) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert table("1f1b", 2, 4, 4) == [
        "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3",
        "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3",
    ]
    assert table("1f1b", 2, 4, 3) == ["F0 F1 F2 F0' F1' F2' B0' B1' B2' B0 B1 B2"] * 2  # not whole rounds: as GPipe


def test_one_order_after_which_all_that_is_needed_is_there() -> None:
    for case in CASES:
        check_order(case)


def check_order(case: tuple[str, int, int, int]) -> None:
    own = orders(*case)
    _, groups, stages, count = case
    for group, actions in enumerate(own):
        assert {action.stage % groups for action in actions} == {group}
        backwards = [action for action in actions if not action.forward]
        for stage in range(group, stages, groups):  # gradients are summed with the last micro-batch's
            assert [one.micro_batch for one in backwards if one.stage == stage] == list(range(count))
    order = merged(own)
    assert sorted(order) == sorted(Action(*one) for one in product(range(stages), range(count), (True, False)))
    place = {action: number for number, action in enumerate(order)}
    for action, number in place.items():
        if action.forward and action.stage:
            assert place[Action(action.stage - 1, action.micro_batch, True)] < number
        if not action.forward:
            assert place[Action(action.stage, action.micro_batch, True)] < number
            if action.stage + 1 < stages:
                assert place[Action(action.stage + 1, action.micro_batch, False)] < number


@pytest.mark.parametrize("capacity", [0, 1])
def test_sends_that_wait_do_not_wait_for_each_other(capacity: int) -> None:
    for case in CASES:
        assert walked(case, capacity), case


def walked(case: tuple[str, int, int, int], capacity: int) -> bool:
    """Processes that take the one order, each its own part: behind an action its result is sent to the next stage's
    group, which has begun to receive it at the same place."""
    _, groups, stages, _ = case
    todo: list[deque[tuple[str, int]]] = [deque() for _ in range(groups)]
    for number, action in enumerate(merged(orders(*case))):
        target = action.stage + (1 if action.forward else -1)
        if 0 <= target < stages and target % groups != action.stage % groups:
            todo[action.stage % groups].append(("send", number))
            todo[target % groups].append(("receive", number))
    sent, received = set[int](), set[int]()
    waiting: list[list[int]] = [[] for _ in range(groups)]  # sent, and not yet received
    moved = True
    while moved:
        moved = False
        for group, own in enumerate(todo):
            waiting[group] = [one for one in waiting[group] if one not in received]
            while own and (own[0][0] == "receive" or len(waiting[group]) <= capacity):
                kind, number = own[0]
                if kind == "receive" and number not in sent:
                    break
                own.popleft()
                moved = True
                if kind == "receive":
                    received.add(number)
                else:
                    sent.add(number)
                    waiting[group].append(number)
    return not any(todo)


def test_orders_that_wait_for_each_other_are_refused() -> None:
    first, second = orders("1f1b", 2, 2, 2)
    with pytest.raises(ValueError, match="wait for each other"):
        merged((first[::-1], second))


def test_in_flight() -> None:
    assert [most_in_flight(own, 1) for own in orders("1f1b", 4, 4, 8)] == [4, 3, 2, 1]
    assert [most_in_flight(own, 1) for own in orders("gpipe", 4, 4, 8)] == [8] * 4
    # (2 (S - s - 1) + (v - 1) S + 1) / v
    assert [most_in_flight(own, 2) for own in orders("1f1b", 4, 8, 8)] == [5.5, 4.5, 3.5, 2.5]


@pytest.mark.full
def test_stages_follow_from_devices() -> None:
    graph = capture(Tower(4), tokens(8))
    for groups, rounds in ((1, 1), (2, 1), (2, 2), (3, 1)):
        plan = Staging(groups, 2 * groups, 2, rounds=rounds).plan(graph)
        numbers = stage_numbers(graph, plan.layers)
        assert numbers.groups == tuple((2 * one, 2 * one + 1) for one in range(groups))
        assert numbers.count == groups * rounds
        for name, layer in graph.layers.items():
            makers = [graph.producer[value] for value in layer.inputs if value in graph.producer]
            assert all(numbers.of[maker] <= numbers.of[name] for maker in makers)
    # Layers that share one device are one group, however they are spread.
    spread = {name: Strategy(2, devices=(number % 3, number % 3 + 1)) for number, name in enumerate(graph.layers)}
    assert stage_numbers(graph, spread).groups == ((0, 1, 2, 3),)
