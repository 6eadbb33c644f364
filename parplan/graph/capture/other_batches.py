"""The captured call exported with other numbers of samples: with twice as many, say, and with a symbol for them.

Two numbers of samples show how each size grows. The symbol shows under which conditions the forward computes this.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parplan.compat import symbolic_sizes
from parplan.errors import CaptureError
from parplan.graph.attributes.containers import ContainerResults
from parplan.graph.attributes.size_branches import SizeBranches
from parplan.graph.capture.block_copies import UnequalBlocks
from parplan.graph.capture.equal_blocks import EqualBlocks
from parplan.graph.capture.model_export import Exported, ExportRequest, export_call
from parplan.graph.user_line import is_users, source_line

__all__ = ["Twin", "at_another_batch", "export_blocks"]

_FURTHER = 8  # times the captured batch, up to which a number of samples is looked for that takes the same branches


@dataclass(frozen=True)
class Twin:
    """The same call exported with another number of samples.

    Args:
        samples: leaves that hold samples.
        export: None where there is none; `errors` says why.
        batch: its samples.
        branches: of the forward on the number of samples, without the digest of its ops.
    """

    samples: frozenset[int]
    export: Exported | None = None
    batch: int = 0
    errors: tuple[str, ...] = ()
    branches: SizeBranches = field(default_factory=SizeBranches)


def at_another_batch(call: ExportRequest, first: Exported) -> Twin:
    """The capture that shows which leaves hold samples, and what changes with their number.

    Usually all leaves of the batch's size do. One may have that size by chance (a bias beside the
    samples): then the model does not fit a larger batch of it, and is tried with that leaf unchanged.
    """
    leading, *others = sorted(call.alike)
    without = [call.alike - {other} for other in others]
    batch = call.batch or 0
    # A smaller batch is tried last: there may be no room for twice the batch, which says nothing about replicas.
    batches = [2 * batch, *([batch // 2] if batch > 3 else [])]
    twin = _twin(call, first, batches, [call.alike, *without, frozenset({leading})])
    if twin.export is None:
        return twin
    branches = _size_branches(call, first, twin)
    if not twin.export.has_ops_of(first):  # it takes another branch: a batch on the side of the captured one is better
        nearby = [n for n in (batch // 2, batch + 1, *range(3 * batch, _FURTHER * batch, batch)) if n > 1]
        likely = nearby[:2] if branches.unknown else [n for n in nearby if not branches.turned(n)][:1]
        tried = (_twin(call, first, [n], [twin.samples]) for n in likely if n != twin.batch)
        twin = next((one for one in tried if one.export is not None and one.export.has_ops_of(first)), twin)
    return replace(twin, branches=replace(branches, twin=twin.batch))


def _twin(call: ExportRequest, first: Exported, batches: Sequence[int], leaves: Sequence[frozenset[int]]) -> Twin:
    """The first export that succeeds with one of `batches` and samples in one of the sets of leaves."""
    reasons = []
    for batch in batches:
        for samples in dict.fromkeys(leaves):
            try:
                made = _export_again(call, first, call.resized(samples, batch))
            except CaptureError as error:
                reasons.append(f"for {batch}: {error}")
                continue
            return Twin(samples, made, batch)
    return Twin(call.alike, errors=tuple(reasons))


def export_blocks(call: ExportRequest, given: Any, known: Collection[str] = ()) -> Exported | None:
    """An export that traces few of many blocks of one structure; None where it has to be one in full.

    Args:
        given: (args, kwargs).
        known: paths of blocks that another export of the call has copied.
    """
    if call.numbers or not (blocks := EqualBlocks(call.model, known)).blocks:
        return None
    try:
        made = export_call(call, given, blocks)
    except (CaptureError, UnequalBlocks):
        return None
    # Nobody sees copied blocks run code of the user's, read tensors on the host, change caches or store values.
    unseen = made.recorder.host_reads.any or made.containers != ContainerResults()
    seen = not (made.sites or made.opaque.sites or made.opaque.checkpoints or unseen)
    return made if seen and blocks.stores_alike(made.recorder.stored) else None


def _export_again(call: ExportRequest, first: Exported, given: Any) -> Exported:
    """The export with other sizes: of blocks that the first one has copied one is traced."""
    made = export_blocks(call, given, first.copied) if first.copied else None
    return made or export_call(call, given)


def _size_branches(call: ExportRequest, first: Exported, twin: Twin) -> SizeBranches:
    """The conditions of the forward on the number of samples, from an export with a symbol for it."""
    assert twin.export is not None
    one, other = (made.recorder.host_reads for made in (first, twin.export))
    batch = call.batch or 1
    if one.sizes.keys() == other.sizes.keys():  # its own code reads none that tells of the samples
        return SizeBranches(batch, not_one=one.measured)
    file, number, _ = next(iter(one.sizes.keys() ^ other.sizes.keys()))
    first_read = source_line(file, number)
    if batch > 1:  # the symbol stands for 2 and more samples
        try:
            with symbolic_sizes(lambda frame: is_users(frame.f_code.co_filename)):
                given = call.resized(twin.samples, call.batch)
                made = _export_again(replace(call, symbolic=twin.samples), first, given)
            if made.has_ops_of(first):
                return SizeBranches.of(made.program, batch, first_read)
        except CaptureError:
            pass
    return SizeBranches(batch, unknown=first_read)
