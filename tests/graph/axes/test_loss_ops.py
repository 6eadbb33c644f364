"""Class losses cut by samples and by vocabulary, and reductions over the batch: forward and backward as torch's own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.graph.axes.loss_ops import (
    BATCH_MEAN,
    CLASS_ROWS,
    CLASS_TERMS,
    run_batch_mean,
    run_batch_sum,
    run_class_rows,
    run_class_terms,
    run_row_losses,
    vocabulary_blocks,
)
from parplan.graph.capture.capture import capture
from parplan.graph.local import LocalLayer, local_module
from parplan.plan import Strategy
from tests.every_case import every_case
from tests.graph.axes.test_table import assert_proved
from tests.graph.single_op import OneOp, part_results, whole_results

ROWS, CLASSES, IGNORED = 9, 24, -100


@dataclass(frozen=True)
class Case:
    """A call of cross entropy."""

    weighted: bool = False
    smoothing: float = 0.0
    ignored: tuple[int, ...] = (2, 5)
    positions: tuple[int, ...] = ()
    ignore_index: int = IGNORED

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(7)
        scores = torch.randn(ROWS, CLASSES, *self.positions, dtype=torch.float64, generator=generator) * 4
        target = torch.randint(0, CLASSES, (ROWS, *self.positions), generator=generator)
        target[list(self.ignored)] = self.ignore_index
        weight = torch.rand(CLASSES, dtype=torch.float64, generator=generator) if self.weighted else None
        return scores.requires_grad_(), target, weight

    def plain(self, scores: Tensor, target: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
        return F.cross_entropy(
            scores, target, weight, ignore_index=self.ignore_index, reduction=reduction, label_smoothing=self.smoothing
        )

    def cut(self, scores: Tensor, target: Tensor, weight: Tensor | None, shards: int, blocks: int) -> Tensor:
        """Loss and count of every row, from the shards of the vocabulary."""
        width, found = CLASSES // shards, []
        for shard in range(shards):
            here = slice(shard * width, (shard + 1) * width)
            own = None if weight is None else weight[here]
            args = (self.ignore_index, self.smoothing, blocks // shards, CLASSES, shard * width)
            found.append(run_class_terms(scores[:, here], target, own, *args))
        return run_row_losses(torch.cat(found, 1))


CASES = [
    Case(weighted, smoothing, ignored, positions)
    for weighted, smoothing, ignored, positions in itertools.product(
        (False, True), (0.0, 0.1), ((), (2, 5)), ((), (3,), (2, 3))
    )
] + [Case(ignore_index=3), Case(weighted=True, smoothing=0.2, ignore_index=0), Case(ignored=tuple(range(ROWS)))]


def reduced(rows: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return rows[..., 0]
    return (run_batch_mean if reduction == "mean" else run_batch_sum)(rows, True, torch.float64)


def assert_as_plain(found: Tensor, expected: Tensor, scores: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    cotangent = torch.linspace(0.5, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    gradients = [torch.autograd.grad(one, scores, cotangent, retain_graph=True)[0] for one in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@every_case("reduction", ["none", "mean", "sum"])
@every_case("case", CASES, ids=str)
def test_a_cut_vocabulary_gives_torchs_cross_entropy(case: Case, reduction: str) -> None:
    scores, target, weight = case.operands()
    for shards in (1, 2, 4):
        rows = case.cut(scores, target, weight, shards, blocks=4)
        assert_as_plain(reduced(rows, reduction), case.plain(scores, target, weight, reduction), scores)


@every_case("reduction", ["none", "mean", "sum"])
@every_case("case", CASES, ids=str)
def test_rows_of_all_classes_give_torchs_cross_entropy(case: Case, reduction: str) -> None:
    scores, target, weight = case.operands()
    rows = run_class_rows(scores, target, weight, case.ignore_index, case.smoothing, False)
    assert_as_plain(reduced(rows, reduction), case.plain(scores, target, weight, reduction), scores)


@pytest.mark.parametrize("weighted", [False, True])
def test_probabilities_and_logarithms_as_torch_reduces_them(weighted: bool) -> None:
    scores, target, weight = Case(weighted).operands()
    likely = torch.rand_like(scores).softmax(1).detach()
    rows = run_class_rows(scores, likely, weight, IGNORED, 0.1, False)
    assert_as_plain(reduced(rows, "mean"), F.cross_entropy(scores, likely, weight, label_smoothing=0.1), scores)
    logs = scores.detach().log_softmax(1).requires_grad_()
    rows = run_class_rows(logs, target, weight, IGNORED, 0.0, True)
    assert_as_plain(reduced(rows, "mean"), F.nll_loss(logs, target, weight), logs)


def test_a_shard_without_a_possible_class_adds_nothing() -> None:
    """A vocabulary padded with masked classes: all scores of the last shard are minus infinity."""
    case = Case()
    scores, target, _ = case.operands()
    target[target >= CLASSES // 2] = 1
    masked = scores.masked_fill(torch.arange(CLASSES) >= CLASSES // 2, -torch.inf)
    for shards in (2, 4):
        rows = case.cut(masked, target, None, shards, blocks=4)
        assert_as_plain(reduced(rows, "mean"), case.plain(masked, target, None, "mean"), scores)


def test_large_scores_lose_no_digits() -> None:
    case = Case(ignored=())
    scores, target, _ = case.operands()
    far = (scores.detach() + 1e4).float().requires_grad_()
    exact = case.plain(far.double(), target, None, "none")
    torch.testing.assert_close(case.cut(far, target, None, 4, 4)[..., 0].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_a_target_that_is_no_class_is_refused_by_every_shard_or_one(wrong: int) -> None:
    case = Case(ignored=())
    scores, target, _ = case.operands()
    target[4] = wrong
    with pytest.raises((IndexError, RuntimeError)):
        case.cut(scores, target, None, 2, blocks=2)


def test_anomaly_detection_finds_no_nan() -> None:
    case = Case(weighted=True, smoothing=0.1)
    scores, target, weight = case.operands()
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        reduced(case.cut(scores, target, weight, 2, blocks=8), "mean").backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def test_blocks_are_fewer_numbers_than_scores() -> None:
    assert [vocabulary_blocks(classes) for classes in (1000, 30522, 32128, 49408, 151936)] == [8, 6, 16, 16, 16]
    assert vocabulary_blocks(10) == vocabulary_blocks(2) == vocabulary_blocks(50257) == 1


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_cut_by_samples_and_positions(weighted: bool) -> None:
    scores, target, weight = Case(weighted, positions=(6,)).operands()
    op = OneOp.of(CLASS_ROWS, (scores, target, weight, IGNORED, 0.1, False), {})
    whole, axes = whole_results(op), op.open_axes()
    assert [dict(axis.dims)["x0"] for axis in axes] == [0, 2]
    for axis in axes:
        assert_proved("class_rows", part_results(op, axis, [1, axis.units - 1], as_batch=True), whole, axis)


def test_terms_are_cut_by_samples_and_vocabulary() -> None:
    scores, target, weight = Case(weighted=True).operands()
    op = OneOp.of(CLASS_TERMS, (scores, target, weight, IGNORED, 0.1, 4), {})
    samples, vocabulary = op.open_axes()
    assert (samples.units, vocabulary.units, dict(vocabulary.dims)["x2"]) == (ROWS, 4, 0)
    assert_proved("class_terms", part_results(op, samples, [1, ROWS - 1], as_batch=True), whole_results(op), samples)
    plain = F.cross_entropy(scores, target, weight, reduction="none", label_smoothing=0.1)
    for shards in (2, 4):
        (terms,) = part_results(op, vocabulary, [4 // shards] * shards).outputs.values()
        torch.testing.assert_close(run_row_losses(terms)[..., 0], plain, rtol=1e-12, atol=1e-12)


def test_a_batch_mean_needs_the_whole_batch() -> None:
    assert OneOp.of(BATCH_MEAN, (torch.ones(4, 2), True, torch.float32), {}).open_axes() == []


class Pairs(nn.Module):
    """A contrastive loss: every sample's class is its own number."""

    def forward(self, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x @ y.T, target)


