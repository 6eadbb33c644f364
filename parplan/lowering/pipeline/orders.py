"""Pipeline schedules: in which order each group of devices takes the forwards and backwards of micro-batches.

Pure tables without times. `F2` is the forward of micro-batch 2, `B2` its backward:

    1f1b                                    gpipe
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3       F0 F1 F2 F3 B0 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3       F0 F1 F2 F3 B0 B1 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3       F0 F1 F2 F3 B0 B1 B2 B3

GPipe (arXiv 1811.06965) keeps the activations of all micro-batches; one forward, one backward (1F1B; PipeDream-flush,
arXiv 2006.09503) those of as many as there are stages from the group's own to the last. Where stages outnumber groups,
every group has several, one in each round through all groups, and 1F1B is the interleaved one (arXiv 2104.04473).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

__all__ = ["Action", "merged", "most_in_flight", "orders"]

BACKWARD_UNITS = 2.0
"""A backward against a forward, in the order that is merged: two matrix products for one."""


@dataclass(frozen=True, order=True)
class Action:
    """The forward or backward of one micro-batch through one stage; stage k is on group k modulo the groups."""

    stage: int
    micro_batch: int
    forward: bool

    def __str__(self) -> str:
        return f"{'F' if self.forward else 'B'}{self.micro_batch}"


def orders(schedule: str, groups: int, stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every group of devices, in its order.

    Several stages per group are interleaved where the groups divide the micro-batches, and go as GPipe does otherwise.

    Args:
        schedule: "gpipe" or "1f1b".
        stages: a multiple of `groups`.

    >>> [" ".join(map(str, own)) for own in orders("1f1b", 2, 2, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    rounds = stages // groups
    total = micro_batches * rounds
    whole = rounds == 1 or micro_batches % groups == 0
    # In every round a group takes as many micro-batches as there are groups before it goes on to its next stage.
    each = groups if whole else micro_batches

    def action(group: int, number: int, forward: bool) -> Action:
        if rounds == 1:
            return Action(group, number, forward)
        turn, place = divmod(number, each * rounds)
        place, within = divmod(place, each)
        return Action((place if forward else rounds - 1 - place) * groups + group, turn * each + within, forward)

    found = []
    for group in range(groups):
        behind = groups - 1 - group
        ahead = behind if rounds == 1 else 2 * behind + (rounds - 1) * groups
        ahead = min(total, ahead) if schedule == "1f1b" and whole else total
        own = [action(group, number, True) for number in range(ahead)]
        for number in range(total):
            own += [action(group, ahead + number, True)] if ahead + number < total else []
            own += [action(group, number, False)]
        found.append(tuple(own))
    return tuple(found)


def merged(own: Sequence[Sequence[Action]]) -> tuple[Action, ...]:
    """One total order of all groups' actions, by when they begin where all stages take equally long.

    Every process follows it, so that any two meet in the same order. An action comes after what it needs: a forward
    after that of the stage before, a backward after that of the stage behind, and after its own forward.

    Raises:
        ValueError: the groups' orders wait for each other.
    """
    stages = 1 + max((action.stage for actions in own for action in actions), default=-1)
    done_s = dict[Action, float]()
    free_s, place = [0.0] * len(own), [0] * len(own)
    found = list[Action]()

    def begins_s(group: int) -> float:
        if place[group] == len(own[group]):
            return inf
        action = own[group][place[group]]
        needed = [] if action.forward else [Action(action.stage, action.micro_batch, True)]
        beside = action.stage + (-1 if action.forward else 1)
        needed += [Action(beside, action.micro_batch, action.forward)] if 0 <= beside < stages else []
        return max([free_s[group], *(done_s.get(one, inf) for one in needed)])

    next_s = [begins_s(group) for group in range(len(own))]
    for _ in range(sum(map(len, own))):
        begin_s, group = min(zip(next_s, range(len(own)), strict=True))
        if begin_s == inf:
            raise ValueError("the orders of the groups wait for each other")
        action = own[group][place[group]]
        found.append(action)
        place[group] += 1
        free_s[group] = done_s[action] = begin_s + (1.0 if action.forward else BACKWARD_UNITS)
        for near in {(group + step) % len(own) for step in (-1, 0, 1)}:  # others do not come after it
            next_s[near] = begins_s(near)
    return tuple(found)


def most_in_flight(own: Sequence[Action], stages_each: int) -> float:
    """Most micro-batches whose activations one group holds at once; a stage of several counts as its part.

    >>> [most_in_flight(own, 1) for own in orders("1f1b", 3, 3, 8)]
    [3.0, 2.0, 1.0]
    """
    held = most = 0
    for action in own:
        held += 1 if action.forward else -1
        most = max(most, held)
    return most / stages_each
