"""Exported programs with pipeline stages under a process group: the plain model's losses and weights, in float64."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parplan.errors import PlanError
from parplan.export.pipeline_text import PipelineProgram
from parplan.export.torch_program import torch_program
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import SAVED, STATES, Plan, Strategy
from parplan.runtime.processes import in_processes
from tests.export.test_torch_program import Made, decoder, perceptron

STEPS, RATE, MOMENTUM = 3, 0.05, 0.9


@dataclass(frozen=True)
class Staged:
    """A plan in stages of equally many devices.

    Args:
        begins: the first layer of each stage but the first.
        groups: of devices, that the stages are on in turns.
        each: devices of a group.
        order: of the devices of all groups; None: as they are numbered.
    """

    begins: Sequence[str]
    groups: int = 2
    each: int = 1
    micro_batches: int = 4
    schedule: str = "1f1b"
    state: str = STATES[0]
    saved: str = SAVED[0]
    order: Sequence[int] | None = None

    def __call__(self, graph: LayerGraph) -> Plan:
        devices = self.order or range(self.groups * self.each)
        stage, chosen = 0, dict[str, Strategy]()
        for name, layer in graph.layers.items():
            stage += stage < len(self.begins) and name == self.begins[stage]
            first = stage % self.groups * self.each
            own = tuple(devices[first : first + self.each])
            apart = layer.batch is not None and not layer.constant
            strategy = Strategy(self.each, 1, None, own) if apart else Strategy(devices=own[:1])
            saved = self.saved if name.startswith("h.") else SAVED[0]
            chosen[name] = replace(strategy, state=self.state if layer.parameters and apart else STATES[0], saved=saved)
        return Plan(
            graph.model, graph.fingerprint, graph.batch or 1, len(devices), chosen, micro_batches=self.micro_batches,
            schedule=self.schedule,
        )  # fmt: skip


class Residual(nn.Module):
    """Two convolutions beside the identity or, where sizes change, beside a third one."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        stride = 1 + (inside != outside)
        self.first, self.second = nn.Conv2d(inside, outside, 3, stride, 1), nn.Conv2d(outside, outside, 3, 1, 1)
        self.norm = nn.GroupNorm(2, outside)
        self.side = nn.Conv2d(inside, outside, 1, stride) if inside != outside else None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.norm(self.first(x)).relu())
        return (made + (x if self.side is None else self.side(x))).relu()


class Convnet(nn.Module):
    """Residual blocks, a mean over positions and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Residual(4, 4), Residual(4, 8), Residual(8, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.stem(x)).mean((-2, -1)))
        return scores


def convnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Convnet(), (torch.randn(8, 3, 6, 6),)


class Rotated(nn.Module):
    """Two inputs, and angles that no sample reaches and both halves read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.linspace(0, 1, 6, device=x.device, dtype=x.dtype).cos()
        x = self.first(x * scale) * angles
        x = self.second(x.tanh()) * angles
        return x, x.square()


def rotated() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Rotated(), (torch.randn(8, 6), torch.rand(8, 1))


class WithLoss(nn.Module):
    """A decoder with its loss inside, of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = decoder()[0]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        scores = self.decoder(tokens)
        targets = tokens.roll(-1, 1) if targets is None else targets
        loss: Tensor = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        return loss


def with_loss(own_targets: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    tokens = decoder()[1][0]
    return WithLoss(), (tokens,) if own_targets else (tokens, tokens.roll(3, 1))


class Masked(nn.Module):
    """Tokens, whose mask the second half reads, and an embedding that is not trained."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        for one in (self.embed, self.first) if frozen else (self.embed,):
            one.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        absent, counts = tokens == 0, tokens + 1
        x = self.second(self.first(self.embed(tokens)).tanh())
        scores: Tensor = x.masked_fill(absent[..., None], 0.5) * counts[..., None]
        return scores


