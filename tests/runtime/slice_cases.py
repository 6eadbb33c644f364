"""Training with state in slices beside the plain model, and what each process keeps of weights and optimizer state."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from examples.gpt2 import GPT2, Sizes
from parplan.api import analyze
from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer
from parplan.plan import STATES, Plan, Scheme, Strategy
from parplan.runtime.measurement.peak_memory import step_peak
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.sharded_state.sharded_tensor import local_tensor
from parplan.runtime.transport import devices, distributed
from parplan.runtime.transport.distributed import DistributedTransport
from tests.runtime.helpers import Planner, Rule, planner, spread
from tests.runtime.micro_batch_cases import Rows, by_train_step

__all__ = ["Decoder", "by_collectives", "decoder_in_less_memory", "in_every_state_under_autocast", "on_ranks",
           "on_ranks_under_autocast", "sharded", "trained", "trained_in_less_memory"]  # fmt: skip


def sharded(rule: Rule, state: str = "sharded") -> Rule:
    """The rule, with the state of every layer in slices."""

    def own(layer: Layer) -> Strategy:
        return replace(rule(layer), state=state)

    return own


def trained(rule: Rule, devices: int, state: str = "sharded", plans: Planner = planner) -> Compiled:
    """Two accumulated backwards a step, clipped, AdamW, the first layer frozen after two steps: the plain model's
    losses, norms and weights."""
    torch.manual_seed(0)
    net = Rows()
    plain = copy.deepcopy(net)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    places = None if dist.is_initialized() else ["cpu"] * devices
    model = Compiled(net, plans(sharded(rule, state), devices, Scheme.GATHER, 1), devices=places)
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
                sliced = state != "replicated" and parameter.dim() > 1
                assert not sliced or local_tensor(kept).numel() == parameter.numel() // ranks, name
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


def by_collectives(rank: int, ranks: int) -> None:
    """The same where slices are exchanged by the collectives that other backends than gloo take."""
    taken = dict.fromkeys(("gather_slices", "sum_to_slices"), 0)

    def counted(name: str) -> Any:
        run = getattr(distributed, name)

        def own(*args: Any, **kwargs: Any) -> Any:
            taken[name] += 1
            return run(*args, **kwargs)

        return own

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(devices, "DistributedTransport", partial(DistributedTransport, collectives=True))
        for name in taken:
            patched.setattr(distributed, name, counted(name))
        on_ranks(rank, ranks)
    assert min(taken.values()) > 10, taken


class Halves(nn.Module):
    """Matrices that autocast reads in bf16, one that the forward casts itself, one that is read as it is, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.own, self.last = (nn.Linear(16, 16) for _ in range(4))
        self.table = nn.Embedding(8, 16)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.relu(self.first(x))) + self.table(places))
        h = functional.linear(h.bfloat16(), self.own.weight.bfloat16()).float()
        result: Tensor = self.last(h)
        return result


def under_autocast(devices: int, state: str) -> tuple[list[Tensor], dict[str, Tensor], Counter[torch.dtype]]:
    """Three steps in bf16, close to the plain model's: the losses, the weights, and of the gathers of matrices and the
    sums of their gradients how many send which type."""
    torch.manual_seed(0)
    net = Halves()
    plain = copy.deepcopy(net)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    places = None if dist.is_initialized() else ["cpu"] * devices
    model = Compiled(net, planner(sharded(spread(devices, "data"), state), devices), devices=places)
    optimizers = [torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9) for own in (model, plain)]
    losses = []
    for _ in range(3):
        every = torch.randn(8 * ranks, 16), torch.randint(8, (8 * ranks,)), torch.randn(8 * ranks, 16)
        parts = [[one.tensor_split(ranks)[rank] for one in every], every]
        for own, optimizer, (x, rows, y) in zip((model, plain), optimizers, parts, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.mse_loss(own(x, rows).float(), y)
            loss.backward()
            optimizer.step()
            losses += [loss.detach()] if own is model else []
    found = model.state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0.05, atol=0.01, msg=f"{name} of {state} state")
    assert model.program is not None
    moves = [one for one in model.program.transfers if one.weights]
    return losses, found, Counter(dtype for one in moves for dtype in (one.exchange.dtype, one.transposed.dtype))


def in_every_state_under_autocast(devices: int) -> None:
    """Weights cast before they are gathered, and gradients summed in float32, give the very numbers of whole ones."""
    *wanted, nothing = under_autocast(devices, "replicated")
    assert not nothing
    for state in ("sharded", "gathered"):
        *found, moved = under_autocast(devices, state)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert moved == {torch.bfloat16: 4, torch.float32: 1 + 5}


def on_ranks_under_autocast(rank: int, ranks: int) -> None:
    """The same with messages, and with the collectives that other backends than gloo take."""
    in_every_state_under_autocast(ranks)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(devices, "DistributedTransport", partial(DistributedTransport, collectives=True))
        in_every_state_under_autocast(ranks)


# ---- a model that does not fit ---------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """A small GPT-2 with its loss inside, on [sentences, 17] tokens."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.net = GPT2(Sizes(layers=layers, width=64, heads=2, tokens=64, positions=16)).double()

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def decoder_in_less_memory(ranks: int) -> Callable[[int, int], None]:
    """Replicas need 2.5 times the memory there is: a plan with layers of every state in micro-batches is chosen, for
    all ranks at once. The case that trains it."""
    net, tokens = Decoder(), torch.randint(64, (16 * ranks, 17))
    graph, cluster = capture(net, (tokens,)), this_cluster(ranks, torch.device("cpu"))
    replicas = {n: spread(ranks, "data")(layer) for n, layer in graph.layers.items()}
    limit_bytes = int(max(RooflineCosts(graph, cluster).peaks(replicas)) / 2.5)
    analysis = analyze(
        net, tokens, cluster=cluster.with_memory(limit_bytes), micro_batches=8,
        # Replaying some of it would be faster, and where gathers are hidden, no layer needs to keep its weights whole.
        pins=[f"net.*=replicas:{ranks} saved:keep", "net.h.0.attn.out=state:sharded"],
    )  # fmt: skip
    assert {own.state for own in analysis.plan.layers.values()} == set(STATES)
    return partial(trained_in_less_memory, analysis.plan, analysis.prediction.memory_bytes)


def trained_in_less_memory(plan: Plan, predicted_bytes: Sequence[int], rank: int, ranks: int, layers: int = 1) -> None:
    """The plan takes what is predicted, and trains as the plain model does."""
    torch.manual_seed(0)
    net, samples = Decoder(layers), 16 * ranks
    plain = copy.deepcopy(net)
    batches = [torch.randint(64, (samples, 17)) for _ in range(5)]
    model = Compiled(net, lambda _: plan)
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.01) for own in (model, plain)]

    def step(own: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, norms: list[Tensor]) -> None:
        optimizer.zero_grad()
        own(tokens).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(own.parameters(), 0.5).detach())
        optimizer.step()

    peaks = []
    for tokens in batches:
        part = tokens.tensor_split(ranks)[rank].clone()
        norms = list[Tensor]()
        held = [*net.parameters(), *(t for s in optimizers[0].state.values() for t in s.values()), part]
        optimizers[0].zero_grad()
        peaks.append(step_peak(partial(step, model, optimizers[0], part, norms), held).peak_bytes)
        step(plain, optimizers[1], tokens, norms)
        torch.testing.assert_close(*norms, rtol=1e-9, atol=1e-12)
        state = model.state_dict()
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-10)
    assert max(peaks[1:]) == pytest.approx(predicted_bytes[rank], rel=0.1)
