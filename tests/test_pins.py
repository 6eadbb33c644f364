"""Pins as text: what is read, what is refused, and which layers a pattern names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.errors import PinError
from parplan.pins import Pin, PinsLike, parse_pin, pins_from, pins_from_toml, read_pins

READ = {
    "fc6=shards:4": Pin("fc6", shards=4),
    "features.*=replicas:4": Pin("features.*", replicas=4),
    "conv1=gpu:0,1": Pin("conv1", devices=(0, 1)),
    "conv1=gpu:3": Pin("conv1", devices=(3,)),
    " fc6 = shards:4;axis:out-features ; update:2 ": Pin("fc6", shards=4, axis="out-features", update_period=2),
    "h.[01].*=replicas:2 shards:2 gpu:3,1,0,2": Pin("h.[01].*", 2, 2, devices=(3, 1, 0, 2)),
}


@pytest.mark.parametrize(("text", "pin"), READ.items(), ids=READ)
def test_text_is_read(text: str, pin: Pin) -> None:
    found = parse_pin(text, "pins")
    assert found == pin
    assert parse_pin(found.describe(), "pins") == pin


REFUSED = {
    "fc6": "no '='; write PATTERN=WORDS",
    "=shards:4": "names no layer",
    "fc6=": "decides nothing",
    "fc6= ; ": "decides nothing",
    "fc6=4": "'4' is not a word and a value",
    "fc6=shards=4": "write shards:4",
    "fc6=shards": "'shards' is not a word and a value; words are replicas:4, shards:4",
    "fc6=shards=": "'shards=' is not a word and a value; words are replicas:4, shards:4",
    "fc6=shard:4": "did you mean shards",
    "fc6=devices:0": "'devices' is not known; words are replicas:4",
    "fc6=shards:0": "shards is '0'; expected a whole number from 1 to 1000000",
    "fc6=shards:-1": "shards is '-1'",
    "fc6=shards:two": "shards is 'two'",
    "fc6=replicas:": "replicas is ''",
    "fc6=replicas:1e3": "replicas is '1e3'",
    "fc6=replicas:" + "9" * 40: "expected a whole number",
    "fc6=replicas:2000000": "expected a whole number from 1 to 1000000, such as replicas:2",
    "fc6=shards:٣": "expected a whole number",
    "fc6=shards:2 shards:4": "shards is given twice",
    "fc6=gpu:": "gpu is ''",
    "fc6=gpu:0,": "gpu is '0,'",
    "fc6=gpu:0, 1": "'1' is not a word and a value",
    "fc6=gpu:-1": "gpu is '-1'",
    "fc6=axis:": "axis is ''",
}


@pytest.mark.parametrize(("text", "words"), REFUSED.items(), ids=[text[:24] for text in REFUSED])
def test_text_is_refused(text: str, words: str) -> None:
    with pytest.raises(PinError) as caught:
        parse_pin(text)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--pin {text!r}")


counts = st.none() | st.integers(1, 64)
PINS = st.builds(
    Pin,
    pattern=st.text("abc.*?019@", min_size=1),
    replicas=counts,
    shards=counts,
    axis=st.none() | st.sampled_from(["out-features", "heads"]),
    devices=st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    update_period=counts,
).filter(lambda pin: bool(pin.words))


@given(PINS)
def test_what_a_pin_says_is_read_back(pin: Pin) -> None:
    assert parse_pin(pin.describe(), pin.origin) == pin


MATCHES = [
    ("fc6", "fc6", True),
    ("fc6", "fc60", False),
    ("block1", "block1.conv", True),
    ("block1", "block1.branch.conv", True),
    ("block1", "block10.conv", False),
    ("features.*", "features.0", True),
    ("features.*", "features.0.conv", True),
    ("features.*", "features", False),
    ("*.attn", "h.0.attn.query", True),
    ("*.attn", "h.0.attention", False),
    ("h.[01]", "h.1.mlp", True),
    ("h.[01]", "h.2.mlp", False),
    ("relu", "relu@1", True),
    ("relu@1", "relu", False),
    ("Conv", "conv", False),
    ("*", "anything.at@2.all", True),
]


@pytest.mark.parametrize(("pattern", "layer", "expected"), MATCHES)
def test_a_pattern_names_layers_and_what_is_inside_a_module(pattern: str, layer: str, expected: bool) -> None:
    assert Pin(pattern, replicas=1).matches(layer) is expected


FORMS: list[PinsLike] = [
    {"fc6": "shards:4", "conv1": {"gpu": [0, 1], "replicas": 2}},
    {"fc6": {"shards": "4"}, "conv1": {"gpu": "0,1", "replicas": 2}},
    ["fc6=shards:4", "conv1=replicas:2 gpu:0,1"],
    (Pin("fc6", shards=4), "conv1=gpu:0,1 replicas:2"),
]


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_pins_have_in_code(form: PinsLike) -> None:
    assert read_pins(form) == (Pin("fc6", shards=4), Pin("conv1", replicas=2, devices=(0, 1)))


def test_nothing_is_no_pins() -> None:
    assert read_pins(None) == read_pins({}) == read_pins([]) == ()
    assert read_pins((), with_plan=True) == ()


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"fc6": 4}, "4 is no pin"),
        ({4: "shards:4"}, "4 is no pin"),
        ({"fc6": {}}, "decides nothing"),
        ({"fc6": {"shards": 2.0}}, "shards is 2.0"),
        ({"fc6": {"shards": True}}, "shards is True"),
        ({"fc6": {"gpu": []}}, "gpu is []"),
        ({"fc6": {"gpu": [0, "x"]}}, "gpu is [0, 'x']"),
        ({"fc6": {"axis": 1}}, "axis is 1"),
        ([4], "4 is no pin"),
        ("fc6=shards:4", "put pins in a list: ['fc6=shards:4']"),
    ],
)
def test_code_is_refused(form: Any, words: str) -> None:
    with pytest.raises(PinError) as caught:
        read_pins(form)
    assert words in str(caught.value)


def test_pins_beside_a_plan_are_refused() -> None:
    with pytest.raises(PinError, match="leave out the plan or the pins"):
        read_pins(["fc6=shards:4"], with_plan=True)


def test_a_file_of_pins(tmp_path: Path) -> None:
    path = tmp_path / "pins.toml"
    path.write_text('[pins]\n"features.*" = "replicas:4"\nfc6 = { shards = 4, gpu = [0, 1, 2, 3], update = 2 }\n')
    expected = (
        Pin("features.*", replicas=4, origin=str(path)),
        Pin("fc6", shards=4, devices=(0, 1, 2, 3), update_period=2, origin=str(path)),
    )
    assert pins_from_toml(path) == read_pins(path) == read_pins(str(path)) == expected
    assert pins_from({"fc6": "shards:4"}, "here")[0].origin == "here"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pins = 3", "has no table [pins]"),
        ("", "has no table [pins]"),
        ("[pin]\nfc6 = 'shards:4'", "'pin' is not known here"),
        ("[pins]\nfeatures.0 = 'shards:4'", "a name with dots needs quotes"),
        ("[pins]\nfeatures.0.conv = 'shards:4'", "a name with dots needs quotes"),
        ("[pins]\nfc6 = 'shards:4'\nfc6 = 'shards:2'", "is not TOML"),
        ("[pins", "is not TOML"),
        ("[pins]\nfc6 = 'shard:4'", "did you mean shards"),
    ],
)
def test_a_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "pins.toml"
    path.write_text(text)
    with pytest.raises(PinError) as caught:
        pins_from_toml(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.toml", ""):
        with pytest.raises(PinError, match=r"is a folder|the name of the pins is empty|No such file"):
            pins_from_toml(path)
