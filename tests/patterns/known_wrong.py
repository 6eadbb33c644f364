"""Cells that are not yet what they have to be, with the reason: expected to fail, and an error once they do not."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KNOWN_WRONG"]

_DATA = "`.data` in the forward cannot be captured, and the error names neither it nor a remedy"
_SEGFAULT = "a plain tensor that is given a cut one (`plain.data = cut`) ends the process"
_GRADIENTS = "a copy of a cut parameter has its gradient, too"
_ROWS = "a result that no sample reaches, expanded to the batch, is refused as a parameter or differs"

# By pattern: cells ("one/*", "ranks/shards") and what is wrong in them.
KNOWN_WRONG: Mapping[str, Mapping[str, str]] = {
    "vq_vae": {"*": _DATA},
    "glow": {"*": _DATA},
    "pixel_cnn": {"*": _DATA},
    "mean_teacher": {"ranks/shards": _SEGFAULT, "ranks/mixed": _SEGFAULT},
    "features_method": {"ranks/*": "batch norm in a method takes each process's own samples, without a word"},
    "running_moments": {"*": "a write to a list of buffers ends in an AttributeError"},
    "pseudo_labels": {"ranks/shards": _GRADIENTS, "ranks/mixed": _GRADIENTS},
    "task_heads": {"ranks/*": "a layer that is first called after the first step is refused as no parameter"},
    "proximal_policy": {"*": _ROWS},
}
