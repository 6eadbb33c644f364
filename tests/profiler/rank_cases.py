"""What each of a few processes checks while they measure together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from parplan.cost_models.measured import AGREEMENT, BATCH_NORM, batch_norm_s
from parplan.cost_models.profile.records import SessionProfile
from parplan.layout import pieces
from parplan.profiler import communication, runtime_costs
from parplan.profiler.communication import KINDS, measure_links
from parplan.profiler.ranks import Ranks
from parplan.profiler.runtime_costs import RuntimeCosts
from parplan.runtime.transport.distributed import DistributedTransport

__all__ = ["CASES"]

CPU = torch.device("cpu")
SIZES = (1 << 10, 1 << 13)


def ranks_agree(rank: int, ranks: int) -> None:
    """Votes, means and maxima are the same everywhere, of all or of the first few."""
    group = Ranks(ranks, CPU)
    assert group.member
    assert group.any(rank == 1)
    assert not group.any(False)
    assert group.mean([float(rank), 1.0]) == [(ranks - 1) / 2, 1.0]
    assert group.max(float(rank)) == ranks - 1
    one = Ranks(1, CPU)
    assert one.member == (rank == 0)
    if one.member:
        assert one.any(True)
        assert not one.any(False)
        assert one.mean([5.0]) == [5.0]


def links_are_measured_once(rank: int, ranks: int) -> None:
    """All kinds and sizes; what is known is left alone unless asked for again."""
    transport, group, profile = DistributedTransport(CPU), Ranks(ranks, CPU), SessionProfile()
    told: list[int] = []
    measure_links(transport, group, "gloo", profile, lambda done, total: told.append(done), cap_s=0.0, sizes=SIZES)
    found = profile.links("gloo")
    assert {(entry.kind, entry.nbytes) for entry in found} == {(kind, size) for kind in KINDS for size in SIZES}
    assert {entry.group for entry in found} == {ranks}
    # A small message may be lost in the noise of what it is measured between: zero is an answer.
    assert all(entry.seconds >= 0 and entry.reference_s > 0 and entry.runs >= 5 and entry.when for entry in found)
    assert told == list(range(1, len(KINDS) * len(SIZES) + 1))
    measure_links(transport, group, "gloo", profile, cap_s=0.0, sizes=SIZES)
    assert profile.links("gloo") == found
    lacking = SessionProfile()  # only the first rank knows one of them: all stay in step
    if rank == 0:
        lacking.put(found[0])
    measure_links(transport, group, "gloo", lacking, cap_s=0.0, sizes=SIZES)
    assert len(lacking.links("gloo")) == len(found)
    measure_links(transport, group, "gloo", profile, cap_s=0.0, again=True, sizes=SIZES)
    assert all(one is not other for one, other in zip(profile.links("gloo"), found, strict=True))
    same: list[list[tuple[str, int, float]] | None] = [None] * ranks
    dist.all_gather_object(same, [(entry.kind, entry.nbytes, entry.seconds) for entry in profile.links("gloo")])
    assert all(other == same[0] for other in same)


def patterns_move_what_they_say(rank: int, ranks: int) -> None:
    """The busiest device receives the bytes an entry stands for."""
    for kind in KINDS[:4]:
        source, target, share = communication._pattern(kind, ranks)
        moved = list(pieces((64, 64), source, target))
        received = [
            sum(piece.elements for piece in moved if piece.target == device and piece.source != device)
            for device in range(ranks)
        ]
        assert max(received) / 64**2 == share, kind


def ranks_agree_on_what_telling_each_other_takes(rank: int, ranks: int) -> None:
    """Measured once, the same figure on all."""
    runtime_costs._LEAST_STEPS = 2
    transport, group, profile = DistributedTransport(CPU), Ranks(ranks, CPU), SessionProfile()
    costs = RuntimeCosts(CPU, group, transport)
    costs._agreement(transport, profile, again=False)
    found = profile.get(AGREEMENT)
    assert found is not None
    assert group.max(found.measurement.forward_s) == found.measurement.forward_s >= 0
    costs._agreement(transport, profile, again=False)
    assert profile.get(AGREEMENT) is found
    costs._agreement(transport, profile, again=True)
    assert profile.get(AGREEMENT) is not found


def batch_norms_take_longer_in_a_step(rank: int, ranks: int) -> None:
    """A whole step beside the predicted one, of as many batch norms as the network has; the same on all."""
    runtime_costs._STEPS_S = 0.0
    transport, group, profile = DistributedTransport(CPU), Ranks(ranks, CPU), SessionProfile()
    costs = RuntimeCosts(CPU, group, transport)
    costs._batch_norm("gloo", profile, again=False)
    found = profile.get(BATCH_NORM)
    assert found is not None
    assert found.nbytes == 3
    assert found.measurement.forward_s > 0
    assert found.measurement.backward_s > 0
    assert group.max(batch_norm_s(profile)) == batch_norm_s(profile)
    costs._batch_norm("gloo", profile, again=False)
    assert profile.get(BATCH_NORM) is found


CASES = {
    "ranks": ranks_agree,
    "links": links_are_measured_once,
    "patterns": patterns_move_what_they_say,
    "agreement": ranks_agree_on_what_telling_each_other_takes,
    "batch norm": batch_norms_take_longer_in_a_step,
}
