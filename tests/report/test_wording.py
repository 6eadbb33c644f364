"""Number and article: no rendered report says "1 layers" or "a AlexNet"."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from parplan.planner.decision import Decision
from parplan.report.terminal import Detail
from tests.every_case import every_case
from tests.report.decisions import DECISIONS, on_two_kinds
from tests.report.golden import printed

# "1 layers", not "0.1 layers"; words that end in s and are no plural are named.
_PLURAL = re.compile(
    r"(?<![\w.,-])1 (?:(?:other|more|logical|training|equal) )?(?!(?:less|loss|bus|across|is|as|was)\b)[a-z]+s\b"
)
_SINGULAR = re.compile(
    r"(?<![\w.,-])(?:[02-9]|\d\d+) (?:device|layer|replica|shard|pass|group|plan|line|sample|step)\b(?!-)"
)
# By letter; words that are spoken otherwise are named.
_A = re.compile(r"(?<![\w.'])a (?:(?!one\b|un[ilu]|us[aeu]|eu)[aeio8]|h100|h200|rtx)[\w-]*", re.IGNORECASE)
_AN = re.compile(r"(?<![\w.'])an (?!hour|h\d|rtx|fc|f\d|l\d|m\d|n\d|r\d|s\d|x)[^\Waeiou8_][\w-]*", re.IGNORECASE)


def _mistakes(text: str) -> list[str]:
    together = " ".join(text.split())
    return [found[0] for pattern in (_PLURAL, _SINGULAR, _A, _AN) for found in pattern.finditer(together)]


def _small(decision: Decision) -> Decision:
    """One sample, one device, one layer: where counts are 1."""
    layer = replace(decision.layers[0], name="only")
    plan = replace(decision.plan, model="Identity", batch=1, layers={"only": layer.strategy})
    return replace(decision, plan=plan, layers=(layer,), parameters=1, passes=None)


@pytest.mark.full
@every_case("detail", Detail)
@every_case("name", DECISIONS)
def test_reports_count_and_use_articles_right(name: str, detail: Detail) -> None:
    decision = DECISIONS[name]()
    some = [decision, _small(decision)]
    some += [on_two_kinds(decision)] if decision.cluster.count > 1 else []
    for one in some:
        assert not _mistakes(printed(one, 120, detail=detail))


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("on 1 lines", "1 lines"),
        ("all 1 devices", "1 devices"),
        ("after 2 pass", "2 pass"),
        ("is a AlexNet", "a AlexNet"),
        ("a a100-80g-sxm", "a a100-80g-sxm"),
        ("an model", "an model"),
        ("1 layer on a device, 0.1 s, an index, a unit, 1 less, an fc layer, 21 layers, a 2-layer net", ""),
    ],
)
def test_the_check_finds_mistakes(text: str, mistake: str) -> None:
    assert _mistakes(text) == [mistake] * bool(mistake)
