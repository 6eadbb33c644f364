"""A compiled model called with other lengths of sequences gives the plain model's numbers, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import compiled, differences, outcome, planner, spread, spread_all
from tests.runtime.ranks import Case, run_case

WORDS, WIDTH, HEADS, BLOCKS = 11, 8, 2, 4
Positions = Callable[["Attention", Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

pytestmark = pytest.mark.filterwarnings("ignore::parplan.errors.PlannedMemoryWarning")


def rotary(block: Attention, q: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    angles = torch.arange(q.shape[-2])[:, None] * block.frequencies
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)

    return turned(q), turned(k), bias


def relative(block: Attention, q: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    places = torch.arange(q.shape[-2])
    near = (places[None] - places[:, None]).clamp(-4, 4) + 4
    return q, k, bias + block.distances(near).permute(2, 0, 1)


def lengthwise(block: Attention, q: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if q.shape[-2] > 8:  # a branch of Python's on the length
        q = q * (q.shape[-2] ** 0.5 / 3)
    return q, k, bias


class Attention(nn.Module):
    """A decoder's block, causal, with a way to tell positions."""

    def __init__(self, positions: Positions) -> None:
        super().__init__()
        self.positions, self.scale = positions, 1.0
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.distances = nn.Embedding(9, HEADS)
        self.frequencies: Tensor
        self.register_buffer("frequencies", 10.0 ** -torch.arange(WIDTH // HEADS // 2))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, length, _ = x.shape
        packed = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        q, k, bias = self.positions(self, q, k, bias)
        bias = bias + torch.full((length, length), -1e9, dtype=x.dtype).triu(1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        found: Tensor = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)) * self.scale
        return found


class Decoder(nn.Module):
    """Words with learned positions, blocks, and the mean of those that are no padding."""

    def __init__(self, positions: Positions) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Attention(positions) for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, words: Tensor) -> Tensor:
        there = words != 0
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        bias = torch.zeros(there.shape, dtype=x.dtype).masked_fill(~there, -1e9)[:, None, None]
        for block in self.blocks:
            x = block(x, bias)
        mean = (x * there[..., None]).sum(1) / there.sum(1, keepdim=True).clamp(min=1)
        found: Tensor = self.head(mean)
        return found


class Residual(nn.Module):
    """A convolution and a pooling, whose lengths round."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.interpolate(F.max_pool1d(self.norm(self.convolution(x)).relu(), 2), size=x.shape[-1])


def convolutions() -> nn.Module:
    ends = nn.Conv1d(WORDS, 4, 3, stride=2, padding=1), nn.AdaptiveAvgPool1d(1)
    return nn.Sequential(ends[0], *[Residual() for _ in range(BLOCKS)], ends[1], nn.Flatten(), nn.Linear(4, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "rotary": lambda: Decoder(rotary),
    "relative": lambda: Decoder(relative),
    "branch on the length": lambda: Decoder(lengthwise),
    "convolutions": convolutions,
}
# Below, between and above the first two; the first ones again.
LENGTHS = (6, 10, 4, 8, 9, 13, 6, 10)
ON_RANKS = (6, 10, 4, 9, 6)


def words(samples: int, length: int) -> Tensor:
    return torch.randint(1, WORDS, (samples, length)).where(torch.rand(samples, length) < 0.9, 0)


def given(name: str, samples: int, length: int) -> Tensor:
    found = words(samples, length)
    return F.one_hot(found, WORDS).transpose(1, 2).double() if name == "convolutions" else found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(pytest.param(name, "hybrid", marks=pytest.mark.full) for name in MODELS),
        pytest.param("rotary", "data", marks=pytest.mark.full),
        ("convolutions", "data"),
    ],
)
def test_every_length_gives_the_plain_models_numbers(name: str, kind: str) -> None:
    plain = MODELS[name]().double()
    model = compiled(plain, spread(2, kind), 2)
    for length in LENGTHS:
        x = given(name, 4, length)
        assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}, length


@pytest.mark.full
def test_an_attribute_of_a_block_that_was_not_traced_is_watched() -> None:
    plain = Decoder(rotary).double()
    model = compiled(plain, spread(2, "data"), 2)
    for length in (6, 9):
        model(words(4, length))
    for net in (plain, model.module):
        setattr(net.get_submodule("blocks.2"), "scale", 0.25)  # noqa: B010
    x = words(4, 9)
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}


def in_another_order(rank: int, ranks: int) -> None:
    torch.manual_seed(3)
    plain = Decoder(rotary).double()
    model = Compiled(copy.deepcopy(plain), planner(spread_all(ranks), ranks), check="off")  # gradients alone move
    for lengths in ((6, 6), (9, 7), (7, 9), (6, 12)):
        own = words(2, lengths[rank])
        torch.testing.assert_close(model(own), plain(own), rtol=1e-9, atol=1e-12)


def sharded(rank: int, ranks: int) -> None:
    torch.manual_seed(3)
    plain = Decoder(rotary).double()
    model = Compiled(copy.deepcopy(plain), planner(spread(ranks, "hybrid"), ranks))
    for length in ON_RANKS:
        torch.manual_seed(length)
        whole = words(2 * ranks, length)
        own = whole[2 * rank : 2 * rank + 2]
        torch.testing.assert_close(model(own), plain(whole)[2 * rank : 2 * rank + 2], rtol=1e-9, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("case", [in_another_order, sharded])
def test_processes_agree_at_every_length(case: Case) -> None:
    run_case(case, 2)
