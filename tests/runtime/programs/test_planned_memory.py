"""A step of larger shapes than the plan was made for is said, with the numbers; one of the planned shapes never is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import PlannedMemoryWarning
from parplan.graph.capture.capture import capture
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.programs.planned_memory import GraphBytes
from tests.runtime.helpers import compiled, differences, outcome, planner, spread
from tests.runtime.ranks import run_case

WORDS, WIDTH = 11, 4


class Words(nn.Module):
    """A score per word, of sequences of any length, and a table that every sample is scaled with."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scores = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.embedding(words).relu())
        return scores


def words(samples: int, length: int) -> Tensor:
    return torch.arange(samples * length).reshape(samples, length) % WORDS


def test_longer_sequences_than_planned_are_warned_of_with_the_numbers() -> None:
    plain = Words().double()
    model = compiled(plain, spread(2, "data"), 2)
    model(words(4, 5))
    said = (
        r"Words: this step may need more memory than its plan was checked for: words is \[samples, 256\], and was "
        r"planned as \[samples, 5\]\. All tensors of its graph, uncut, add up to .* for 4 samples, in the planned one "
        r"to .* for 4 samples\. Compile with the largest shapes"
    )
    with pytest.warns(PlannedMemoryWarning, match=said):
        found = outcome(model, model, words(4, 256))
    assert differences(found, outcome(plain, plain, words(4, 256))) == {}


def test_a_length_is_warned_of_once_and_a_clearly_longer_one_again() -> None:
    model = compiled(Words(), spread(2, "data"), 2)
    model(words(4, 5))
    with pytest.warns(PlannedMemoryWarning, match=r"\[samples, 20\]"):
        model(words(4, 20))
    for length in (20, 21, 5, 3, 20):  # warnings are errors
        model(words(4, length))
    with pytest.warns(PlannedMemoryWarning, match=r"\[samples, 40\]"):
        copy.deepcopy(model)(words(4, 40))


def test_as_many_words_in_fewer_samples_are_no_reason_to_warn() -> None:
    model = compiled(Words(), spread(2, "data"), 2)
    model(words(8, 5))
    model(words(4, 10))
    model(words(32, 5))  # more samples of the planned shape are the caller's choice
    with pytest.warns(PlannedMemoryWarning, match="for 8 samples, in the planned one to .* for 8 samples"):
        model(words(8, 10))


def test_no_step_without_gradients_is_warned_of() -> None:
    model = compiled(Words(), spread(2, "data"), 2)
    model(words(4, 5))
    with torch.no_grad():
        model(words(4, 50))


@pytest.mark.full
def test_bytes_are_those_of_every_tensor_at_any_number_of_samples() -> None:
    graph = capture(Words(), (words(6, 5),))
    size, parameters = GraphBytes.of(graph), WORDS * WIDTH + WIDTH * 3 + 3
    assert size.others == 4 * parameters
    whole = {samples: capture(Words(), (words(samples, 5),)) for samples in (2, 6, 9)}
    for samples, other in whole.items():
        assert size.at(samples) == sum(spec.nbytes for spec in other.values.values())


def _every_rank_warns(rank: int, ranks: int) -> None:
    model = Compiled(Words().double(), planner(spread(ranks, "data"), ranks))
    model(words(2 + rank, 5)).sum().backward()
    with pytest.warns(PlannedMemoryWarning, match=f"for {ranks * (2 + rank)} samples, in the planned one to .* for 5 "):
        model(words(2 + rank, 64)).sum().backward()


@pytest.mark.full
def test_every_process_warns_and_counts_the_samples_of_all() -> None:
    run_case(_every_rank_warns, 2)
