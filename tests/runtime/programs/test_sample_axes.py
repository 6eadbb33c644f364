"""Every process gets the results of its own samples, as the plain model gives them, wherever the samples lie."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import parplan
from parplan.errors import CaptureError, RuntimeFailure
from parplan.graph.capture.capture import capture
from parplan.layout import Range
from parplan.plan import Scheme
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.module.train_step import sample_axes
from parplan.runtime.programs.sample_axes import SampleAxis
from tests.runtime.helpers import compiled, differences, outcome, planner, random_passes, random_strategies, spread
from tests.runtime.ranks import Case, run_case

WORDS, WIDTH = 12, 4


class WordModel(nn.Module):
    """Sequences lie along dimension 0, samples along dimension 1; the words' scores are [time * samples, words]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, 6)
        self.decoder = nn.Linear(6, WORDS)

    def forward(self, words: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        found, state = self.rnn(self.encoder(words))
        return self.decoder(found).view(-1, WORDS).log_softmax(1), state


class Does(nn.Module):
    """One function, with layers at hand."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.fc, self.out, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6), nn.LayerNorm(WIDTH)
        self.does = does

    def forward(self, *inputs: Tensor) -> Any:
        return self.does(self, *inputs)


class OwnWeight(nn.Module):
    """A weight that is applied by a function: such an op is a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.first = nn.Parameter(torch.randn(6, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x).reshape(-1, WIDTH), self.weight).relu()


def lookup(m: Does, x: Tensor) -> Tensor:
    steps = (x[..., 0] > 0).sum(1).clamp(max=2) - 3
    found: Tensor = m.out(m.fc(x)[torch.arange(len(x)), steps])
    return found


def batched_lookup(m: Does, x: Tensor) -> Tensor:
    rows = (x[..., 0] > 0).long()
    found: Tensor = m.fc(x)[torch.arange(len(x))[:, None], rows]
    return found


def lookup_behind(m: Does, x: Tensor) -> Tensor:
    found: Tensor = m.fc(x)[(x[0, :, 0] > 0).long(), torch.arange(x.shape[1])]
    return found


def masked(m: Does, x: Tensor) -> Tensor:
    h: Tensor = m.fc(x).clone()
    h[x[..., 0] > 0] = 0.5
    return h


# How it is made, and the dimension of the samples.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "samples_inside": (lambda: Does(lambda m, x: m.out(m.fc(x)).view(-1, 6)), 1),
    "flat_before_a_layer": (lambda: Does(lambda m, x: m.out(m.fc(x).view(-1, WIDTH))), 1),
    "flat_through_layers": (lambda: Does(lambda m, x: m.out(m.norm(m.fc(x.reshape(-1, WIDTH))).relu())), 1),
    "flat_twice": (lambda: Does(lambda m, x: m.fc(m.fc(x.reshape(-1, WIDTH)).view(x.shape)).view(-1, 2)), 1),
    "several_results": (lambda: Does(lambda m, x: ((h := m.fc(x).view(-1, WIDTH)), m.out(h), h.relu().sum(1))), 1),
    "with_a_dimension_behind": (lambda: Does(lambda m, x: m.fc(x).transpose(1, 2).reshape(-1, 3).relu()), 0),
    "all_in_one": (lambda: Does(lambda m, x: m.fc(x).reshape(-1)), 1),
    "turned_and_flat": (lambda: Does(lambda m, x: m.out(m.fc(x).transpose(0, 1).reshape(-1, WIDTH))), 0),
    "samples_outside": (lambda: Does(lambda m, x: m.out(m.fc(x)).view(-1, 6)), 0),
    "turned": (lambda: Does(lambda m, x: m.fc(x).transpose(0, 1)), 1),
    "own_weight": (OwnWeight, 1),
    "lookup": (lambda: Does(lookup), 0),
    "batched_lookup": (lambda: Does(batched_lookup), 0),
    "lookup_behind": (lambda: Does(lookup_behind), 1),
    "masked": (lambda: Does(masked), 0),
}


def inputs(dim: int, samples: int) -> Tensor:
    """[samples, 3, width], or samples along dimension 1."""
    x = torch.randn(samples, 3, WIDTH, dtype=torch.float64)
    return x.transpose(0, dim).contiguous()


@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_samples_are_taken_out_of_a_flattened_dimension(outer: int, inner: int) -> None:
    whole = torch.arange(5 * outer * 4 * 2 * inner).view(5, outer, 4, 2, inner)  # 4 samples, 2 indices for each
    axis, flat = SampleAxis(1, 2, outer, inner), whole.flatten(1, 4)
    assert axis.of(flat, 4)
    assert not axis.of(flat, 3)
    picked = torch.cat([whole[:, :, :1], whole[:, :, 2:]], 2)
    assert torch.equal(axis.take(flat, [Range(0, 1), Range(2, 4)]), picked.flatten(1, 4))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_replicas_and_shards_give_the_plain_results(name: str) -> None:
    make, dim = MODELS[name]
    torch.manual_seed(0)
    net, x = make().double(), inputs(dim, 6)
    wanted = outcome(net, net, x)
    for rule in ("data", "out-features"):
        model = compiled(net, spread(2, rule), 2, dim=dim)
        assert differences(outcome(model.module, model, x), wanted) == {}
    assert model.graph is not None
    assert all(layer.batch is not None for layer in model.graph.layers.values() if not layer.constant)


