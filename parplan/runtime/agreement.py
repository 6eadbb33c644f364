"""What processes tell each other before a step: how many samples each brings, and the seed of what they draw alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parplan.errors import RuntimeFailure
from parplan.layout import Grid
from parplan.runtime.calls import Call
from parplan.runtime.distributed import DistributedTransport
from parplan.runtime.programs import Captured
from parplan.runtime.transport import Transport

__all__ = ["Agreement", "agree"]


@dataclass(frozen=True)
class Agreement:
    """What processes know of each other before a step.

    Args:
        samples: per process.
        wishes: which processes want to compare the step with the plain module; None where they did not tell.
    """

    samples: tuple[int, ...]
    wishes: tuple[bool, ...] | None


def agree(transport: Transport, call: Call, captured: Captured, wish: bool = False) -> Agreement:
    """Samples per process of a step; what devices draw together gets rank 0's seed.

    Args:
        wish: whether this process wants to compare the step with the plain module.

    Raises:
        RuntimeFailure: no process has a sample, or processes of one group brought different numbers.
    """
    agreement = _agreement(transport, call, captured, wish)
    if captured.shares or transport.processes == 1:
        call.check(sum(agreement.samples))  # else a rank may have no samples, and does not know of the others'
    return agreement


def _agreement(transport: Transport, call: Call, captured: Captured, wish: bool) -> Agreement:
    own = call.batch if call.batch is not None else 1
    seed = int(torch.randint(1 << 62, ()).item()) if captured.draws.any else 0
    if not isinstance(transport, DistributedTransport):
        captured.draws.seed = seed
        return Agreement((own,), (wish,))
    if not captured.shares:
        return Agreement((own,) * transport.processes, None)
    agreed = transport.gather(own, seed, int(wish))
    captured.draws.seed = agreed[0][1]
    sizes = tuple(size for size, _, _ in agreed)
    if captured.groups is not None:
        _same_in_rows(captured.groups, sizes, call)
    return Agreement(sizes, tuple(bool(wishes) for _, _, wishes in agreed))


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
