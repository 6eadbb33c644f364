"""Plans survive being written and read, equal plans print equal text, and every malformed one is refused by name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.errors import PlanError
from parplan.fields import ranges
from parplan.plan import Plan, Strategy

PLAN = Plan(
    model="AlexNet",
    fingerprint="0123456789abcdef",
    batch=512,
    devices=4,
    layers={
        "conv1": Strategy(4, 1, None, (0, 1, 2, 3)),
        "fc6": Strategy(2, 2, "out-features", (0, 1, 2, 3), update_period=2),
        "loss": Strategy(),
    },
)

TEXT = """{
  "schema": "parplan.plan/1",
  "model": "AlexNet",
  "fingerprint": "0123456789abcdef",
  "batch": 512,
  "devices": 4,
  "rules": "default",
  "layers": {
    "conv1": {"replicas": 4, "shards": 1, "axis": null, "devices": [0, 1, 2, 3]},
    "fc6": {"replicas": 2, "shards": 2, "axis": "out-features", "devices": [0, 1, 2, 3], "update_period": 2},
    "loss": {"replicas": 1, "shards": 1, "axis": null, "devices": [0]}
  }
}
"""


def test_the_text_of_a_plan() -> None:
    assert PLAN.to_json() == TEXT


def test_the_text_is_read_back() -> None:
    assert Plan.from_json(TEXT) == PLAN
    assert list(Plan.from_json(TEXT).layers) == ["conv1", "fc6", "loss"]


def test_notes_are_kept_where_they_were_written() -> None:
    noted = replace(PLAN, note="as of the review", notes={"fc6": 'half "sharded"', "loss": ""})
    text = noted.to_json()
    assert '  "note": "as of the review",\n' in text
    assert '"update_period": 2, "note": "half \\"sharded\\""}' in text
    assert text.count("note") == 2
    assert Plan.from_json(text) == noted
    changed = noted.with_layers({"fc6": Strategy()})
    assert (changed.note, dict(changed.notes)) == (noted.note, {"fc6": 'half "sharded"'})


def test_a_note_on_no_layer_is_refused() -> None:
    with pytest.raises(PlanError, match="a note on 'fc9' and no such layer"):
        replace(PLAN, notes={"fc9": "gone"})


def test_a_plan_is_kept_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(PLAN.to_json(), encoding="utf-8")
    assert Plan.load(file) == PLAN


NAMES = st.text(min_size=1, max_size=8)
COUNTS = st.integers(1, 4)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    replicas, shards = draw(COUNTS), draw(COUNTS)
    devices = tuple(draw(st.permutations(range(replicas * shards + 2)))[: replicas * shards])
    axis = draw(NAMES) if shards > 1 else None
    return Strategy(replicas, shards, axis, devices, draw(st.none() | COUNTS))


PLANS = st.builds(
    Plan,
    model=NAMES,
    fingerprint=NAMES,
    batch=COUNTS,
    devices=COUNTS,
    layers=st.dictionaries(NAMES, strategies(), max_size=4),
    rules=st.sampled_from(["default", "strict"]),
)


@pytest.mark.full
@given(PLANS)
def test_every_plan_survives(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert pickle.loads(pickle.dumps(plan)) == plan


def on(*devices: int) -> Plan:
    return Plan("Net", "f", 64, 2048, {"a": Strategy(len(devices), 1, None, devices)})


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ((0, 1, 2, 3, 4, 5, 6, 7), "[0, 1, 2, 3, 4, 5, 6, 7]"),
        (tuple(range(128)), '"0-127"'),
        ((*range(4), *range(8, 12), 15), '"0-3,8-11,15"'),
        ((*range(4, 8), *range(4), 9), '"4-7,0-3,9"'),
        (tuple(range(9, 0, -1)), '"9,8,7,6,5,4,3,2,1"'),
    ],
)
def test_many_devices_are_written_as_ranges(devices: tuple[int, ...], text: str) -> None:
    plan = on(*devices)
    assert f'"devices": {text}}}' in plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan


@given(st.permutations(range(40)), st.integers(1, 40))
def test_every_order_of_devices_survives(order: list[int], size: int) -> None:
    plan = on(*order[:size])
    listed = plan.to_json().replace(f'"{ranges(order[:size])}"', str(order[:size]))
    assert Plan.from_json(plan.to_json()) == Plan.from_json(listed) == plan


@pytest.mark.parametrize("text", ["0-3", " 0 - 1, 2,3 ", "0,1-2,3", "00-03"])
def test_ranges_are_read_however_they_are_written(text: str) -> None:
    data = json.loads(on(0, 1, 2, 3).to_json())
    data["layers"]["a"]["devices"] = text
    assert Plan.from_json(json.dumps(data)) == on(0, 1, 2, 3)


def test_a_plan_for_thousands_of_devices_is_short() -> None:
    layers = {f"block.{index}": Strategy(256, 8, "heads", tuple(range(2048))) for index in range(100)}
    assert len(Plan("Net", "f", 2048, 2048, layers).to_json()) < 100 * 100


def test_a_plan_cannot_be_changed_from_outside() -> None:
    layers = {"a": Strategy()}
    plan = Plan("Net", "f", 1, 1, layers)
    layers["b"] = Strategy()
    assert list(plan.layers) == ["a"]
    with pytest.raises(TypeError):
        plan.layers["c"] = Strategy()  # type: ignore[index]


def test_replacing_some_layers() -> None:
    changed = PLAN.with_layers({"conv1": Strategy()})
    assert changed.layers == {**PLAN.layers, "conv1": Strategy()}
    assert PLAN.layers["conv1"].replicas == 4


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Strategy(), "1 device"),
        (Strategy(2, 1, None, (0, 1)), "2 replicas"),
        (Strategy(1, 2, "heads", (0, 1)), "2 shards of heads"),
        (Strategy(2, 2, "heads", (0, 1, 2, 3)), "2 replicas x 2 shards of heads"),
    ],
)
def test_words_for_a_strategy(strategy: Strategy, words: str) -> None:
    assert strategy.describe() == words


def changed(*path: str, value: Any) -> Callable[[Any], Any]:
    def change(data: Any) -> Any:
        place = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return data

    return change


def without(*path: str) -> Callable[[Any], Any]:
    def change(data: Any) -> Any:
        place = data
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        return data

    return change


# (what is done to the plan, what the error says)
MALFORMED = [
    (lambda data: [data], r"it is no object of JSON; write one with"),
    (changed("schema", value="parplan.plan/2"), "schema 'parplan.plan/2'.*'parplan.plan/1'"),
    (without("schema"), r'it has no "schema"; write one with'),
    (without("batch"), "missing field 'batch'"),
    (changed("bacth", value=4), "unknown field 'bacth'"),
    (changed("model", value=3), "model is 3; expected text"),
    (changed("fingerprint", value=None), "fingerprint is None; expected text"),
    (changed("batch", value="512"), "batch is '512'; expected a whole number of at least 1"),
    (changed("batch", value=True), "batch is True; expected a whole number of at least 1"),
    (changed("batch", value=2.0), "batch is 2.0; expected a whole number of at least 1"),
    (changed("batch", value=0), "batch is 0; expected a whole number of at least 1"),
    (changed("devices", value=-1), "devices is -1; expected a whole number of at least 1"),
    (changed("rules", value="loose"), "rules is 'loose'; expected one of default, strict"),
    (changed("layers", value=[]), r"layers is \[\]; expected an object with a strategy for every layer"),
    (changed("layers", "fc6", value=4), "fc6 is 4; expected a table of replicas, shards, axis, devices"),
    (changed("layers", "fc6", "replica", value=4), "fc6: unknown field 'replica'; did you mean replicas"),
    (without("layers", "fc6", "shards"), "fc6: missing field 'shards'"),
    (changed("layers", "fc6", "replicas", value=0), "fc6: replicas is 0; expected a whole number of at least 1"),
    (changed("layers", "fc6", "replicas", value=2.5), "fc6: replicas is 2.5; expected a whole number of at least 1"),
    (changed("layers", "fc6", "shards", value=False), "fc6: shards is False; expected a whole number of at least 1"),
    (
        changed("layers", "fc6", "update_period", value=0),
        "fc6: update_period is 0; expected a whole number of at least 1",
    ),
    (
        changed("layers", "fc6", "update_period", value=None),
        "fc6: update_period is None; expected a whole number of at least 1",
    ),
    (changed("layers", "fc6", "axis", value=1), "fc6: axis is 1; expected text or null"),
    (changed("layers", "fc6", "devices", value=4), "fc6: devices is 4; expected a list of logical device numbers"),
    (changed("layers", "fc6", "devices", value=[0, "1"]), r"fc6: devices is \[0, '1'\]; expected a list of logical"),
    (changed("layers", "fc6", "devices", value=[0, True]), r"fc6: devices is \[0, True\]; expected a list of logical"),
    (changed("layers", "fc6", "devices", value=[0, -1]), r"fc6: devices is \[0, -1\]; expected a list of logical"),
    (changed("layers", "fc6", "devices", value=""), r"fc6: devices is ''; expected a list of logical .* \"0-3,8-11\""),
    (changed("layers", "fc6", "devices", value="0-"), r"fc6: devices is '0-'; expected .* \"0-3,8-11\""),
    (changed("layers", "fc6", "devices", value="0-3,"), r"fc6: devices is '0-3,'; expected .* \"0-3,8-11\""),
    (changed("layers", "fc6", "devices", value="-1-3"), r"fc6: devices is '-1-3'; expected .* \"0-3,8-11\""),
    (changed("layers", "fc6", "devices", value="0-1-2"), r"fc6: devices is '0-1-2'; expected .* \"0-3,8-11\""),
    (changed("layers", "fc6", "devices", value="0-\u0663"), r"fc6: devices is .*; expected .* \"0-3,8-11\""),
    (changed("layers", "fc6", "devices", value="0,7-4"), "fc6: devices has the range '7-4'; the lower .* first: 4-7"),
    (changed("layers", "fc6", "devices", value="0-999999999"), "fc6: devices is .* names more than 1,048,576 numbers"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED, ids=[message for _, message in MALFORMED])
def test_malformed_plans_are_refused(change: Callable[[Any], Any], message: str) -> None:
    text = json.dumps(change(json.loads(TEXT)))
    with pytest.raises(PlanError, match=message) as refused:
        Plan.from_json(text, "my.json")
    assert "my.json" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "my.json is not a plan"),
        ("{", "my.json is not a plan"),
        (TEXT.replace('"loss"', '"fc6"'), "'fc6' appears twice"),
        (TEXT.replace('"replicas": 4', '"replicas": 4, "replicas": 2'), "'replicas' appears twice"),
        (TEXT.replace("512", "NaN"), "batch is nan; expected a whole number of at least 1"),
        ("[" * 100_000, "my.json is not a plan"),
    ],
)
def test_texts_that_are_no_plans_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text, "my.json")


NO_PLANS = [
    pytest.param(None, "cannot read the plan my.json: No such file or directory", id="missing"),
    pytest.param("folder", "cannot read the plan my.json: that is a folder; name a file that `parplan", id="folder"),
    pytest.param(b"", "my.json is not a plan: it is empty; write one with", id="empty"),
    pytest.param(
        b"\xff\xfe\x00",
        "cannot read the plan my.json: it is not text in UTF-8 (byte 0); name a file that `parplan",
        id="binary",
    ),
    pytest.param(b'{"schema": ', "my.json is not a plan: it is not JSON (Expecting value: line 1", id="broken"),
    pytest.param(b"[1]", "my.json is not a plan: it is no object of JSON; write one with", id="list"),
    pytest.param(b"{}", 'my.json is not a plan: it has no "schema"; write one with', id="no schema"),
    pytest.param(b'{"schema": "x/1"}', "my.json has schema 'x/1'; this version of parplan reads", id="other schema"),
    pytest.param(b'{"schema": "x/1", "schema": "x/2"}', "it is not JSON ('schema' appears twice)", id="twice"),
]


@pytest.mark.parametrize(("content", "words"), NO_PLANS)
def test_a_file_that_is_no_plan_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | str | None, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("my.json")
    if content == "folder":
        file.mkdir()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(PlanError) as refused:
        Plan.load(file)
    assert words in str(refused.value)


def test_an_empty_name_is_no_file() -> None:
    with pytest.raises(PlanError, match=r"^the name of the plan is empty; name a file"):
        Plan.load("")
