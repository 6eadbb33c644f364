"""What processes tell each other before a step: how many samples each brings, and the seed of what they draw alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parplan.errors import RuntimeFailure
from parplan.layout import Grid
from parplan.runtime.calls import Call
from parplan.runtime.distributed import DistributedTransport
from parplan.runtime.programs import Captured
from parplan.runtime.transport import Transport

__all__ = ["agree"]


def agree(transport: Transport, call: Call, captured: Captured) -> tuple[int, ...]:
    """Samples per process of a step; what devices draw together gets rank 0's seed.

    Raises:
        RuntimeFailure: no process has a sample, or processes of one group brought different numbers.
    """
    samples = _samples(transport, call, captured)
    if captured.shares or transport.processes == 1:
        call.check(sum(samples))  # else a rank may have no samples, and does not know of the others'
    return samples


def _samples(transport: Transport, call: Call, captured: Captured) -> tuple[int, ...]:
    own = call.batch if call.batch is not None else 1
    seed = int(torch.randint(1 << 62, ()).item()) if captured.draws.any else 0
    if not isinstance(transport, DistributedTransport):
        captured.draws.seed = seed
        return (own,)
    if not captured.shares:
        return (own,) * transport.processes
    agreed = transport.gather(own, seed)
    captured.draws.seed = agreed[0][1]
    sizes = tuple(size for size, _ in agreed)
    if captured.groups is not None:
        _same_in_rows(captured.groups, sizes, call)
    return sizes


def _same_in_rows(groups: Grid, sizes: Sequence[int], call: Call) -> None:
    """Refuse groups that cannot have brought the same samples, and gradients that no rank has the whole of."""
    for row in range(groups.replicas):
        found = {rank: sizes[rank] for rank in groups.row(row)}
        if len(set(found.values())) > 1:
            told = ", ".join(f"rank {rank}: {size}" for rank, size in found.items())
            raise RuntimeFailure(
                f'with inputs="group" the shards of one replica bring the same samples, these brought {told}; let them '
                "read the same ones (parplan.PlanSampler with same_within_group=True)"
            )
    if any(tensor.requires_grad for tensor in call.tensors):
        raise RuntimeFailure('an input needs a gradient, of which each rank has a part only; compile with inputs="own"')
