"""What ranks do with sharded parameters that plain training does with plain ones; each case runs on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves

from parplan.errors import RuntimeFailure
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.programs import captures
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor, local_tensor
from tests.runtime.helpers import Rule, planner

__all__ = ["CASES"]

Change = Callable[[list[nn.Parameter]], object]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def same(found: Any, wanted: Any, what: str) -> None:
    """Refuse what is further off than rounding, or is of another shape."""
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}")


class Net(nn.Module):
    """Layers of even and uneven widths, with a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.third = nn.Linear(8, 8, bias=False)
        self.third.weight = self.second.weight
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8) to (N, 4)."""
        h = torch.tanh(self.first(x))
        result: Tensor = self.last(torch.tanh(self.third(torch.tanh(self.second(h)))))
        return result


def placements(ranks: int) -> Sequence[Mapping[str, Strategy]]:
    """Plans that cut parameters: over all ranks, along both axes, whole on one rank, in replicas."""
    everyone = tuple(range(ranks))
    first, last = Strategy(devices=(0,)), Strategy(devices=(ranks - 1,))
    cut = {axis: Strategy(1, ranks, axis, everyone) for axis in ("out-features", "in-features")}
    names = ("first", "second", "third", "last")
    found = [
        dict.fromkeys(names, cut["out-features"]),
        {**dict.fromkeys(names, cut["in-features"]), "last": Strategy(ranks, 1, None, everyone)},
        {"first": first, "second": last, "third": last, "last": cut["out-features"]},
    ]
    if ranks == 4:
        found.append(dict.fromkeys(names, Strategy(2, 2, "out-features", everyone)))
    return found


class Pair:
    """A compiled model and its plain twin, trained alike."""

    def __init__(
        self, rule: Rule | Mapping[str, Strategy], rank: int, ranks: int, net: nn.Module | None = None
    ) -> None:
        torch.manual_seed(3)
        module = net if net is not None else Net().double()
        self.plain = copy.deepcopy(module)
        self.model = Compiled(module, planner(rule, ranks))
        self.rank, self.ranks = rank, ranks

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        """The two models."""
        return self.model, self.plain

    def backward(self, penalty: Callable[[nn.Module], Tensor] | None = None) -> None:
        """Gradients of one batch on both."""
        x = torch.randn(2 * self.ranks, 8, dtype=torch.float64)
        y = torch.randn(2 * self.ranks, 4, dtype=torch.float64)
        own = slice(2 * self.rank, 2 * self.rank + 2)
        for module, samples in ((self.model, own), (self.plain, slice(None))):
            loss = nn.functional.mse_loss(module(x[samples]), y[samples])
            (loss if penalty is None else loss + penalty(module)).backward()

    def steps(self, optimizers: Sequence[torch.optim.Optimizer], change: Change | None = None, count: int = 3) -> None:
        """Train both, changing gradients in between, and compare."""
        for _ in range(count):
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.backward()
            for module, optimizer in zip(self.both, optimizers, strict=True):
                torch.manual_seed(7)
                if change is not None:
                    change(list(module.parameters()))
                optimizer.step()
        self.compare()

    def train(self, make: Make, change: Change | None = None, count: int = 3) -> None:
        """Train both with an optimizer of each one's parameters, made before the parameters are cut."""
        self.steps(tuple(make(list(module.parameters())) for module in self.both), change, count)

    def compare(self) -> None:
        """The states agree."""
        state = self.model.state_dict()
        for name, tensor in self.plain.state_dict().items():
            assert type(state[name]) is Tensor
            same(state[name], tensor, name)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def clipped(order: float) -> Change:
    """Clipping by a norm that every step exceeds."""

    def clip(parameters: list[nn.Parameter]) -> None:
        every = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        before = float(torch.linalg.vector_norm(every, order))
        same(float(clip_grad_norm_(parameters, 1e-2, order, error_if_nonfinite=True)), before, f"norm {order}")

    return clip


def scaled_noise(parameters: list[nn.Parameter]) -> None:
    """Noise in proportion to each gradient's norm."""
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.add_(torch.randn_like(parameter) * parameter.grad.norm().item())


