"""Exported programs of models that torch runs otherwise than the plan: kept whole, said, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples import gpt2
from parplan.errors import PlanError
from parplan.export.program_text import TorchProgram
from parplan.export.titan_config import titan_config
from parplan.export.torch_program import torch_program
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Scheme, Strategy
from parplan.runtime.processes import in_processes
from tests.export.test_torch_program import check_trained, cut, in_slices, train
from tests.runtime.helpers import planner, spread


class Between(nn.Module):
    """A function between two linear layers, of the first one's result and of what the module has."""

    scale: Tensor

    def __init__(self, inner: Callable[[nn.Module, Tensor], Tensor], width: int = 16) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(6, width), nn.Linear(width, 4), inner
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.inner(self, self.up(x)))
        return result


def tensor_parallel(module: nn.Module, *args: Tensor) -> TorchProgram:
    """The program of linear layers, and of what is between them, over two devices."""
    graph = capture(module, args)

    def own(name: str) -> Strategy:
        layer = graph.layers[name]
        axis = {"up": "out-features", "down": "in-features"}.get(name, "features")
        return Strategy(1, 2, axis, (0, 1)) if layer.axis(axis) is not None else Strategy()

    plan = Plan(graph.model, graph.fingerprint, graph.batch or 1, 2, {name: own(name) for name in graph.layers})
    return torch_program(graph, plan, module, args)


def attended(sizes: Callable[[Tensor], float]) -> Callable[[nn.Module, Tensor], Tensor]:
    def inner(_: nn.Module, h: Tensor) -> Tensor:
        return (h.tanh() / sizes(h)).relu()

    return inner


BY_SIZES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a factor": lambda _, h: h.relu() * h.shape[-1] ** -0.5,
    "elements of a sample": attended(lambda h: h.numel() / h.shape[0]),
    "a root": attended(lambda h: math.sqrt(h.shape[-1])),
    "a slice of a buffer": lambda own, h: h.relu() * own.scale[: h.shape[-1]],  # type: ignore[index]
    "groups": lambda _, h: functional.group_norm(h, 4),
    "a branch": lambda _, h: h.tanh() * 2 if h.shape[-1] >= 16 else h.tanh() * 3,
    "a limit": lambda _, h: h.clamp(max=0.05 * h.shape[-1]),
    "a threshold": lambda _, h: functional.threshold(h, 1.0 / h.shape[-1], 0.0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BY_SIZES)
def test_code_that_reads_sizes_has_whole_tensors(name: str) -> None:
    """Parts have other sizes, by which Python would work out other numbers, without an error."""
    found = tensor_parallel(Between(BY_SIZES[name]), torch.randn(8, 6))
    whole = {
        "up": "ColwiseParallel(output_layouts=Replicate())", "down": "RowwiseParallel(input_layouts=Replicate())",
    }  # fmt: skip
    assert found.styles == whole


def test_code_without_sizes_keeps_parts() -> None:
    found = tensor_parallel(Between(lambda _, h: (h.relu() * 0.5).view(len(h), -1) + 1), torch.randn(8, 6))
    assert found.styles == {"up": "ColwiseParallel()", "down": "RowwiseParallel()"}


def test_random_numbers_that_parts_share_are_said() -> None:
    found = tensor_parallel(Between(lambda own, h: functional.dropout(h, 0.5, own.training)), torch.randn(8, 6))
    assert found.styles["up"] == "ColwiseParallel()"
    assert any("random numbers of its own for every part" in one for one in found.otherwise)


def copies(module: nn.Module, *args: Tensor, state: str = "replicated", micro_batches: int = 1) -> TorchProgram:
    """The program of replicas on two devices."""
    graph = capture(module, args)
    plan = in_slices(planner(spread(2, "data"), 2, micro_batches=micro_batches), state)(graph)
    return torch_program(graph, plan, module, args)


