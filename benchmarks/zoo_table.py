"""The rows of benchmarks/zoo.py as Markdown: figures of each group, and a line for each model."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.zoo import DEVICES, names
from benchmarks.zoo_configurations import HEADS

__all__ = ["GROUPS", "counts", "groups", "remark", "table", "write_table"]

GROUPS = ("causal", "seq2seq", "masked", "images", "timm")


def groups(targets: Iterable[str]) -> dict[str, str]:
    """The group of each target: the head that its model has."""
    from transformers.models.auto import modeling_auto

    # The later wins: of two heads a model has the first, but an encoder with a decoder is built as one.
    order = [*reversed(list(zip(HEADS, GROUPS, strict=False))), (HEADS[1], "seq2seq")]
    heads = {kind: group for head, group in order for kind in getattr(modeling_auto, head, {})}
    return {one: "timm" if one.startswith("timm") else heads[one.partition(":")[2]] for one in targets}


def counts(rows: Mapping[str, Any]) -> dict[str, str]:
    """Figures of a group of rows, by the words of the table's head."""
    built = [row for row in rows.values() if row["status"] != "not built"]
    planned = [row for row in built if "products" in row]
    moe = [row for row in planned if "experts" in row]
    verified = [row for row in planned if any(one["passed"] for one in row.get("verified", {}).values())]
    return {
        "run": str(len(rows)),
        "built": str(len(built)),
        "planned": str(len(planned)),
        "all products cut": str(sum(not row["uncut"] for row in planned)),
        "experts cut": f"{sum(bool(row['experts_cut']) for row in moe)} of {len(moe)}",
        "verified": str(sum(row["status"] != "WRONG" for row in verified)),
        "wrong": str(sum(row["status"] == "WRONG" for row in built)),
        "refused": str(sum(row["status"] == "refused" for row in built)),
        "crashed or ended": str(sum(row["status"] in ("CRASHED", "ENDED") for row in built)),
    }


def remark(row: Mapping[str, Any]) -> str:
    """The words of one row: its refusal, or the parts that stay whole and why."""
    if "products" not in row:
        return re.sub(r"^transformers:/\S+: ", "", str(row["detail"])).split(" at /")[0]
    said = [f"{count} {'of odd sizes' if why == 'sizes' else why} whole" for why, count in row["kept_whole"].items()]
    kinds = Counter(one.split(": ")[1].split(" ")[0] for one in row["uncut"])
    said += [f"{count} {op} not cut in {DEVICES}" for op, count in kinds.items()]
    layers = [one for one in row["whole"] if not one.endswith("(reduce)")]
    said += [f"no replicas of {len(layers)} layers, such as {layers[0]}"] if layers else []
    said += [f"no row for {', '.join(row['unknown'])}"] if row["unknown"] else []
    for plan, one in row.get("verified", {}).items():
        said += [] if one["passed"] else [f"{plan}: {one.get('detail', '')}"]
    return "; ".join(said)


def table(rows: Mapping[str, Any], group_of: Mapping[str, str]) -> str:
    """The rows as Markdown: figures of each group, then a line for each model."""
    by_group = {group: {k: row for k, row in sorted(rows.items()) if group_of[k] == group} for group in GROUPS}
    figures = {group: counts(own) for group, own in by_group.items() if own}
    heads = list(next(iter(figures.values())))
    lines = [f"| | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    lines += [f"| {group} | {' | '.join(own.values())} |" for group, own in figures.items()]
    for group in figures:
        lines += ["", f"## {group}", "", "| model | parameters | products cut | verified | what stays whole, and why |"]
        lines += ["| --- " * 5 + "|"]
        for target, row in by_group[group].items():
            size = f"{row['parameters']:,}" if "parameters" in row else "-"
            cut = f"{row['products'] - len(row['uncut']) - sum(row['kept_whole'].values())} of {row['products']}" \
                if "products" in row else row["status"]  # fmt: skip
            passed = [one["passed"] for one in row.get("verified", {}).values()]
            word = "-" if not passed or None in passed else "yes" if all(passed) else "NO"
            lines.append(f"| {target.partition(':')[2]} | {size} | {cut} | {word} | {remark(row).replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def write_table(path: Path, rows: Mapping[str, Any]) -> None:
    """Replace everything behind the marker in a file by the table."""
    before = path.read_text(encoding="utf-8").partition(MARKER)[0]
    versions = [f"{one} {version(one)}" for one in ("torch", "transformers", "timm")]
    ran = f"{len(rows)} of {len(names())} targets were run"
    said = f"{ran}, on {time.strftime('%Y-%m-%d')} with {', '.join(versions)}.\n"
    path.write_text(f"{before}{MARKER}\n\n{said}\n{table(rows, groups(rows))}", encoding="utf-8")


MARKER = "<!-- table: python -m benchmarks.zoo --json FILE --table docs/models.md -->"