def layerwise_rates(parameters: list[nn.Parameter]) -> None:
    """LARS: a gradient's size follows that of its parameter."""
    for parameter in parameters:
        assert parameter.grad is not None
        ratio = parameter.detach().norm() / (parameter.grad.norm() + 1e-8)
        parameter.grad.mul_(torch.where(ratio > 0, ratio, 1.0))


def standardized(parameters: list[nn.Parameter]) -> None:
    """Gradient centralisation: code that looks along one dimension."""
    for parameter in parameters:
        assert parameter.grad is not None
        if parameter.dim() > 1:
            parameter.grad -= parameter.grad.mean(1, keepdim=True)


CHANGES: dict[str, Change] = {
    **{f"norm {order}": clipped(order) for order in (1.0, 2.0, float("inf"))},
    "value": lambda parameters: clip_grad_value_(parameters, 1e-3),
    "noise": scaled_noise,
    "LARS": layerwise_rates,
    "centralised": standardized,
}


@contextmanager
def captured_once() -> Iterator[None]:
    """Captures `Net` once for all pairs of a case, which differ in what comes after: plans, optimizers, gradients."""
    graphs: dict[object, LayerGraph] = {}
    original = vars(captures)["capture"]

    def capture(module: nn.Module, *given: Any, **options: Any) -> LayerGraph:
        assert isinstance(module, Net)
        shapes = tuple(leaf.shape for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
        if shapes not in graphs:
            graphs[shapes] = original(module, *given, **options)
        return graphs[shapes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captures, "capture", capture)
        yield


@captured_once()
def changed_gradients(rank: int, ranks: int) -> None:
    """Clipping, and code that looks across a gradient's elements, under every kind of placement."""
    for rule in placements(ranks):
        for change in CHANGES.values():
            Pair(rule, rank, ranks).train(sgd, change, 2)


OPTIMIZERS: dict[str, Make] = {
    "SGD": sgd,
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": adamw,
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.01),
}


@captured_once()
def optimizers(rank: int, ranks: int) -> None:
    """torch's optimizers, by the same numbers, made before the parameters are cut."""
    for rule in placements(ranks)[::2]:
        for make in OPTIMIZERS.values():
            Pair(rule, rank, ranks).train(make)


@captured_once()
def loaded_optimizers(rank: int, ranks: int) -> None:
    """A state saved from blocks fits the plain model, and a plain one's is loaded into blocks, before any step."""
    makes = (sgd, adamw, OPTIMIZERS["Adafactor"], OPTIMIZERS["Adam foreach"])
    for rule in placements(ranks):
        for make in makes:
            pair = Pair(rule, rank, ranks)
            first = [make(list(module.parameters())) for module in pair.both]
            pair.steps(first, count=2)
            states = [optimizer.state_dict() for optimizer in first]
            for found, wanted in zip(leaves(states[0]), leaves(states[1]), strict=True):
                assert not isinstance(found, ShardedTensor)
                same(found, wanted, "state of the optimizer")
            # Crosswise: the plain twin goes on from the state of blocks, and the other way round.
            others = [make(list(module.parameters())) for module in pair.both]
            for optimizer, state in zip(others, reversed(states), strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))
            pair.steps(others, count=2)
            # A new model, whose parameters are cut only after its optimizer is loaded.
            new = Compiled(Net().double(), planner(rule, ranks))
            new.load_state_dict(pair.plain.state_dict())
            pair.model = new
            late = [make(list(module.parameters())) for module in pair.both]
            for optimizer in late:
                optimizer.load_state_dict(copy.deepcopy(others[1].state_dict()))
            pair.steps(late, count=2)


def leaves(state: Any) -> list[Any]:
    """The tensors of an optimizer's state."""
    return [leaf for leaf in tree_leaves(state["state"]) if isinstance(leaf, Tensor)]


def states_in_blocks(rank: int, ranks: int) -> None:
    """A state that holds blocks, as no state_dict() gives any more, is refused by name."""
    pair = Pair(placements(ranks)[0], rank, ranks)
    optimizer = sgd(list(pair.model.parameters()))
    pair.steps((optimizer, sgd(list(pair.plain.parameters()))), count=1)
    state = optimizer.state_dict()
    for entry, parameter in zip(state["state"].values(), pair.model.parameters(), strict=False):
        entry["momentum_buffer"] = torch.zeros_like(local_tensor(parameter))
    optimizer.load_state_dict(state)
    with pytest.raises(RuntimeFailure, match=r"the state of SGD for first.weight has shape .* it was saved in blocks"):
        optimizer.step()


