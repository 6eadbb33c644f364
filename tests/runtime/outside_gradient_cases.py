"""Terms of the loss that use parameters directly, each process its own: averaged over processes, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parplan.errors import RuntimeFailure
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.sharded_state.block_placement import TaggedCollectives
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor
from tests.runtime.helpers import planner, spread
from tests.runtime.sharded_cases import Net, placements, same

__all__ = ["CASES"]

Term = Callable[[Any, Tensor, int], Tensor]


class _Case:
    """A compiled model beside a plain one, and every rank's samples."""

    def __init__(self, rule: Any, rank: int, ranks: int, group: dist.ProcessGroup | None = None) -> None:
        net = Net().double()
        self.rank, self.ranks = rank, ranks
        self.plain = copy.deepcopy(net)
        self.model = Compiled(net, planner(rule, ranks), group=group)
        self.x = torch.randn(ranks, 3, 8, dtype=torch.float64)
        self.model(self.x[rank]).sum().backward()  # from here on parameters are cut
        self.model.zero_grad()

    def loss(self, module: nn.Module, term: Term | None, rank: int) -> Tensor:
        """A rank's loss: of its samples, and its term."""
        loss: Tensor = module(self.x[rank]).square().mean()
        held = module.module if isinstance(module, Compiled) else module
        return loss if term is None else loss + term(held, self.x[rank], rank)

    def wanted(self, term: Term | None) -> dict[str, Tensor]:
        """The plain model's gradients of the mean of all ranks' losses."""
        self.plain.zero_grad()
        torch.stack([self.loss(self.plain, term, rank) for rank in range(self.ranks)]).mean().backward()
        return {name: p.grad for name, p in self.plain.named_parameters() if p.grad is not None}

    def compare(self, term: Term | None, what: str) -> None:
        """Backward on both sides, with the same gradients."""
        wanted = self.wanted(term)
        self.model.zero_grad()
        self.loss(self.model, term, self.rank).backward()
        found = {name: whole(p.grad) for name, p in self.model.module.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            same(found[name], gradient, f"{what}: {name}")


def whole(tensor: Tensor) -> Tensor:
    """An ordinary tensor."""
    return tensor.whole() if isinstance(tensor, ShardedTensor) else tensor


def everywhere(rank: int, ranks: int) -> Iterator[_Case]:
    """Replicated parameters, and cut ones."""
    yield _Case(spread(ranks, "data"), rank, ranks)
    for rule in placements(ranks):
        yield _Case(rule, rank, ranks)


def _middle(module: Any) -> Any:
    return module.second.weight


RIGHT: dict[str, Term] = {
    "equal": lambda m, x, r: 0.1 * _middle(m).square().sum(),
    "a factor behind the sum": lambda m, x, r: (1 + r) * _middle(m).square().sum(),
    "a factor behind a mean, of every parameter": lambda m, x, r: (
        (1 + r) * sum((p.abs() ** 1.5).mean() for p in m.parameters())
    ),
    "a factor behind a norm": lambda m, x, r: (1 + r) * m.first.weight.norm() * m.last.bias.norm(1),
    "a factor behind an extreme": lambda m, x, r: (1 + r) * m.first.weight.amax(),
    "samples": lambda m, x, r: (x @ _middle(m).T).tanh().mean() + x[0] @ m.first.bias,
    "a row of its own": lambda m, x, r: m.first.weight[r].square().sum(),
    "sums by rows": lambda m, x, r: (m.first.weight.square().sum(1) * (1 + r + x[0])).sum(),
    "parameters together": lambda m, x, r: (1 + r) * (m.first.weight * _middle(m)).sum() + m.first.bias.sum() * r,
    "a second call": lambda m, x, r: r * Net.forward(m, x + 1).square().mean(),
    "not differentiable everywhere": lambda m, x, r: (r + 1) * m.last.weight.clamp(-0.1, 0.1).relu().sum(),
}

REFUSED_IF_CUT: dict[str, Term] = {
    "a factor before the sum": lambda m, x, r: ((1 + r) * m.first.weight).square().sum(),
    "a number as a tensor": lambda m, x, r: (x.sum() * m.first.weight).square().sum(),
    "a mask": lambda m, x, r: (m.first.weight * (torch.arange(64).view(8, 8) % (r + 2))).sum(),
    "another function": lambda m, x, r: (m.first.weight.sin() if r else m.first.weight.cos()).sum(),
}


def terms_are_averaged(rank: int, ranks: int) -> None:
    """The gradients are those of the mean of all losses."""
    for case in everywhere(rank, ranks):
        for name, term in RIGHT.items():
            case.compare(term, name)
        case.compare(None, "no term")


def values_before_a_sum(rank: int, ranks: int) -> None:
    """Right for replicated parameters; refused for cut ones, of which each process has a part of the sum."""
    case = _Case(spread(ranks, "data"), rank, ranks)
    for name, term in REFUSED_IF_CUT.items():
        case.compare(term, name)
    for rule in placements(ranks):
        case = _Case(rule, rank, ranks)
        if not isinstance(case.model.get_parameter("first.weight"), ShardedTensor):
            continue
        for term in REFUSED_IF_CUT.values():
            with pytest.raises(RuntimeFailure, match=r"not the same on all|different operations"):
                case.loss(case.model, term, rank)
            dist.barrier()
        case.compare(None, "afterwards")


def before_the_first_call(rank: int, ranks: int) -> None:
    """A term's backward before anything is cut, and one after it: both the mean."""
    for rule in placements(ranks):
        net = Net().double()
        plain = copy.deepcopy(net)
        model = Compiled(net, planner(rule, ranks))
        for _ in range(2):
            for module, factor in ((model.module, rank + 1), (plain, (ranks + 1) / 2)):
                module.zero_grad()
                (factor * module.get_parameter("first.weight").square().sum()).backward()
            found = model.module.get_parameter("first.weight").grad
            assert found is not None
            same(whole(found), plain.get_parameter("first.weight").grad, "first.weight")
            model(torch.randn(3, 8, dtype=torch.float64)).sum().backward()


def norms_of_different_orders(rank: int, ranks: int) -> None:
    """Ranks that ask for different norms of a cut parameter are told so."""
    for case in everywhere(rank, ranks):
        weight = case.model.module.get_parameter("first.weight")
        if isinstance(weight, ShardedTensor):
            with pytest.raises(RuntimeFailure, match="order"):
                weight.norm(1 + rank % 2)


def several_calls(rank: int, ranks: int) -> None:
    """The model called twice, with and without a term, in one backward and in two that accumulate."""
    for case in everywhere(rank, ranks):
        for term in (None, RIGHT["samples"]):

            def twice(m: Any, x: Tensor, r: int, term: Term | None = term) -> Tensor:
                found: Tensor = m(x + 1).square().mean()
                return found if term is None else found + term(m, x, r)

            wanted = case.wanted(twice)
            model, x = case.model, case.x[rank]
            for apart in (False, True):
                model.zero_grad()
                losses = [model(x).square().mean(), model(x + 1).square().mean()]
                if term is not None:
                    losses.append(term(model.module, x, rank))
                for loss in losses if apart else [sum(losses)]:
                    loss.backward()
                for name, p in model.module.named_parameters():
                    assert p.grad is not None
                    same(whole(p.grad), wanted[name], f"{name}, apart: {apart}")


def users_hooks_see_the_mean(rank: int, ranks: int) -> None:
    """Hooks of the user, made before and after the first call, and torch.autograd.grad."""
    for case in everywhere(rank, ranks):
        term = RIGHT["a factor behind the sum"]
        wanted = case.wanted(term)["second.weight"]
        weight = _middle(case.model.module)
        seen: list[Tensor] = []
        weight.register_hook(lambda g, seen=seen: seen.append(g))
        weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad))
        case.loss(case.model, term, rank).backward()
        seen += torch.autograd.grad(case.loss(case.model, term, rank), [weight])
        assert len(seen) == 4
        for gradient in seen:
            same(whole(gradient), wanted, "what a hook sees")