def masked(frozen: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Masked(frozen), (torch.randint(0, 7, (8, 5)),)


IN_TWO, IN_FOUR = ("h.1.ln1",), ("h.0.ln1", "h.1.ln1", "ln_f")

CASES: dict[str, tuple[Made, Staged]] = {
    "perceptron, 1f1b": (perceptron, Staged(("2",))),
    "perceptron, gpipe": (perceptron, Staged(("2",), schedule="gpipe")),
    "perceptron, interleaved": (perceptron, Staged(("1", "2", "4"))),
    "perceptron, replicas": (perceptron, Staged(("2",), each=2, micro_batches=2)),
    "perceptron, devices in another order": (perceptron, Staged(("2",), each=2, micro_batches=2, order=(3, 1, 0, 2))),
    "decoder, 1f1b": (decoder, Staged(IN_TWO)),
    "decoder, gpipe and replays": (decoder, Staged(IN_TWO, schedule="gpipe", saved="replay")),
    "decoder, interleaved": (decoder, Staged(IN_FOUR)),
    "decoder, interleaved, micro-batches that groups do not divide": (decoder, Staged(IN_FOUR, micro_batches=3)),
    "decoder, four groups": (decoder, Staged(IN_FOUR, groups=4)),
    "decoder, cut inside a block": (decoder, Staged(("h.0.down",))),
    "decoder, cut behind a module": (decoder, Staged(("h.0.add_1",))),
    "decoder, replicas": (decoder, Staged(IN_TWO, each=2, micro_batches=2)),
    "decoder, replicas in slices, interleaved": (decoder, Staged(IN_FOUR, each=2, micro_batches=2, state="gathered")),
    "decoder, replicas in slices and replays": (
        decoder, Staged(IN_TWO, each=2, micro_batches=3, state="sharded", saved="replay"),
    ),
    "convnet, 1f1b": (convnet, Staged(("blocks.1.first",))),
    "convnet, gpipe, interleaved": (
        convnet, Staged(("blocks.0.first", "blocks.1.first", "blocks.2.first"), schedule="gpipe")
    ),
    "convnet, replicas": (convnet, Staged(("blocks.1.first",), each=2, micro_batches=2)),
    "a loss inside": (with_loss, Staged(("decoder.h.1.ln1",))),
    "a loss of the inputs themselves": (partial(with_loss, True), Staged(("decoder.h.0.attn.out",))),
    "a loss inside, interleaved, replicas": (
        with_loss, Staged(("decoder.h.0.ln1", "decoder.h.1.ln1", "decoder.ln_f"), each=2, micro_batches=2),
    ),
    "a mask, and a layer that is not trained": (masked, Staged(("second",), each=2, micro_batches=2)),
    "a first stage that is not trained": (partial(masked, True), Staged(("second",))),
    "two inputs and results, and angles": (rotated, Staged(("second",))),
}  # fmt: skip


def doubled(args: Sequence[Tensor]) -> list[Tensor]:
    return [one.double() if one.is_floating_point() else one for one in args]


def loss_of(results: Tensor | tuple[Tensor, ...], wanted: Tensor) -> Tensor:
    first = results if isinstance(results, Tensor) else results[0] + results[1]
    return (first - wanted.double().flatten(1).mean(1).reshape(-1, *[1] * (first.dim() - 1))).square().mean()


def train(text: str, name: str, rank: int, ranks: int) -> dict[str, Tensor]:
    """Steps by an exported program, in one process of several: weights of its stages, and the losses it knows of."""
    space: dict[str, object] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), space)
    made, staged = CASES[name]
    module, args = made()
    parts = [one.tensor_split(staged.each) for one in doubled(args)]
    shares = [own[0] if len(own) == 1 else own for own in zip(*parts, strict=True)]
    inside = "loss_part" in text
    mesh, model, step = space["parallelize"](  # type: ignore[operator]
        module.double(), *(() if inside else (loss_of,)), shares[0]
    )
    number = mesh["data"].get_local_rank()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step(shares[number], *(() if inside else (parts[0][number],)))
        optimizer.step()
        if loss is not None:
            dist.all_reduce(loss, group=mesh["data"].get_group())
            losses.append(loss / mesh["data"].size())
    state = {key.partition(".")[2]: one for key, one in model.state_dict().items()}
    whole = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in state.items()}
    return {**whole, "losses": torch.stack(losses)} if losses else whole


@pytest.mark.parametrize(
    "name", [name if name == "decoder, 1f1b" else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_losses_and_weights_are_the_plain_models(name: str) -> None:
    made, staged = CASES[name]
    module, args = made()
    graph = capture(module, args)
    text = torch_program(graph, staged(graph), module, args).text()
    assert "import parplan" not in text
    found = in_processes(staged.groups * staged.each, partial(train, text, name), timeout_s=120)
    plain, inputs = copy.deepcopy(module).double(), doubled(args)
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=RATE, momentum=MOMENTUM), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        results = plain(*inputs)
        loss = results if isinstance(results, Tensor) and results.dim() == 0 else loss_of(results, inputs[0])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    told = [own.pop("losses") for own in found if "losses" in own]
    assert len(told) == staged.each  # the last stage's copies
    for one in told:
        torch.testing.assert_close(one, torch.stack(losses), rtol=1e-9, atol=1e-12)
    wanted = plain.state_dict()
    assert {key for own in found for key in own} == wanted.keys()
    for own in found:
        for key, tensor in own.items():
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-8, atol=1e-11, msg=f"{key} differs")


def refused(made: Made, plan: Callable[[LayerGraph], Plan]) -> str:
    module, args = made()
    graph = capture(module, args)
    with pytest.raises(PlanError) as caught:
        torch_program(graph, plan(graph), module, args)
    return str(caught.value)


def moved(staged: Staged, **strategies: Strategy) -> Callable[[LayerGraph], Plan]:
    """A plan with other strategies for some layers."""
    return lambda graph: staged(graph).with_layers(strategies)


class Looped(nn.Module):
    """A layer that is called twice, or the weight of one that code takes from it."""

    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self.embed, self.body, self.middle = nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh()
        self.functional = functional

    def forward(self, x: Tensor) -> Tensor:
        first = self.embed(x)
        x = self.middle(first.tanh() + self.body(first))
        made: Tensor = nn.functional.linear(x, self.embed.weight) if self.functional else self.body(x) + first
        return made


