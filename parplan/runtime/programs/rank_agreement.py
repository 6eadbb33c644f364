"""All-gather of the facts that processes need of each other before a step.

How many samples each brings, the seed of what they draw alike, and a checksum of inputs without samples: of these a
plan that moves values between processes takes some process's, so they have to be the same on all.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from parplan.errors import RuntimeFailure
from parplan.runtime.calls import ModelCall, digest
from parplan.runtime.programs.program_cache import Captured
from parplan.runtime.transport.base import Transport

__all__ = ["Agreement", "come_together", "exchange_facts"]

_SHOWN = 4  # differences between ranks that an error names


@dataclass(frozen=True)
class Agreement:
    """The facts that processes know of each other before a step.

    Args:
        samples: per process.
        wishes: which processes want to compare the step with the plain module; None where they did not tell.
    """

    samples: tuple[int, ...]
    wishes: tuple[bool, ...] | None


def come_together(transport: Transport, training: bool) -> None:
    """Tell the other processes of a call in which all exchange values; without gradients wait for them, too.

    Raises:
        RankAlone: another process is somewhere else.
    """
    gradients = torch.is_grad_enabled()
    what = f"in {_mode(training)}" + ("" if gradients else " without gradients")
    remedy = (
        "in such a call processes exchange values: let every rank make it (move it out of `if rank == 0:`), or take "
        "plain = model.plain() on all ranks, a copy with whole weights, and run that where you like"
    )
    transport.come_together(what, remedy, gradients)


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def exchange_facts(
    transport: Transport,
    call: ModelCall,
    captured: Captured,
    wish: bool = False,
    refused: bool = False,
    serves: Callable[[int], bool] | None = None,
) -> Agreement:
    """Samples per process of a step; what devices draw together gets rank 0's seed.

    Args:
        wish: whether this process wants to compare the step with the plain module.
        refused: whether the model refuses this process's inputs: it raises an error of its own then.
        serves: whether the capture is that of a number of samples; asked where processes bring different ones.

    Raises:
        RuntimeFailure: no process has a sample, processes of one group brought different numbers, or the model refuses
            another process's inputs.
    """
    own = call.batch if call.batch is not None else 1
    seeded = captured.seeded
    seed = seeded.local_seed = int(torch.randint(1 << 62, ()).item()) if seeded.any or seeded.apart else 0
    if transport.processes == 1:
        seeded.seed = seed
        call.check(own)
        return Agreement((own,), (wish,))
    if not captured.exchanges:
        return Agreement((own,) * transport.processes, None)  # a rank may have no samples, and not know the others'
    graph, reads = captured.graph, captured.graph.reads
    given = zip(graph.user_inputs, call.leaves, strict=True) if captured.compares else ()
    shared = {str(n): leaf for n, leaf in given if n in captured.shared_inputs and isinstance(leaf, Tensor)}
    checksum = _checksum(shared, call) if captured.compares else 0
    kind = zlib.crc32(repr(call.signature).encode())
    agreed = transport.gather(own, seed, kind, reads.digest, int(refused), checksum, int(wish))
    refusing = [str(rank) for rank, (_, _, _, _, refuses, *_) in enumerate(agreed) if refuses]
    if refusing and not refused:
        raise RuntimeFailure(
            f"rank {transport.rank}: the model refuses the inputs of rank {', '.join(refusing)}, whose error says why; "
            "the step has not run on any rank"
        )
    if len({signature for _, _, signature, *_ in agreed}) > 1:
        _refuse_other_inputs(transport, captured, call)
    seeded.seed = agreed[0][1]
    sizes = tuple(size for size, *_ in agreed)
    if len({reading for _, _, _, reading, *_ in agreed}) > 1:
        _refuse_other_reads(transport, captured)
    _check_shared(transport, captured, call, shared, len({other for *_, other, _ in agreed}) == 1)
    if captured.groups is None:
        _check_branches(captured, sizes, serves)
    else:
        # Groups that cannot have brought the same samples, and gradients that no rank has the whole of, are refused.
        for row in map(captured.groups.row, range(captured.groups.replicas)):
            if len({sizes[rank] for rank in row}) > 1:
                told = ", ".join(f"rank {rank}: {sizes[rank]}" for rank in row)
                raise RuntimeFailure(
                    f'with inputs="group" the shards of one replica bring the same samples, these brought {told}; let '
                    "them read the same ones (parplan.PlanSampler with same_within_group=True)"
                )
        if any(tensor.requires_grad for tensor in call.tensors):
            raise RuntimeFailure(
                'an input needs a gradient, of which each rank has a part only; compile with inputs="own"'
            )
    call.check(sum(sizes))
    return Agreement(sizes, tuple(bool(wishes) for *_, wishes in agreed))


def _check_shared(
    transport: Transport, captured: Captured, call: ModelCall, shared: Mapping[str, Tensor], alike: bool
) -> None:
    """Refuse inputs without samples that are not `alike` on all processes, or whose gradients lie there in parts."""
    model = captured.graph.model
    if not alike:
        names = " and ".join(map(repr, shared)) or "an argument that is no tensor"
        apart = 'compile with inputs="own"'
        if captured.graph.batch is not None:
            apart = f"give it one entry per sample (along dimension {call.dim}), "
            apart += "or use a plan in which processes exchange gradients alone"
        raise RuntimeFailure(
            f"{names} of {model} has no samples and differs between processes, while {captured.compares}; bring the "
            f"same on all processes, or {apart}"
        )
    trained = (name for name, leaf in shared.items() if leaf.requires_grad and torch.is_grad_enabled())
    for name in trained:
        if captured.splits_gradient(name, transport.processes):
            raise RuntimeFailure(
                f"{name!r} of {model} has no samples and needs a gradient, of which each process would have a part "
                "only under this plan; bring it detached, or make it a parameter of the model"
            )


def _refuse_other_inputs(transport: Transport, captured: Captured, call: ModelCall) -> NoReturn:
    """Raise the error of inputs that differ in more than their number of samples; every process has to call this."""

    def words(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return f"{leaf!r:.40}"
        shape = ["samples" if call.has_samples(leaf) and d == call.dim else str(n) for d, n in enumerate(leaf.shape)]
        needs = ", with a gradient" if leaf.requires_grad else ""
        return f"{str(leaf.dtype).removeprefix('torch.')} [{', '.join(shape)}]{needs}"

    names = [str(name) for name in captured.graph.user_inputs]
    names = names if len(names) == len(call.leaves) else [f"input {n}" for n, _ in enumerate(call.leaves)]
    differing = _differing(transport, dict(zip(names, map(words, call.leaves), strict=True)), "missing")
    told = [_on_ranks(repr(name), each) for name, each in differing.items()] or ["they are nested otherwise"]
    raise RuntimeFailure(
        f"rank {transport.rank}: inputs of {captured.graph.model} differ between processes in more than their number "
        f"of samples, while these exchange values under this plan: {'; '.join(told[:_SHOWN])}. Bring them alike (pad "
        'all to one length), or let processes exchange gradients alone: replicas of all layers, batch_norm="local", '
        'scalars="per_replica"'
    )


def _refuse_other_reads(transport: Transport, captured: Captured) -> NoReturn:
    """Raise the error of forwards that read other values; every process has to call this."""
    reads, mode = captured.graph.reads, ""  # no attribute has that path
    own = {mode: _mode(captured.graph.training), **{path: repr(value) for path, value in reads.told}}
    differing = _differing(transport, own, "not read")
    modes = differing.pop(mode, [])
    told = [", ".join(f"rank {rank} is in {one}" for rank, one in enumerate(modes))] if modes else []
    # That some ranks do not read an attribute follows from one that differs, or from the mode of a module.
    causes = {path: each for path, each in differing.items() if "not read" not in each}
    told += [_on_ranks(path, each) for path, each in (causes or ({} if told else differing)).items()]
    what = "; ".join(told[:_SHOWN]) + ("" if causes or modes else " (is a module in another mode there?)")
    raise RuntimeFailure(
        f"rank {transport.rank}: the forward reads attributes of the model that are not the same on all ranks; set "
        f"them alike: {what}"
    )


def _differing(transport: Transport, own: Mapping[str, str], absent: str) -> dict[str, list[str]]:
    """Per name that is not the same on all ranks, each rank's, or `absent`; every process has to call this."""
    found = [json.loads(text) for text in transport.gather_texts(json.dumps(own))]
    names = dict.fromkeys(name for one in found for name in one)
    each = {name: [one.get(name, absent) for one in found] for name in names}
    return {name: values for name, values in each.items() if len({*values}) > 1}