@pytest.mark.full
@pytest.mark.parametrize("name", ["flat_through_layers", "several_results", "flat_twice"])
def test_drawn_plans_give_the_plain_results(name: str) -> None:
    make, dim = MODELS[name]
    torch.manual_seed(0)
    net, draw, x = make().double(), random.Random(4), inputs(dim, 8)
    wanted = outcome(net, net, x)
    graph = capture(copy.deepcopy(net), (x,), dim=dim)
    for number in range(6):
        table = random_strategies(graph, 4, draw) if number % 2 else random_passes(graph, 4, draw)
        scheme = Scheme.GATHER if number % 2 else Scheme.BROADCAST
        model = Compiled(copy.deepcopy(net), planner(table, 4, scheme), devices=["cpu"] * 4, dim=dim)
        assert differences(outcome(model.module, model, x), wanted) == {}


def test_targets_are_cut_where_results_have_samples() -> None:
    graph = capture(MODELS["samples_inside"][0]().double(), (inputs(1, 4),), dim=1)
    axis, given = sample_axes(graph, 1)
    assert (axis, given) == (SampleAxis(0, 1, 3), SampleAxis(1, 1))
    targets = torch.arange(12)  # of 3 steps, 4 samples in each
    assert axis.of(targets, 4)
    assert axis.take(targets, [Range(1, 3)]).tolist() == [1, 2, 5, 6, 9, 10]


# --- several processes -----------------------------------------------------------------------


def same(found: Tensor | None, wanted: Tensor | None, what: str) -> None:
    assert found is not None, what
    assert wanted is not None, what
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for item in result for t in tensors(item)]


def own_results(net: nn.Module, dim: int, batches: Sequence[Tensor], rank: int, kind: str) -> None:
    """This rank's results and the mean gradient are those of the plain model, given each rank's samples by itself."""
    plain = copy.deepcopy(net)
    model = Compiled(net, planner(spread(len(batches), kind), len(batches)), dim=dim)
    found, wanted = tensors(model(batches[rank])), [tensors(plain(batch)) for batch in batches]
    for number, (one, other) in enumerate(zip(found, wanted[rank], strict=True)):
        same(one, other, f"result {number}")
    sum(t.square().sum() for t in found).backward()  # type: ignore[union-attr]
    (sum(t.square().sum() for results in wanted for t in results) / len(batches)).backward()  # type: ignore[union-attr]
    if kind == "data":
        for (name, one_p), other_p in zip(model.named_parameters(), plain.parameters(), strict=True):
            if other_p.grad is not None:
                same(one_p.grad, other_p.grad, name)


def merged(rank: int, ranks: int) -> None:
    for name, (make, dim) in MODELS.items():
        for kind in ("data", "out-features") if name in CUT else ("data",):
            try:
                own_results(make().double(), dim, [inputs(dim, n) for n in range(2, ranks + 2)], rank, kind)
            except Exception as error:
                raise AssertionError(f"{name}, {kind}") from error


CUT = ("flat_before_a_layer", "own_weight", "lookup")


def words(rank: int, ranks: int) -> None:
    for kind in ("data", "out-features"):
        batches = [torch.randint(0, WORDS, (5, samples)) for samples in range(2, ranks + 2)]
        own_results(WordModel().double(), 1, batches, rank, kind)


def refused(rank: int, ranks: int) -> None:
    """The same model runs in one process, and where all ranks bring the same batch."""
    net = Does(lambda m, x, neighbour: m.fc(x) + m.fc(x)[neighbour]).double()
    bags = nn.EmbeddingBag(WORDS, WIDTH).double()
    x, neighbour = inputs(0, 4), torch.tensor([1, 0, 3, 2])
    offsets = torch.tensor([0, 3])
    for module, call in ((net, (x, neighbour)), (bags, (neighbour, offsets))):
        with pytest.raises(CaptureError, match="takes positions along the samples"):
            Compiled(copy.deepcopy(module), planner(spread(ranks, "data"), ranks))(*call)
    with pytest.raises(CaptureError, match="result 0, made by flip, grows with the batch"):
        Compiled(Does(lambda m, x: m.fc(x).flip(0)).double(), planner(spread(ranks, "data"), ranks))(x)
    alike = Compiled(copy.deepcopy(net), planner(spread(ranks, "out-features"), ranks), inputs="group")
    same(alike(x, neighbour), net(x, neighbour), "the same batch on all ranks")


