"""Profiles as text, to be read by people, kept beside results and given to others; nothing is ever unpickled.

Equal stores give equal text, one entry a line, so that a diff shows which measurements changed. A text is used only
after every field of every entry was checked, and then all of it is imported, or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from parplan.cost_models.profile.records import Conditions, Entry, EntryGroup
from parplan.cost_models.profile.schema import CONDITIONS, LINKS, PARTS, EntryTable
from parplan.cost_models.profile.store import Merged, ProfileStore
from parplan.errors import ProfileError
from parplan.fields import Field, list_of, parse_json, read_fields, read_file
from parplan.files import write_files

__all__ = ["SCHEMA", "export_profile", "from_text", "import_profile", "to_text"]

SCHEMA = "parplan.profile/2"


def export_profile(store: ProfileStore, file: str | Path) -> int:
    """Write the store's entries to `file`; returns how many they are.

    The file is whole or as it was.

    Raises:
        ProfileError: there is nothing to export; the store is damaged.
        ParplanError: the file cannot be written.
    """
    groups = store.groups()
    if not groups:
        raise ProfileError(f"{store.path} has nothing to export; run parplan profile first")
    write_files({str(file): to_text(groups)})
    return sum(len(group.entries) for group in groups)


def import_profile(store: ProfileStore, file: str | Path) -> Merged:
    """Merge the entries of an exported `file` into the store, marked with the file's name unless they have an origin.

    Raises:
        ProfileError: the file cannot be read or holds anything that is no measurement; the store is then as it was.
    """
    text = read_file(file, "profile", ProfileError, "name a file that `parplan profile --export` wrote")
    name = Path(file).name.encode(errors="replace").decode()  # file names need not be text

    def named(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        return tuple(replace(entry, origin=entry.origin or name) for entry in entries)

    groups = from_text(text, str(file))
    return store.merge([EntryGroup(group.conditions, named(group.parts), named(group.links)) for group in groups])


def to_text(groups: Iterable[EntryGroup]) -> str:
    """The groups as text, sorted by conditions and entries; equal groups give equal text."""
    ordered = sorted(groups, key=lambda group: tuple(vars(group.conditions).values()))
    texts = []
    for group in ordered:
        conditions = _json(read_fields(vars(group.conditions), CONDITIONS, "conditions", ProfileError))
        parts, links = _lines(PARTS, group.parts), _lines(LINKS, group.links)
        body = f'      "conditions": {conditions},\n      "parts": {parts},\n      "links": {links}'
        texts.append(f"    {{\n{body}\n    }}")
    blocks = ",\n".join(texts)
    profiles = f"[\n{blocks}\n  ]" if blocks else "[]"
    return f'{{\n  "schema": {_json(SCHEMA)},\n  "profiles": {profiles}\n}}\n'


def from_text(text: str, where: str = "profile") -> list[EntryGroup]:
    """Read a profile; `where` names the source in errors.

    Raises:
        ProfileError: not JSON, another schema, or an entry with a missing, unknown or impossible field; names it.
    """
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ProfileError(f"{where} is not a profile: {error}; write one with `parplan profile --export`") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        again = "; measure again with `parplan profile`" if found == "parplan.profile/1" else ""
        raise ProfileError(f"{where} has schema {found!r:.60}; this version of parplan reads {SCHEMA!r}{again}")
    profiles = read_fields(data, (_anything("schema"), list_of("profiles")), where, ProfileError)["profiles"]
    groups = []
    for number, item in enumerate(profiles, start=1):
        at = f"{where}: profile {number}"
        found = read_fields(item, (_anything("conditions"), list_of("parts"), list_of("links")), at, ProfileError)
        conditions = Conditions(**read_fields(found["conditions"], CONDITIONS, at, ProfileError))
        at = f"{at} ({conditions.describe()})"
        groups.append(EntryGroup(conditions, _entries(_PARTS, found["parts"], at), _entries(LINKS, found["links"], at)))
    _check_once([group.conditions for group in groups], where, "conditions")
    return groups


def _lines(table: EntryTable[Entry], entries: Sequence[Entry]) -> str:
    rows = [table.row(entry) for entry in sorted(entries, key=lambda entry: entry.key)]
    for row in rows:
        for name in ("origin", "gradients"):
            if name in row and not row[name]:
                del row[name]
        if "signature" in row:
            row["signature"] = row["signature"].split("\n")  # a line of it per op: to be read
    lines = ",\n".join(f"        {_json(row)}" for row in rows)
    return f"[\n{lines}\n      ]" if rows else "[]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


_anything = partial(Field, expected="a value", read=lambda value: value)


def _read_lines(value: Any) -> str:
    if not (isinstance(value, list) and value and all(isinstance(line, str) and "\n" not in line for line in value)):
        raise ValueError
    return str(_SIGNATURE.read("\n".join(value)))


_SIGNATURE, *_OTHERS = PARTS.fields
_PARTS = replace(PARTS, fields=(Field("signature", "a list of lines of text", _read_lines), *_OTHERS))


def _entries(table: EntryTable[Entry], items: Sequence[Any], where: str) -> tuple[Entry, ...]:
    numbered = enumerate(items, start=1)
    found = tuple(table.entry(item, f"{where}, {table.word} {number}") for number, item in numbered)
    _check_once([entry.key for entry in found], where, table.word)
    return found


def _check_once(keys: Sequence[Any], where: str, noun: str) -> None:
    first: dict[Any, int] = {}
    for number, key in enumerate(keys, start=1):
        if (before := first.setdefault(key, number)) != number:
            raise ProfileError(f"{where}: {noun} {number} is {noun} {before} once more; leave one of them")
