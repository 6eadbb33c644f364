"""Each rule alone: what it lets through, what it refuses, and what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parplan.errors import RuleError
from parplan.planner.search_space import rules

UNITS = {"out-features": 4096}

LEGAL: list[Callable[[], None]] = [
    lambda: rules.r1_batch("fc", 128, 128, 4),
    lambda: rules.r1_batch("fc", 7, None, 1),
    lambda: rules.r2_feeders("add", {"a": 2, "b": 2}),
    lambda: rules.r3_fed("conv", {"a": 1, "b": 1}),
    lambda: rules.r4_divides("pool", 4, {"fc": 2}),
    lambda: rules.r5_axis("fc", "out-features", UNITS, 4),
    lambda: rules.r1_batch("fc", 130, 130, 4, uneven=True),
    lambda: rules.r5_axis("fc", None, {}, 1),
    lambda: rules.r6_devices("fc", 2, 2, (3, 2, 1, 0), 4),
    lambda: rules.r7_loss("loss", True, 1),
    lambda: rules.r7_loss("fc", False, 4),
    lambda: rules.r8_update_period("fc", 2, 4),
    lambda: rules.r8_update_period("fc", None, 3),
]

BROKEN: list[tuple[str, Callable[[], None], str]] = [
    ("R1", lambda: rules.r1_batch("fc", 130, 130, 4), "130 cannot be split over 4 replicas; use 1 or 2 or 5 replicas"),
    ("R1", lambda: rules.r1_batch("pool", 128, 6, 4), "a batch of 6 cannot be split over 4 replicas; use 2 or 3 or 6"),
    ("R1", lambda: rules.r1_batch("fc", 3, 3, 4, uneven=True), "3 cannot be split over 4 replicas; use 1 or 3 replic"),
    ("R1", lambda: rules.r1_batch("fc", 9, 9, 2, uneven=True, passes=2), "over 2 replicas in equal parts, which 2 pa"),
    ("R1", lambda: rules.r1_batch("roll", 128, None, 2), "its samples depend on each other"),
    (
        "R1",
        lambda: rules.r1_batch("far", 128, None, 2, unknown=["aten.cdist"]),
        "does not know how aten.cdist treats samples, so 2 replicas might change the numbers; use 1 replica, or",
    ),
    ("R5", lambda: rules.r5_axis("far", None, {}, 4), "it cannot be cut in 4; its axes are none: it cannot be sharded"),
    ("R2", lambda: rules.r2_feeders("add", {"a": 2, "b": 4}), r"2 \(a\), 4 \(b\) replicas"),
    ("R3", lambda: rules.r3_fed("conv", {"a": 1, "b": 4}), r"1 \(a\), 4 \(b\) replicas"),
    ("R4", lambda: rules.r4_divides("pool", 4, {"fc": 3}), "the 3 replicas of fc, which it feeds, do not divide its 4"),
    ("R5", lambda: rules.r5_axis("fc", "out-features", UNITS, 3), "4096 out-features cannot be cut in 3; use 1 or 2"),
    ("R1", lambda: rules.r1_batch("pool", 128, 6, 4, 4), "cannot be split over 4 replicas; use 2 or 3 replicas"),
    ("R5", lambda: rules.r5_axis("fc", "out-features", UNITS, 3, 3), "cannot be cut in 3; use 1 or 2 shards"),
    ("R5", lambda: rules.r5_axis("fc", "heads", UNITS, 2), r"along 'heads'; its axes are out-features \(4096\)"),
    ("R5", lambda: rules.r5_axis("fc6", "out-features", UNITS, 1), "one shard is not cut"),
    ("R6", lambda: rules.r6_devices("fc", 2, 2, (0, 1), 4), "2 replicas x 2 shards need 4 devices, it has 2"),
    ("R6", lambda: rules.r6_devices("fc", 1, 2, (1, 1), 4), "name one device twice"),
    ("R6", lambda: rules.r6_devices("fc", 1, 2, (3, 4), 4), "device 4 does not exist; the plan has devices 0 to 3"),
    ("R7", lambda: rules.r7_loss("loss", True, 2), "a loss is never sharded"),
    ("R8", lambda: rules.r8_update_period("fc", 3, 4), "period of 3 does not divide 4 passes; use 1 or 2 or 4"),
]  # fmt: skip


@pytest.mark.parametrize("rule", LEGAL)
def test_what_is_legal_passes(rule: Callable[[], None]) -> None:
    rule()


@pytest.mark.parametrize(("name", "rule", "text"), BROKEN)
def test_what_is_broken_is_refused_with_numbers(name: str, rule: Callable[[], None], text: str) -> None:
    with pytest.raises(RuleError, match=text) as caught:
        rule()
    assert caught.value.rule == name
    assert str(caught.value).endswith(f"({name})")
    assert str(caught.value).startswith(caught.value.layer + ": ")
