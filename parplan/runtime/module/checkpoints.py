"""Checkpoints in one file: replaced atomically, verified by a checksum, read without running code from the file.

The file is what `torch.save` writes, whole tensors under the plain model's names whatever the plan, and one line more:
the SHA-256 of all before it. `torch.load` reads it too. docs/checkpoints.md has the other ways to save.
"""

from __future__ import annotations

import io
import os
import pickle
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from parplan.errors import CheckpointError, RankAloneWarning
from parplan.files import checked_digest, replacing, write_digest
from parplan.runtime.compat import default_store
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.transport.distributed import explained
from parplan.runtime.transport.rendezvous import RANK_WAIT, wait_s

__all__ = ["PathLike", "group_of", "load_checkpoint", "save_checkpoint"]

_CALLS = defaultdict[str, "count[int]"](count)
"""Numbers for the calls of this process, by kind and group."""

PathLike = str | os.PathLike[str]


def save_checkpoint(path: PathLike, /, **parts: Any) -> None:
    """Write `parts` to one file in place of an older one, which stays if anything fails or the process is killed.

        parplan.save_checkpoint("run.pt", model=model, optimizer=optimizer, epoch=3)

    Under torchrun every rank has to call this, with the same parts, and rank 0 writes.

    Args:
        parts: whatever has a `state_dict()` is saved by it; anything else is data: tensors, numbers, texts, and lists,
            tuples and dictionaries of them.

    Raises:
        CheckpointError: on every rank, if the file cannot be written, or a part holds more than data.
    """
    states = {
        name: part.state_dict() if callable(getattr(part, "state_dict", None)) else part for name, part in parts.items()
    }
    ranks = _Ranks(parts.values())
    trouble = ""
    if ranks.own == 0:
        try:
            _write(path, states)
        except CheckpointError as error:
            trouble = str(error)
    ranks.raise_any(f"saving {path}", trouble)


def load_checkpoint(path: PathLike, /, **parts: Any) -> dict[str, Any]:
    """Load a file of `save_checkpoint` into `parts`, whatever the plan and the number of processes that wrote it.

        epoch = parplan.load_checkpoint("run.pt", model=model, optimizer=optimizer)["epoch"]

    Under torchrun every rank has to call this, with the same parts, and every rank reads the file.

    Args:
        parts: each takes what was saved under its name by its `load_state_dict()`.

    Returns:
        What the file holds under other names.

    Raises:
        CheckpointError: on every rank, if the file cannot be read by one of them, is damaged, holds more than data, or
            lacks one of `parts`; nothing is loaded then.
    """
    for name, part in parts.items():
        if not callable(getattr(part, "load_state_dict", None)):
            raise CheckpointError(
                f"{name}, of type {type(part).__name__}, has no load_state_dict(); leave it out, and take it from "
                "what load_checkpoint returns"
            )
    ranks = _Ranks(parts.values())
    states: dict[str, Any] = {}
    digest = trouble = ""
    try:
        digest, states = _read(path)
        missing = [name for name in parts if name not in states]
        if missing:
            raise CheckpointError(f"{path} holds {_listed(states)}; it has no {_listed(missing)}")
    except CheckpointError as error:
        trouble = str(error)
    ranks.raise_any(f"loading {path}", trouble, digest)
    for name, part in parts.items():
        part.load_state_dict(states.pop(name))
    return states


def group_of(parts: Iterable[Any]) -> tuple[bool, dist.ProcessGroup | None]:
    """Whether several processes save `parts` together, and their group; None for the default one."""
    groups = [part.process_group for part in parts if isinstance(part, Compiled)]
    group = groups[0] if groups else None
    return group is not None or (dist.is_available() and dist.is_initialized()), group


class _Ranks:
    """The processes that save or load together.

    Attributes:
        own: the rank of this one.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self._several, self._group = group_of(parts)
        self.own = dist.get_rank(self._group) if self._several else 0

    def raise_any(self, step: str, trouble: str, digest: str = "") -> None:
        """Raise on every rank what is in the way of one of them, or that they read different files."""
        told = [(trouble, digest)]
        if self._several:
            self._warn_alone(step)
            told = [("", "")] * dist.get_world_size(self._group)
            with explained(step, self.own):
                dist.all_gather_object(told, (trouble, digest), self._group)
        for rank, (reason, _) in enumerate(told):
            if reason:
                raise CheckpointError(f"rank {rank}: {reason}" if self._several else reason)
        differing = [rank for rank, (_, other) in enumerate(told) if other != told[0][1]]
        if differing:
            raise CheckpointError(
                f"{step}: ranks {', '.join(map(str, differing))} read another file of that name than rank 0; put it "
                "where all processes read the same one"
            )

    def _warn_alone(self, step: str) -> None:
        """On rank 0, wait for the others, and say after some seconds that they have to come: `if rank == 0: save(...)`
        would end at the group's timeout, half an hour later, without a word until then. Others wait as it writes."""
        group = self._group or dist.group.WORLD
        assert group is not None  # there are several processes
        # By kind and number of the call: paths may differ, as rank 0 alone writes.
        kind = f"parplan/{step.partition(' ')[0]}/{group.group_name}"
        key, ranks = f"{kind}/{next(_CALLS[kind])}", dist.get_world_size(self._group)
        try:
            store, limit = default_store(), wait_s()
            begin, there = time.monotonic(), store.add(key, 1)
            while self.own == 0 and there < ranks and time.monotonic() - begin < limit:
                time.sleep(0.01)
                there = store.add(key, 0)
        except (RuntimeError, ValueError):  # the group or its store has gone: collectives say so
            return
        if self.own == 0 and there < ranks:
            warnings.warn(
                f"{step}: {there} of {ranks} ranks have come within {limit:g} s; every rank has to call it, with "
                f"the same parts, also where rank 0 alone writes ({RANK_WAIT} sets how long)",
                RankAloneWarning,
                stacklevel=4,
            )


def _write(path: PathLike, states: Mapping[str, Any]) -> None:
    try:
        with replacing(path) as file:
            torch.save(dict(states), file)
            file.flush()
            if unsafe := _unsafe(file.name):
                holding = []
                for name, state in states.items():
                    torch.save(state, buffer := io.BytesIO())
                    buffer.seek(0)
                    holding += [name] if _unsafe(buffer) else []
                raise CheckpointError(
                    f"{_listed(holding)} cannot be saved: loading {_listed(unsafe)} would run code from the file; save "
                    "tensors, numbers, texts, and lists, tuples and dictionaries of them"
                )
            write_digest(file)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot write {path}: {_reason(error)}") from error


def _read(path: PathLike) -> tuple[str, dict[str, Any]]:
    """The file's checksum and what it holds."""
    try:
        with open(path, "rb") as file:
            digest = checked_digest(file, path)
            if digest is None:
                raise CheckpointError(
                    f"{path} does not end with a checksum: it is truncated, or was not written by save_checkpoint "
                    "(what torch.save wrote, torch.load reads)"
                )
            file.seek(0)
            return digest, torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds more than data, and nothing of it is loaded: {_reason(error)}") from error
    except Exception as error:  # no such file, or no memory for it: the other ranks wait to hear of it
        raise CheckpointError(f"cannot read {path}: {_reason(error)}") from error


def _unsafe(file: str | BinaryIO) -> list[str]:
    """Names in a file of `torch.save` that only running code could load."""
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))


def _reason(error: BaseException) -> str:
    """The operating system's reason, where there is one: torch reports a full disk as its own error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
