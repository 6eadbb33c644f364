"""Tables whose rows are scaled in the same layer (Gemma's embeddings): cut by rows, each shard looks up its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from parplan.graph.capture.capture import capture
from tests.runtime.helpers import compiled, differences, outcome, spread

ROWS, WIDTH = 8, 4


class ScaledEmbedding(nn.Embedding):
    """Rows times the root of their width."""

    def forward(self, words: Tensor) -> Tensor:
        """[samples, length] to [samples, length, width]."""
        return super().forward(words) * math.sqrt(self.embedding_dim)


class ScaledBags(nn.EmbeddingBag):
    """Sums of rows, halved."""

    def forward(self, words: Tensor) -> Tensor:  # type: ignore[override]
        """[samples, length] to [samples, width]."""
        found: Tensor = super().forward(words) / 2
        return found


class Lookup(nn.Module):
    """A table and a layer behind it."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.last = table, nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        """Scores of looked-up rows."""
        scores: Tensor = self.last(self.table(words))
        return scores


@pytest.mark.sampled(1)
@pytest.mark.parametrize("few", [False, True], ids=["all_rows", "rows_of_the_first_shard"])
@pytest.mark.parametrize("kind", [ScaledEmbedding, ScaledBags])
def test_a_scaled_table_cut_by_rows_gives_the_plain_numbers(kind: type[nn.Module], few: bool) -> None:
    net = Lookup(kind(ROWS, WIDTH))
    words = torch.randint(ROWS // 4 if few else ROWS, (4, 5))
    (table,) = (layer for name, layer in capture(net, (words,)).layers.items() if name.startswith("table"))
    (rows,) = (axis.name for axis in table.axes if axis.dims.get(table.parameters[0]) == 0)
    for devices in (2, 4):
        model = compiled(net, spread(devices, rows), devices, check="off")
        assert differences(outcome(model.module, model, words), outcome(net, net, words)) == {}