class Trained(nn.Module):
    """Two linear layers, and a function of what they make and of targets."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.loss = nn.Linear(6, 8), nn.Linear(8, 4), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.b(self.a(x).relu()), y)


def contrasted(h: Tensor, y: Tensor) -> Tensor:
    """Each sample beside all others."""
    alike = functional.normalize(h, dim=-1) @ functional.normalize(h * 2, dim=-1).T
    return functional.cross_entropy(5 * alike, torch.arange(len(h))) + 0 * y.sum()


PAIR = torch.randn(8, 6), torch.randint(0, 4, (8,))
ALONE = "of all samples in the plan, here of those of each copy alone"


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (contrasted, ALONE),
        (lambda h, y: functional.cross_entropy(h - h.mean(0), y), ALONE),
        (lambda h, y: functional.cross_entropy(h, y).sqrt(), "each copy has those of its own"),
        (partial(functional.cross_entropy, ignore_index=1), "the mean of copies' means"),
    ],
)
def test_what_needs_all_samples_is_said(loss: Callable[[Tensor, Tensor], Tensor], text: str) -> None:
    said = copies(Trained(loss), *PAIR).otherwise
    assert any(text in one for one in said), said
    assert not any("here whole in every process" in one for one in said)


def test_a_mean_over_samples_is_that_of_copies() -> None:
    said = copies(Trained(lambda h, y: (h.mean(1) * y).mean()), *PAIR).otherwise
    assert said == []


def test_a_sum_over_samples_is_refused() -> None:
    with pytest.raises(PlanError, match="torch averages gradients over copies"):
        copies(Trained(partial(functional.cross_entropy, reduction="sum")), *PAIR)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def test_parts_of_a_batch_are_equal_or_an_error() -> None:
    """Parts that `chunk` makes of other batches would be fewer, and copies never put their gradients together."""
    said = copies(net(), torch.randn(12, 6), micro_batches=4)
    assert any("12 samples in uneven parts" in one and "2 copies x 4 micro-batches" in one for one in said.otherwise)
    assert copies(net(), torch.randn(16, 6), micro_batches=4).otherwise == []
    assert any("7 samples in uneven parts" in one for one in copies(net(), torch.randn(7, 6)).otherwise)
    space: dict[str, Any] = {"__name__": "exported"}
    exec(compile(said.text(), "exported.py", "exec"), space)
    with pytest.raises(ValueError, match="6 samples have no 4 equal micro-batches"):
        space["train_step"](net(), None, None, torch.randn(6, 6), torch.randn(6, 4))


def test_inputs_without_samples_have_no_micro_batches() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 8)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            result: Tensor = self.a(x) * scale
            return result

    with pytest.raises(PlanError, match="no samples along its first dimension"):
        copies(Scaled(), torch.randn(8, 6), torch.randn(3, 8)[0], micro_batches=2)


@pytest.mark.parametrize("state", ["sharded", "gathered"])
def test_slices_start_from_one_seed(state: str) -> None:
    assert "whose ranks start from one seed" in " ".join(copies(net(), torch.randn(8, 6), state=state).text().split())
    assert "seed" not in copies(net(), torch.randn(8, 6)).text()


@pytest.mark.parametrize("functional_one", [False, True])
def test_statistics_of_each_copy_are_said(functional_one: bool) -> None:
    class Normal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if functional_one:
                return functional.batch_norm(h, None, None, training=True)
            result: Tensor = self.norm(h)
            return result

    found = copies(Normal(), torch.randn(8, 6))
    assert found.statistics is not functional_one
    where = "here" if functional_one else "on CPUs"
    assert any(f"statistics of all samples in the plan, {where} of each copy's own" in one for one in found.otherwise)


class Listed(nn.Module):
    """Blocks in a list, which has no forward that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = x + block(x)
        return x


def test_modules_that_are_called_are_replayed() -> None:
    module, x = Listed(), torch.randn(8, 6)
    graph = capture(module, (x,))
    plan = planner(spread(2, "data"), 2)(graph)
    layers = {n: replace(own, saved="replay" if n.startswith("h.") else "keep") for n, own in plan.layers.items()}
    assert torch_program(graph, replace(plan, layers=layers), module, (x,)).replayed == ["h.0", "h.1", "h.2"]


def test_updates_between_passes_are_said_of_cut_layers_too() -> None:
    module, x = (
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)),
        torch.randn(8, 6),
    )
    graph, both = capture(module, (x,)), (0, 1)
    own = {
        "0": Strategy(2, 1, None, both), "1": Strategy(2, 1, None, both), "2": Strategy(1, 2, "out-features", both, 2),
        "3": Strategy(1, 2, "features", both), "4": Strategy(1, 2, "in-features", both, 2),
    }  # fmt: skip
    plan = Plan(graph.model, graph.fingerprint, 8, 2, own, scheme=Scheme.BROADCAST)
    said = torch_program(graph, plan, module, (x,)).otherwise
    assert any(one.startswith("2, 4: updated every 2 passes") for one in said), said


