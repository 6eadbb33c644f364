"""Small networks the cost tests share, captured once."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph


class Attention(nn.Module):
    """Tokens to a loss through one attention block; the class weights are the embedding's (tied)."""

    def __init__(self, words: int = 48, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.classes = nn.Linear(width, words, bias=False)
        self.classes.weight = self.embed.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor, following: Tensor) -> Any:
        x = self.embed(tokens)
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return self.loss(self.classes(x).flatten(0, 1), following.flatten())


@dataclass(frozen=True)
class Network:
    """A model with a call and its captured training graph."""

    model: nn.Module
    args: tuple[Tensor, ...]
    graph: LayerGraph


EXAMPLES = ("mlp", "alexnet", "two_tower", "vgg16", "resnet50")
NETWORKS = (*EXAMPLES, "attention")


@cache
def network(name: str) -> Network:
    """One of NETWORKS: the small version of an example, or the attention block."""
    if name == "attention":
        tokens = torch.arange(84).reshape(12, 7) % 48
        model, args = Attention(), (tokens, tokens.flip(0))
    else:
        model, args = importlib.import_module(f"examples.{name}").small()
    return Network(model, args, capture(model, args))


@cache
def full_alexnet() -> LayerGraph:
    """The example at full size, 512 images."""
    example = importlib.import_module("examples.alexnet")
    return capture(example.build(), example.example_inputs())
