"""Cells that are not yet what they have to be, with the reason: expected to fail, and an error once they do not."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KNOWN_WRONG"]

_ONCE = "second derivatives count as zero where the gradient of a compiled model's inputs is not reached"
_SEQUENCE = "a plan that cuts the sequence refuses a call of a length that it does not divide, or of the last word"
_FEWER = "evaluation needs a parameter on fewer devices than training holds it on, and is refused"
_ROWS = "a result that no sample reaches, expanded to the batch, is refused as a parameter or differs"

# By pattern: cells ("one/*", "ranks/shards") and what is wrong in them.
KNOWN_WRONG: Mapping[str, Mapping[str, str]] = {
    "nano_gpt": dict.fromkeys(("one/shards", "one/mixed", "ranks/shards", "ranks/mixed"), _SEQUENCE),
    "segment_memory": dict.fromkeys(("one/shards", "one/mixed", "ranks/shards", "ranks/mixed"), _SEQUENCE),
    "crf_tagger": {"ranks/shards": _FEWER, "ranks/mixed": _FEWER},
    "physics_informed": {"*": _ONCE},
    "penalised_critic": {"*": _ONCE},
    "task_heads": {"ranks/*": "a layer that is first called after the first step is refused as no parameter"},
    "proximal_policy": {"*": _ROWS},
}