def _on_ranks(name: str, each: Sequence[str]) -> str:
    return f"{name} is " + ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(each))


def _check_branches(captured: Captured, sizes: Sequence[int], serves: Callable[[int], bool] | None) -> None:
    """Refuse numbers of samples for which ranks have captured different branches.

    Each has captured for as many samples in all as if every rank brought as many as itself. All look at all of these
    numbers and at the sum, so that all refuse.
    """
    supposed = {size * len(sizes) for size in sizes if size}
    graph = captured.graph  # one that is bound to its samples is made for as many as there are
    for batch in sorted({*supposed, sum(sizes)}) if len(supposed) > 1 and not graph.fixed_batch else ():
        if serves is not None and not serves(batch):
            line = graph.size_branches.turned(batch) or graph.size_branches.line
            raise RuntimeFailure(
                f"{graph.model} takes another branch for other numbers of samples, of which the processes bring "
                f"{', '.join(map(str, sizes))}; bring as many on each\n  at {line}"
            )


def _checksum(shared: Mapping[str, Tensor], call: ModelCall) -> int:
    """A checksum of inputs that have to be the same on all processes."""
    found = hashlib.blake2b(digest_size=7)
    found.update(repr([leaf for leaf in call.leaves if not isinstance(leaf, Tensor)]).encode())
    for tensor in shared.values():
        found.update(digest(tensor))
    return int.from_bytes(found.digest(), "big")