def shared(rank: int, ranks: int) -> None:
    """An input without samples is each process's own where only gradients are exchanged, else the same for all."""
    net = Does(lambda m, x, scale: m.out(m.fc(x) * scale)).double()
    x, own = inputs(0, 3), torch.tensor([1.0 + rank], dtype=torch.float64)
    apart = Compiled(copy.deepcopy(net), planner(spread(ranks, "data"), ranks))
    same(apart(x, own), net(x, own), "its own scale")
    cut = Compiled(copy.deepcopy(net), planner(spread(ranks, "out-features"), ranks))
    both = torch.ones(1, dtype=torch.float64)
    same(cut(x, both), net(x, both), "one scale for all")
    with pytest.raises(RuntimeFailure, match="'inputs_1' of Does has no samples and differs between processes"):
        cut(x, own)
    same(cut(x, both), net(x, both), "one scale for all, again")
    both.mul_(2)
    same(cut(x, both), net(x, both), "the same scale, written by all")
    both.mul_(1 + rank)
    with pytest.raises(RuntimeFailure, match="'inputs_1' of Does has no samples and differs between processes"):
        cut(x, both)


def large(rank: int, ranks: int) -> None:
    """A table of 2 MiB that is another one on one process, only from the second call on."""
    net = Does(lambda m, x, table: m.out(m.fc(x) * table.sum())).double()
    x, cut = inputs(0, 3), Compiled(copy.deepcopy(net), planner(spread(ranks, "out-features"), ranks))
    table = torch.full((1 << 18,), 1e-6, dtype=torch.float64)
    for _ in range(2):
        same(cut(x, table), net(x, table), "one table for all")
    with pytest.raises(RuntimeFailure, match="'inputs_1' of Does has no samples and differs between processes"):
        cut(x, table * (1 + rank))


def one_graph() -> tuple[Tensor, Tensor]:
    """Features of 5 nodes and weights of all pairs, the same on every rank."""
    drawn = torch.Generator().manual_seed(5)
    x, pairs = (torch.randn(5, width, generator=drawn, dtype=torch.float64) for width in (WIDTH, 5))
    return x, pairs


def alike(rank: int, ranks: int) -> None:
    """Inputs that hold no samples: the plain model's results and gradients, and a refusal where ranks differ."""
    net = Does(lambda m, x, pairs: m.out(pairs @ m.fc(x)).tanh()).double()
    x, pairs = one_graph()
    plain = copy.deepcopy(net)
    model = parplan.compile(net, inputs="same", optimizer="sgd", pins=["fc=shards:2", "out=shards:2"])
    for one in (model, plain):
        found = one(x, pairs)
        assert found.shape == (5, 6)
        found.square().sum().backward()
    same(model(x, pairs), plain(x, pairs), "one graph")
    for (name, trained), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if other.grad is None:
            assert trained.grad is None, name
            continue
        assert trained.grad is not None, name
        same(trained.grad.full_tensor() if isinstance(trained.grad, DTensor) else trained.grad, other.grad, name)
    strategies = model.plan.layers.values() if model.plan is not None else ()
    assert strategies
    assert all(strategy.replicas == 1 for strategy in strategies)
    with pytest.raises(RuntimeFailure, match=r"differs between processes, while inputs=.same. says that all bring the"):
        model(x * (1 + rank), pairs)
    with pytest.raises(RuntimeFailure, match="'inputs_0' of Does has no samples and needs a gradient"):
        model(x.clone().requires_grad_(), pairs)


def of_all_together(rank: int, ranks: int) -> None:
    """A model that takes one process's inputs and not those of all is refused in words about the user's own."""
    net = Does(lambda m, x, pairs: m.out(pairs @ m.fc(x))).double()
    x, pairs = one_graph()
    model = Compiled(net, planner(spread(ranks, "data"), ranks))
    with pytest.raises(CaptureError, match=rf"here 5 of {5 * ranks} along dimension 0, of inputs of shape \[5, 4\]"):
        model(x, pairs)
    with pytest.raises(CaptureError, match=r"^Does cannot be captured.* \[5, 3\]"):  # its own shapes do not fit
        model(x[:, :3], pairs)


def parts_of_a_gradient(rank: int, ranks: int) -> None:
    """The gradient of an input that all share is the process's own, or refused where processes have parts of it."""
    net = Does(lambda m, x, scale: m.out(m.fc(x) * scale)).double()
    x, scale = inputs(rank, 3), torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
    apart = Compiled(copy.deepcopy(net), planner(spread(ranks, "data"), ranks))
    found, wanted = (torch.autograd.grad(model(x, scale).square().mean(), scale)[0] for model in (apart, net))
    same(found, wanted, "of its own loss")
    cut = Compiled(copy.deepcopy(net), planner(spread(ranks, "out-features"), ranks))
    with pytest.raises(RuntimeFailure, match="'inputs_1' of Does has no samples and needs a gradient, of which each"):
        cut(x, scale)
    with torch.no_grad():
        same(cut(x, scale), net(x, scale), "without gradients")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [merged, words, refused, shared, large, alike, of_all_together, parts_of_a_gradient])
def test_processes_get_their_own_results(case: Case) -> None:
    run_case(case, 2)
