"""Models with sharded parameters: how they come to be, are converted, replaced, copied and called; on every rank."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import parplan
from parplan.errors import RuntimeFailure
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.sharded_state.cutting import same_start
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor
from tests.runtime.helpers import planner, spread
from tests.runtime.nets import mlp
from tests.runtime.sharded_cases import Net, Pair, adamw, clipped, placements, same, sgd, whole

__all__ = ["CASES"]


def converted(rank: int, ranks: int) -> None:
    """Moved to another type and back with gradients and the optimizer's state, which stay on the same objects."""
    for rule in placements(ranks):
        pair = Pair(rule, rank, ranks)
        optimizers = [sgd(list(m.parameters())) for m in pair.both]
        pair.steps(optimizers, count=1)
        known = list(pair.model.parameters())
        for module in pair.both:
            module.float()
        assert all(
            p.dtype is torch.float32 and whole(p.detach()).dtype is torch.float32 for p in pair.model.parameters()
        )
        for module in pair.both:
            module.double()
        assert [id(p) for p in pair.model.parameters()] == [id(p) for p in known]
        pair.compare()
        pair.steps(optimizers, clipped(2.0), 2)


def replaced(rank: int, ranks: int) -> None:
    """Parameters that the user replaces, by hand or by assign=True, are cut at the next call."""
    for rule in placements(ranks):
        pair = Pair(rule, rank, ranks)
        pair.backward()
        state = {name: torch.randn_like(value) for name, value in pair.plain.state_dict().items()}
        state["third.weight"] = state["second.weight"]
        pair.model.load_state_dict(copy.deepcopy(state), assign=True)
        pair.plain.load_state_dict(copy.deepcopy(state))
        tied = pair.model.get_submodule("second").weight  # assign=True unties, as it does in a plain model
        assert isinstance(tied, nn.Parameter)
        pair.model.get_submodule("third").register_parameter("weight", tied)
        pair.compare()
        new = torch.randn(8, 8, dtype=torch.float64)
        for module in pair.both:
            module.get_submodule("first").weight = nn.Parameter(new.clone())
        pair.backward()
        assert isinstance(pair.model.get_submodule("first").weight, ShardedTensor)
        pair.steps([sgd(list(m.parameters())) for m in pair.both], clipped(2.0), 2)


def parametrization_removed(rank: int, ranks: int) -> None:
    """Parameters of a parametrization that is removed after they were cut: the next call says so."""
    net = mlp()
    nn.utils.parametrizations.weight_norm(net.get_submodule("0"))
    model = Compiled(net, planner(spread(ranks, "out-features"), ranks))
    x = torch.randn(2, 6, dtype=torch.float64)
    model(x).sum().backward()
    nn.utils.parametrize.remove_parametrizations(model.module.get_submodule("0"), "weight")
    with pytest.raises(RuntimeFailure, match="not in the model any more"):
        model(x)


def written_copies(rank: int, ranks: int) -> None:
    """Tensors of state_dict() are copies: a write to one is refused at the next call, unless the state was loaded."""
    for rule in placements(ranks):
        pair = Pair(rule, rank, ranks)
        optimizers = [sgd(list(m.parameters())) for m in pair.both]
        pair.steps(optimizers)
        pair.model.state_dict()["first.weight"].zero_()
        with pytest.raises(RuntimeFailure, match=r"first\.weight was written through a tensor of state_dict"):
            pair.model(torch.randn(2, 8, dtype=torch.float64))
        for module in pair.both:
            state = module.state_dict()
            state["first.weight"].mul_(0.5)
            module.load_state_dict(state)
        pair.steps(optimizers)


