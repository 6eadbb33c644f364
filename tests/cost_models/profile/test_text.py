"""Profiles as text: out and in again unchanged, refused whole when anything in them is wrong."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parplan.cost_models.profile.records import EntryGroup
from parplan.cost_models.profile.store import Merged, ProfileStore
from parplan.cost_models.profile.text import export_profile, from_text, import_profile, to_text
from parplan.errors import ParplanError, ProfileError
from tests.cost_models.profiles import CPU, H200, group, groups, link, part

GOLDEN = """\
{
  "schema": "parplan.profile/2",
  "profiles": [
    {
      "conditions": {"device": "AMD EPYC, 1 thread", "busy": 1, "torch": "2.13.0", "cuda": "", "flags": ""},
      "parts": [
        {"signature": ["conv 0:float32[8, 3]", "relu µ"], "family": "conv", "flops": 2000000000.0, \
"nbytes": 3000000.0, "forward_s": 0.001, "backward_s": 0.002, "spread": 0.01, "runs": 7, "reference_s": 0.0005, \
"when": "2025-06-01T12:00:00+00:00"}
      ],
      "links": [
        {"backend": "gloo", "kind": "all-reduce", "group": 2, "nbytes": 64, "seconds": 0.0001, "spread": 0.02, \
"runs": 9, "reference_s": 0.0005, "when": "2025-06-01T12:00:00Z", "origin": "lab.json"}
      ]
    },
    {
      "conditions": {"device": "h200-sxm", "busy": 1, "torch": "2.11.0", "cuda": "12.8", "flags": "tf32 matmul"},
      "parts": [],
      "links": [
        {"backend": "gloo", "kind": "all-reduce", "group": 2, "nbytes": 64, "seconds": 0.0001, "spread": 0.02, \
"runs": 9, "reference_s": 0.0005, "when": "2025-06-01T12:00:00Z"}
      ]
    }
  ]
}
"""
SAMPLE = [
    replace(group(CPU, part("conv 0:float32[8, 3]\nrelu µ")), links=group(CPU, link(64), origin="lab.json").links),
    group(H200, link(64)),
]


# ---- out and in again ------------------------------------------------------------------------------------------------


def test_the_text_is_for_people() -> None:
    assert to_text(reversed(SAMPLE)) == GOLDEN
    assert from_text(GOLDEN) == SAMPLE


@pytest.mark.full
@given(groups)
def test_text_gives_back_what_it_was_made_from(found: list[EntryGroup]) -> None:
    assert from_text(to_text(found)) == found


@pytest.mark.full
@settings(max_examples=25)
@given(groups.filter(bool), st.randoms())
def test_an_export_taken_in_elsewhere_is_the_same_store(found: list[EntryGroup], random: Any) -> None:
    shuffled = [replace(g, parts=tuple(random.sample(g.parts, len(g.parts)))) for g in reversed(found)]
    with tempfile.TemporaryDirectory() as name:
        file, again = Path(name) / "export.json", Path(name) / "again.json"
        with ProfileStore(Path(name) / "a") as here, ProfileStore(Path(name) / "b") as there:
            for each in shuffled:
                here.put(each.conditions, each.entries)
            count = export_profile(here, file)
            assert import_profile(there, file) == Merged(added=count)
            assert there.groups() == here.groups() == found
            export_profile(there, again)
        assert again.read_bytes() == file.read_bytes()


def test_what_was_taken_in_names_its_file(store: ProfileStore, tmp_path: Path) -> None:
    file = tmp_path / "from the lab.json"
    file.write_text(to_text([*SAMPLE[:1], group(H200, part("relu"))]), encoding="utf-8")
    assert import_profile(store, file) == Merged(added=3)
    assert import_profile(store, file) == Merged(kept=3)
    assert [entry.origin for entry in store.under(H200).all()] == ["from the lab.json"]
    assert [entry.origin for entry in store.groups()[0].links] == ["lab.json"]


def test_an_export_of_nothing_is_refused(store: ProfileStore, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="nothing to export; run parplan profile first"):
        export_profile(store, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_an_export_that_fails_leaves_the_file(
    store: ProfileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "out.json").write_text("before")
    store.put(CPU, [part("a")])
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ParplanError, match=r"cannot write .*out\.json: No space left"):
        export_profile(store, tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == "before"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.json", "profiles.sqlite"]


# ---- what is refused -------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]


def conditions(data: dict[str, Any]) -> dict[str, Any]:
    """The conditions of the second profile."""
    found: dict[str, Any] = data["profiles"][1]["conditions"]
    return found


def some_part(data: dict[str, Any]) -> dict[str, Any]:
    """The second part of the second profile."""
    found: dict[str, Any] = data["profiles"][1]["parts"][1]
    return found


def some_link(data: dict[str, Any]) -> dict[str, Any]:
    """The only link of the second profile."""
    found: dict[str, Any] = data["profiles"][1]["links"][0]
    return found


PART, LINK = r"profile 2 \(h200-sxm, .*\), part 2", r"profile 2 \(h200-sxm, .*\), link 1"

WRONG: tuple[tuple[Change, str], ...] = (
    (
        lambda d: d.update(schema="parplan.profile/1"),
        r"has schema 'parplan.profile/1'; .*; measure again with",
    ),
    (lambda d: d.update(schema="parplan.profile/3"), r"has schema 'parplan.profile/3'; .*reads 'parplan.profile/2'$"),
    (lambda d: d.pop("schema"), "has schema None"),
    (lambda d: d.pop("profiles"), "missing field 'profiles'"),
    (lambda d: d.update(extra=1), "unknown field 'extra'; known: schema, profiles"),
    (lambda d: d.update(profiles={}), r"profiles is {}; expected a list"),
    (lambda d: d["profiles"].append(5), "profile 3 is 5; expected a table of conditions, parts, links"),
    (lambda d: d["profiles"].append(d["profiles"][0]), "conditions 3 is conditions 1 once more"),
    (lambda d: d["profiles"][1].pop("links"), "profile 2: missing field 'links'"),
    (lambda d: conditions(d).pop("torch"), "profile 2: missing field 'torch'; add it"),
    (lambda d: conditions(d).update(device=""), "profile 2: device is ''; expected text that is not empty"),
    (lambda d: conditions(d).update(busy=0), "busy is 0; expected a whole number of at least 1"),
    (lambda d: conditions(d).update(busy=True), "busy is True; expected a whole number"),
    (lambda d: d["profiles"][1].update(parts=None), "parts is None; expected a list"),
    (lambda d: d["profiles"][1]["parts"].append([]), r"part 3 is \[\]; expected a table of signature"),
    (lambda d: d["profiles"][1]["parts"].append(some_part(d)), "part 3 is part 2 once more"),
    (lambda d: some_part(d).pop("forward_s"), f"{PART}: missing field 'forward_s'"),
    (lambda d: some_part(d).update(forwards=1), f"{PART}: unknown field 'forwards'"),
    (lambda d: some_part(d).update(forward_s=-1e-9), f"{PART}: forward_s is -1e-09; expected seconds from 0"),
    (lambda d: some_part(d).update(forward_s=float("nan")), f"{PART}: forward_s is nan"),
    (lambda d: some_part(d).update(backward_s=float("inf")), f"{PART}: backward_s is inf"),
    (lambda d: some_part(d).update(backward_s=1e7), f"{PART}: backward_s is 10000000.0; expected seconds from 0 to"),
    (lambda d: some_part(d).update(forward_s="0.1"), f"{PART}: forward_s is '0.1'"),
    (lambda d: some_part(d).update(forward_s=None), f"{PART}: forward_s is None"),
    (lambda d: some_part(d).update(forward_s=True), f"{PART}: forward_s is True"),
    (lambda d: some_part(d).update(forward_s=10**400), f"{PART}: forward_s is a whole number beyond reason"),
    (lambda d: some_part(d).update(runs=2**70), f"{PART}: runs is a whole number beyond reason"),
    (lambda d: some_part(d).update(runs=0), f"{PART}: runs is 0"),
    (lambda d: some_part(d).update(runs=1.5), f"{PART}: runs is 1.5"),
    (lambda d: some_part(d).update(when="2025-02-31T00:00:00Z"), f"{PART}: when is '2025-02-31T00:00:00Z'"),
    (lambda d: some_part(d).update(when="2025-02-01T00:00:00+02:00"), f"{PART}: when is .*; expected a time like"),
    (lambda d: some_part(d).update(when=5), f"{PART}: when is 5"),
    (lambda d: some_part(d).update(signature="relu"), f"{PART}: signature is 'relu'; expected a list"),
    (lambda d: some_part(d).update(signature=[]), rf"{PART}: signature is \[\]; expected a list of lines"),
    (lambda d: some_part(d).update(signature=["a\nb"]), f"{PART}: signature is .*; expected a list of lines"),
    (lambda d: some_part(d).update(signature=["\ud800"]), f"{PART}: signature is .*; expected a list of lines of text"),
    (lambda d: some_part(d).update(family=["relu"]), f"{PART}: family is"),
    (lambda d: some_part(d).update(origin=3), f"{PART}: origin is 3; expected text"),
    (lambda d: some_link(d).update(seconds=-1), f"{LINK}: seconds is -1"),
    (lambda d: some_link(d).update(group=0), f"{LINK}: group is 0"),
    (lambda d: some_link(d).pop("kind"), f"{LINK}: missing field 'kind'"),
)


def refused(store: ProfileStore, file: Path, words: str) -> None:
    """Importing `file` fails with `words`, names the file, and leaves the store's entries as they were."""
    store.put(H200, [part("relu 1", 9.0)])
    before = list(store._connection.iterdump())
    with pytest.raises(ProfileError, match=words) as caught:
        import_profile(store, file)
    assert str(file) in str(caught.value)
    assert list(store._connection.iterdump()) == before


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_text_changes_nothing(store: ProfileStore, tmp_path: Path, change: Change, words: str) -> None:
    data = json.loads(to_text([group(CPU, part("a")), group(H200, part("relu 1"), part("relu 2"), link(64))]))
    change(data)
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(data))
    refused(store, file, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a profile: Expecting value: line 1"),
        (b"SQLite format 3\0", "it is binary, not text"),
        (b"\x80\x04\x95", "cannot read the profile .*not text in UTF-8 .byte 0.; name a file that"),
        (b'{"schema": "parplan.profile/2",\n "profiles": [', "is not a profile: .*line 2"),
        (b'{"schema": "parplan.profile/2", "profiles": [], "profiles": []}', "'profiles' appears twice"),
        (b"[" * 100_000, "is not a profile: .*recursion"),
        (b"[]", "has schema 'list'"),
        (b"9" * 5000, "is not a profile: Exceeds the limit"),
        (GOLDEN.encode().replace(b"0.002", b"1e999"), "part 1: backward_s is inf"),
        (GOLDEN.encode()[:-40], "is not a profile"),
    ],
)
def test_what_is_no_profile_changes_nothing(store: ProfileStore, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "wrong.json").write_bytes(content)
    refused(store, tmp_path / "wrong.json", words)


def test_a_missing_file_changes_nothing(store: ProfileStore, tmp_path: Path) -> None:
    refused(store, tmp_path / "absent.json", r"cannot read the profile .*absent\.json")
    refused(store, tmp_path, "cannot read the profile")


def test_an_import_that_cannot_be_written_changes_nothing(store: ProfileStore, tmp_path: Path) -> None:
    file = tmp_path / "big.json"
    file.write_text(to_text([group(CPU, *(part(f"a {n} {'x' * 900}") for n in range(100)))]))
    store._connection.execute("PRAGMA max_page_count = 14")
    store.put(H200, [part("relu 1", 9.0)])
    with pytest.raises(ProfileError, match="the disk is full"):
        import_profile(store, file)
    assert store.groups() == [group(H200, part("relu 1", 9.0))]
