"""All-gather of the facts that have to be the same in all processes when a model is compiled: versions, model, options.

Processes that differ in one of them meet in collectives that do not fit together: gloo aborts one of them without an
error, and the others wait for it until the group's timeout. So these are compared first, in texts that any version
reads.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import zip_longest

import torch
from torch import nn

from parplan.errors import RuntimeFailure
from parplan.runtime.transport.base import Transport

__all__ = ["check_same_start"]

_EXCHANGING = "comparing versions, model and options"
_SHOWN = 60  # characters of a fact; of longer ones the first line that differs is shown
_REMEDIES = {
    "version of parplan": "install the same on every host",
    "version of torch": "install the same on every host",
    "model": "build the same one on every rank",
    "plan": "load the same file on every rank",
    "start": "give the same weights on every rank",
}


def check_same_start(module: nn.Module, transport: Transport, given: Mapping[str, object]) -> None:
    """Refuse processes that compile different models, with different options, or by different versions.

    Args:
        given: options and other facts that decide which values processes exchange, by name; an error that is one is
            raised, if all have it.

    Raises:
        RuntimeFailure: on every rank, naming the first fact that differs, its values and their ranks.
    """
    facts = {
        "version of parplan": str(import_module("parplan").__version__),
        "version of torch": torch.__version__.partition("+")[0],  # builds for other accelerators compute alike
        "model": _model_text(module),
        **{name: str(value) for name, value in given.items()},
    }
    short = {name: text if len(text) <= _SHOWN else _digest(text) for name, text in facts.items()}
    told: list[dict[str, str]] = [
        json.loads(text) for text in transport.gather_texts(json.dumps(short), name=_EXCHANGING)
    ]
    names = dict.fromkeys(name for one in told for name in one)
    differing = next((name for name in names if len({one.get(name) for one in told}) > 1), None)
    failures = (value for value in given.values() if isinstance(value, Exception))
    if differing is None and (failure := next(failures, None)) is not None:
        raise failure
    if differing is None:
        return
    if any(differing not in one for one in told):
        whole = [str(one.get(differing, "unknown")) for one in told]
    else:
        whole = transport.gather_texts(facts[differing], name=_EXCHANGING)
    raise RuntimeFailure(
        f"rank {transport.rank}: all ranks have to compile the same, and the {differing} differs: "
        f"{_first_difference(whole)}; {_REMEDIES.get(differing, 'give the same on every rank')}"
    )


def _model_text(module: nn.Module) -> str:
    """Names, types and shapes of the parameters and buffers, one a line."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return "\n".join(
        f"{name}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}{'' if t.requires_grad else ' (no gradient)'}"
        for name, t in named
    )


def _first_difference(texts: Sequence[str]) -> str:
    """The first line that differs between ranks, as each has it."""
    lines = zip_longest(*(text.splitlines() for text in texts), fillvalue="nothing")
    found = next((own for own in lines if len(set(own)) > 1), tuple(texts))
    ranks: dict[str, list[str]] = defaultdict(list)
    for rank, line in enumerate(found):
        ranks[line.strip().rstrip(",") or "nothing"].append(str(rank))
    return ", ".join(f"{line} on rank{'s' * (len(own) > 1)} {', '.join(own)}" for line, own in ranks.items())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