def given_to_plain_tensors(rank: int, ranks: int) -> None:
    """`plain.data = cut` gives the whole values; a later write to the same memory in plain PyTorch is refused."""
    for rule in placements(ranks):
        pair = Pair(rule, rank, ranks)
        followers = [copy.deepcopy(module).requires_grad_(False) for module in (pair.plain, pair.plain)]
        optimizers = [sgd(list(m.parameters())) for m in pair.both]
        pair.steps(optimizers)
        for follower, module in zip(followers, pair.both, strict=True):
            for slow, fast in zip(follower.parameters(), module.parameters(), strict=True):
                slow.data = 0.3 * slow.data + 0.7 * fast.data
        x = torch.randn(2, 8, dtype=torch.float64)
        same(followers[1](x), followers[0](x), "result of a plain model that was given cut tensors")
        pair.steps(optimizers)
        cut = next(p for p in pair.model.parameters() if isinstance(p, ShardedTensor))
        row, wanted = torch.zeros(0, dtype=torch.float64), cut.whole()
        row.data = cut.detach()[1]
        same(row, wanted[1], "row")
        with pytest.raises(RuntimeFailure, match=r"weight was written.*plain tensor was given.*clone\(\)"):
            pair.steps(optimizers)
        same(row, wanted[1], "row")
        wanted = cut.whole()
        plain = [torch.zeros(0, dtype=torch.float64) for _ in range(2)]
        plain[0].data, plain[1].data = cut, cut.data.clone()
        values, cut.data = cut.data, torch.zeros_like(wanted)  # other memory, which is the cut tensor's alone
        with torch.no_grad():
            cut.add_(1)
        same(plain[0], wanted, "whole")
        with pytest.raises(RuntimeFailure, match="plain tensor was given"):
            values.mul_(2)
        del plain, row
        values.mul_(2)


def called_directly(rank: int, ranks: int) -> None:
    """The held module gives the model's results, and each process's samples count for the gradients."""
    for rule in placements(ranks):
        pair = Pair(rule, rank, ranks)
        pair.backward()
        x = torch.randn(2 * ranks, 8, dtype=torch.float64)
        own = slice(2 * rank, 2 * rank + 2)
        with torch.no_grad():
            same(pair.model.module(x[own]), pair.plain(x)[own], "result of the module")
        for optimizer in (sgd(list(m.parameters())) for m in pair.both):
            optimizer.zero_grad()
        pair.model.module(x[own]).square().sum().backward()
        (pair.plain(x).square().sum() / ranks).backward()
        for found, wanted in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            assert found.grad is not None
            same(whole(found.grad), wanted.grad, "gradient")
        with pytest.raises(RuntimeFailure, match="is cut over processes"):
            torch.save(pair.model.module.state_dict(), io.BytesIO())


def in_inference_mode(rank: int, ranks: int) -> None:
    """A first call that records nothing, and training after it."""
    for rule in placements(ranks):
        pair = Pair(rule, rank, ranks)
        x = torch.randn(2 * ranks, 8, dtype=torch.float64)
        own = slice(2 * rank, 2 * rank + 2)
        with torch.inference_mode():
            same(pair.model.eval()(x[own]), pair.plain.eval()(x)[own], "result")
            same(pair.model(x[own]), pair.plain(x)[own], "result again")
            same(clip_norm(pair.model), clip_norm(pair.plain), "norm")
        for module in pair.both:
            module.train()
        pair.steps([adamw(list(m.parameters())) for m in pair.both], clipped(2.0))


def clip_norm(module: nn.Module) -> Tensor:
    """The norm of all parameters."""
    norm: Tensor = torch.stack([p.norm() for p in module.parameters()]).norm()
    return norm


def captured_before(rank: int, ranks: int) -> None:
    """A model that was analysed and verified in the same process can still be cut."""
    module = Net().double()
    parplan.analyze(module, torch.zeros(4, 8, dtype=torch.float64), gpus=2)
    parplan.verify(module, torch.zeros(4, 8, dtype=torch.float64), devices=2)
    pair = Pair(placements(ranks)[0], rank, ranks, module)
    pair.train(sgd)
    parplan.analyze(pair.model.module, torch.zeros(4, 8, dtype=torch.float64), gpus=2)


def not_cut(rank: int, ranks: int) -> None:
    """What is in the way of cutting is told on all ranks, before anything is changed; then it works."""
    pair = Pair(placements(ranks)[0], rank, ranks)
    first, *_ = pair.model.parameters()
    before = [type(p) for p in pair.model.parameters()]
    for obstacle in (weakref.ref, lambda p: (p * p).sum()):
        held: Any = obstacle(list(pair.model.parameters())[1]) if rank == 0 else None
        expected = "first.bias cannot be cut over processes" if rank == 0 else "rank 0 could not cut a parameter"
        with pytest.raises(RuntimeFailure, match=expected):
            pair.backward()
        assert [type(p) for p in pair.model.parameters()] == before
        assert not vars(first)
        del held
    pair.plain.zero_grad()
    pair.train(sgd)


