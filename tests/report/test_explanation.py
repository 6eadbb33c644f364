"""One layer of a kept report: its alternatives, and whether a cost, a rule, memory or a person decided."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from parplan.errors import ParplanError
from parplan.planner.decision import Alternative
from parplan.report.as_json import to_dict
from parplan.report.explanation import layer_named, render_explanation
from tests.report.decisions import DATA, HYBRID, ONE, alexnet, pinned

NAME = "encoder.fc6"


def report(*alternatives: Alternative, **changes: Any) -> dict[str, Any]:
    """AlexNet's report in which fc6 has these alternatives and another name."""
    decision = alexnet()
    fc6 = next(layer for layer in decision.layers if layer.name == "fc6")
    layer = replace(fc6, name=NAME, alternatives=alternatives, **changes)
    return to_dict(replace(decision, layers=tuple(layer if one is fc6 else one for one in decision.layers)))


def explained(data: dict[str, Any], name: str = NAME, width: int = 80) -> str:
    stream = io.StringIO()
    render_explanation(data, layer_named(data, name), Console(file=stream, width=width))
    assert max(map(len, stream.getvalue().splitlines())) <= width
    return " ".join(stream.getvalue().split())


@pytest.mark.parametrize("width", [50, 80, 120])
def test_every_alternative_has_its_price(width: int) -> None:
    better = Alternative(DATA, -1e-3, 0.0, -1e-3, fits=False)
    text = explained(
        report(better, Alternative(HYBRID, 1e-3, -5e-4, 0.0), Alternative(ONE, 0.02, 0.0, 0.0)), width=width
    )
    assert "encoder.fc6: linear, 1,000 parameters, 4 shards of out-features on devices 0-3" in text
    assert "is fed by flatten: 4 replicas on devices 0-3" in text
    assert (
        "Decided by cost: the best other strategy, 2 replicas x 2 shards of out-features, takes 500 µs more (2.7 %)."
        in text
    )
    assert "4 replicas -2.00 ms -11 % -1.00 - -1.00" in text
    assert "does not fit" in text
    assert "whole +20.00 ms +107 % +20.00 - -" in text


@pytest.mark.parametrize(
    ("alternatives", "changes", "words"),
    [
        ((), {"why": "a loss is never sharded"}, "It has no alternative: a loss is never sharded."),
        ((Alternative(DATA, -1.0, 0, 0, False),), {}, "Decided by memory: every other strategy needs more"),
        ((Alternative(DATA, -1e-3, 0, 0),), {}, "Not decided by this layer's cost: 4 replicas would take 1.00 ms less"),
        ((), {"refused": ("fc6: 9 heads cannot be cut in 4 (R5)",)}, "Rules that leave out others"),
    ],
)
def test_what_decided(alternatives: tuple[Alternative, ...], changes: dict[str, Any], words: str) -> None:
    assert words in explained(report(*alternatives, **changes))


def test_a_pin_decides() -> None:
    assert "Decided by hand: pinned by *a=gpu:0,1." in explained(to_dict(pinned()), "conva")


def test_a_layer_is_found_by_the_end_of_its_name() -> None:
    assert layer_named(report(), "fc6")["name"] == NAME
    with pytest.raises(ParplanError, match=r"'conv9' is no layer of AlexNet; did you mean conv\d\?"):
        layer_named(report(), "conv9")
    twice = report()
    twice["layers"].append({**twice["layers"][0], "name": "decoder.fc6"})
    with pytest.raises(ParplanError, match=r"several end in it: encoder\.fc6, decoder\.fc6"):
        layer_named(twice, "fc6")