def made_afterwards(rank: int, ranks: int) -> None:
    """Optimizers made after the parameters are cut, with parameter groups, over a wrapped part and a plain rest."""
    for rule in placements(ranks):
        pair = Pair(rule, rank, ranks)
        pair.backward()
        groups: list[list[dict[str, Any]]] = [
            [
                {"params": [p for p in m.parameters() if p.dim() > 1], "lr": 0.2},
                {"params": [p for p in m.parameters() if p.dim() == 1]},
            ]
            for m in pair.both
        ]
        optimizers = [torch.optim.SGD(group, lr=0.1, momentum=0.9) for group in groups]
        pair.steps(optimizers, clipped(2.0))
        part = Pair(rule, rank, ranks)
        head = nn.Linear(4, 4).double()
        part.plain = nn.Sequential(part.plain, copy.deepcopy(head))
        part.model = nn.Sequential(part.model, head)  # type: ignore[assignment]
        both = [adamw(list(m.parameters())) for m in part.both]
        for _ in range(3):
            for optimizer in both:
                optimizer.zero_grad()
            part.backward()
            for p in head.parameters():  # as the loss outside is each rank's own
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= ranks
            for module, optimizer in zip(part.both, both, strict=True):
                clip_grad_norm_(module.parameters(), 1e-2)
                optimizer.step()
        part.compare()


def accumulation(rank: int, ranks: int) -> None:
    """Gradients that add up, are set to zero in place, scaled by hooks, and frozen parameters."""
    for rule in placements(ranks):
        pair = Pair(rule, rank, ranks)
        pair.backward()
        seen: list[list[Tensor]] = [[], []]
        for module, found in zip(pair.both, seen, strict=True):
            weights = list(module.parameters())
            weights[0].register_hook(lambda g: g * 0.5)
            weights[1].register_hook(lambda g, found=found: found.append(g.norm()))
            weights[1].register_post_accumulate_grad_hook(lambda p, found=found: found.append(p.grad.sum()))
            module.zero_grad(set_to_none=False)
        for _ in range(3):
            pair.backward()
        same(seen[0], seen[1], "what hooks saw")
        for (name, parameter), twin in zip(pair.model.named_parameters(), pair.plain.parameters(), strict=True):
            assert parameter.grad is not None
            same(whole(parameter.grad), twin.grad, f"gradient of {name}")
        optimizers = [sgd(list(m.parameters())) for m in pair.both]
        pair.steps(optimizers, clipped(2.0), 1)
        for module in pair.both:
            next(iter(module.children())).requires_grad_(False)
        pair.steps(optimizers, clipped(2.0), 2)
        for module in pair.both:
            module.requires_grad_(True)
        pair.steps(optimizers, clipped(2.0), 2)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be cut."""
    return tensor.whole() if isinstance(tensor, ShardedTensor) else tensor


def hooks_from_before(rank: int, ranks: int) -> None:
    """Hooks, attributes and gradients that a parameter had before it was cut stay; a removed hook is gone."""
    pair = Pair(placements(ranks)[0], rank, ranks)
    counts = [0, 0]
    for number, module in enumerate(pair.both):
        weight, bias, *_ = module.parameters()
        weight.tag = "decayed"  # type: ignore[attr-defined]
        weight.grad = torch.ones_like(weight)

        def count(gradient: Tensor, number: int = number) -> Tensor:
            counts[number] += 1
            return gradient * 3

        weight.register_hook(count)
        removed = bias.register_hook(count)
        pair.handle = removed  # type: ignore[attr-defined]
        if number == 0:
            first = removed
    pair.backward()
    first.remove()
    removed.remove()
    pair.backward()
    assert counts == [3, 3]
    weight, *_ = pair.model.parameters()
    assert weight.tag == "decayed"  # type: ignore[attr-defined]
    for parameter, twin in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        assert parameter.grad is not None
        same(whole(parameter.grad), twin.grad, "gradient")


@captured_once()
def penalties(rank: int, ranks: int) -> None:
    """Terms of the loss on parameters themselves."""
    terms: list[Callable[[nn.Module], Tensor]] = [
        lambda m: 0.1 * torch.stack([p.norm() ** 2 for p in m.parameters()]).sum(),
        lambda m: 0.1 * torch.stack([p.abs().sum() for p in m.parameters()]).sum(),
        lambda m: 0.1 * next(iter(m.parameters())).sum(0).norm(),
        lambda m: 0.1 * parameters_to_vector(m.parameters()).norm(3),
        lambda m: 0.1 * (lambda w: (w @ w.T - torch.eye(8, dtype=w.dtype)).norm())(next(iter(m.parameters()))),
    ]
    for rule in placements(ranks):
        for term in terms:
            pair = Pair(rule, rank, ranks)
            pair.backward()
            pair.backward(term)
            for (name, parameter), twin in zip(pair.model.named_parameters(), pair.plain.parameters(), strict=True):
                assert parameter.grad is not None
                same(whole(parameter.grad), twin.grad, f"gradient of {name}")
            pair.steps([sgd(list(m.parameters())) for m in pair.both], count=1)


@captured_once()
def vectors(rank: int, ranks: int) -> None:
    """Numbers of parameters and their shapes are the whole model's, also as one vector, there and back."""
    for rule in placements(ranks):
        pair = Pair(rule, rank, ranks)
        pair.backward()
        assert sum(p.numel() for p in pair.model.parameters()) == sum(p.numel() for p in pair.plain.parameters())
        vector = parameters_to_vector(pair.model.parameters())
        same(vector, parameters_to_vector(pair.plain.parameters()), "vector")
        for module in pair.both:
            vector_to_parameters(vector.detach() * 2, module.parameters())
        pair.compare()
        pair.steps([sgd(list(m.parameters())) for m in pair.both])