def test_samples_that_are_classes_are_no_vocabulary() -> None:
    x = torch.randn(48, 6)
    graph = capture(Pairs(), (x, x.clone(), torch.arange(48)))
    ops = [node.target for layer in graph.layers.values() for node in layer.nodes]
    assert CLASS_TERMS not in ops
    assert CLASS_ROWS in ops


class Scored(nn.Module):
    """The loss of scores, which are also returned in the rows of another loss if so asked."""

    def __init__(self, case: Case, reduction: str, rows_too: bool = False) -> None:
        super().__init__()
        self.case, self.reduction, self.rows_too = case, reduction, rows_too

    def forward(self, scores: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        loss = self.case.plain(scores, target, None, self.reduction)
        return (loss, self.case.plain(scores, target, None, "none")) if self.rows_too else loss


def ops_on_one_device(model: nn.Module, scores: Tensor, target: Tensor) -> tuple[list[str], tuple[Tensor, ...]]:
    """The ops of a captured model as one device runs it, and their results."""
    graph = capture(model, (scores, target))
    whole = Strategy(1, 1, None, (0,))
    parts = [LocalLayer(layer, whole, 0, ROWS) for layer in graph.layers.values()]
    code = local_module(graph, parts, ["scores", "target"], list(graph.results))
    ops = [
        str(getattr(node.target, "__name__", node.target)) for node in code.graph.nodes if node.op == "call_function"
    ]
    return ops, code(scores, target)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("classes", [CLASSES, 7], ids=["cut", "whole"])
@pytest.mark.parametrize("case", [Case(), Case(positions=(3,)), Case(smoothing=0.1), Case(ignore_index=3)], ids=str)
def test_a_loss_that_one_device_has_all_of_is_torchs_own_op(case: Case, classes: int, reduction: str) -> None:
    scores, target, _ = case.operands()
    scores = scores.detach()[:, :classes].clone().requires_grad_()
    target = torch.where(target < 0, target, target % classes)
    ops, (found,) = ops_on_one_device(Scored(case, reduction), scores, target)
    assert ops == ["run_class_loss"]
    assert_as_plain(found, case.plain(scores, target, None, reduction), scores)


def test_rows_that_are_results_stay() -> None:
    scores, target, _ = Case().operands()
    model = Scored(Case(), "mean", rows_too=True)
    ops, found = ops_on_one_device(model, scores, target)
    assert ops == ["run_class_loss", "run_class_terms", "run_row_losses", "select.int"]
    for one, expected in zip(found, model(scores, target), strict=True):
        assert_as_plain(one, expected, scores)
