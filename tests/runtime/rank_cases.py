"""What the ranks of the torchrun tests do: every case runs on every rank and compares with the plain model there."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parplan.errors import RuntimeFailure
from parplan.graph.axes.experts import GroupedInDouble
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer
from parplan.layout import Grid, Layout, pieces
from parplan.lowering.program import Compute, Exchange
from parplan.plan import Scheme, Strategy
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.sharded_state.sharded_tensor import local_tensor
from parplan.runtime.transport.distributed import DistributedTransport
from tests.own_backward import Between, OwnBackwards
from tests.runtime.expert_nets import EXPERTS, Mixture
from tests.runtime.helpers import Rule, planner, random_passes, spread, spread_all
from tests.runtime.module.test_train_step import OPTIMIZERS, Case, plain_step, small
from tests.runtime.module.test_train_step import hybrid as hybrid_case
from tests.runtime.nets import Adds, DropLinear, RandomNet, Tied, Towers, conv_net, mlp
from tests.runtime.test_odd_nets import NormedTwice, norms_apart

__all__ = ["CASES"]

PASSES = (Scheme.BROADCAST, Scheme.INTERLEAVE)


@dataclass(frozen=True)
class Step:
    """Samples per rank of one training step."""

    sizes: tuple[int, ...]

    def own(self, tensor: Tensor, rank: int) -> Tensor:
        """A rank's samples of the whole batch."""
        parts: tuple[Tensor, ...] = tensor.split(list(self.sizes))
        return parts[rank]


def same(found: Tensor, wanted: Tensor, what: str) -> None:
    """Refuse what is further off than rounding."""
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def steps(ranks: int, uneven: bool = True) -> list[Step]:
    """Even steps, and where asked uneven ones, down to ranks without a sample."""
    even = [Step((3,) * ranks)]
    return [*even, Step((*range(2, ranks + 2),)), Step((2, *(0,) * (ranks - 1))), *even] if uneven else even * 2


def train(
    net: nn.Module,
    rule: Rule | Mapping[str, Strategy],
    shape: Sequence[int],
    rank: int,
    plan: list[Step],
    scheme: Scheme = Scheme.GATHER,
    again: bool = False,
) -> Compiled:
    """Train beside the plain model: results, input gradients and, after each step, the state must agree.

    Args:
        again: both within a checkpoint, which computes the forward again for the backward.
    """
    ranks = dist.get_world_size()
    plain = copy.deepcopy(net)
    model = Compiled(net, planner(rule, ranks, scheme))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, plain)]
    for step in plan:
        x = torch.randn(sum(step.sizes), *shape, dtype=torch.float64)
        mine = step.own(x, rank).clone().requires_grad_()
        whole = x.clone().requires_grad_()
        if again:
            result, wanted = (checkpoint(m, x, use_reentrant=False) for m, x in ((model, mine), (plain, whole)))
        else:
            result, wanted = model(mine), plain(whole)
        pull = torch.randn_like(wanted) / wanted.numel()
        for optimizer in optimizers:
            optimizer.zero_grad()
        # The mean over ranks of what each rank pulls is the whole pull.
        result.backward(step.own(pull, rank) * ranks)
        wanted.backward(pull)
        assert mine.grad is not None
        assert whole.grad is not None
        same(result, step.own(wanted, rank), "result")
        same(mine.grad / ranks, step.own(whole.grad, rank), "input gradient")
        for optimizer in optimizers:
            optimizer.step()
        same_state(model, plain)
    return model


def same_state(model: nn.Module, plain: nn.Module) -> None:
    """Full tensors under the plain model's names, with its values."""
    state, wanted = model.state_dict(), plain.state_dict()
    assert list(state) == list(wanted)
    for name, tensor in wanted.items():
        same(state[name].double(), tensor.double(), name)


def data_parallel(rank: int, ranks: int) -> None:
    """Equal and unequal shares, without any exchange of sizes."""
    model = train(mlp(), spread(ranks, "data"), (6,), rank, steps(ranks))
    assert model.program is not None
    assert not model.program.transfers
    assert len(model.program.buckets) == 1


