"""Profiles as text, to be read by people, kept beside results and given to others; nothing is ever unpickled.

Equal stores give equal text, one entry a line, so that a diff shows which measurements changed. A text is believed only
after every field of every entry was checked, and then all of it is taken in, or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from parplan.cost_models.profile.fields import CONDITIONS, LINKS, PARTS, Group, Kept, Table, checked
from parplan.cost_models.profile.records import Conditions, LinkEntry, PartEntry
from parplan.cost_models.profile.store import Merged, ProfileStore
from parplan.errors import ProfileError
from parplan.files import write_files

__all__ = ["SCHEMA", "export_profile", "from_text", "import_profile", "read_profile", "to_text"]

SCHEMA = "parplan.profile/1"

Entry = TypeVar("Entry", PartEntry, LinkEntry)


def export_profile(store: ProfileStore, file: str | Path, conditions: Conditions | None = None) -> int:
    """Write the store's entries, or those made under `conditions`, to `file`; how many they are.

    The file is whole or as it was.

    Raises:
        ProfileError: there is nothing to export; the store is damaged.
        ParplanError: the file cannot be written.
    """
    groups = store.groups(conditions)
    if not groups:
        under = f" under {conditions.describe()}" if conditions is not None else ""
        hints = "; ".join(store.strangers(conditions)) if conditions is not None else ""
        raise ProfileError(f"{store.path} has nothing to export{under}; {hints or 'run parplan profile first'}")
    write_files({str(file): to_text(groups)})
    return sum(len(group.parts) + len(group.links) for group in groups)


def import_profile(store: ProfileStore, file: str | Path) -> Merged:
    """Take the entries of an exported `file` into the store, marked with the file's name; what became of them.

    Raises:
        ProfileError: the file cannot be read or holds anything that is no measurement; nothing is taken in then.
    """
    return store.merge(read_profile(file, Path(file).name))


def read_profile(file: str | Path, origin: str) -> list[Group]:
    """The entries of an exported file; `origin` is where those come from that were measured where it was written.

    Raises:
        ProfileError: the file cannot be read or holds anything that is no measurement.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read the profile {file}: {error}") from error
    name = origin.encode(errors="replace").decode()  # file names need not be text
    return [_from(group, name) for group in from_text(text, str(file))]


def to_text(groups: Iterable[Group]) -> str:
    """The groups as text, sorted by conditions and entries; equal groups give equal text."""
    ordered = sorted(groups, key=lambda group: tuple(vars(group.conditions).values()))
    blocks = ",\n".join(_block(group) for group in ordered)
    profiles = f"[\n{blocks}\n  ]" if blocks else "[]"
    return f'{{\n  "schema": {_json(SCHEMA)},\n  "profiles": {profiles}\n}}\n'


def from_text(text: str, where: str = "profile") -> list[Group]:
    """Read a profile; `where` names the source in errors.

    Raises:
        ProfileError: not JSON, another schema, or an entry with a missing, unknown or impossible field; names it.
    """
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{where} is not a profile: {error}; write one with `parplan profile --export`") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ProfileError(f"{where} has schema {found!r:.60}; this version of parplan reads {SCHEMA!r}")
    _check_keys(data, ("schema", "profiles"), where)
    items = _list(data["profiles"], f"{where}: profiles")
    groups = [_group(item, f"{where}: profile {number}") for number, item in enumerate(items, start=1)]
    _check_once([group.conditions for group in groups], where, "conditions")
    return groups


def _from(group: Group, origin: str) -> Group:
    parts = tuple(replace(part, origin=part.origin or origin) for part in group.parts)
    return replace(group, parts=parts, links=tuple(replace(x, origin=x.origin or origin) for x in group.links))


def _block(group: Group) -> str:
    conditions = _json(checked(vars(group.conditions), CONDITIONS, "conditions"))
    parts, links = _lines(PARTS, group.parts), _lines(LINKS, group.links)
    body = f'      "conditions": {conditions},\n      "parts": {parts},\n      "links": {links}'
    return f"    {{\n{body}\n    }}"


def _lines(table: Table[Entry], entries: Sequence[Kept[Entry]]) -> str:
    if not entries:
        return "[]"
    ordered = sorted(entries, key=lambda kept: table.key_of(kept.entry))
    lines = ",\n".join(f"        {_json(_entry_to_dict(table, kept))}" for kept in ordered)
    return f"[\n{lines}\n      ]"


def _entry_to_dict(table: Table[Entry], kept: Kept[Entry]) -> dict[str, Any]:
    row = dict(table.row(kept, table.word))
    if not row["origin"]:
        del row["origin"]
    if "signature" in row:
        row["signature"] = row["signature"].split("\n")  # a line of it per op: to be read
    return row


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"{key!r} appears twice")
        seen[key] = value
    return seen


def _group(item: Any, where: str) -> Group:
    item = _object(item, where)
    _check_keys(item, ("conditions", "parts", "links"), where)
    conditions = Conditions(**checked(_object(item["conditions"], f"{where}: conditions"), CONDITIONS, where))
    named = f"{where} ({conditions.describe()})"
    return Group(conditions, _entries(PARTS, item["parts"], named), _entries(LINKS, item["links"], named))


def _entries(table: Table[Entry], items: Any, where: str) -> tuple[Kept[Entry], ...]:
    numbered = enumerate(_list(items, f"{where}: {table.name}"), start=1)
    found = tuple(_entry(table, item, f"{where}, {table.word} {number}") for number, item in numbered)
    _check_once([table.key_of(kept.entry) for kept in found], where, table.word)
    return found


def _entry(table: Table[Entry], item: Any, where: str) -> Kept[Entry]:
    row = {"origin": "", **_object(item, where)}
    if "signature" in row:
        lines = _list(row["signature"], f"{where}: signature")
        if not lines or not all(isinstance(line, str) and "\n" not in line for line in lines):
            raise ProfileError(f"{where}: signature is {str(lines)[:60]}; expected a list of lines")
        row["signature"] = "\n".join(lines)
    return table.kept(row, where)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"{where} is {str(value)[:60]!r}; expected an object in braces")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"{where} is {str(value)[:60]!r}; expected a list")
    return value


def _check_keys(data: dict[str, Any], names: Sequence[str], where: str) -> None:
    faults = [f"unknown field {name!r}" for name in sorted(set(data) - set(names))]
    faults += [f"missing field {name!r}" for name in names if name not in data]
    if faults:
        raise ProfileError(f"{where}: {', '.join(faults)}; the fields are {', '.join(names)}")


def _check_once(keys: Sequence[Any], where: str, what: str) -> None:
    first: dict[Any, int] = {}
    for number, key in enumerate(keys, start=1):
        if (before := first.setdefault(key, number)) != number:
            raise ProfileError(f"{where}: {what} {number} is {what} {before} once more; leave one of them")
