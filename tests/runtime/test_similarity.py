"""Similarities of all samples with all others (texts x images): one of the two directions may be cut as features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer
from parplan.plan import Strategy
from tests.runtime.helpers import compiled, differences, outcome


class Pairs(nn.Module):
    """Texts and images brought into one space, and the cosines of all pairs, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        self.texts, self.images = nn.Linear(6, 8), nn.Linear(5, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, texts: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """[samples, 6], [samples, 5] -> [samples, samples], and the same the other way round."""
        found = [side(x) for side, x in ((self.texts, texts), (self.images, images))]
        first, second = (x / x.norm(dim=-1, keepdim=True) for x in found)
        scores = first @ second.t() * self.scale.exp()
        return scores, scores.t()


def given(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 6, dtype=torch.float64), torch.randn(samples, 5, dtype=torch.float64)


def test_the_samples_of_one_side_are_features_of_the_other() -> None:
    graph = capture(Pairs(), given(8))
    (similarity,) = (layer for layer in graph.layers.values() if len(layer.inputs) == 2)
    assert similarity.batch is None
    assert graph.fixed_batch
    assert [(axis.name, axis.units) for axis in similarity.axes] == [("features", 8)]


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
