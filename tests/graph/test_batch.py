"""Replicas are never given to what looks at several samples at once, or has the batch size built in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.graph.capture.capture import capture
from tests.graph.by_hand import assert_same_numbers, halves
from tests.graph.models import rand


class Does(nn.Module):
    """One function, with a linear layer before it and a parameter at hand."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.per_sample = nn.Parameter(rand(6, 4))
        self.does = does

    def forward(self, x: Tensor) -> Any:
        return self.does(self.fc(x), self.per_sample)


def no_grad_share(y: Tensor, p: Tensor) -> Tensor:
    with torch.no_grad():
        share = y / y.shape[0]
    return y + share


def autocast_share(y: Tensor, p: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        share = y / y.shape[0]
    return y + share


# What must see the batch whole, and whether its code holds only for the captured batch.
WHOLE = {
    "divided_by_the_batch": (lambda y, p: y / y.shape[0], True),
    "divided_without_gradient": (no_grad_share, True),
    "divided_under_autocast": (autocast_share, True),
    "softmax_over_samples": (lambda y, p: y.softmax(0), False),
    "roll": (lambda y, p: y.roll(1, 0), False),
    "flip": (lambda y, p: y.flip(0), False),
    "similarity": (lambda y, p: y @ y.t(), False),
    "similarity_of_rows": (lambda y, p: (y[:, None] * y[None, :]).sum(-1), False),
    "cumsum": (lambda y, p: y.cumsum(0), False),
    "mean": (lambda y, p: y.mean(), False),
    "mean_loss": (lambda y, p: F.mse_loss(y, torch.zeros_like(y)), False),
    "sum_loss": (lambda y, p: F.mse_loss(y, torch.zeros_like(y), reduction="sum"), False),
    "norm": (lambda y, p: y / y.norm(), False),
    "one_sample": (lambda y, p: y - y[0], False),
    "every_other_sample": (lambda y, p: y[::2], False),
    "sum": (lambda y, p: y.sum(0), False),
    "sorted": (lambda y, p: y.sort(0)[0], False),
}

# What samples can be spread over.
SPREAD = {
    "merged_with_time": lambda y, p: y.reshape(y.shape[0], 2, 2).reshape(-1, 2).relu().reshape(y.shape[0], -1),
    "loss_per_sample": lambda y, p: F.mse_loss(y, torch.zeros_like(y), reduction="none"),
    "zeros_of_the_batch": lambda y, p: y + torch.zeros(y.shape[0], 4, dtype=torch.float64),
    "full_slices": lambda y, p: y[:, 1:] * y[:, :-1],
    "expanded": lambda y, p: y[:, None].expand(y.shape[0], 3, 4) + p[0],
    "transposed_twice": lambda y, p: (y.t() * 2).t().softmax(-1),
    "squeezed_anywhere": lambda y, p: y.unsqueeze(1).squeeze() + 1,
    "broadcast_loss": lambda y, p: F.mse_loss(y[:, :1].expand(-1, 2), y[:, 2:], reduction="none"),
    "squeezed": lambda y, p: y.unsqueeze(1).squeeze(1),
    "transposed_view": lambda y, p: y.t().reshape(-1),
    "one_step_each": lambda y, p: y[torch.arange(len(y)), (y[:, 0] > 0).long() - 2],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_the_batch_whole_gets_no_replicas(name: str) -> None:
    does, fixed = WHOLE[name]
    model = Does(does).double()
    graph = capture(model, (rand(6, 4),))
    whole = [layer for layer in graph.layers.values() if layer.batch is None]
    assert whole
    assert not any(layer.constant for layer in whole)
    assert graph.fixed_batch is fixed
    if name != "divided_under_autocast":  # whose numbers are those of bfloat16
        assert_same_numbers(graph, model, (rand(6, 4),), None, halves)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SPREAD)
def test_what_treats_samples_alike_gets_replicas(name: str) -> None:
    model = Does(SPREAD[name]).double()
    graph = capture(model, (rand(6, 4),))
    spread = [layer for layer in graph.layers.values() if not layer.constant]
    assert all(layer.batch is not None and layer.batch.units == 6 for layer in spread)
    assert not graph.fixed_batch
    assert_same_numbers(graph, model, (rand(6, 4),), None, halves)


def test_a_parameter_per_sample_keeps_the_batch_whole() -> None:
    model = Does(lambda y, p: y * p).double()
    graph = capture(model, (rand(6, 4),))
    assert [layer.batch is not None for layer in graph.layers.values()] == [False, False]
    assert graph.fixed_batch
    assert_same_numbers(graph, model, (rand(6, 4),), None, halves)


def test_a_number_that_follows_the_batch_binds_the_capture_to_it() -> None:
    model = Does(lambda y, p: (y, y.shape[0])).double()
    graph = capture(model, (rand(6, 4),))
    assert graph.fixed_batch
    assert graph.layers["fc"].batch is not None


def test_what_follows_a_mixture_is_not_constant() -> None:
    model = Does(lambda y, p: F.relu((y @ y.t()).mean(1)) * 2).double()
    graph = capture(model, (rand(6, 4),))
    assert not any(layer.constant for layer in graph.layers.values())


def test_what_no_sample_reaches_is_constant() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)

        def forward(self, x: Tensor) -> Any:
            return x + self.embed(torch.arange(5)) * 3

    graph = capture(Positions().double(), (rand(6, 5, 4),))
    assert {name: layer.constant for name, layer in graph.layers.items()} == {
        "arange": True,
        "embed": True,
        "mul": False,
    }


