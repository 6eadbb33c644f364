"""Errors in a model's code are told with the layer that they come from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import parplan
from parplan.errors import ModelError, PlanError
from parplan.graph.user_line import failing_layer, failing_module


class Words(nn.Module):
    """An embedding of ten words in front of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(self.words(x)).sum(1)
        return out


class GivesBias(Words):
    """Returns a parameter as it is."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        last = self.net[2]
        assert isinstance(last, nn.Linear)
        return super().forward(x), last.bias


def test_an_index_out_of_range_names_the_layer_of_the_compiled_model() -> None:
    compiled = parplan.compile(Words(), torch.zeros(8, 6, dtype=torch.long), devices=["cpu", "cpu"], check="off")
    with pytest.raises(IndexError, match=r"^words: index out of range"):
        compiled(torch.full((8, 6), 12))


def test_an_index_out_of_range_names_the_layer_of_the_plain_model() -> None:
    with pytest.raises(ModelError, match="words: IndexError: index out of range"):
        parplan.verify(Words(), torch.full((8, 6), 12), devices=2)


def test_a_module_is_found_in_a_traceback() -> None:
    model = Words()
    with pytest.raises(IndexError) as caught:
        model(torch.full((8, 6), 12))
    assert failing_module(caught.value, model) == "words"
    assert failing_module(ValueError(), model) == ""
    assert failing_layer(ValueError(), ("a", "b", "c"), {}) == "a .. c"


def test_a_parameter_that_is_returned_is_named_as_the_model_names_it() -> None:
    with pytest.raises(PlanError, match=r"^net\.2\.bias: the model returns a parameter"):
        parplan.compile(GivesBias(), torch.zeros(8, 6, dtype=torch.long), devices=["cpu", "cpu"])(
            torch.zeros(8, 6, dtype=torch.long)
        )
