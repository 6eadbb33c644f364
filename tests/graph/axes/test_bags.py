"""Embedding bags of [samples, length] and by offsets: rows are proved cut and uncut, models give the plain numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.errors import CaptureError
from parplan.graph.axes.bags import EMBEDDING_BAGS, OFFSET_BAGS
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer
from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from tests.every_case import every_case
from tests.graph.axes.test_table import assert_proved
from tests.graph.single_op import OneOp, part_results, whole_results
from tests.runtime.helpers import compiled, differences, outcome, planner, spread

ROWS, WIDTH, SAMPLES = 12, 6, 6
SUM, MEAN, MAX = range(3)


def one_op(mode: int, padding: int, scaled: bool, by_frequency: bool = False) -> OneOp:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    indices = torch.randint(0, ROWS, (SAMPLES, 4), generator=generator)
    indices[1] = max(padding, 0)  # a bag of nothing but padding
    scales = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator).requires_grad_() if scaled else None
    return OneOp.of(EMBEDDING_BAGS, (weight, indices, None, scales, mode, padding, by_frequency, False), {})


CALLS = [(SUM, -1, False), (SUM, 5, False), (SUM, -1, True), (SUM, 0, True), (MEAN, -1, False), (MEAN, 7, False)]
CALLS += [(MAX, -1, False), (MAX, 2, False)]


@every_case("call", CALLS)
def test_parts_add_up_to_the_whole(call: tuple[int, int, bool]) -> None:
    op = one_op(*call)
    whole, axes = whole_results(op), op.open_axes()
    assert len(axes) == (2 if call[0] == MAX else 3)
    for axis in axes:
        for parts in (2, 3):
            assert_proved("embedding_bags", part_results(op, axis, [axis.units // parts] * parts), whole, axis)
        if not axis.partial:
            uneven = part_results(op, axis, [1, axis.units - 1], as_batch=True)
            assert_proved("embedding_bags", uneven, whole, axis)


@every_case("last", [False, True])
@every_case("call", CALLS)
def test_parts_of_bags_by_offsets_add_up_to_the_whole(call: tuple[int, int, bool], last: bool) -> None:
    op = one_op(*call)
    weight, indices, *scales = op.operands.values()
    offsets = torch.tensor([0, 3, 3, 10, 23, *([24] if last else [])])  # an empty bag, and bags of one
    flat = [weight, indices.flatten(), offsets, scales[0].detach().flatten().requires_grad_() if scales else None]
    op = OneOp.of(OFFSET_BAGS, (*flat, *call[:2], False, last), {})
    whole, axes = whole_results(op), op.open_axes()
    assert len(axes) == (1 if call[0] == MAX else 2)
    for axis in axes:
        for parts in (2, 3):
            assert_proved("offset_bags", part_results(op, axis, [axis.units // parts] * parts), whole, axis)


def test_gradients_by_frequency_need_the_whole_batch() -> None:
    assert one_op(SUM, -1, False, by_frequency=True).open_axes() == []


class Bags(nn.Module):
    """Sparse features beside dense ones, as in a model of recommendations."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag, self.dense, self.top = nn.EmbeddingBag(ROWS, WIDTH, **options), nn.Linear(4, WIDTH), nn.Linear(6, 3)

    def forward(self, dense: Tensor, indices: Tensor, scales: Tensor | None = None) -> Tensor:
        found: Tensor = self.top(self.bag(indices, per_sample_weights=scales) * self.dense(dense))
        return found


def by_rows(layer: Layer) -> Strategy:
    """The table cut by rows, where it can be."""
    return Strategy(1, 2, "vocabulary", (0, 1)) if layer.axis("vocabulary") else Strategy()


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"mode": "sum", "padding_idx": -1},
    "max": {"mode": "max"},
    "weighted": {"mode": "sum"},
    "by_frequency": {"scale_grad_by_freq": True},
}


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
def test_plans_give_the_plain_numbers(name: str) -> None:
    torch.manual_seed(1)
    net = Bags(**OPTIONS[name]).double()
    dense, indices = torch.randn(SAMPLES, 4, dtype=torch.float64), torch.randint(0, ROWS, (SAMPLES, 3))
    given = (dense, indices, *([torch.randn(SAMPLES, 3, dtype=torch.float64)] if name == "weighted" else []))
    wanted = outcome(net, net, *given)
    for rule in (spread(2, "data"), spread(2, "features"), spread(2, "out-features"), by_rows):
        model = compiled(net, rule, 2)
        assert differences(outcome(model.module, model, *given), wanted) == {}
    bag = capture(copy.deepcopy(net), given).layers["bag"]
    assert (bag.batch is None) is (name == "by_frequency")
    axes = {"by_frequency": set[str](), "max": {"features"}}
    assert {axis.name for axis in bag.axes} == axes.get(name, {"features", "vocabulary"})


def test_another_number_of_samples_needs_no_other_capture() -> None:
    net = Bags().double()
    model = Compiled(copy.deepcopy(net), planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    for samples in (4, 6, 3):
        given = torch.randn(samples, 4, dtype=torch.float64), torch.randint(0, ROWS, (samples, 3))
        torch.testing.assert_close(model(*given), net(*given), rtol=1e-9, atol=1e-9)
    assert model.graph is not None
    assert model.graph.batch == 4


def test_offsets_of_the_users_own_keep_the_batch_whole() -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(ROWS, WIDTH)

        def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
            found: Tensor = self.bag(indices, offsets)
            return found

    net, given = Ragged().double(), (torch.randint(0, ROWS, (7,)), torch.tensor([0, 2, 2]))
    bag = capture(net, given).layers["bag"]
    assert bag.batch is None
    assert {axis.name for axis in bag.axes} == {"features", "vocabulary"}
    for rule in (spread(2, "data"), spread(2, "features"), by_rows):
        model = compiled(net, rule, 2)
        assert differences(outcome(model.module, model, *given), outcome(net, net, *given)) == {}


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(CaptureError, match="an embedding asks for a sparse gradient"):
        capture(nn.EmbeddingBag(ROWS, WIDTH, sparse=True), (torch.zeros(2, 3, dtype=torch.int64),))


def test_a_function_with_regular_offsets_is_the_same_op() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=torch.float64))

        def forward(self, indices: Tensor) -> Tensor:
            offsets = torch.arange(0, indices.numel(), indices.shape[1])
            return F.embedding_bag(indices.reshape(-1), self.table, offsets)

    graph = capture(Flat(), (torch.zeros(SAMPLES, 3, dtype=torch.int64),))
    (layer,) = graph.layers.values()
    assert layer.batch is not None
