"""Training with state in slices beside the plain model, and what each process keeps of weights and optimizer state."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from parplan.graph.layer_graph import Layer
from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.sharded_state.sharded_tensor import local_tensor
from tests.runtime.helpers import Rule, planner, spread
from tests.runtime.micro_batch_cases import Rows, by_train_step

__all__ = ["on_ranks", "sharded", "trained"]


def sharded(rule: Rule, state: str = "sharded") -> Rule:
    """The rule, with the state of every layer in slices."""

    def own(layer: Layer) -> Strategy:
        return replace(rule(layer), state=state)

    return own


def trained(rule: Rule, devices: int, state: str = "sharded") -> Compiled:
    """Two accumulated backwards a step, clipped, AdamW, the first layer frozen after two steps: the plain model's
    losses, norms and weights."""
    torch.manual_seed(0)
    net = Rows()
    plain = copy.deepcopy(net)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    places = None if dist.is_initialized() else ["cpu"] * devices
    model = Compiled(net, planner(sharded(rule, state), devices), devices=places)
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.01) for own in (model, plain)]

    def step(own: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        optimizer.zero_grad()
        losses = [functional.mse_loss(own(x), y) for x, y in batches]
        for loss in losses:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(own.parameters(), 0.1)
        optimizer.step()
        return [*(loss.detach() for loss in losses), norm.detach()]

    for number in range(4):
        if number == 2:
            for own in (model.module, plain):
                own.get_parameter("net.0.weight").requires_grad_(False)
        batches = [(torch.randn(4 * ranks, 8).double(), torch.randn(4 * ranks, 8).double()) for _ in range(2)]
        parts = [(x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]) for x, y in batches]
        found, wanted = step(model, optimizers[0], parts), step(plain, optimizers[1], batches)
        torch.testing.assert_close(found[-1], wanted[-1], rtol=1e-9, atol=1e-12)
        if ranks == 1:
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        found_state = model.state_dict()
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(found_state[name], tensor, rtol=1e-9, atol=1e-10)
    if ranks > 1:
        for name, parameter in model.module.named_parameters():
            known = optimizers[0].state[parameter]["exp_avg"]
            for kept in (parameter, known):
                assert parameter.dim() == 1 or local_tensor(kept).numel() == parameter.numel() // ranks, name
    return model


def cut_or_whole(layer: Layer, cut: Strategy, whole: Strategy) -> Strategy:
    """Of layers with parameters and of others."""
    return cut if layer.parameters else whole


def on_ranks(rank: int, ranks: int) -> None:
    """Replicas, and replicas of shards."""
    everyone = tuple(range(ranks))
    for state in ("sharded", "gathered"):
        trained(spread(ranks, "data"), ranks, state)
        if ranks == 4:
            whole, cut = Strategy(4, 1, None, everyone), Strategy(2, 2, "out-features", everyone)
            trained(partial(cut_or_whole, cut=cut, whole=whole), ranks, state)
        for micro_batches in (1, 3):
            by_train_step(sharded(spread(ranks, "data"), state), ranks, micro_batches, 5 * ranks)