def looped(functional: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Looped(functional), (torch.randn(8, 6),)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        left: Tensor = self.left(x)
        both: Tensor = left + self.right(x)
        return both


class Pair(nn.Module):
    """Two linear layers with something around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)


class Dictionary(Pair):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.second(self.first(x))}


class Early(Pair):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        return x, self.second(x)


class Weighed(Pair):
    def forward(self, x: Tensor, weights: Tensor) -> tuple[Tensor]:
        return (self.second(self.first(x * weights)),)


class Fused(Pair):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = (self.second(self.first(x).tanh() - targets) - targets).square().mean()
        return loss


class Summed(Pair):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = (self.second(self.first(x).tanh()) - targets).square().sum()
        return loss


def pair(kind: type[Pair], *more: Tensor) -> Made:
    return lambda: (kind(), (torch.randn(8, 6), *more))


SECOND = Staged(("second",))

REFUSED: dict[str, tuple[Made, Callable[[LayerGraph], Plan], str]] = {
    "shards": (
        perceptron,
        moved(Staged(("2",), each=2, micro_batches=2), **{"4": Strategy(1, 2, "out-features", (2, 3))}),
        r"^4: 2 shards of out-features .* replicas instead",
    ),
    "groups of other sizes": (
        perceptron,
        lambda graph: replace(moved(Staged(("2",)), **{"0": Strategy(2, 1, None, (0, 2))})(graph), devices=3),
        r"groups of 2, 1 devices; torch's have equally many",
    ),
    "a round of stages that ends early": (perceptron, Staged(("1", "4")), r"stage 3 of 4 has no layer"),
    "an order that is not that of the code": (
        lambda: (Branches(), (torch.randn(8, 6),)),
        moved(Staged(("left",)), right=Strategy()),
        r"^left: it is in stage 1 and runs before right, of stage 0; ",
    ),
    "a cut beside a module that is called twice": (
        looped, Staged(("add",)), r"^add: stage 1 begins there, .* give body and add the same devices",
    ),
    "a value two stages on": (
        decoder,
        Staged(("h.0.ln1", "h.0.attn.out", "h.0.ln2"), groups=4),
        r"^h.0.add: in stage 2 it reads a result of add, of stage 0",
    ),
    "an early result": (pair(Early), SECOND, r"^first: the model returns its result, made in stage 0"),
    "targets in front of weights": (
        pair(Fused, torch.randn(8, 6)), Staged(("tanh",)), r"reads input targets in stage 1; .* behind its last",
    ),
    "a sum of losses": (pair(Summed, torch.randn(8, 6)), SECOND, r"the loss is a sum over samples"),
    "an input without samples": (pair(Weighed, torch.randn(6)), SECOND, r"^input weights of Weighed has no samples"),
    "a dictionary": (pair(Dictionary), SECOND, r"returns a dict; .* a tuple of them"),
    "a module in two stages": (
        looped, Staged(("middle",)), r"^body.weight: it is used by body .stage 0., body@1 .stage 1",
    ),
    "a weight that code takes from another module": (
        partial(looped, True), Staged(("middle",)), r"^embed.weight: it is used by embed .stage 0., linear .stage 1",
    ),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_cannot_express_is_refused_by_name(name: str) -> None:
    made, plan, told = REFUSED[name]
    assert re.search(told, refused(made, plan))


@pytest.mark.full
@pytest.mark.parametrize(
    ("begins", "cuts"),
    [
        (IN_FOUR, {"h.0": "BEGINNING", "h.1": "BEGINNING", "ln_f": "BEGINNING"}),
        (("h.0.down",), {"h.0.down": "BEGINNING"}),
        (("h.0.add_1",), {"h.0.down": "END"}),
        (("h.0.attn.attention",), {"h.0.attn.qkv": "END"}),
    ],
)
def test_a_stage_begins_with_the_largest_module_there(begins: Sequence[str], cuts: Mapping[str, str]) -> None:
    module, args = decoder()
    graph = capture(module, args)
    program = torch_program(graph, Staged(begins)(graph), module, args)
    assert isinstance(program, PipelineProgram)
    assert program.stages.cuts == cuts
    assert [sorted(names.items()) for names in program.stages.tied] == [
        [("head.weight", len(begins)), ("wte.weight", 0)]
    ]


def test_keyword_arguments_are_refused_with_stages() -> None:
    module, (x, scale) = rotated()
    graph = capture(module, (x,), {"scale": scale})
    with pytest.raises(PlanError, match=r"Rotated is called with keyword arguments; .* wrap the model"):
        torch_program(graph, SECOND(graph), module, (x,), {"scale": scale})


def test_devices_that_have_no_layers_run_no_process() -> None:
    module, args = perceptron()
    graph = capture(module, args)
    program = torch_program(graph, Staged(("2",), order=(3, 1, 0, 2))(graph), module, args)
    assert isinstance(program, PipelineProgram)
    assert (program.devices, program.stages.groups) == (2, ((1,), (0,)))
    assert "2 of 4 devices have layers in the plan, here processes in their order" in program.otherwise
