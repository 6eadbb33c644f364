"""Reports that were kept: read from the JSON that `--json` wrote, and checked against its JSON Schema.

The checker knows the part of the standard that report.schema.json uses, so that no package is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from parplan.errors import ParplanError, PlanError
from parplan.fields import parse_json, read_file, shown
from parplan.plan import Plan
from parplan.report.as_json import SCHEMA

__all__ = ["SavedPlan", "json_schema", "load_plan_or_report", "load_report", "violations"]

TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip
WRITE = "write one with `parplan analyze --json`"


@dataclass(frozen=True)
class SavedPlan:
    """A plan from a file, with the report it comes from if the file is one; `name` is the file's."""

    name: str
    plan: Plan
    report: Mapping[str, Any] | None = None


@cache
def json_schema() -> Mapping[str, Any]:
    """The JSON Schema of `parplan.report/1`."""
    text = Path(__file__).with_name("report.schema.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


def violations(value: Any, schema: Mapping[str, Any], where: str = "the report") -> Iterator[str]:
    """Differences of a value from its schema, a sentence each.

    Knows type, enum, minimum, items, properties, required, additionalProperties and $ref to this schema's $defs.
    """
    if "$ref" in schema:
        schema = json_schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{where} is {shown(value)}, not {' or '.join(kinds)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {shown(value)}, not {' or '.join(map(repr, schema['enum']))}"
    if "minimum" in schema and value is not None and value < schema["minimum"]:
        yield f"{where} is {shown(value)}, below {schema['minimum']}"
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from violations(item, schema["items"], f"{where}[{index}]")
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        yield from (f"{where} lacks {name!r}" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            inside = known.get(name, others)
            if inside is False:
                yield f"{where} has an unknown {shown(name)}"
            elif inside is not True:
                yield from violations(item, inside, f"{where}.{name}")


def _is(value: Any, kind: str) -> bool:
    """Whether a value has a type of JSON; true and false are no numbers."""
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def load_report(path: str | Path) -> Mapping[str, Any]:
    """A report from the file that `--json` wrote.

    Raises:
        ParplanError: no such file, not JSON, or not what the schema says.
    """
    return _checked(_parsed(path), path)


def load_plan_or_report(path: str | Path) -> SavedPlan:
    """A plan from the file that `--out` wrote, or that of a report.

    Raises:
        ParplanError: the file is neither.
    """
    data = _parsed(path)
    if not (isinstance(data, dict) and data.get("schema") == SCHEMA):
        return SavedPlan(str(path), Plan.load(path))
    report = _checked(data, path)
    return SavedPlan(str(path), Plan.from_json(json.dumps(report["plan"]), f"the plan in {path}"), report)


def _parsed(path: str | Path) -> Any:
    text = read_file(path, "report", ParplanError, WRITE)
    try:
        return parse_json(text)
    except ValueError as error:
        raise PlanError(f"{path} is neither a plan nor a report: it is not JSON ({error})") from error


def _checked(data: Any, path: str | Path) -> Mapping[str, Any]:
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ParplanError(f"{path} is no report: its schema is not {SCHEMA!r}; {WRITE}")
    wrong = next(violations(data, json_schema(), str(path)), None)
    if wrong is not None:
        raise ParplanError(f"{wrong}; {WRITE}")
    return data
