"""The JSON report holds the promised keys, and the same facts as the decision."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from parplan.plan import Plan
from parplan.report.as_json import to_dict, to_json
from tests.report.decisions import DECISIONS, alexnet, alone, crowded, on_two_kinds, pinned

TOP = {"schema", "model", "cluster", "batch", "plan", "layers", "passes", "predicted", "baselines", "proof", "seconds"}
LAYER = ["name", "kind", "replicas", "shards", "axis", "devices", "state", "saved", "forward_s", "backward_s",
         "transfer_s", "reduce_s", "memory_bytes", "source", "why", "parameters", "inputs", "alternatives",
         "refused"]  # fmt: skip


@pytest.mark.parametrize("name", sorted(DECISIONS))
def test_promised_keys(name: str) -> None:
    found = json.loads(to_json(DECISIONS[name]()))
    assert found["schema"] == "parplan.report/1"
    assert set(found) >= TOP
    assert {tuple(layer) for layer in found["layers"]} == {tuple(LAYER)}
    assert {"step_s", "memory_bytes"} <= set(found["predicted"])
    assert all({"name", "step_s", "fits"} <= set(baseline) for baseline in found["baselines"])
    assert set(found["proof"]) == {
        "status",
        "objective",
        "bound",
        "gap",
        "seconds",
        "covered",
        "alike",
        "simpler",
        "stages",
    }
    assert set(found["seconds"]) == {"capture", "costs", "solve", "total", "start"}


def test_figures_are_the_decisions_own() -> None:
    decision = alexnet()
    found = to_dict(decision)
    layer, facts = found["layers"][14], decision.layers[14]
    assert (layer["name"], layer["shards"], layer["axis"], layer["devices"]) == ("fc6", 4, "out-features", [0, 1, 2, 3])
    assert (layer["forward_s"], layer["source"], layer["why"]) == (facts.forward_s, "estimated", facts.why)
    assert found["predicted"]["step_s"] == decision.prediction.step_s
    assert found["predicted"]["memory_bytes"] == list(decision.prediction.memory_bytes)
    assert found["bends"] == {"fc6": ["R2: 4 replicas feed 1 through an all-gather"]}
    assert (found["batch"], found["passes"], found["model"]) == (512, 1, "AlexNet")
    assert [one["scheme"] for one in found["schemes"]] == ["gather", "broadcast", "interleave"]
    assert [one["passes"] for one in found["schemes"]] == [1, 4, 4]


def test_pins_and_copies_are_in_the_facts() -> None:
    found, step_s = to_dict(pinned()), pinned().prediction.step_s
    assert (found["pins"]["step_s"], found["pins"]["proven"]) == (step_s, False)
    assert found["pins"]["price_s"] == pytest.approx(0.38 * step_s)
    assert found["pins"]["share"] == pytest.approx(0.38 / 0.62)
    first, *_, last = found["pins"]["each"]
    assert (first["pin"], first["origin"], first["layers"]) == ("*a=gpu:0,1", "--pin", 2)
    assert (first["price_s"], first["share"]) == (pytest.approx(0.2 * step_s), pytest.approx(0.25))
    assert (last["without_s"], last["price_s"], last["share"]) == (None, None, None)
    assert "(R6)" in last["why_not"]
    assert found["pins"]["layers"]["conva"] == "pinned by *a=gpu:0,1"
    assert found["copies"]["fcb"] == [{"layer": "conva", "devices": [0, 1]}]
    assert (to_dict(alexnet())["pins"], to_dict(alexnet())["copies"]) == (None, {})


def test_the_plan_inside_can_be_read_back() -> None:
    decision = crowded()
    assert Plan.from_json(json.dumps(to_dict(decision)["plan"])) == decision.plan


def test_what_is_not_known_is_null() -> None:
    found = json.loads(to_json(alone()))
    assert found["proof"]["bound"] is None
    assert found["proof"]["gap"] is None
    (illegal,) = (entry for entry in to_dict(crowded())["baselines"] if entry["name"] == "pure data parallel")
    assert (illegal["step_s"], illegal["fits"]) == (None, False)


def test_equal_decisions_give_equal_text() -> None:
    assert to_json(alexnet()) == to_json(alexnet())
    assert to_json(alexnet()) != to_json(replace(alexnet(), precision="bf16"))


def test_equal_devices_keep_their_keys_and_several_kinds_are_listed() -> None:
    plain = to_dict(DECISIONS["alexnet"]())["cluster"]
    assert (plain["device"], plain["count"]) == ("v100-sxm2", 4)
    (group,) = plain["devices"]
    assert group == {key: plain[key] for key in ("device", "memory_bytes", "source", "estimated", "count")} | {
        "numbers": [0, 1, 2, 3]
    }
    mixed = to_dict(on_two_kinds(DECISIONS["alexnet"]()))["cluster"]
    assert "device" not in mixed
    assert [(group["device"], group["count"], group["numbers"]) for group in mixed["devices"]] == [
        ("v100-sxm2", 3, [0, 1, 2]),
        ("cpu", 1, [3]),
    ]
