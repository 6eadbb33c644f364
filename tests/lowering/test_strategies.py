"""Which layers all processes compute redundantly, rather than one for all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.lower import lower
from parplan.lowering.step_setting import StepSetting
from parplan.lowering.strategies import on_every_process
from parplan.plan import Strategy
from tests.runtime.helpers import spread

Formula = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """(N, 6) through a layer, then by a formula."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(()))
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, self.layer(x))


def _similarity(net: nn.Module, h: Tensor) -> Tensor:
    """Samples against samples, scaled by a parameter."""
    return functional.cross_entropy(h @ h.T * net.scale, torch.arange(len(h)))  # type: ignore[operator]


def _graph(formula: Formula, samples: int = 4) -> LayerGraph:
    return capture(Net(formula), (torch.zeros(samples, 6),))


def _whole(graph: LayerGraph, strategies: dict[str, Strategy]) -> set[int]:
    """How many devices compute layers that mix samples."""
    layers = graph.layers.items()
    return {len(strategies[n].devices) for n, layer in layers if layer.batch is None and not layer.constant}


EVERYWHERE: dict[str, Formula] = {
    "a mean": lambda net, h: h.square().mean(),
    "a spread": lambda net, h: h.std(),
    "a sum and a mean": lambda net, h: h.sum() + 3 * h.mean(),
}


@pytest.mark.parametrize("formula", EVERYWHERE.values(), ids=EVERYWHERE)
def test_few_numbers_of_the_whole_batch_are_computed_by_all(formula: Formula) -> None:
    graph = _graph(formula)
    planned = {name: spread(2, "data")(layer) for name, layer in graph.layers.items()}
    assert _whole(graph, planned) == {1}
    found = on_every_process(graph, planned, 2)
    assert _whole(graph, found) == {2}
    program = lower(graph, found, StepSetting.per_process(2, 4))
    assert all(set(move.wanted.devices) == {0, 1} for move in program.transfers), program.text()
    assert on_every_process(graph, planned, 1) == planned, "one process is asked once"


ONCE: dict[str, tuple[Formula, int]] = {
    "a parameter": (_similarity, 4),
    "random numbers": (lambda net, h: (h.std() + torch.rand(())) * 2, 4),
    "many numbers": (lambda net, h: h.std(), 4096),
    "no single number": (lambda net, h: (h - h.mean(0)).square().mean(), 4),
    "sizes of the whole batch": (lambda net, h: (h @ h.T).softmax(1).diagonal().sum(), 4),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("formula", "samples"), ONCE.values(), ids=ONCE)
def test_others_run_where_the_plan_says(formula: Formula, samples: int) -> None:
    graph = _graph(formula, samples)
    planned = {name: spread(2, "data")(layer) for name, layer in graph.layers.items()}
    assert 1 in _whole(graph, on_every_process(graph, planned, 2))


def test_what_lies_on_some_processes_stays_there() -> None:
    graph = _graph(EVERYWHERE["a mean"])
    planned = {name: spread(2, "data")(layer) for name, layer in graph.layers.items()}
    assert on_every_process(graph, planned, 4) == planned