def model_parallel(rank: int, ranks: int) -> None:
    """Every linear layer cut; ranks hold slices."""
    model = train(mlp(), spread(ranks, "out-features"), (6,), rank, steps(ranks))
    assert local_tensor(next(iter(model.parameters()))).shape == (12 // ranks, 6)
    assert next(iter(model.parameters())).shape == (12, 6)
    train(mlp(), spread(ranks, "in-features"), (6,), rank, steps(ranks))


def hybrid(rank: int, ranks: int) -> None:
    """Convolutions by samples with global batch norm, linear layers cut, uneven ranks; then evaluation."""
    net = conv_net()
    plain = copy.deepcopy(net)
    model = train(net, spread(ranks, "hybrid"), (3, 8, 8), rank, steps(ranks))
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2 * ranks, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        same(model.eval()(x[2 * rank : 2 * rank + 2]), plain.eval()(x)[2 * rank : 2 * rank + 2], "evaluation")


def passes(rank: int, ranks: int) -> None:
    """The linear layers in passes, by both schemes, with uneven ranks; where there are four, in two replicas too."""
    for scheme in PASSES:
        model = train(conv_net(), spread(ranks, "hybrid"), (3, 8, 8), rank, steps(ranks), scheme)
        assert model.program is not None
        numbers = [step.pass_number for step in model.program.forward if isinstance(step, Compute)]
        assert set(numbers) == {None, *range(ranks)}
        if ranks == 4:
            pairs = hybrid_case(ranks, scheme, {}, fewest=2)
            train(small(), pairs.plan.layers, (3, 8, 8), rank, steps(ranks), scheme)


def drawn_passes(rank: int, ranks: int) -> None:
    """Random networks and plans with passes."""
    for seed in range(6):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        net = RandomNet(draw)
        graph = capture(net, (torch.zeros(4 * ranks, 3, 8, 8, dtype=torch.float64),))
        rule = random_passes(graph, ranks, draw)
        if net(torch.zeros(2, 3, 8, 8, dtype=torch.float64)).dim() > 1:
            train(net, rule, (3, 8, 8), rank, steps(ranks, uneven=False), PASSES[seed % 2])


def train_steps(rank: int, ranks: int) -> None:
    """Updates between passes, as a plain loop on all samples that updates at the same moments."""
    legal = [period for period in (1, 2) if ranks % period == 0]
    for scheme, first, second in itertools.product(PASSES, legal, legal):
        case = hybrid_case(ranks, scheme, {"4": first, "6": second})
        net = small()
        plain, model = copy.deepcopy(net), Compiled(net, planner(case.plan.layers, ranks, scheme))
        opts = [OPTIMIZERS["momentum"](m) for m in (model, plain)]
        for _ in range(2):
            x = torch.randn(8, 3, 8, 8, dtype=torch.float64)
            y = torch.randn(8, 8, dtype=torch.float64)
            own = slice(8 // ranks * rank, 8 // ranks * (rank + 1))
            loss = model.train_step(x[own], y[own], nn.functional.mse_loss, opts[0])
            wanted = plain_step(case, plain, x, y, nn.functional.mse_loss, opts[1])
            total = loss / ranks
            dist.all_reduce(total)
            same(total, torch.tensor(wanted, dtype=torch.float64), "loss")
            same_state(model, plain)


def lone_train_steps(rank: int, ranks: int) -> None:
    """Only rank 0 has samples: some passes have none, and the others' loss is 0."""
    for scheme in PASSES:
        case, net = hybrid_case(ranks, scheme, {"4": 1, "6": 1}), small()
        plain, model = copy.deepcopy(net), Compiled(net, planner(case.plan.layers, ranks, scheme))
        opts = [OPTIMIZERS["momentum"](m) for m in (model, plain)]
        x, y = torch.randn(5, 3, 8, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
        own, all_of = slice(0, 0 if rank else 5), torch.arange(5)
        one_sender = [all_of, *[all_of[:0]] * (ranks - 1)]
        samples = one_sender if scheme is Scheme.BROADCAST else list(all_of.tensor_split(ranks))
        loss = model.train_step(x[own], y[own], nn.functional.mse_loss, opts[0])
        wanted = plain_step(case, plain, x, y, lambda out, t: nn.functional.mse_loss(out, t) / ranks, opts[1], samples)
        same(loss, torch.tensor(0.0 if rank else wanted * ranks, dtype=torch.float64), "loss")
        same_state(model, plain)


def group_train_steps(rank: int, ranks: int) -> None:
    """The shards of one replica in front bring the same samples, and the layers behind run in passes."""
    everyone = tuple(range(ranks))
    for scheme in PASSES:
        table = {str(n): Strategy(2, 2, axis, everyone) for n, axis in ((0, "out-features"), (1, "features"))}
        table |= {"2": Strategy(1, 4, "out-features", everyone, 1), "3": Strategy(1, 4, "features", everyone)}
        table["4"] = Strategy(1, 4, "in-features", everyone, 1)
        net = mlp()
        graph = capture(net, (torch.zeros(6, 6, dtype=torch.float64),))
        case = Case(graph, planner(table, ranks, scheme)(graph))
        plain, model = copy.deepcopy(net), Compiled(net, planner(table, ranks, scheme), inputs="group")
        opts = [OPTIMIZERS["momentum"](m) for m in (model, plain)]
        for samples in (4, 3):
            x, y = (torch.randn(samples * 2, width, dtype=torch.float64) for width in (6, 4))
            own = slice(samples * (rank // 2), samples * (rank // 2 + 1))
            model.train_step(x[own], y[own], nn.functional.mse_loss, opts[0])
            plain_step(case, plain, x, y, nn.functional.mse_loss, opts[1])
            same_state(model, plain)


def group_inputs(rank: int, ranks: int) -> None:
    """The shards of one replica bring the same samples: the same state, and nothing is gathered at the start."""
    for shards in {ranks, 2}:
        table = {name: Strategy(ranks // shards, shards, "out-features", tuple(range(ranks))) for name in ("0", "2")}
        rest = Strategy(ranks, 1, None, tuple(range(ranks)))
        net = mlp()
        plain, model = copy.deepcopy(net), Compiled(net, planner({**dict.fromkeys("134", rest), **table}, ranks),
                                                    inputs="group")  # fmt: skip
        opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        rows = ranks // shards
        for samples in (3, 2):
            x, y = (torch.randn(samples * rows, width, dtype=torch.float64) for width in (6, 4))
            own = slice(samples * (rank // shards), samples * (rank // shards + 1))
            for opt in opts:
                opt.zero_grad()
            found, wanted = model(x[own]), plain(x)
            same(found, wanted[own], "result")
            nn.functional.mse_loss(found, y[own]).backward()
            nn.functional.mse_loss(wanted, y).backward()
            for opt in opts:
                opt.step()
            same_state(model, plain)
        assert model.program is not None
        assert "input" not in {transfer.source for transfer in model.program.transfers}
        with pytest.raises(RuntimeFailure, match="bring the same samples, these brought rank 0: 1"):
            model(torch.zeros(1 + rank % 2, 6, dtype=torch.float64))


def own_backwards(rank: int, ranks: int) -> None:
    """Autograd Functions, some of which need all samples, beside layers with replicas and with shards."""
    for kind in ("data", "out-features"):
        train(OwnBackwards().double(), spread(ranks, kind), (6,), rank, steps(ranks))


def tensor_hooks(rank: int, ranks: int) -> None:
    """A hook is given the gradient of all ranks' samples, on one of them; behind it a loss may be each rank's own."""

    def register(module: nn.Module, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: gradient / gradient.norm())
        return h

    for kind in ("data", "out-features"):
        train(Between(register).double(), spread(ranks, kind), (6,), rank, steps(ranks))
    net = nn.Sequential(mlp(), HookedMean()).double()
    plain = copy.deepcopy(net)
    model = Compiled(net, planner(spread(ranks, "data"), ranks), scalars="per_replica")
    x = torch.randn(3 * ranks, 6, dtype=torch.float64)
    loss = model(x[3 * rank : 3 * rank + 3])
    loss.backward()
    plain(x).backward()
    same(loss, plain[1](plain[0](x[3 * rank : 3 * rank + 3])), "loss")
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        if wanted.grad is not None:
            assert found.grad is not None
            same(found.grad, wanted.grad, "gradient")


class HookedMean(nn.Module):
    """A loss inside of a model, of scores that have a hook."""

    def forward(self, scores: Tensor) -> Tensor:
        """One number."""
        scores.register_hook(lambda gradient: gradient / gradient.norm())
        return scores.square().mean()


def save_and_load(rank: int, ranks: int) -> None:
    """The state saved under one plan goes on under another, and on the plain model."""
    cut = train(mlp(), spread(ranks, "out-features"), (6,), rank, steps(ranks, uneven=False))
    state = {name: tensor.clone() for name, tensor in cut.state_dict().items()}
    other = Compiled(mlp(), planner(spread(ranks, "in-features"), ranks))
    other.prepare(torch.zeros(2, 6, dtype=torch.float64))
    other.load_state_dict(state)
    plain = mlp()
    plain.load_state_dict(state)
    same_state(other, plain)
    x = torch.randn(ranks * 2, 6, dtype=torch.float64)
    same(other(x[2 * rank : 2 * rank + 2]), plain(x)[2 * rank : 2 * rank + 2], "result")


def wrapped_part(rank: int, ranks: int) -> None:
    """A compiled part within a plain model: the whole model's state has full tensors, and loads."""
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(6, 6).double(), mlp())
    whole = copy.deepcopy(plain)
    whole[1] = Compiled(whole[1], planner(spread(ranks, "out-features"), ranks))
    x = torch.randn(ranks * 2, 6, dtype=torch.float64)
    own = slice(2 * rank, 2 * rank + 2)
    same(whole(x[own]), plain(x)[own], "result")
    assert local_tensor(next(iter(whole[1].parameters()))).shape == (12 // ranks, 6)
    same_state(whole, plain)
    for parameter in plain.parameters():
        nn.init.uniform_(parameter)
    whole.load_state_dict(plain.state_dict())
    same_state(whole, plain)
    same(whole(x[own]), plain(x)[own], "result of what was loaded")


def tied(rank: int, ranks: int) -> None:
    """One weight, cut in two ways: it stays whole. Cut in one way: each rank holds its slice."""
    table = {"first": cut("out-features", ranks), "second": cut("in-features", ranks)}
    train(Tied().double(), table, (8,), rank, steps(ranks))
    model = train(Tied().double(), spread(ranks, "out-features"), (8,), rank, steps(ranks))
    assert local_tensor(next(iter(model.parameters()))).shape == (8 // ranks, 8)


def cut(axis: str, ranks: int) -> Strategy:
    """All ranks share one replica."""
    return Strategy(1, ranks, axis, tuple(range(ranks)))


def towers(rank: int, ranks: int) -> None:
    """Layers on different ranks that wait for each other in both directions: must not hang."""
    places = {name: i % ranks for i, name in enumerate(("a1", "b1", "b2", "a2", "a3", "b3", "last"))}
    model = train(Towers().double(), towers_on(places), (6,), rank, steps(ranks))
    held = [name for name, parameter in model.named_parameters() if local_tensor(parameter).numel()]
    assert held == [
        f"{n}.{p}"
        for n in ("a1", "b1", "a2", "b2", "a3", "b3", "last")
        if places[n] == rank
        for p in ("weight", "bias")
    ]


def towers_on(places: Mapping[str, int]) -> dict[str, Strategy]:
    """Each layer on one rank."""
    return {name: Strategy(devices=(place,)) for name, place in places.items()}


def checkpointed(rank: int, ranks: int) -> None:
    """A checkpoint computes the forward again on all ranks together, however many steps each of them has."""
    train(conv_net(), spread(ranks, "hybrid"), (3, 8, 8), rank, steps(ranks), again=True)
    places = dict.fromkeys(("a1", "a2", "b1", "b2", "a3"), 0) | {"b3": 1, "last": ranks - 1}
    train(Towers().double(), towers_on(places), (6,), rank, steps(ranks), again=True)


def steps_that_fail(rank: int, ranks: int) -> None:
    """An error in every rank's loss, in the middle of a step: the steps after it are as if it had not been."""
    case, net = hybrid_case(ranks, Scheme.INTERLEAVE, {"4": ranks, "6": ranks // 2}), small()
    plain, model = copy.deepcopy(net), Compiled(net, planner(case.plan.layers, ranks, Scheme.INTERLEAVE))
    opts = [OPTIMIZERS["momentum"](m) for m in (model, plain)]
    x, y = torch.randn(4 * ranks, 3, 8, 8, dtype=torch.float64), torch.randn(4 * ranks, 8, dtype=torch.float64)
    own = slice(4 * rank, 4 * rank + 4)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model.train_step(x[own], y[own], lambda out, target: 1 / 0, opts[0])  # type: ignore[arg-type,return-value]
        model.train_step(x[own], y[own], nn.functional.mse_loss, opts[0])
        plain_step(case, plain, x, y, nn.functional.mse_loss, opts[1])
        same_state(model, plain)


class WithLoss(nn.Module):
    """A model that returns its own loss beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mean squared error over the whole batch, and what it is of."""
        result = self.net(x)
        return nn.functional.mse_loss(result, y), result


def loss_inside(rank: int, ranks: int) -> None:
    """A result without samples is the whole batch's, on every rank."""
    net = WithLoss()
    plain = copy.deepcopy(net)
    model = Compiled(net, planner(spread(ranks, "data"), ranks))
    x, y = (torch.randn(2 * ranks, width, dtype=torch.float64) for width in (6, 4))
    own = slice(2 * rank, 2 * rank + 2)
    loss, _ = model(x[own], y[own])
    wanted, _ = plain(x, y)
    loss.backward()
    wanted.backward()
    same(loss, wanted, "loss")
    for (name, parameter), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert twin.grad is not None
        same(parameter.grad, twin.grad, name)


def local_batch_norm(rank: int, ranks: int) -> None:
    """As DistributedDataParallel, value by value, over several steps and in evaluation."""
    net = conv_net()
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    model = Compiled(net, planner(spread(ranks, "data"), ranks), batch_norm="local")
    generator = torch.Generator().manual_seed(rank)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.05)) for m in (model, ddp)]
    for _ in range(3):
        x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=generator)
        found = []
        for each, optimizer in pairs:
            optimizer.zero_grad()
            result = each(x)
            result.square().sum().backward()
            optimizer.step()
            found.append(result)
        same(found[0], found[1], "result")
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=generator)
    same(model.eval()(x), ddp.eval()(x), "evaluation")
    same_state(model, ddp.module)


def converted_local_norm(rank: int, ranks: int) -> None:
    """Evaluated right after the model was converted, every rank has the first one's statistics."""
    model = Compiled(conv_net(), planner(spread(ranks, "data"), ranks), batch_norm="local")
    model(torch.randn(4, 3, 8, 8, dtype=torch.float64) + rank)
    model.float().double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    dist.broadcast(x, 0)
    results = whole_of(model(x)).chunk(ranks)
    for other in results[1:]:
        same(other, results[0], "evaluation")


def running_statistics(rank: int, ranks: int) -> None:
    """Of modules that not all ranks run, or that run elsewhere when they are called again."""
    for table in norms_apart(ranks):
        net = NormedTwice()
        plain = copy.deepcopy(net)
        model = train(net, table, (6,), rank, steps(ranks, uneven=False))
        plain.load_state_dict(model.state_dict())
        x = torch.randn(2 * ranks, 6, dtype=torch.float64)
        same(model.eval()(x[2 * rank : 2 * rank + 2]), plain.eval()(x)[2 * rank : 2 * rank + 2], "evaluation")


class OwnLoss(nn.Module):
    """A model that returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean squared error."""
        return nn.functional.mse_loss(self.net(x), y)


class Centred(nn.Module):
    """A model whose code depends on the number of samples of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Less the mean over samples."""
        y = self.net(x)
        result: Tensor = y - y.sum(0) / x.shape[0]
        return result


def bound_to_the_batch(rank: int, ranks: int) -> None:
    """A rank whose own share stays the same captures again when another rank's changes."""
    plan = [Step((2,) * ranks), Step((2,) * (ranks - 1) + (5,)), Step((2,) * ranks)]
    train(Centred(), spread(ranks, "data"), (6,), rank, plan)


class Pooled(nn.Module):
    """A mean over the steps of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        """(N, steps, 6) to (N, 4)."""
        result: Tensor = self.net(x).mean(1)
        return result


def lengths(rank: int, ranks: int) -> None:
    """Replicas whose sequences differ in length, as padding to a batch's longest gives them: ranks capture alone."""
    net = Pooled()
    plain, model = copy.deepcopy(net), Compiled(net, planner(spread(ranks, "data"), ranks))
    for long in (3, 5, 3):
        model.zero_grad()
        plain.zero_grad()
        xs = [torch.randn(2, 3 if one == 0 else long, 6, dtype=torch.float64) for one in range(ranks)]
        model(xs[rank]).sum().backward()
        for x in xs:
            (plain(x).sum() / ranks).backward()
        for (name, parameter), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None
            assert twin.grad is not None
            same(parameter.grad, twin.grad, name)


def frozen(rank: int, ranks: int) -> None:
    """Frozen parameters get no gradient, others do."""
    net = mlp()
    net[0].requires_grad_(False)
    model = Compiled(net, planner(spread(ranks, "data"), ranks))
    model(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False, False, False]


class TwoHeads(nn.Module):
    """A body with two results."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8).double()
        self.left = nn.Linear(8, 4).double()
        self.right = nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both heads' scores."""
        h = self.body(x).tanh()
        return self.left(h), self.right(h)


def unused_results(rank: int, ranks: int) -> None:
    """A head that no rank's loss uses has no gradient, so that momentum and decay leave it alone."""

    def apart(layer: Layer) -> Strategy:
        return Strategy(devices=(1,) if layer.name == "right" else (0,))

    for kind in (spread(ranks, "data"), spread(ranks, "out-features"), apart):
        plain = TwoHeads()
        model = Compiled(copy.deepcopy(plain), planner(kind, ranks))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, plain)]
        for used in ([0], [1], [0, 1], [1]):
            x = torch.randn(2 * ranks, 6, dtype=torch.float64)
            for optimizer, one, own in zip(optimizers, (model, plain), (x.chunk(ranks)[rank], x), strict=True):
                optimizer.zero_grad()
                results = one(own)
                sum(results[head].square().mean() for head in used).backward()
                optimizer.step()
        state = model.state_dict()
        for name, tensor in plain.state_dict().items():
            same(state[name], tensor, name)


def own_losses(rank: int, ranks: int) -> None:
    """With scalars="per_replica" every rank has its own loss and DistributedDataParallel's gradients."""
    net = OwnLoss()
    for rule in (spread(ranks, "data"), spread(ranks, "out-features")):
        plain = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
        model = Compiled(copy.deepcopy(net), planner(rule, ranks), scalars="per_replica")
        x, y = (torch.randn(3 * ranks, width, dtype=torch.float64)[3 * rank : 3 * rank + 3] for width in (6, 4))
        found, wanted = model(x, y), plain(x, y)
        assert found.shape == ()
        same(found, wanted, "loss")
        for loss, module in ((found, model), (wanted, plain)):
            loss.backward()
            torch.optim.SGD(module.parameters(), lr=1.0).step()
        same_state(model, plain.module)


def draws(rank: int, ranks: int) -> None:
    """What is computed redundantly is dropped alike, shards are dropped apart, however the ranks were seeded."""
    everyone = tuple(range(ranks))
    model = Compiled(nn.Sequential(nn.Identity(), Adds()), planner(spread_all(ranks), ranks))
    seen = []
    for _ in range(2):
        torch.rand(rank)  # ranks need not be in step
        result = whole_of(model(torch.zeros(2, 32, dtype=torch.float64)))
        assert (result == result[0]).all()
        assert 0 < int((result[0] == 0).sum()) < 32
        seen.append(result)
    assert not torch.equal(*seen)
    torch.manual_seed(3)
    cut = {"0": Strategy(1, ranks, "features", everyone)}
    apart = Compiled(nn.Sequential(nn.Dropout(), nn.Identity()), planner(cut, ranks))
    parts = apart(torch.ones(1, 32 * ranks, dtype=torch.float64)).chunk(ranks, 1)
    assert not any(torch.equal(parts[0], part) for part in parts[1:])
    linear = DropLinear(16, 2 * ranks, bias=False).double()
    linear.weight.data[:] = linear.weight.data[0].clone()
    table = {"0": Strategy(1, ranks, "out-features", everyone)}
    alike = Compiled(nn.Sequential(linear, nn.Identity()), planner(table, ranks))
    torch.rand(rank)
    result = alike(torch.ones(1, 16, dtype=torch.float64))
    same(result, result[:, :1].expand_as(result), "shards that drop one input")


def whole_of(tensor: Tensor) -> Tensor:
    """What all ranks have, one after the other."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.detach())
    return torch.cat(found)


def moves(rank: int, ranks: int) -> None:
    """The transport alone: between all kinds of layouts, there and transposed."""
    transport = DistributedTransport(torch.device("cpu"))
    whole = torch.arange(8 * 12, dtype=torch.float64).reshape(8, 12)
    everyone, turned = tuple(range(ranks)), tuple(reversed(range(ranks)))
    layouts = [
        Layout(Grid(everyone, ranks, 1), 0), Layout(Grid(turned, 1, ranks), None, 1),
        Layout(Grid(everyone, ranks, 1), None), Layout(Grid((ranks - 1,), 1, 1), None),
    ]  # fmt: skip
    for source in layouts:
        for target in layouts:
            moving = tuple(pieces(whole.shape, source, target))
            parts = {r: part(whole, target, r) for r in target.grid.devices}
            exchange = Exchange("test", moving, {r: tuple(t.shape) for r, t in parts.items()}, whole.dtype)
            own = {rank: part(whole, source, rank)} if rank in source.grid.devices else {}
            found = transport.start(exchange, own).wait()
            transport.end()
            assert set(found) == {rank} & set(parts)
            for tensor in found.values():
                same(tensor, parts[rank], f"{source} to {target}")


def part(whole: Tensor, layout: Layout, device: int) -> Tensor:
    """What a device holds of a tensor."""
    row, column = layout.grid.position(device)
    if layout.batch_dim is not None:
        whole = whole.tensor_split(layout.grid.replicas, layout.batch_dim)[row]
    if layout.shard_dim is not None:
        whole = whole.tensor_split(layout.grid.shards, layout.shard_dim)[column]
    return whole


def experts(rank: int, ranks: int) -> None:
    """A mixture of experts by samples and by experts, whose parameters are cut; uneven ranks, and some without rows."""
    for axis, form in (("data", "grouped"), ("experts", "grouped"), ("experts", "gathered")):
        with GroupedInDouble():
            model = train(Mixture(form), spread(ranks, axis), (3, 6), rank, steps(ranks))
        held = local_tensor(dict(model.named_parameters())["experts.up"])
        assert held.shape[0] == EXPERTS // (ranks if axis == "experts" else 1)


CASES = {
    case.__name__: case
    for case in (
        moves, data_parallel, model_parallel, hybrid, passes, drawn_passes, train_steps, lone_train_steps,
        checkpointed, steps_that_fail, group_train_steps, group_inputs, save_and_load, wrapped_part, tied, towers,
        loss_inside, local_batch_norm, converted_local_norm, running_statistics, bound_to_the_batch, lengths, frozen,
        own_losses, unused_results, draws, own_backwards, tensor_hooks, experts,
    )
}  # fmt: skip
