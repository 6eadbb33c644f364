"""Similarities of all samples with all others (texts x images): one of the two directions may be cut as features."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.errors import PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer
from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import compiled, differences, outcome, planner, spread
from tests.runtime.rank_cases import same, same_state
from tests.runtime.ranks import run_case


class Pairs(nn.Module):
    """Texts and images brought into one space, and the cosines of all pairs, as CLIP has them.

    Args:
        with_features: they are results too.
    """

    def __init__(self, with_features: bool = False) -> None:
        super().__init__()
        self.texts, self.images = nn.Linear(6, 8), nn.Linear(5, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.with_features = with_features
        self.double()

    def forward(self, texts: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        """[samples, 6], [samples, 5] -> [samples, samples], and the same the other way round."""
        found = [side(x) for side, x in ((self.texts, texts), (self.images, images))]
        first, second = (x / x.norm(dim=-1, keepdim=True) for x in found)
        scores = first @ second.t() * self.scale.exp()
        return (scores, scores.t(), first, second) if self.with_features else (scores, scores.t())


def given(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 6, dtype=torch.float64), torch.randn(samples, 5, dtype=torch.float64)


def test_the_samples_of_one_side_are_features_of_the_other() -> None:
    graph = capture(Pairs(), given(8))
    (similarity,) = (layer for layer in graph.layers.values() if len(layer.inputs) == 2)
    assert similarity.batch is None
    assert graph.fixed_batch
    assert [(axis.name, axis.units) for axis in similarity.axes] == [("features", 8)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [2, 4])
def test_a_similarity_cut_by_features_gives_the_plain_numbers(devices: int) -> None:
    def rule(layer: Layer) -> Strategy:
        everyone = tuple(range(devices))
        if layer.batch is None:
            return Strategy(1, devices, "features", everyone)
        return Strategy(devices, 1, None, everyone)

    net = Pairs()
    model = compiled(net, rule, devices)
    for samples in (8, 12):
        x = given(samples)
        assert differences(outcome(model.module, model, *x), outcome(net, net, *x)) == {}
    with pytest.raises(PlanError, match="7 features cannot be cut in"):
        model(*given(7))


def over_processes(rank: int, ranks: int) -> None:
    """Pairs are those of all processes' samples, in every process; features are of its own."""
    for axis in ("data", "out-features"):
        net = Pairs(with_features=True)
        plain = copy.deepcopy(net)
        model = Compiled(net, planner(spread(ranks, axis), ranks))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
        for _ in range(3):
            x, own = given(2 * ranks), slice(2 * rank, 2 * rank + 2)
            found, wanted = model(*(side[own] for side in x)), plain(*x)
            same(found[0], wanted[0], "texts x images")
            same(found[1], wanted[1], "images x texts")
            for n in (2, 3):
                same(found[n], wanted[n][own], "features")
            for results, optimizer in zip((found, wanted), optimizers, strict=True):
                optimizer.zero_grad()
                targets = torch.arange(2 * ranks)
                pairs = sum(functional.cross_entropy(scores, targets) for scores in results[:2])
                (pairs + results[2].square().mean() + results[3].pow(3).mean()).backward()
                optimizer.step()
            same_state(model, plain)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_pairs_are_whole_in_every_process(ranks: int) -> None:
    run_case(over_processes, ranks)