class Recurrent(nn.Module):
    """A layer that keeps weak references to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8) to (N, 4), over 2 steps."""
        result: Tensor = self.last(self.rnn(torch.stack([x, x * 2], 1))[0][:, 1])
        return result


def recurrent(rank: int, ranks: int) -> None:
    """A recurrent layer on one rank."""
    places = {"rnn": Strategy(devices=(ranks - 1,)), "last": Strategy(1, ranks, "out-features", tuple(range(ranks)))}

    def rule(layer: Any) -> Strategy:
        return places.get(
            layer.name, Strategy(ranks, 1, None, tuple(range(ranks))) if layer.batch is not None else Strategy()
        )

    Pair(rule, rank, ranks, Recurrent().double()).train(adamw, clipped(2.0))


def evaluated(optimizer: torch.optim.Optimizer, module: nn.Module, x: Tensor, y: Tensor) -> float:
    """The loss, and its gradients."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(module(x), y)
    loss.backward()
    return loss.item()


def closures(rank: int, ranks: int) -> None:
    """LBFGS, which works on flat vectors and calls the model within its step."""
    for rule in placements(ranks):
        pair = Pair(rule, rank, ranks)
        x, y = (torch.randn(2 * ranks, width, dtype=torch.float64) for width in (8, 4))
        own = slice(2 * rank, 2 * rank + 2)
        for module, samples in zip(pair.both, (own, slice(None)), strict=True):
            optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4, tolerance_change=0, tolerance_grad=0)

            closure = partial(evaluated, optimizer, module, x[samples], y[samples])
            for _ in range(2):
                optimizer.step(closure)
        pair.compare()


def half(rank: int, ranks: int) -> None:
    """bfloat16 parameters: norms are computed in float32 as plain torch's are."""
    torch.manual_seed(2)
    module = mlp().to(torch.bfloat16)
    plain = copy.deepcopy(module)
    model = Compiled(module, planner(spread(ranks, "out-features"), ranks))
    model(torch.randn(2, 6, dtype=torch.bfloat16)).sum().backward()
    for parameter, twin in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.norm(), twin.norm(), rtol=1e-2, atol=0.0)
        assert parameter.norm().dtype is torch.bfloat16
    clip_grad_norm_(model.parameters(), 1e-3)


def started_alike(rank: int, ranks: int) -> None:
    """Ranks begin with rank 0's values, in messages of bounded size, tensors of all layouts."""
    module = nn.Module()
    shapes = [(3, 5), (1,), (0,), (7, 2, 2)]
    for number, shape in enumerate(shapes):
        module.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape) + rank))
    module.turned = nn.Parameter((torch.randn(4, 6) + rank).t())
    module.register_buffer("count", torch.tensor(rank))
    from parplan.runtime.sharded_state import cutting as sharding
    from parplan.runtime.transport.distributed import DistributedTransport

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "CHUNK_BYTES", 32)
        same_start(module, DistributedTransport(torch.device("cpu")))
    for tensor in (*module.parameters(), *module.buffers()):
        found = [torch.empty_like(tensor).contiguous() for _ in range(ranks)]
        dist.all_gather(found, tensor.detach().contiguous())
        assert all(torch.equal(other, found[0]) for other in found)


def clipped_as_in_any_loop(rank: int, ranks: int) -> None:
    """A plan made by parplan with a pin, clipped in the usual loop; also two models that train in turns."""
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).double() for _ in range(2))
    plain = [copy.deepcopy(first), copy.deepcopy(second)]
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randint(4, (8,))
    own, labels = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
    models = [parplan.compile(module, own, pins=[f"*=shards:{ranks}"]) for module in (first, second)]
    optimizers = [adamw(list(module.parameters())) for module in (*models, *plain)]
    for _ in range(3):
        norms = []
        for module, optimizer in zip((*models, *plain), optimizers, strict=True):
            optimizer.zero_grad()
            mine = module in models
            nn.functional.cross_entropy(module(own if mine else x), labels if mine else y).backward()
            norms.append(clip_grad_norm_(module.parameters(), 0.1))
            optimizer.step()
        same(norms[:2], norms[2:], "norms")
    for model, twin in zip(models, plain, strict=True):
        same(dict(model.state_dict()), dict(twin.state_dict()), "state")


