"""Training through pipeline stages beside the plain model, in one process and on ranks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from parplan.api import analyze
from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import unit_of
from parplan.lowering.pipeline.stages import stage_numbers
from parplan.plan import SAVED, SCHEDULES, STATES, Plan, Strategy
from parplan.runtime.execution import slot_parts
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import planner, spread
from tests.runtime.slice_cases import Decoder, trained_in_less_memory

__all__ = [
    "Crossed", "Staging", "Tower", "collectives_of_a_step", "decoder_in_stages", "messages_of_a_step", "on_ranks",
    "tokens", "trained",
]  # fmt: skip

TOKENS, WIDTH = 24, 16


class Block(nn.Module):
    """A residual block with dropout that may be off."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return result


class Tower(nn.Module):
    """A language model with its loss inside: an embedding, blocks, a skip over all of them, and a head, tied or not."""

    def __init__(self, blocks: int = 4, tied: bool = False, counted: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.counted = counted
        self.double()

    def forward(self, words: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        first = x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x + 0.5 * first)
        if self.counted:
            return functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores.argmax(-1)
        return (scores - labels[..., None] / TOKENS).square().mean(), scores


class Scale(nn.Module):
    """A product with a weight, as a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b * self.weight


class Crossed(nn.Module):
    """Branches that read each other's results, in another order than that of their stages when they are scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.scale = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH), Scale()
        self.b, self.c, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.double()

    def forward(self, words: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(words)
        scaled = self.scale(self.a(x), x)
        scores = self.head(scaled + self.c(self.b(x)))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    """Sentences and labels, of which some are ignored, in some samples more than in others."""
    words = torch.randint(0, TOKENS, (samples, 6))
    labels = words.roll(-1, 1)
    labels[torch.rand(labels.shape) < torch.linspace(0, 0.8, samples)[:, None]] = -100
    return words, labels


@dataclass(frozen=True)
class Staging:
    """Layers in forward order cut into stages, on equal groups of devices.

    Args:
        groups: of devices.
        rounds: stages per group.
        seed: where to cut; None: into equally many layers.
        scattered: every layer is on a group that is drawn, so that there are many rounds.
        state, saved: of the layers' strategies, where they can have them.
    """

    groups: int
    devices: int
    micro_batches: int
    schedule: str = "1f1b"
    rounds: int = 1
    seed: int | None = None
    state: str = STATES[0]
    saved: str = SAVED[0]
    scattered: bool = False

    def plan(self, graph: LayerGraph) -> Plan:
        """The plan."""
        names, stages, each = list(graph.layers), self.groups * self.rounds, self.devices // self.groups
        ends = [len(names) * (number + 1) // stages for number in range(stages - 1)]
        if self.seed is not None:
            ends = sorted(random.Random(self.seed).choices(range(len(names)), k=stages - 1))
        known, draw = unit_of(graph), random.Random(self.seed)
        chosen = dict[str, Strategy]()
        for place, (name, layer) in enumerate(graph.layers.items()):
            stage = draw.randrange(self.groups) if self.scattered else sum(place >= end for end in ends)
            first = stage % self.groups * each
            own = tuple(range(first, first + each))
            apart = layer.batch is not None and not layer.constant
            strategy = Strategy(each, 1, None, own) if apart else Strategy(devices=own[:1])
            saved = self.saved if name in known else SAVED[0]
            chosen[name] = replace(strategy, state=self.state if layer.parameters else STATES[0], saved=saved)
        plan = planner(chosen, self.devices, micro_batches=self.micro_batches)(graph)
        return replace(plan, schedule=self.schedule)


def trained(
    staging: Staging,
    samples: int,
    net: Callable[[], nn.Module] = Tower,
    sizes: Sequence[int] = (),
    steps: int = 3,
    place: str = "cpu",
    threads: bool = False,
) -> Compiled:
    """Losses, results, norms and weights of steps with AdamW and clipping: the plain model's.

    Args:
        samples: per step; of later steps `sizes`, where they are given.
        place: where the model and, in one process, all logical devices are.
        threads: each logical device has one.
    """
    torch.manual_seed(0)
    own = net().to(place)
    plain = copy.deepcopy(own)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    places = None if dist.is_initialized() else [place] * staging.devices
    model = Compiled(own, staging.plan, devices=places, threads=threads)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain)]
    for number in range(steps):
        batch = [tensor.to(place) for tensor in tokens((sizes or (samples,) * steps)[number])]
        part = [tensor.tensor_split(ranks)[rank] for tensor in batch]
        (found, scores), (wanted, all_scores) = model(*part), plain(*batch)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(scores, all_scores.tensor_split(ranks)[rank], rtol=1e-9, atol=1e-10)
        norms = []
        for one, loss, optimizer in zip((model, plain), (found, wanted), optimizers, strict=True):
            optimizer.zero_grad()
            (loss / 2).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1))
            optimizer.step()
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-8, atol=1e-12)
        state = model.state_dict()
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-8, atol=1e-9)
    assert model.graph is not None
    numbers = stage_numbers(model.graph, staging.plan(model.graph).layers)
    assert staging.seed is not None or (len(numbers.groups), numbers.count) == (
        staging.groups,
        staging.groups * staging.rounds,
    )
    return model


