"""Inputs that hold positions along samples are found; labels, tokens and positions that the model computes are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.runtime.programs.sample_axes import check_own_samples
from tests.graph.models import rand

SAMPLES, TIME = 6, 3


class Does(nn.Module):
    """One function of features [samples, time, 4], whole numbers [samples, time] and others that all samples share."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.fc, self.embedding = nn.Linear(4, 4), nn.Embedding(12, 4)
        self.bag = nn.EmbeddingBag(12, 4)
        self.does = does

    def forward(self, x: Tensor, own: Tensor, shared: Tensor) -> Any:
        return self.does(self, self.fc(x), own, shared)


def captured(does: Callable[..., Any]) -> LayerGraph:
    own, shared = torch.zeros(SAMPLES, TIME, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)
    return capture(Does(does).double(), (rand(SAMPLES, TIME, 4), own, shared))


def without_gradient(m: Does, h: Tensor, own: Tensor, shared: Tensor) -> Tensor:
    with torch.no_grad():
        found = h[own[:, 0]]
    return h + found


def written(m: Does, h: Tensor, own: Tensor, shared: Tensor) -> Tensor:
    index = torch.zeros(5, dtype=torch.int64)
    index[1:] = shared[0, 1:] + 1
    return h[index].sum()


def mixed_precision(m: Does, h: Tensor, own: Tensor, shared: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return h.index_select(0, shared[1])


def masked(m: Does, h: Tensor, own: Tensor, shared: Tensor) -> Tensor:
    h = h.clone()
    h[own == 0] = 0.0
    return h


INDEXED = {
    "neighbours": (lambda m, h, own, shared: h + h[own[:, 0]], ("own",)),
    "edges": (lambda m, h, own, shared: torch.zeros_like(h).index_add(0, shared[1], h[shared[0]]), ("shared",)),
    "segments": (lambda m, h, own, shared: h.new_zeros(len(h), 4).scatter_add(0, own[:, :1], h[:, 0]), ("own",)),
    "arithmetic": (lambda m, h, own, shared: h[(own[:, 0] * 2 - 1).clamp(0, 5).flip(0)], ("own",)),
    "two_inputs": (lambda m, h, own, shared: h[own[:, 0] + shared[0, 0]], ("own", "shared")),
    "merged": (lambda m, h, own, shared: h.reshape(-1, 4)[own[:, 0]], ("own",)),
    "merged_inside": (lambda m, h, own, shared: h.transpose(0, 1).reshape(-1, 4)[own[:, 0]], ("own",)),
    "offsets": (lambda m, h, own, shared: m.bag(own[:, 0], shared[0]), ("shared",)),
    "put": (lambda m, h, own, shared: h.index_put((own[:, 0],), h[:1]), ("own",)),
    "looked_up": (lambda m, h, own, shared: F.embedding(own, h[:, 0]), ("own",)),
    "pointers": (lambda m, h, own, shared: h[torch.searchsorted(shared[0], torch.arange(len(h))) - 1], ("shared",)),
    "without_gradient": (without_gradient, ("own",)),
    "mixed_precision": (mixed_precision, ("shared",)),
    "written": (written, ("shared",)),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", INDEXED)
def test_an_input_that_indexes_samples_is_refused_with_its_name_and_line(name: str) -> None:
    does, inputs = INDEXED[name]
    graph = captured(does)
    assert graph.sample_indices[0].inputs == inputs
    assert "test_sample_indices.py:" in graph.sample_indices[0].line
    with pytest.raises(CaptureError, match=f"takes positions along the samples .* from input '{inputs[0]}'"):
        check_own_samples(graph)


ALLOWED = {
    "labels": lambda m, h, own, shared: h.mean(1).log_softmax(-1).gather(1, own[:, :1]),
    "tokens": lambda m, h, own, shared: m.embedding(own) + h,
    "relative": lambda m, h, own, shared: (h + h[torch.arange(len(h)) + own[:, 0] * 0]).sum(),
    "of_this_sample": lambda m, h, own, shared: h.gather(1, own[:, :, None].expand(-1, -1, 4)),
    "best_of_the_data": lambda m, h, own, shared: m.embedding(h.argmax(-1)),
    "hardest_samples": lambda m, h, own, shared: h[h.sum((1, 2)).topk(2)[1]],
    "shuffled": lambda m, h, own, shared: h + h[torch.randperm(len(h))],
    "masked": masked,
    "classes": lambda m, h, own, shared: h.new_zeros(7, 4).index_add(0, own[:, 0], h[:, 0]),
    "shared_table": lambda m, h, own, shared: m.embedding.weight[shared[0]].sum(0) + h,
    "steps": lambda m, h, own, shared: h[:, shared[0] % 3],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ALLOWED)
def test_other_indices_are_allowed(name: str) -> None:
    graph = captured(ALLOWED[name])
    assert graph.sample_indices == ()
    check_own_samples(graph)


UNPLACED = {
    "sorted": lambda m, h, own, shared: h.sort(0)[0],
    "flipped": lambda m, h, own, shared: h.flip(0),
    "running_sum": lambda m, h, own, shared: h.cumsum(0),
    "every_other": lambda m, h, own, shared: h[::2],
    "rolled": lambda m, h, own, shared: h.roll(1, 0),
    "of_no_sample": lambda m, h, own, shared: torch.arange(len(h)),
}


@pytest.mark.parametrize("name", UNPLACED)
def test_a_result_whose_samples_lie_nowhere_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"result 0, made by .*, grows with the batch, but no dimension of it is"):
        check_own_samples(captured(UNPLACED[name]))


WHOLE = {
    "similarity": lambda m, h, own, shared: h[:, 0] @ h[:, 0].t(),
    "number": lambda m, h, own, shared: h.mean(),
    "vector": lambda m, h, own, shared: h.sum(0),
    "best": lambda m, h, own, shared: h.topk(2, 0)[0],
    "parameters": lambda m, h, own, shared: m.fc.weight * 2,
    "in_place": lambda m, h, own, shared: (h[:, 1].relu(), h.transpose(0, 1)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_results_that_do_not_grow_with_the_batch_are_allowed(name: str) -> None:
    check_own_samples(captured(WHOLE[name]))