class Heads(nn.Module):
    """Heads of several tasks, one of which is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        """(N, 8) to (N, 4)."""
        result: Tensor = self.heads[head](torch.tanh(self.first(x)))
        return result


def _given(plan: Plan) -> Callable[[LayerGraph], Plan]:
    return lambda graph: plan


def read_later(rank: int, ranks: int) -> None:
    """Layers that are first called after some steps, with the optimizer's state of a penalty on them; then all in one
    loss, while the first call's graph is alive."""
    everyone = tuple(range(ranks))
    cut, last = Strategy(1, ranks, "out-features", everyone), Strategy(devices=(ranks - 1,))
    shared = Strategy(ranks, 1, None, everyone)
    for first, late in ((cut, cut), (shared, cut), (shared, last), (cut, shared)):
        chosen = {"first": first, "tanh": shared, "heads.0": first, "heads.1": late}
        pair = Pair({}, rank, ranks, Heads().double())
        pair.model = Compiled(pair.model.module, _given(Plan("", "", 2 * ranks, ranks, chosen)))
        optimizers = [sgd(list(m.parameters())) for m in pair.both]
        for heads in ((0,), (0, 1), (1,)):
            x = torch.randn(2 * ranks, 8, dtype=torch.float64)
            own = slice(2 * rank, 2 * rank + 2)
            for module, samples, optimizer in zip(pair.both, (own, slice(None)), optimizers, strict=True):
                optimizer.zero_grad()
                losses = [module(x[samples], head).square().mean() for head in heads]
                if heads == (0,):
                    losses += [0.1 * p.square().sum() for p in module.parameters()]
                torch.stack(losses).sum().backward()
                optimizer.step()
            pair.compare()
        known = pair.model.get_parameter("heads.1.weight")
        assert any(p is known for group in optimizers[0].param_groups for p in group["params"])
        assert isinstance(known, ShardedTensor) is (late is not shared)


class Scaled(torch.autograd.Function):
    """x * weight, whose weight has a gradient where x is not zero."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        """(N, 8) and (8,) to (N, 8)."""
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Keep both."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        """None for the weight where all of x is zero."""
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0) if bool(x.any()) else None


class Scale(nn.Module):
    """A scaled value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8) to the same."""
        scaled: Tensor = Scaled.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return scaled


def gradients_on_some_ranks(rank: int, ranks: int) -> None:
    """Whether parameters on a few ranks have gradients is asked once for each program; what changes then is refused."""
    last = Strategy(devices=(ranks - 1,))
    model = Compiled(Scale(), planner(lambda layer: last, ranks), check="off")
    asked: list[int] = []
    gather = model._transport.gather

    def counted(*numbers: int) -> list[tuple[int, ...]]:
        asked.append(len(numbers))
        return gather(*numbers)

    model._transport.gather = counted  # type: ignore[method-assign]
    per_step = []
    for _ in range(3):
        asked.clear()
        model.zero_grad()
        model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
        gradient = model.get_parameter("weight").grad
        assert gradient is not None
        same(whole(gradient), torch.full((8,), 2.0, dtype=torch.float64), "gradient")
        per_step.append(len(asked))
    assert per_step[1] == per_step[2] < per_step[0]
    model.zero_grad()
    result = model(torch.zeros(2, 8, dtype=torch.float64)).sum()
    if rank < ranks - 1:
        result.backward()
        return
    with pytest.raises(RuntimeFailure, match="weight had a gradient in some steps and has none in others"):
        result.backward()


CASES = {
    case.__name__: case
    for case in (
        converted, replaced, parametrization_removed, written_copies, given_to_plain_tensors, called_directly,
        in_inference_mode, captured_before, not_cut, recurrent, closures, half, started_alike, clipped_as_in_any_loop,
        gradients_on_some_ranks, read_later,
    )
}  # fmt: skip
