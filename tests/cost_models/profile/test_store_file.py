"""The file of a profile store: where it is, and what happens when it, or its place, cannot be used."""

from __future__ import annotations

import os
import random
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from parplan.cost_models.known import mismatches
from parplan.cost_models.profile import store_file
from parplan.cost_models.profile.store import ProfileStore
from parplan.errors import ProfileError
from tests.cost_models.profiles import CPU, link, part


def filled(path: Path) -> bytes:
    """A store with a few pages of entries, and its bytes."""
    with ProfileStore(path) as store:
        store.under(CPU).put(*(part(f"conv2d {n} {'x' * 300}") for n in range(40)), *(link(n) for n in range(9)))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("given", "cache", "expected"),
    [
        ("{}/mine", "{}/cache", "{}/mine/profiles.sqlite"),
        ("", "{}/cache", "{}/cache/parplan/profiles.sqlite"),
        ("", "relative", "{}/.cache/parplan/profiles.sqlite"),
        ("", "", "{}/.cache/parplan/profiles.sqlite"),
        ("~/here", "", "{}/here/profiles.sqlite"),
    ],
)
def test_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, cache: str, expected: str
) -> None:
    monkeypatch.setenv("PARPLAN_CACHE", given.format(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", cache.format(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with ProfileStore() as store:
        store.under(CPU).put(part("relu"))
        assert str(store.path) == expected.format(tmp_path)
    assert store.path.is_file()


def test_a_name_with_odd_characters(tmp_path: Path) -> None:
    path = tmp_path / "50% of #1?mode=ro.sqlite"
    with ProfileStore(path) as store:
        store.under(CPU).put(part("relu"))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


# ---- files that cannot be used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["noise", "cut in a page", "cut at a page", "cut to a page", "holes", "short"])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_damaged_file_is_reported_and_left_alone(tmp_path: Path, kind: str, read_only: bool) -> None:
    path = tmp_path / "p.sqlite"
    whole = filled(path)
    damaged = {
        "noise": random.Random(5).randbytes(len(whole)),
        "cut in a page": whole[: len(whole) // 2 + 100],
        "cut at a page": whole[:-4096],
        "cut to a page": whole[:4096],
        "holes": whole[:4096] + bytes(4096) + whole[8192:],
        "short": b"SQLite format 3\0",
    }[kind]
    path.write_bytes(damaged)
    with pytest.raises(ProfileError, match=rf"{path} is damaged.*left as it is.*parplan profile --import FILE"):
        ProfileStore(path, read_only=read_only)
    assert path.read_bytes() == damaged
    assert [file.name for file in tmp_path.iterdir()] == ["p.sqlite"]


@pytest.mark.parametrize("value", ["-1.0", "'fast'", "9e999"])
def test_figures_that_were_never_written_are_damage(tmp_path: Path, value: str) -> None:
    filled(tmp_path / "p.sqlite")
    connection = sqlite3.connect(tmp_path / "p.sqlite", isolation_level=None)
    connection.execute(f"UPDATE parts SET forward_s = {value} WHERE signature LIKE 'conv2d 7 %'")
    connection.close()
    with (
        ProfileStore(tmp_path / "p.sqlite") as store,
        pytest.raises(ProfileError, match=r"damaged.*part: forward_s"),
    ):
        store.under(CPU)


def test_missing_tables_are_damage(tmp_path: Path) -> None:
    filled(tmp_path / "p.sqlite")
    connection = sqlite3.connect(tmp_path / "p.sqlite", isolation_level=None)
    connection.execute("DROP TABLE links")
    connection.close()
    with ProfileStore(tmp_path / "p.sqlite") as store, pytest.raises(ProfileError, match=r"is damaged.*no such table"):
        store.under(CPU)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            "PRAGMA user_version = 7",
            r"newer parplan \(schema 7, this one's is 2\); .*as it is: upgrade parplan",
        ),
        (
            "PRAGMA user_version = 1",
            r"older parplan \(schema 1, .*as it is: move it away, then import a saved",
        ),
        ("PRAGMA application_id = 1", "an SQLite file of something else"),
    ],
)
def test_files_of_others_are_refused_and_left_alone(
    tmp_path: Path, statement: str, words: str, read_only: bool
) -> None:
    path = tmp_path / "p.sqlite"
    filled(path)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ProfileError, match=words):
        ProfileStore(path, read_only=read_only)
    assert path.read_bytes() == before


# ---- places that cannot be written -----------------------------------------------------------------------------------


@pytest.fixture(name="locked")
def _locked() -> Iterator[Path]:
    """A folder with a store that this process may read and not write, even where it runs as root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        filled(folder / "p.sqlite")
        folder.chmod(0o555)
        (folder / "p.sqlite").chmod(0o444)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(user)
            folder.chmod(0o755)


def test_a_store_is_read_where_nothing_can_be_written(locked: Path) -> None:
    with ProfileStore(locked / "p.sqlite", read_only=True) as store:
        assert len(store.under(CPU).family("conv2d")) == 40
        with pytest.raises(ProfileError, match="opened for reading only"):
            store.under(CPU).put(part("relu"))


def test_a_store_is_not_made_where_nothing_can_be_written(locked: Path) -> None:
    with pytest.raises(ProfileError, match=r"cannot make .*sub.*Permission denied; set PARPLAN_CACHE"):
        ProfileStore(locked / "sub" / "p.sqlite")
    with pytest.raises(ProfileError, match=r"q\.sqlite cannot be opened.*PARPLAN_CACHE"):
        ProfileStore(locked / "q.sqlite")
    with ProfileStore(locked / "p.sqlite") as store, pytest.raises(ProfileError, match="cannot be written"):
        store.under(CPU).put(part("relu"))


def test_a_reader_makes_nothing(tmp_path: Path) -> None:
    with ProfileStore(tmp_path / "sub" / "p.sqlite", read_only=True) as store:
        assert (store.groups(), store.under(CPU).get("relu"), mismatches(store.groups(), CPU)) == ([], None, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["folder", "folder/file/p.sqlite"])
def test_a_place_that_is_something_else(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    with pytest.raises(ProfileError, match=r"PARPLAN_CACHE"):
        ProfileStore(tmp_path / place)


def test_a_full_disk_loses_only_what_was_being_written(store: ProfileStore) -> None:
    profile = store.under(CPU)
    profile.put(part("first"))
    store._connection.execute("PRAGMA max_page_count = 12")
    with pytest.raises(ProfileError, match="the disk is full; make room"):
        profile.put(*(part(f"x {n} {'y' * 900}") for n in range(100)))
    assert [entry.signature for entry in store.groups()[0].parts] == ["first"]
    profile.put(part("second"))
    assert profile.get("second") is not None


def test_another_process_that_holds_on_is_named(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_file, "_BUSY_S", 0.01)
    with ProfileStore(store.path) as second:
        store._connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(ProfileError, match="in use by another process"):
            second.under(CPU).put(part("relu"))
        store._connection.execute("ROLLBACK")
        second.under(CPU).put(part("relu"))


def test_an_interrupt_in_a_batch_leaves_nothing_of_it(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("parplan.cost_models.profile.store._insert", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.under(CPU).put(part("relu"))
    assert store.groups() == []
    store.under(CPU).put(part("relu"))
