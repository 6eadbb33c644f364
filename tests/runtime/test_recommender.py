"""A recommender (tables of bags, interaction of features, linear layers): its tables cut by rows and by columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer
from parplan.plan import Strategy
from tests.runtime.helpers import CLOSE, Rule, compiled, differences, outcome, spread

ROWS, WIDTH, SAMPLES, DENSE = (12, 24, 8), 8, 4, 5


class Recommender(nn.Module):
    """Dense features and bags of categories, all pairs of which interact: the form of DLRM (Naumov et al. 2019).

    Args:
        by_offsets: bags are flat indices with the offsets at which they begin, else [samples, length].
    """

    def __init__(self, by_offsets: bool) -> None:
        super().__init__()
        modes = ("sum", "mean", "sum")
        self.tables = nn.ModuleList(nn.EmbeddingBag(r, WIDTH, mode=m) for r, m in zip(ROWS, modes, strict=True))
        self.bottom = nn.Sequential(nn.Linear(DENSE, 16), nn.ReLU(), nn.Linear(16, WIDTH), nn.ReLU())
        features = len(ROWS) + 1
        self.top = nn.Sequential(nn.Linear(WIDTH + features * (features - 1) // 2, 16), nn.ReLU(), nn.Linear(16, 1))
        self.by_offsets = by_offsets
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(features, features, -1))
        self.double()

    def forward(self, dense: Tensor, *bags: Tensor) -> Tensor:
        """[samples, dense], then for each table its indices, or its indices and offsets -> a score per sample."""
        first = self.bottom(dense)
        each = zip(bags[::2], bags[1::2], strict=True) if self.by_offsets else zip(bags, strict=True)
        found = [table(*bag) for table, bag in zip(self.tables, each, strict=True)]
        features = torch.stack([first, *found], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        score: Tensor = self.top(torch.cat([first, products[:, self.pairs[0], self.pairs[1]]], 1))
        return score


def given(by_offsets: bool) -> tuple[Tensor, ...]:
    bags: list[Tensor] = []
    for rows in ROWS:
        if by_offsets:
            lengths = torch.randint(0, 4, (SAMPLES,))
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])
            bags += [torch.randint(0, rows, (max(7, int(lengths.sum())),)), offsets]
        else:
            bags.append(torch.randint(0, rows, (SAMPLES, 3)))
    return torch.randn(SAMPLES, DENSE, dtype=torch.float64), *bags


def cut(devices: int, axis: str) -> Rule:
    """Tables cut along an axis, all else by samples where it can be."""

    def rule(layer: Layer) -> Strategy:
        everyone = tuple(range(devices))
        if layer.name.startswith("tables"):
            return Strategy(1, devices, axis, everyone)
        return Strategy(devices, 1, None, everyone) if layer.batch is not None else Strategy()

    return rule


@pytest.mark.sampled(1)
@pytest.mark.parametrize("by_offsets", [False, True], ids=["rectangular", "by offsets"])
@pytest.mark.parametrize("axis", ["data", "features", "vocabulary"])
@pytest.mark.parametrize("devices", [2, 4])
def test_tables_cut_by_rows_and_by_columns_train_as_the_plain_model(by_offsets: bool, axis: str, devices: int) -> None:
    torch.manual_seed(2)
    plain = Recommender(by_offsets)
    model = compiled(plain, spread(devices, axis) if axis == "data" else cut(devices, axis), devices)
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(3):
        batch = given(by_offsets)
        assert differences(outcome(model.module, model, *batch), outcome(plain, plain, *batch)) == {}
        for optimizer in optimizers:
            optimizer.step()
    for (name, found), wanted in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=CLOSE, atol=CLOSE, msg=name)


@pytest.mark.full
def test_all_but_bags_by_offsets_keep_their_samples() -> None:
    layers = capture(Recommender(False), given(False)).layers
    assert [name for name, layer in layers.items() if layer.batch is None and layer.reached] == []
    layers = capture(Recommender(True), given(True)).layers
    assert {name for name, layer in layers.items() if layer.batch is None and layer.reached} == {
        f"tables.{table}" for table in range(len(ROWS))
    }
