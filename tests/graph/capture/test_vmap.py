"""Functions of one sample that `torch.vmap` runs on all of them: captured as the batched ops they become."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import parplan


class MaskedBySegments(nn.Module):
    """Attention whose mask a function of sample and two positions gives, which compares segments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(12, 16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """(N, T) tokens and their segments to (N, T, 16)."""
        n, t = tokens.shape
        places = torch.arange(t)

        def seen(own: Tensor, other: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) | (own == other)

        mask = seen
        for dims in ((None, 0, None, 0), (0, None, 0, None), (0, 0, None, None)):
            mask = torch.vmap(mask, in_dims=dims)
        q, k, v = (part.view(n, t, 2, 8).transpose(1, 2) for part in self.qkv(self.embed(tokens)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask(segments, segments, places, places)[:, None])
        result: Tensor = self.out(y.transpose(1, 2).reshape(n, t, 16))
        return result


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pins", [{"embed": "replicas:2", "out": "replicas:2"}, {"out": "shards:2"}])
def test_a_mask_made_by_vmap_is_planned_and_the_same(pins: dict[str, str]) -> None:
    call = torch.randint(12, (6, 5)), torch.randint(2, (6, 5))
    plan = parplan.analyze(MaskedBySegments(), call, gpus=2, gpu="k20", pins=pins).plan
    found = parplan.verify(MaskedBySegments(), call, plan=plan)
    assert found.passed, found.rows


class MaskWithoutGradients(MaskedBySegments):
    """The same, its mask made under `no_grad`, which the export keeps as a part of its own."""

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.vmap(lambda own: (own > 0).sum() + 1.0)(segments)
        result: Tensor = super().forward(tokens, segments) * scale[:, None, None]
        return result


@pytest.mark.full
def test_vmap_without_gradients_is_captured() -> None:
    call = torch.randint(12, (6, 5)), torch.randint(2, (6, 5))
    plan = parplan.analyze(MaskWithoutGradients(), call, gpus=2, gpu="k20").plan
    assert parplan.verify(MaskWithoutGradients(), call, plan=plan).passed
