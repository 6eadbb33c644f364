"""Cells that are not yet what they have to be, with the reason: expected to fail, and an error once they do not."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KNOWN_WRONG"]

# By pattern: cells ("one/*", "ranks/shards") and what is wrong in them.
KNOWN_WRONG: Mapping[str, Mapping[str, str]] = {}