def on_ranks(rank: int, ranks: int) -> None:
    """Every schedule; groups of one device and of two, state in slices, replays, tied weights, uneven micro-batches."""
    for schedule in ("1f1b", "gpipe"):
        trained(Staging(ranks, ranks, 4, schedule), 4 * ranks)
    trained(Staging(ranks, ranks, 2 * ranks, rounds=2), 4 * ranks)
    trained(Staging(ranks, ranks, 3, saved="replay"), 4 * ranks, lambda: Tower(tied=True))
    trained(Staging(ranks, ranks, 4), 4 * ranks, lambda: Tower(counted=False), sizes=(4 * ranks, 5 * ranks + 1, ranks))
    if ranks == 4:
        for state in STATES:
            trained(Staging(2, 4, 4, state=state), 16)
    with patch.object(slot_parts, "TOGETHER", 100):  # bytes: two or three micro-batches of an input
        trained(Staging(ranks, ranks, 7), 7 * ranks, sizes=(7 * ranks, 9 * ranks + 1, 7 * ranks))


def collectives_of_a_step(rank: int, ranks: int) -> None:
    """A step agrees on its facts and on the loss's factor; what targets count is told once, where that is not known."""
    for counted in (False, True):
        model = Compiled(Tower(counted=counted), Staging(ranks, ranks, 4).plan)
        part = [tensor.tensor_split(ranks)[rank] for tensor in tokens(4 * ranks)]
        model(*part)[0].backward()  # at first processes compare more: the plain model, which parameters have gradients
        transport = model._captures._transport
        counted_calls = {name: Mock(wraps=getattr(dist, name)) for name in COLLECTIVES}
        with patch.multiple(dist, **counted_calls), patch.object(transport, "gather", wraps=transport.gather) as facts:
            model(*part)[0].backward()
            calls = {name: getattr(dist, name).call_count for name in COLLECTIVES}
        assert calls == {**dict.fromkeys(COLLECTIVES, 0), "all_gather": 1, "broadcast": int(counted)}, calls
        assert facts.call_count == 1


def messages_of_a_step(rank: int, ranks: int) -> None:
    """Inputs and results of all micro-batches go together, whatever their number."""
    sent = []
    for micro_batches in (4, 8):
        model = Compiled(Tower(), Staging(ranks, ranks, micro_batches).plan)
        part = [tensor.tensor_split(ranks)[rank] for tensor in tokens(8 * ranks)]
        model(*part)[0].backward()
        with patch.object(dist, "isend", Mock(wraps=dist.isend)) as isend:
            model(*part)[0].backward()
            sent.append(isend.call_count)
    assert sent[1] - sent[0] == 4 * 3, sent  # of every micro-batch, the three values between the stages


COLLECTIVES = ("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list")


# ---- a model that does not fit ---------------------------------------------------------------------------------------


def decoder_in_stages(ranks: int) -> Callable[[int, int], None]:
    """Replicas need 2.5 times the memory there is: stages that fit are planned, for all ranks at once. The case that
    trains them."""
    net, words = Decoder(layers=4), torch.randint(64, (16 * ranks, 17))
    graph, cluster = capture(net, (words,)), this_cluster(ranks, torch.device("cpu"))
    replicas = {name: spread(ranks, "data")(layer) for name, layer in graph.layers.items()}
    small = cluster.with_memory(int(max(RooflineCosts(graph, cluster).peaks(replicas)) / 2.5))
    analysis = analyze(net, words, cluster=small, micro_batches=8, stages=ranks)
    assert analysis.plan.schedule in SCHEDULES[1:]
    assert len(stage_numbers(graph, analysis.plan.layers).groups) == ranks
    return partial(trained_in_less_memory, analysis.plan, analysis.prediction.memory_bytes, layers=4)