def averaged(rank: int, ranks: int) -> None:
    """Moving averages: by deep copy and by hand, by AveragedModel; the averages run and are saved whole."""
    average = get_ema_multi_avg_fn(0.9)
    for rule in placements(ranks):
        pair = Pair(rule, rank, ranks)
        pair.backward()
        models = [AveragedModel(m, multi_avg_fn=average) for m in pair.both]
        copies = [copy.deepcopy(m) for m in pair.both]
        optimizers = [sgd(list(m.parameters())) for m in pair.both]
        for _ in range(3):
            pair.steps(optimizers, count=1)
            for module, model, twin in zip(pair.both, models, copies, strict=True):
                model.update_parameters(module)
                with torch.no_grad():
                    for mean, given in zip(twin.parameters(), module.parameters(), strict=True):
                        mean.mul_(0.9).add_(given, alpha=0.1)
        x = torch.randn(2 * ranks, 8, dtype=torch.float64)
        own = slice(2 * rank, 2 * rank + 2)
        for ours, theirs in (models, copies):
            state = ours.state_dict()
            for name, tensor in theirs.state_dict().items():
                same(state[name], tensor, name)
            with torch.no_grad():
                same(ours.eval()(x[own]), theirs.eval()(x)[own], "result of the average")
                same(ours(x[own]), theirs(x)[own], "result of the average, again")


def scaler(rank: int, ranks: int) -> None:
    """A gradient that is infinite in one rank's block skips the step on all, and the scale falls alike."""
    pair = Pair(placements(ranks)[0], rank, ranks)
    optimizers = [adamw(list(m.parameters())) for m in pair.both]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in pair.both]
    for step in range(4):
        x, y = (torch.randn(2 * ranks, width, dtype=torch.float64) for width in (8, 4))
        own = slice(2 * rank, 2 * rank + 2)
        for module, samples, optimizer, each in zip(pair.both, (own, slice(None)), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            each.scale(nn.functional.mse_loss(module(x[samples]), y[samples])).backward()
            if step == 1:
                with torch.no_grad():
                    weight, *_ = module.parameters()
                    assert weight.grad is not None
                    weight.grad[0, 0] = float("inf")
            each.unscale_(optimizer)
            clip_grad_norm_(module.parameters(), 1e-2)
            each.step(optimizer)
            each.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        pair.compare()


CASES = {
    case.__name__: case
    for case in (
        changed_gradients, optimizers, loaded_optimizers, states_in_blocks, made_afterwards, accumulation,
        hooks_from_before, penalties, vectors, averaged, scaler,
    )
}  # fmt: skip
