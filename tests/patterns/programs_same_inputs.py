"""Whole programs whose inputs are no samples, or not all of them: one graph, one state, masks beside sentences."""

# mypy: disable-error-code="operator"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import Run
from tests.patterns.pattern import Section

SECTION = Section("Programs: inputs that are not samples")

WORDS = 12


class _Sage(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.near, self.own = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        source, target = edges
        total = x.new_zeros(x.shape).scatter_add_(0, target.unsqueeze(-1).expand(-1, x.size(1)), x[source])
        count = x.new_zeros(x.size(0)).index_add_(0, target, x.new_ones(target.size(0)))
        return self.near(total / count.clamp(min=1).unsqueeze(-1)) + self.own(x)


class _Translator(nn.Module):
    """Words lie along dimension 0, sentences along dimension 1; of padding masks too where `turn` is set."""

    def __init__(self, turn: bool, known: dict[str, bool]) -> None:
        super().__init__()
        self.turn, self.known = turn, known
        self.source, self.target, self.out = nn.Embedding(WORDS, 8), nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)

    def forward(self, source: Tensor, target: Tensor, masks: tuple[Tensor, Tensor], padded: tuple[Tensor, ...]) -> Any:
        source_padding, target_padding = (mask.T for mask in padded) if self.turn else padded
        given = (self.source(source), self.target(target), *masks, None, source_padding, target_padding, source_padding)
        return self.out(self.transformer(*given, **self.known))


def _translate(run: Run, turn: bool, **known: bool) -> None:
    model = run.compile(_Translator(turn, known), dim=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    minus = float("-inf")
    masks = torch.zeros(5, 5), torch.triu(torch.full((6, 6), minus), 1)
    for _ in range(3):
        source, target = run.randint(WORDS - 1, 5, 4, dim=1) + 1, run.randint(WORDS - 1, 7, 4, dim=1) + 1
        source = torch.where((source == 2) & (torch.arange(5).unsqueeze(1) > 1), 0, source)
        padded = [torch.zeros(words.shape).masked_fill(words == 0, minus) for words in (source, target[:-1])]
        scores = model(source, target[:-1], masks, tuple(mask if turn else mask.T for mask in padded))
        loss = F.cross_entropy(scores.reshape(-1, WORDS), target[1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


_CAUSAL = {"src_is_causal": False, "tgt_is_causal": True}
_PARTS = tuple(f"transformer.{one}.out_proj" for one in (
    "encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"
))  # fmt: skip


@SECTION(
    "translation: `nn.Transformer(..., src_is_causal=False, tgt_is_causal=True)`, sentences along dimension 1 of all",
    free=_PARTS,
)
def masked_translation(run: Run) -> None:
    _translate(run, turn=True, **_CAUSAL)


@SECTION(
    "the same with padding masks `[sentences, words]` beside words `[words, sentences]`",
    refused={
        "ranks/*": "bring all inputs with samples there",
        "one/replicas": "its samples depend on each other",
        "one/mixed": "its samples depend on each other",
    },
    why="samples lie along one dimension of all inputs: turn the masks inside the model",
    free=_PARTS,
)
def masks_by_sentence(run: Run) -> None:
    _translate(run, turn=False, **_CAUSAL)


@SECTION(
    "the same, and nn.Transformer sees for itself whether masks are causal",
    refused={"*": "src_is_causal=False, tgt_is_causal=True"},
    why="it would branch on a mask's values: say it in the call",
    free=_PARTS,
)
def masked_translation_that_looks(run: Run) -> None:
    _translate(run, turn=True)
