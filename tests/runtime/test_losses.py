"""Losses inside a model are split over samples and vocabulary: the plain model's numbers, in and between processes."""

from __future__ import annotations

import copy
import random
from math import prod

import pytest
import torch
from torch import nn

from parplan.graph.capture.capture import capture
from parplan.lowering.program import Transfer
from parplan.plan import Scheme
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import differences, executor, outcome, planner, random_passes, random_strategies
from tests.runtime.loss_cases import (
    ELEMENT_LOSSES,
    LANGUAGE,
    VOCABULARY,
    Elements,
    Language,
    cut_losses,
    language_batch,
    losses_by_ranks,
    trained_beside,
)
from tests.runtime.ranks import run_case

CUTS = [(3, 1), (1, 2), (1, 4), (2, 2), (3, 2)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("options", LANGUAGE)
def test_three_steps_with_a_cut_vocabulary_are_the_plain_models(options: str, cut: tuple[int, int]) -> None:
    torch.manual_seed(0)
    batches = [language_batch(samples) for samples in (6, 6, 7)]
    model = trained_beside(Language(**LANGUAGE[options]), cut_losses(*cut), prod(cut), batches)
    assert model.program is not None
    loss = model.program.strategies["loss"]
    assert (loss.replicas, loss.shards, loss.axis) == (*cut, "vocabulary" if cut[1] > 1 else None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("loss", ELEMENT_LOSSES)
def test_three_steps_with_a_replicated_loss_are_the_plain_models(loss: str, replicas: int) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(n, 3, 8).double(), torch.randn(n, 3, 8).double()) for n in (6, 6, 5)]
    net = Elements(ELEMENT_LOSSES[loss])
    model = trained_beside(net, cut_losses(replicas, 1), replicas, batches)
    assert model.program is not None
    graph = capture(net, batches[0])
    whole = [name for name, layer in graph.layers.items() if layer.batch is None and not layer.constant]
    if loss != "kl_div":  # torch divides by the number of samples, a constant of the capture
        assert whole[0].removeprefix("loss.") in ("batch_mean", "batch_sum")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(30))
def test_any_plan_with_or_without_passes_keeps_the_numbers(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    name = draw.choice(list(LANGUAGE))
    net, batch = Language(**LANGUAGE[name]), language_batch(8, (draw.randrange(8),))
    graph = capture(net, batch)
    passes = seed % 2 == 1
    chosen = random_passes(graph, 4, draw) if passes else random_strategies(graph, 4, draw)
    scheme = draw.choice([Scheme.BROADCAST, Scheme.INTERLEAVE]) if passes else Scheme.GATHER
    model = Compiled(copy.deepcopy(net), planner(chosen, 4, scheme), devices=["cpu"] * 4)
    assert differences(outcome(model, model, *batch), outcome(net, net, *batch)) == {}


def test_shards_of_a_loss_exchange_a_few_numbers_of_each_row_and_no_scores() -> None:
    net, (tokens, labels) = Language(), language_batch(6)
    graph = capture(net, (tokens, labels))
    strategies = {name: cut_losses(1, 4)(layer) for name, layer in graph.layers.items()}
    program = executor(net, graph, strategies, 4, 6).program
    behind = {v for name in ("loss", "row_losses") for v in graph.layers[name].outputs}
    rows = 6 * tokens.shape[1]
    moved = [step for step in program.forward if isinstance(step, Transfer) and step.given.value in behind]
    assert moved
    assert all(prod(step.given.shape) < rows * VOCABULARY for step in moved)
    scores = {value for value, spec in graph.values.items() if spec.elements == rows * VOCABULARY}
    assert not [step.text() for step in program.forward if isinstance(step, Transfer) and step.given.value in scores]


def test_a_loss_of_nothing_but_ignored_targets_is_no_number_and_has_no_gradient() -> None:
    net, batch = Language(), language_batch(4, range(4))
    model = Compiled(copy.deepcopy(net), planner(cut_losses(2, 2), 4), devices=["cpu"] * 4, check="off")
    found, wanted = model(*batch), net(*batch)
    assert found.isnan()
    assert wanted.isnan()
    found.backward()
    wanted.backward()
    for mine, plain in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad)


def test_a_target_that_is_no_class_is_refused() -> None:
    net, (tokens, labels) = Language(), language_batch(4)
    model = Compiled(copy.deepcopy(net), planner(cut_losses(1, 2), 2), devices=["cpu"] * 2, check="off")
    labels[2, 3] = VOCABULARY
    with pytest.raises((IndexError, RuntimeError)):
        model(tokens, labels)


def test_narrow_scores_are_added_up_in_float32() -> None:
    """In bfloat16 as near to the exact loss as the plain model is, or nearer."""
    torch.manual_seed(0)
    net, batch = Language().to(torch.bfloat16), language_batch(12)
    exact = copy.deepcopy(net).double()(*batch)
    model = Compiled(copy.deepcopy(net), planner(cut_losses(2, 2), 4), devices=["cpu"] * 4, check="off")
    found = model(*batch)
    assert found.dtype is torch.bfloat16
    assert abs(found.double() - exact) <= abs(net(*batch).double() - exact) + 2**-7 * exact


def test_a_loss_module_keeps_its_name() -> None:
    graph = capture(Elements(nn.CrossEntropyLoss()), (torch.randn(4, 8).double(), torch.zeros(4, dtype=torch.long)))
    assert [*graph.layers][-2:] == ["loss", "loss.batch_mean"]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_over_processes_are_the_plain_models(ranks: int) -> None:
    run_case(losses_by_ranks, ranks)
