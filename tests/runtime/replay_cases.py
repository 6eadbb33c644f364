"""Plans whose layers run forward again before their backward, in training beside the plain model and beside plans that
keep what the backward needs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import unit_of
from parplan.lowering.program import Compute
from parplan.lowering.segments import Segments
from parplan.plan import Plan, Scheme, Strategy
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import Rule, planner, spread
from tests.runtime.micro_batch_cases import by_train_step
from tests.runtime.slice_cases import cut_or_whole, sharded, trained

__all__ = [
    "Decoder", "Mixed", "beside_kept", "both_results", "checkpointed", "on_ranks", "one_result", "replaying",
    "whole", "words",
]  # fmt: skip


def replaying(
    rule: Rule | Mapping[str, Strategy],
    devices: int,
    scheme: Scheme = Scheme.GATHER,
    micro_batches: int = 1,
    which: Callable[[int], bool] = lambda place: True,
) -> Callable[[LayerGraph], Plan]:
    """As `planner`, with those layers of units replayed that `which` says, by their place among them."""
    of = planner(rule, devices, scheme, micro_batches)

    def plan(graph: LayerGraph) -> Plan:
        known = of(graph)
        assert unit_of(graph), "no layer can be replayed"
        chosen = {name for place, name in enumerate(unit_of(graph)) if which(place)}
        return known.with_layers(
            {n: replace(own, saved="replay" if n in chosen else "keep") for n, own in known.layers.items()}
        )

    return plan


class Decoder(nn.Module):
    """Words to a loss by two blocks of attention and a wide layer, with dropout."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16)
        self.norms, self.last = nn.ModuleList(nn.LayerNorm(16) for _ in range(4)), nn.Linear(16, 32)
        self.mixing = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.mixed = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.wide = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16), nn.Dropout(dropout))
            for _ in range(2)
        )
        self.dropout = dropout
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words[:, :-1])
        for number in range(2):
            parts = self.mixing[number](self.norms[2 * number](x)).unflatten(2, (4, 12)).transpose(1, 2)
            q, k, v = parts.chunk(3, 3)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
            x = x + functional.dropout(self.mixed[number](mixed.transpose(1, 2).flatten(2)), self.dropout)
            x = x + self.wide[number](self.norms[2 * number + 1](x))
        return functional.cross_entropy(self.last(x).flatten(0, 1), words[:, 1:].flatten())


def words(samples: int) -> Tensor:
    """A batch for the decoder."""
    return torch.randint(32, (samples, 9))


class Mixed(nn.Module):
    """Convolutions and pooling, then linear layers, to two results."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.back = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh())
        self.one, self.other = (nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.back(self.front(x))
        return self.one(y), self.other(y)


Loss = Callable[[nn.Module, Tensor], Tensor]


def steps(model: nn.Module, loss: Loss, batches: list[Tensor]) -> list[Tensor | None]:
    """Losses, gradients and the numbers that are drawn next, of one forward per batch and then the backwards in
    reverse order."""
    torch.manual_seed(1)
    losses = [loss(model, batch) for batch in batches]
    for one in reversed(losses):
        one.backward()
    return [*(one.detach() for one in losses), *(p.grad for p in model.parameters()), torch.rand(3)]


def beside_kept(
    net: nn.Module,
    rule: Rule,
    devices: int,
    loss: Loss,
    batches: list[Tensor],
    which: Callable[[int], bool] = lambda place: True,
    **options: Any,
) -> None:
    """The same steps with and without replay: equal losses and gradients, whatever is drawn."""
    places = None if dist.is_initialized() else ["cpu"] * devices
    lowered, results = Segments.steps, []

    def kept(self: Segments, *args: Any) -> list[Compute]:
        return [replace(step, unit=None) for step in lowered(self, *args)]

    for change in (lowered, kept):
        with mock.patch.object(Segments, "steps", change):
            plan = replaying(rule, devices, which=which)
            model = Compiled(copy.deepcopy(net), plan, devices=places, **options)
            results.append(steps(model, loss, batches))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def own_rows(batch: Tensor) -> Tensor:
    """This process's part of a batch."""
    return batch.tensor_split(dist.get_world_size())[dist.get_rank()]


def one_result(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that leaves one of two results out."""
    result: Tensor = model(x)[0].square().mean()
    return result


def both_results(model: nn.Module, x: Tensor) -> Tensor:
    """A loss of two results."""
    first, second = model(x)
    result: Tensor = first.square().mean() + second.tanh().mean()
    return result


def retained(model: nn.Module, x: Tensor) -> Tensor:
    """A loss of two results, of which one has gone back alone before."""
    first, second = model(x)
    first.square().mean().backward(retain_graph=True)
    result: Tensor = first.mean() + second.square().mean()
    return result


def whole(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that the model gives."""
    result: Tensor = model(x)
    return result


def checkpointed(model: nn.Module, x: Tensor, use_reentrant: bool = False) -> Tensor:
    """The same, of a model that a checkpoint runs again."""
    result: Tensor = checkpoint(model, x, use_reentrant=use_reentrant)
    return result


def on_ranks(rank: int, ranks: int) -> None:
    """Replicas and shards, whatever lies in slices; dropout; results that a loss leaves out; micro-batches.

    On four ranks one state, and no results that a loss leaves out: what they add is groups of more ranks.
    """
    everyone = tuple(range(ranks))
    whole_rows, cut = Strategy(ranks, 1, None, everyone), Strategy(1, ranks, "out-features", everyone)
    mixed: Rule = partial(cut_or_whole, cut=cut, whole=whole_rows)
    for state in ("replicated", "sharded", "gathered") if ranks == 2 else ("gathered",):
        trained(spread(ranks, "data"), ranks, state, replaying)
    by_train_step(sharded(spread(ranks, "data"), "gathered"), ranks, 3, 5 * ranks, replaying)
    torch.manual_seed(0)
    trained(mixed, ranks, "replicated", replaying)
    batches = [own_rows(words(2 * ranks)) for _ in range(2)]
    replicas, gathered = spread(ranks, "data"), sharded(spread(ranks, "data"), "gathered")
    for rule, loss in ((replicas, whole), (gathered, checkpointed), (spread(ranks, "hybrid"), whole)):
        beside_kept(Decoder(), rule, ranks, loss, batches)
    if ranks > 2:
        return
    images = [own_rows(torch.randn(2 * ranks, 3, 8, 8).double()) for _ in range(2)]
    for rule, loss in ((replicas, both_results), (gathered, one_result), (gathered, retained)):
        beside_kept(Mixed(), rule, ranks, loss, images)