class Tied(nn.Module):
    """Tokens, whose table is that of the last layer."""

    def __init__(self, functional_one: bool = False) -> None:
        super().__init__()
        self.tokens, self.a, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.functional_one = functional_one
        if functional_one:
            del self.head
        else:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(self.tokens(x)).relu()
        result: Tensor = functional.linear(h, self.tokens.weight) if self.functional_one else self.head(h)
        return result


class Unused(nn.Module):
    """A layer that the forward leaves out, and attention whose own layers it calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.left, self.attention = (
            nn.Linear(6, 8),
            nn.Linear(3, 3),
            nn.MultiheadAttention(8, 2, batch_first=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        result: Tensor = self.attention(h, h, h, need_weights=False)[0]
        return result


def made(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    if kind == "unused":
        return Unused(), (torch.randn(4, 5, 6),)
    return Tied(kind == "read elsewhere"), (torch.randint(0, 12, (8, 5)),)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("state", ["replicated", "gathered"])
@pytest.mark.parametrize("kind", ["unused", "tied", "read elsewhere"])
def test_weights_that_no_module_has_alone_train_like_the_plain_models(kind: str, state: str) -> None:
    module, args = made(kind)
    program = copies(module, *args, state=state)
    assert program.unused is (kind == "unused")
    if state == "gathered":
        assert program.sharded
        assert any("here in those of the whole model" in one for one in program.otherwise)
    check_trained(in_processes(2, partial(train, program.text(), partial(made, kind))), partial(made, kind))


def test_a_module_called_twice_is_whole_in_the_plan() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.b(self.a(self.a(x).relu()).relu())
            return result

    found = copies(Twice(), torch.randn(8, 6), state="gathered")
    assert [names for names, _ in found.slices or ()] == [("b",)]
    whole = "in slices of their own or whole in the plan, here in those of the whole model"
    assert found.otherwise == [f"a, a@1: {whole}"]


@pytest.mark.parametrize("name", ['a"""b', "back\\slash", "\N{MATHEMATICAL DOUBLE-STRUCK CAPITAL A}", "new\nline"])
def test_any_name_is_written(name: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(6, 8))
            self.down = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.down(getattr(self, name)(x).relu())
            return result

    module, x = Named(), torch.randn(8, 6)
    graph = capture(module, (x,))
    plan = planner(spread(2, "data"), 2)(graph)
    layers = {n: replace(own, saved="replay") if n != "down" else own for n, own in plan.layers.items()}
    text = torch_program(graph, replace(plan, layers=layers), module, (x,)).text()
    space: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), space)
    assert " ".join(name.split()) in " ".join(space["__doc__"].split())


def lm(change: Callable[[LayerGraph, Plan], Plan]) -> tuple[str, ...]:
    torch.manual_seed(0)
    module, args = gpt2.small()
    graph = capture(module, args)
    return titan_config(graph, change(graph, planner(spread(2, "data"), 2)(graph))).otherwise


def test_torchtitan_is_told_what_its_degrees_leave_out() -> None:
    def embeddings(graph: LayerGraph, plan: Plan) -> Plan:
        tables = {name for name, layer in graph.layers.items() if layer.kind == "embedding"}
        own = {n: replace(one, state="gathered") if n in tables else one for n, one in plan.layers.items()}
        return replace(plan, layers=own)

    def alone(graph: LayerGraph, plan: Plan) -> Plan:
        return plan.with_layers({n: Strategy() for n in plan.layers if n.startswith("h.")})

    plain = lm(lambda graph, plan: plan)
    assert len(plain) == 1
    assert any("have other state in the plan than replicated" in one for one in lm(embeddings))
    assert any("have other replicas in the plan than 2" in one for one in lm(alone))


def test_slices_beside_shards_are_said_once() -> None:
    """Layers of a copy's devices, in slices over the copies, are in groups of their own."""
    module, x = net(), torch.randn(8, 6)
    graph = capture(module, (x,))
    found = torch_program(graph, in_slices(cut(2))(graph), module, (x,))
    assert found.sharded
    assert [names for names, _ in found.slices or ()]