class _PartUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.free = nn.Linear(8, 4), nn.Linear(4, 4)
        self.used.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


def trained_later(rank: int, ranks: int) -> None:
    """A parameter that is frozen at first, and one that no call of the model uses."""
    net = _PartUsed().double()
    model = Compiled(net, planner(spread(ranks, "data"), ranks))
    model(torch.randn(3, 8, dtype=torch.float64)).sum().backward()
    for parameter in (net.used.weight.requires_grad_(), net.free.weight):
        ((1 + rank) * parameter.sum()).backward()
        assert parameter.grad is not None
        same(parameter.grad, torch.full_like(parameter, (ranks + 1) / 2), "gradient")


def second_derivatives(rank: int, ranks: int) -> None:
    """Of terms that are the same on all processes; refused where they differ."""
    case = _Case(spread(ranks, "data"), rank, ranks)
    weight = _middle(case.model.module)
    (first,) = torch.autograd.grad((weight**3).sum(), [weight], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), [weight])
    same(second, 6 * weight, "second derivative")
    with pytest.raises(RuntimeFailure, match="to be differentiated again"):
        torch.autograd.grad((1 + rank) * (weight**3).sum(), [weight], create_graph=True)
    case = _Case(spread(ranks, "out-features"), rank, ranks)
    weight = _middle(case.model.module)
    (first,) = torch.autograd.grad((weight**3).sum(), [weight], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), [weight])
    same(whole(second), whole(6 * weight.detach()), "second derivative")
    for term in ((1 + rank) * (weight**3).sum(), (weight @ weight).sum()):
        with pytest.raises(RuntimeFailure, match=r"to be differentiated again|not the same on all"):
            torch.autograd.grad(term, [weight], create_graph=True)
        dist.barrier()


def on_one_rank_only(rank: int, ranks: int) -> None:
    """An error at the group's timeout, where the term is."""
    case = _Case(spread(ranks, "data"), rank, ranks, dist.new_group(timeout=timedelta(seconds=6)))
    if rank == 0:
        with pytest.raises(RuntimeFailure, match=r"gradient of second.weight.*every rank has to run this line"):
            case.loss(case.model, RIGHT["samples"], rank).backward()
    else:
        case.loss(case.model, None, rank).backward()
    dist.barrier()


def nothing_is_sent_without_a_term(rank: int, ranks: int) -> None:
    """Steps of the model alone, called once and twice, compare no gradients."""
    for case in everywhere(rank, ranks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TaggedCollectives, "exchange", None)
            for _ in range(2):
                loss = case.loss(case.model, None, rank)
                loss.backward()
                (loss.detach() + case.model(case.x[rank]).sum() + case.model(case.x[rank] + 1).sum()).backward()


CASES = {
    case.__name__: case
    for case in (
        terms_are_averaged, values_before_a_sum, several_calls, users_hooks_see_the_mean, trained_later,
        second_derivatives, nothing_is_sent_without_a_term, before_the_first_call, norms_of_different_orders,
        on_one_rank_only,
    )
}  # fmt: skip