# --- random small networks ------------------------------------------------------------------

Step = Callable[[], nn.Module]


class Add(nn.Module):
    """A residual branch around a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return x + self.inner(x)


class Call(nn.Module):
    """A function as a step."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


# Steps on [samples, 6, 4]; every one keeps the shape.
STEPS: dict[str, Step] = {
    "linear": lambda: nn.Linear(4, 4),
    "conv": lambda: nn.Conv1d(6, 6, 3, padding=1, groups=2),
    "norm": lambda: nn.LayerNorm(4),
    "group_norm": lambda: nn.GroupNorm(3, 6),
    "batch_norm": lambda: nn.BatchNorm1d(6),
    "relu": lambda: nn.ReLU(inplace=True),
    "residual": lambda: Add(nn.Linear(4, 4)),
    "pool": lambda: nn.MaxPool1d(3, 1, 1),
    "merge": lambda: Call(lambda x: x.reshape(-1, 4).tanh().view(x.shape)),
    "heads": lambda: Call(lambda x: x.view(-1, 3, 2, 4).transpose(1, 2).reshape(x.shape)),
    "softmax": lambda: Call(lambda x: x.softmax(-1)),
    "mixed": lambda: Call(lambda x: x - x.mean(0)),
    "scaled": lambda: Call(lambda x: x * x.shape[0]),
    "rolled": lambda: Call(lambda x: x.roll(1, 0)),
    "concat": lambda: Call(lambda x: torch.cat([x[:, :3], x[:, 3:] * 2], 1)),
    "similar": lambda: Call(lambda x: torch.einsum("bij,cij->bc", x, x).softmax(1).sum(1).view(-1, 1, 1) * x),
}


@pytest.mark.full
@settings(max_examples=15)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4), st.sampled_from([4, 6]), st.booleans())
def test_replicas_of_random_networks_compute_the_whole(steps: list[str], batch: int, training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(STEPS[step]() for step in steps)).double()
    x = rand(batch, 6, 4)
    graph = capture(model, (x,), training=training)
    assert_same_numbers(graph, model, (x.clone(),), None, halves)


class OneSize(nn.Module):
    """A linear layer whose result has its number of samples written down."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y.view(8, 2, 2)


def test_a_model_of_one_batch_size_keeps_the_reason() -> None:
    graph = capture(OneSize(), (rand(8, 4),))
    assert graph.layers["fc"].batch is None
    assert "for 16: OneSize cannot be captured" in graph.one_batch
    assert "view" in graph.one_batch
    assert capture(nn.Linear(4, 4), (rand(8, 4),)).one_batch == ""


def test_no_room_for_twice_the_batch_does_not_cost_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed allocation says nothing about the model: a smaller second batch shows what depends on the batch."""
    model, make = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.empty

    def empty(size: Any, **options: Any) -> Tensor:
        if isinstance(size, list) and size[0] > 8:
            raise RuntimeError("not enough memory: you tried to allocate 99 GiB")
        return make(size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    graph = capture(model, (rand(8, 4),))
    assert graph.layers["0"].batch is not None
    assert graph.one_batch == ""


def test_a_model_without_memory_may_branch_on_its_samples() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(4, 4), torch.ones(4, device="meta")

        def forward(self, x: Tensor) -> Any:
            return self.fc(x) * self.scale * math.sqrt(x.shape[0])

    graph = capture(Counts().to("meta"), (torch.zeros(6, 4, device="meta"),))
    assert graph.size_branches.ops
    assert graph.batch == 6
