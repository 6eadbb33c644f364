"""The profile store: what is found and what is not, with many writers at once."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from collections import Counter
from dataclasses import fields, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from parplan.cost_models.known import mismatches
from parplan.cost_models.profile.records import Conditions, LinkEntry, PartEntry, SessionProfile
from parplan.cost_models.profile.schema import CONDITIONS, LINKS, PARTS
from parplan.cost_models.profile.store import ProfileStore
from parplan.cost_models.sampling import Measurement
from parplan.errors import ProfileError
from tests.cost_models.profiles import CPU, H200, group, link, part
from tests.cost_models.store_writers import (
    BATCH,
    WRITERS,
    open_new_stores,
    run_threads,
    write_batches_until_killed,
    write_some,
)


@pytest.mark.parametrize("kind", ["session", "store"])
def test_every_profile_gives_back_what_was_put(store: ProfileStore, kind: str) -> None:
    profile: SessionProfile = store.under(CPU) if kind == "store" else SessionProfile()
    a, b, other = part("conv2d 1"), part("conv2d 2"), part("relu 1")
    for entry in (b, a, other, part("relu 1"), replace(a, flops=1.0)):
        profile.put(entry)
    for nbytes in (20, 10, 10):
        profile.put(link(nbytes))
    profile.put(replace(link(10), backend="nccl"))
    assert profile.get("conv2d 1") == replace(a, flops=1.0)
    assert profile.get("conv2d 3") is None
    assert sorted(profile.family("conv2d"), key=lambda e: e.signature) == [replace(a, flops=1.0), b]
    assert sorted(e.signature for e in profile.all()) == ["conv2d 1", "conv2d 2", "relu 1"]
    assert sorted(profile.links("gloo"), key=lambda e: e.nbytes) == [link(10), link(20)]


def test_entries_outlive_the_store(tmp_path: Path) -> None:
    with ProfileStore(tmp_path / "deep" / "folder" / "p.sqlite") as store:
        store.under(CPU).put(part("relu"))
    with ProfileStore(tmp_path / "deep" / "folder" / "p.sqlite") as store:
        assert store.under(CPU).get("relu") == part("relu")


@pytest.mark.parametrize(
    "now",
    [
        replace(CPU, device="h200-sxm"),
        replace(CPU, torch="2.12.0"),
        replace(CPU, busy=2),
        replace(CPU, cuda="12.8"),
        replace(CPU, flags="deterministic"),
    ],
)
def test_entries_made_under_other_conditions_are_never_found(store: ProfileStore, now: Conditions) -> None:
    store.put(CPU, [part("relu"), link(10)])
    other = store.under(now)
    assert (other.get("relu"), *other.family("relu"), *other.links("gloo")) == (None,)


def test_the_conditions_kept_are_counted_and_dated(store: ProfileStore) -> None:
    days = [f"2025-06-0{day}T12:00:00+00:00" for day in (1, 2, 3)]
    store.put(H200, [part("undated", when="")])
    store.put(CPU, [part("a", when=days[1]), part("b", when=days[2]), part("c", when=""), link(1, when=days[0])])
    found = [(group.conditions, group.describe(), group.last_when) for group in store.groups()]
    assert found == [(CPU, "3 parts and 1 link", days[2]), (H200, "1 part", "")]


@pytest.mark.parametrize(
    ("now", "notes"),
    [
        (CPU, []),
        (
            replace(CPU, torch="2.14.0"),
            [
                "2 parts and 1 link of this device were measured with torch 2.13.0, here is 2.14.0: "
                "stale, not used; run parplan profile again"
            ],
        ),
        (
            replace(CPU, busy=2, flags="deterministic"),
            [
                "2 parts and 1 link of this device were measured with 1 device at once, here are 2; with torch's "
                "default switches, here with deterministic: not used; run parplan profile as you run now"
            ],
        ),
        (
            replace(H200, cuda="13.0"),
            [
                "1 part of this device was measured with cuda 12.8, here is 13.0: "
                "stale, not used; run parplan profile again"
            ],
        ),
        (
            replace(CPU, device="a100"),
            ["only profiles of other devices (AMD EPYC, 1 thread, h200-sxm) are here, none of a100"],
        ),
    ],
)
def test_what_was_not_used_is_told(store: ProfileStore, now: Conditions, notes: list[str]) -> None:
    store.put(CPU, [part("a"), part("b"), link(1)])
    store.put(H200, [part("a")])
    assert mismatches(store.groups(), now) == notes


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (part("relu", forward_s=-1.0), "part 'relu': forward_s is -1.0; expected seconds from 0"),
        (part("relu", forward_s=float("nan")), "forward_s is nan"),
        (part("relu", when="yesterday"), "when is 'yesterday'; expected a time like"),
        (part("re\0lu"), "signature is .*; expected text"),
        (link(-1), "link 'gloo all-reduce 2 -1': nbytes is -1; expected a whole number"),
    ],
)
def test_what_no_measurement_gives_is_refused(store: ProfileStore, entry: PartEntry | LinkEntry, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        store.put(CPU, [part("fine"), entry, link(1)])
    assert store.groups() == []


def test_an_infinite_spread_is_an_unknown_one(store: ProfileStore) -> None:
    entry = part("noop")
    store.put(CPU, [replace(entry, measurement=replace(entry.measurement, spread=float("inf")))])
    assert store.under(CPU).get("noop") == replace(entry, measurement=replace(entry.measurement, spread=1.0))


def test_what_was_measured_here_is_not_overwritten(store: ProfileStore) -> None:
    old, new = "2025-01-01T00:00:00Z", "2025-01-02T00:00:00+00:00"
    store.under(CPU).put(part("mine", 1.0, old))
    merges = [
        store.merge([group(CPU, part("mine", 2.0, new), part("theirs", 2.0, old), link(1, 2.0, old), origin="a")]),
        store.merge([group(CPU, part("theirs", 3.0, old), link(1, 3.0, new), origin="b")]),
    ]
    assert [m.describe() for m in merges] == [
        "2 entries added, 0 replaced by newer ones, 1 left as it was",
        "0 entries added, 1 replaced by newer ones, 1 left as it was",
    ]
    (found,) = store.groups()
    assert [(entry.measurement.forward_s, entry.origin) for entry in found.parts] == [(1.0, ""), (2.0, "a")]
    assert [(entry.seconds, entry.origin) for entry in found.links] == [(3.0, "b")]
    profile = store.under(CPU)
    profile.put(part("theirs", 4.0, old))
    assert [entry.origin for entry in profile.all()] == ["", ""]


def test_the_table_of_fields_has_all_fields() -> None:
    names = [field.name for field in (*fields(PartEntry)[:-3], *fields(Measurement), *fields(PartEntry)[-2:])]
    assert [field.name for field in PARTS.fields] == names
    assert [field.name for field in LINKS.fields] == [field.name for field in fields(LinkEntry)]
    assert [field.name for field in CONDITIONS] == [field.name for field in fields(Conditions)]


def test_the_file_has_a_column_for_every_field(store: ProfileStore) -> None:
    for name, fields_ in (("conditions", CONDITIONS), ("parts", PARTS.fields), ("links", LINKS.fields)):
        columns = [row["name"] for row in store._connection.execute(f"PRAGMA table_info({name})")]
        assert columns[1:] == [field.name for field in fields_]
        assert len(set(columns)) == len(columns)


# ---- many at once ----------------------------------------------------------------------------------------------------


def test_eight_processes_write_at_once(tmp_path: Path, processes: ForkServerContext) -> None:
    path, count = tmp_path / "new" / "p.sqlite", 12
    writers = [processes.Process(target=write_some, args=(path, writer, count)) for writer in range(WRITERS)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(120)
    assert [process.exitcode for process in writers] == [0] * WRITERS
    with ProfileStore(path, read_only=True) as store:
        (found,) = store.groups()
    expected = {f"writer {w} {n}": w + n / 1024 for w in range(WRITERS) for n in range(count)}
    assert {entry.signature: entry.measurement.forward_s for entry in found.parts} == expected
    assert {entry.nbytes for entry in found.links} == {1000 * w + n for w in range(WRITERS) for n in range(count)}


def test_processes_that_make_a_store_at_once_all_have_it(tmp_path: Path, processes: ForkServerContext) -> None:
    together = processes.Barrier(4)
    openers = [processes.Process(target=open_new_stores, args=(tmp_path, together)) for _ in range(4)]
    for process in openers:
        process.start()
    for process in openers:
        process.join(120)
    assert [process.exitcode for process in openers] == [0] * 4


@pytest.mark.full
def test_eight_threads_share_a_file(store: ProfileStore) -> None:
    def work(writer: int) -> None:
        with ProfileStore(store.path) as own:
            for number in range(20):
                own.under(CPU).put(part(f"t {writer} {number}", number))
                assert own.under(CPU).get(f"t {writer} {number}") is not None

    run_threads(work)
    assert len(store.under(CPU).family("t")) == WRITERS * 20


def test_a_writer_killed_in_the_middle_leaves_whole_batches(tmp_path: Path, processes: ForkServerContext) -> None:
    path, told = tmp_path / "p.sqlite", set[str]()
    for round_ in range(1, 6):
        receiver, sender = processes.Pipe(duplex=False)
        process = processes.Process(target=write_batches_until_killed, args=(path, round_, sender))
        process.start()
        sender.close()
        told |= {f"r{round_}b{receiver.recv()}" for _ in range(2 + round_)}
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        with contextlib.suppress(EOFError):
            while True:
                told.add(f"r{round_}b{receiver.recv()}")
        receiver.close()
        with ProfileStore(path) as store:
            counts = Counter(entry.family for group in store.groups() for entry in group.parts)
        assert set(counts.values()) == {BATCH}
        assert counts.keys() >= told
        assert len(counts.keys() - told) <= round_  # committed, and killed before telling
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
