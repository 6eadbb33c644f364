"""Cells that are not yet what they have to be, with the reason: expected to fail, and an error once they do not."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KNOWN_WRONG"]

_SEGFAULT = "a plain tensor that is given a cut one (`plain.data = cut`) ends the process"

# By pattern: cells ("one/*", "ranks/shards") and what is wrong in them.
KNOWN_WRONG: Mapping[str, Mapping[str, str]] = {
    "mean_teacher": {"ranks/shards": _SEGFAULT, "ranks/mixed": _SEGFAULT},
    "features_method": {"ranks/*": "batch norm in a method takes each process's own samples, without a word"},
    "task_heads": {"ranks/*": "a layer that is first called after the first step is refused as no parameter"},
}
