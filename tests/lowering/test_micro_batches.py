"""Micro-batches: how results follow from those of parts of the batch, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.errors import PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.micro_batches import How, check_micro_batches, combinations
from parplan.plan import Plan, Scheme, Strategy


class Scored(nn.Module):
    """Scores of 64 classes for every sample, and what a function makes of scores, targets and a weight."""

    def __init__(self, result: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.body = nn.Linear(8, 64)
        self.result = result

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.result(self.body(x), y, self.body.weight)


def graph_of(result: Callable[[Tensor, Tensor, Tensor], object]) -> LayerGraph:
    return capture(Scored(result), (torch.randn(6, 8), torch.randint(0, 64, (6,))))


def mean(scores: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    return functional.cross_entropy(scores, targets)


def hows(graph: LayerGraph) -> list[How]:
    found = combinations(graph)
    return [found[value].how for value in graph.user_outputs if isinstance(value, str)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (mean, [How.MEAN]),
        (lambda s, y, w: (mean(s, y, w), s), [How.MEAN, How.SAMPLES]),
        (lambda s, y, w: functional.cross_entropy(s, y, reduction="sum"), [How.SUM]),
        (lambda s, y, w: (mean(s, y, w) + 0.01 * w.pow(2).sum()) / 2, [How.MEAN]),
        (lambda s, y, w: -s.mean() + s.pow(2).mean(), [How.MEAN]),
        (lambda s, y, w: 3 - functional.cross_entropy(s, y), [How.MEAN]),
        (lambda s, y, w: (s.sum(), (s.argmax(1) == y).sum()), [How.SUM, How.SUM]),
        (lambda s, y, w: (s.sum(1), w.pow(2).sum()), [How.SAMPLES, How.SAME]),
    ],
)
def test_results_follow_from_those_of_micro_batches(
    result: Callable[[Tensor, Tensor, Tensor], object], expected: list[How]
) -> None:
    assert hows(graph_of(result)) == expected


def test_a_mean_over_targets_is_weighed_by_what_counts() -> None:
    graph = graph_of(mean)
    (loss,) = combinations(graph).values()
    assert loss.counts is not None
    assert graph.values[loss.counts].shape == (6, 2)
    (plain,) = combinations(graph_of(lambda s, y, w: s.mean())).values()
    assert plain.counts is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda s, y, w: s.pow(2).mean().sqrt(), "needs all samples at once"),
        (lambda s, y, w: s.mean() * s.mean(), "needs all samples at once"),
        (lambda s, y, w: 1 / s.pow(2).mean(), "needs all samples at once"),
        (lambda s, y, w: mean(s, y, w) + s.mean(), "adds a mean over samples and a mean over targets"),
        (lambda s, y, w: s.sum() + s.mean(), "adds a mean over samples and a sum"),
        (lambda s, y, w: s.sum() + w.sum(), "needs all samples at once"),  # the weights would count in every term
        (lambda s, y, w: (s @ s.t()).sum(1), "needs all samples at once"),
        (lambda s, y, w: s.mean(0), "needs all samples at once"),
    ],
)
def test_what_does_not_follow_is_refused(result: Callable[[Tensor, Tensor, Tensor], object], words: str) -> None:
    with pytest.raises(PlanError, match=rf"{words}.*use 1 micro-batch"):
        combinations(graph_of(result))


class Written(nn.Module):
    """A buffer that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(0.1)
        result: Tensor = self.body(x)
        return result


@pytest.mark.full
def test_a_buffer_that_the_forward_writes_is_refused() -> None:
    with pytest.raises(PlanError, match="seen: is written in the forward"):
        combinations(capture(Written(), (torch.randn(4, 8),)))


def test_plans_with_micro_batches_that_cannot_be() -> None:
    graph = graph_of(mean)
    plan = Plan(graph.model, graph.fingerprint, 6, 1, dict.fromkeys(graph.layers, Strategy()), micro_batches=3)
    check_micro_batches(plan, graph)
    with pytest.raises(PlanError, match="3 micro-batches, and scheme interleave"):
        check_micro_batches(replace(plan, scheme=Scheme.INTERLEAVE), graph)
    with pytest.raises(PlanError, match="3 micro-batches of 2 samples; use at most 2"):
        check_micro_batches(replace(plan, batch=2), graph)
    with pytest.raises(PlanError, match="has no samples"):
        check_micro_batches(plan, replace(graph, batch=None))
