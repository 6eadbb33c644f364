"""Sums of parameter gradients as compute steps add to them: of any strides and owners, in bounded memory."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parplan.layout import whole_block
from parplan.lowering.program import State
from parplan.runtime.execution.gradients import Gradients
from parplan.runtime.transport.local import LocalTransport

SHAPE = (3, 4)


def sums() -> Gradients:
    transport = LocalTransport([torch.device("cpu")])
    store: Any = SimpleNamespace(
        original=lambda name: torch.zeros(SHAPE), place=lambda name, device: whole_block(SHAPE),
        as_gradients=lambda found, touched, behind: found,
    )  # fmt: skip
    recorder: Any = SimpleNamespace(totals=torch.no_grad())
    return Gradients(store, transport, recorder)


def drawn(kind: str) -> Tensor:
    value = torch.randint(-8, 8, SHAPE).float()
    made = {
        "expanded": value[:1].expand(SHAPE), "transposed": value.t().contiguous().t(),
        "strided": torch.stack([value, value], -1)[..., 0],
    }  # fmt: skip
    return made.get(kind, value)


@pytest.mark.parametrize("seed", range(20))
def test_a_sum_is_that_of_all_terms(seed: int) -> None:
    """Terms of others are never written, and at most two of a block are kept."""
    random.seed(seed)
    torch.manual_seed(seed)
    found, state = sums(), State("w", {0: whole_block(SHAPE)})
    wanted, theirs = torch.zeros(SHAPE), list[tuple[Tensor, Tensor]]()
    for _ in range(6):
        gradient, own = drawn(random.choice(["expanded", "transposed", "strided", "dense"])), random.random() < 0.5
        wanted += gradient
        theirs += [] if own else [(gradient, gradient.clone())]
        found.add(state, 0, gradient, own)
        assert len(found._terms["w"][0]) <= 2
    (total,) = found.totals(["w"]).values()
    torch.testing.assert_close(total, wanted)
    for gradient, before in theirs:
        torch.testing.assert_close(gradient, before, rtol=0, atol=0)


def test_a_sum_that_is_known_is_ours_to_write_to() -> None:
    found, state = sums(), State("w", {0: whole_block(SHAPE)})
    given = torch.ones(SHAPE)
    found.add(state, 0, given, own=False)
    assert found.known(state, 0) is None
    found.add(state, 0, torch.ones(SHAPE), own=False)
    total = found.known(state, 0)
    assert total is not None
    assert total.data_ptr() != given.data_ptr()
    total.add_(1)
    (whole,) = found.totals(["w"]).values()
    torch.testing.assert_close(whole, torch.full(SHAPE, 3.0))
