"""Message sizes of transfers, by formula and by pieces, against the messages that the runtime sends."""

from __future__ import annotations

from math import prod
from random import Random

import pytest

from benchmarks.memory_networks import NETWORKS
from parplan.cost_models.memory.message_sizes import Messages, messages
from parplan.layout import Region
from parplan.lowering.lower import lower
from parplan.lowering.program import Exchange, Slot
from parplan.lowering.step_setting import StepSetting
from tests.cost_models.memory.test_plan_peaks import captured, random_plan


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [network.name for network in NETWORKS])
def test_sizes_are_those_of_the_exchanges(name: str) -> None:
    graph, seen = captured(name), 0
    for seed in range(12):
        random = Random(seed)
        devices = random.choice([2, 3, 4, 6, 8])
        setting = StepSetting.per_process(devices, random.choice([24, 25, 5]))
        for transfer in lower(graph, random_plan(graph, devices, random), setting).transfers:
            there, back = messages(transfer.given, transfer.wanted)
            check(there, transfer.exchange, transfer.given, transfer.wanted)
            check(back, transfer.transposed, transfer.wanted, transfer.given)
            seen += 1
    assert seen > 12


def check(found: Messages, exchange: Exchange, source: Slot, target: Slot) -> None:
    for place, device in enumerate(target.devices):
        arriving = exchange.received.get(device, {}).values()
        pieces = [piece for piece in exchange.pieces if piece.target == device]
        assert found.received[place] == sum(piece.elements for message in arriving for piece in message)
        assert found.pieces[place] == len(pieces)
        assert found.own[place] == any(piece.source == device for piece in pieces)
    for place, device in enumerate(source.devices):
        sending = exchange.sent.get(device, {}).values()
        shape = source.local_shapes[device]
        copied = [m for m in sending if len(m) > 1 or not contiguous(m[0].source_region, shape)]
        assert found.copied[place] == sum(piece.elements for message in copied for piece in message)
        assert found.shared[place] == (len(copied) < len(sending))


def contiguous(block: Region, shape: tuple[int, ...]) -> bool:
    """Whether a block lies in one piece in memory: before the first cut dimension only single indices."""
    lengths = [len(extent) for extent in block]
    cut = [dim for dim, length in enumerate(lengths) if length != shape[dim]]
    return not cut or (cut == [cut[0]] and prod(lengths[: cut[0]]) == 1)
