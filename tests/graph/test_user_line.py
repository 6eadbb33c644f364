"""Errors in a model's code are told with the layer that they come from."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import parplan
from parplan.errors import CaptureError, ModelError, PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.user_line import failing_layer, failing_module
from parplan.runtime.execution.gradients import Gradients
from parplan.runtime.execution.parameter_store import Store


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


class Splits(nn.Module):
    """Batch norm, two halves, and a tensor made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.net(x).chunk(2, 1)
        product: torch.Tensor = one * two
        return product * torch.tensor([1.0, 2.0, 3.0])


class NumberAgain(nn.Module):
    """Returns a number that other layers of its results have read."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.fc(x)
        mean = y.pow(2).mean()
        return mean, y * mean


def test_an_index_out_of_range_names_the_layer_of_the_compiled_model() -> None:
    compiled = parplan.compile(Words(), torch.zeros(8, 6, dtype=torch.long), devices=["cpu", "cpu"], check="off")
    with pytest.raises(
        IndexError, match=r"^words: index out of range(.|\n)*test_user_line\.py:\d+: .*self\.words\(x\)"
    ):
        compiled(torch.full((8, 6), 12))


def test_an_index_out_of_range_names_the_layer_of_the_plain_model() -> None:
    with pytest.raises(ModelError, match="words: IndexError: index out of range"):
        parplan.verify(Words(), torch.full((8, 6), 12), devices=2)


class Picks(nn.Module):
    """Takes a column that is not there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 9]


def test_a_constant_index_out_of_range_names_layer_and_line_of_the_capture() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(Picks()))
    wanted = (
        r"^Sequential cannot be captured: 1\.0: IndexError: index 9 (.|\n)*test_user_line\.py:\d+: return x\[:, 9\]"
    )
    with pytest.raises(CaptureError, match=wanted):
        parplan.analyze(model, torch.zeros(8, 6), gpus=2, gpu="k20")


@pytest.mark.full
def test_values_are_named_as_the_model_names_them() -> None:
    graph = capture(Words(), (torch.zeros(8, 6, dtype=torch.long),))
    layer = graph.layers["net.2"]
    assert [graph.label(p) for p in sorted(layer.parameters)] == ["net.2.bias", "net.2.weight"]
    assert [graph.label(value) for value in layer.outputs] == ["the result of net.2"]
    assert [graph.label(str(value)) for value in graph.user_inputs] == ["input 'x'"]
    split = capture(Splits(), (torch.zeros(8, 6),))
    labels = {split.label(value) for layer in split.layers.values() for value in (*layer.inputs, *layer.buffers)}
    assert {"net.0.running_mean", "net.0.num_batches_tracked"} & labels
    assert not [label for label in labels if label.startswith(("p_", "b_", "c_")) and "," not in label]


def test_a_number_that_cannot_differ_by_replica_is_named_by_its_layer() -> None:
    with pytest.raises(PlanError, match=r"^the result of .*: other layers read this number too"):
        parplan.compile(NumberAgain(), torch.randn(8, 6), devices=["cpu", "cpu"], scalars="per_replica")


def test_a_module_is_found_in_a_traceback() -> None:
    model = Words()
    with pytest.raises(IndexError) as caught:
        model(torch.full((8, 6), 12))
    assert failing_module(caught.value, model) == "words"
    assert failing_module(ValueError(), model) == ""
    assert failing_layer(ValueError(), {"a": (), "b": (), "c": ()}) == ("a .. c", "")


def test_a_parameter_that_is_returned_is_named_as_the_model_names_it() -> None:
    with pytest.raises(PlanError, match=r"^net\.2\.bias: the model returns a parameter"):
        parplan.compile(GivesBias(), torch.zeros(8, 6, dtype=torch.long), devices=["cpu", "cpu"])(
            torch.zeros(8, 6, dtype=torch.long)
        )


def test_a_gradient_sum_that_fails_names_the_parameters_as_the_model_does() -> None:
    graph, told = capture(Words(), (torch.zeros(8, 6, dtype=torch.long),)), list[str]()
    parameters = sorted(graph.layers["net.2"].parameters)
    named: Any = SimpleNamespace(label=graph.label)
    store: Any = SimpleNamespace(
        sum_label=partial(Store.sum_label, named),
        shapes={p: {0: (1,), 1: (1,)} for p in parameters},
        original=lambda name: torch.zeros(1),
    )
    transport: Any = SimpleNamespace(
        owned=(0, 1),
        on=lambda device: nullcontext(),
        physical=lambda device: "cpu",
        message=lambda name, tensors: torch.cat(tensors),
        reduce=lambda name, group, flats: told.append(name),
    )
    recorder: Any = SimpleNamespace(sums=nullcontext())
    bucket: Any = SimpleNamespace(parameters=parameters, groups=((0, 1),))
    Gradients(store, transport, recorder).launch(bucket)
    assert told == ["the gradient sum of net.2.bias, net.2.weight"]
