"""Exported programs under a process group: the plain model's losses and weights, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from examples import alexnet, gpt2, resnet50
from parplan.export.program_text import TorchProgram
from parplan.export.torch_program import torch_program
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.plan import Plan, Strategy
from parplan.runtime.processes import in_processes
from tests.runtime.helpers import planner, spread

Made = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


def perceptron() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    return net, (torch.randn(8, 6),)


def decoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return gpt2.small()


def convnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return resnet50.small()


class Looked(nn.Module):
    """Tokens, looked up by rows of one table and columns of another, between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.kinds = nn.Embedding(12, 8), nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(self.tokens(x) * self.kinds(x)).relu())
        return result


def looked() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Looked(), (torch.randint(0, 12, (8, 5)),)


class Heads(nn.Module):
    """Attention with rotated queries and keys, of which a head's width is fixed, or how many heads there are."""

    angles: Tensor

    def __init__(self, counted: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.shape = (4, -1) if counted else (-1, 4)
        self.register_buffer("angles", torch.linspace(0, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, self.shape).transpose(1, 2) for one in (self.query, self.key, self.value))
        q, k = (one * self.angles.cos() + one.flip(-1) * self.angles.sin() for one in (q, k))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = x + self.out(seen.transpose(1, 2).flatten(2))
        return result


def attention(counted: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(Heads(counted), nn.LayerNorm(16)), (torch.randn(4, 6, 16),)


def by_heads(tensor: int) -> Callable[[LayerGraph], Plan]:
    """Attention over `tensor` of four devices by heads, with the linear layers around it."""

    def plan(graph: LayerGraph) -> Plan:
        everyone, found = (0, 1, 2, 3), dict[str, Strategy]()
        for name, layer in graph.layers.items():
            wanted = {"linear": "in-features" if name.endswith("out") else "out-features"}.get(layer.kind, "heads")
            known = layer.axis(wanted) is not None
            found[name] = Strategy(4 // tensor, tensor, wanted, everyone) if known else Strategy(4, 1, None, everyone)
            if not known and layer.batch is None:
                found[name] = Strategy()
        return Plan(graph.model, graph.fingerprint, graph.batch or 1, 4, found)

    return plan


def cut(tensor: int) -> Callable[[LayerGraph], Plan]:
    """Pairs of linear layers, and what is between them, over `tensor` devices; all else on each copy's."""

    def plan(graph: LayerGraph, devices: int = 4) -> Plan:
        everyone = tuple(range(devices))

        def own(layer: Layer) -> Strategy:
            wanted = {
                "up": "out-features", "down": "in-features", "0": "out-features", "2": "in-features",
                "tokens": "vocabulary", "kinds": "features",
            }  # fmt: skip
            axis = wanted.get(layer.name.rpartition(".")[2])
            if layer.kind == "activation":
                axis = layer.axes[-1].name if layer.axes else None
            known = axis is not None and layer.axis(axis) is not None
            if known:
                return Strategy(devices // tensor, tensor, axis, everyone)
            return Strategy(devices, 1, None, everyone) if layer.batch is not None else Strategy()

        return Plan(
            graph.model, graph.fingerprint, graph.batch or 1, devices, {n: own(la) for n, la in graph.layers.items()}
        )

    return plan


def columns(graph: LayerGraph) -> Plan:
    """Every layer over four devices by what it gives."""
    chosen = {
        name: Strategy(1, 4, "out-features" if layer.kind == "linear" else "features", (0, 1, 2, 3))
        for name, layer in graph.layers.items()
    }
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, 4, chosen)


def deep() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), (torch.randn(8, 6),)


def in_slices(planned: Callable[[LayerGraph], Plan], state: str = "gathered") -> Callable[[LayerGraph], Plan]:
    """The same plan with a state, weights in slices, of all layers with replicas."""

    def plan(graph: LayerGraph) -> Plan:
        found = planned(graph)
        layers = {n: replace(own, state=state if own.replicas > 1 else own.state) for n, own in found.layers.items()}
        return replace(found, layers=layers)

    return plan


def with_state(state: str, saved: str, micro_batches: int) -> Callable[[LayerGraph], Plan]:
    def plan(graph: LayerGraph) -> Plan:
        found = planner(spread(2, "data"), 2, micro_batches=micro_batches)(graph)
        layers = {
            name: replace(own, state=state, saved=saved if name.startswith("h.0.") else "keep")
            for name, own in found.layers.items()
        }
        return replace(found, layers=layers)

    return plan


CASES: dict[str, tuple[Made, Callable[[LayerGraph], Plan]]] = {
    "copies": (perceptron, planner(spread(2, "data"), 2)),
    "columns and rows": (perceptron, cut(4)),
    "columns and rows in two copies": (perceptron, cut(2)),
    "a decoder in copies": (decoder, planner(spread(2, "data"), 2)),
    "a decoder in columns and rows": (decoder, cut(2)),
    "columns alone": (deep, columns),
    "embeddings": (looked, cut(4)),
    "embeddings in two copies": (looked, cut(2)),
    "heads": (attention, by_heads(4)),
    "heads in two copies": (attention, by_heads(2)),
    "counted heads": (partial(attention, True), by_heads(4)),
    "a decoder in columns, rows and slices": (decoder, in_slices(cut(2))),
    "a decoder in slices": (decoder, with_state("gathered", "replay", 2)),
    "a decoder in slices for a step": (decoder, with_state("sharded", "keep", 1)),
    "a convnet in slices": (convnet, with_state("gathered", "keep", 1)),
    "a convnet in copies": (convnet, planner(spread(2, "data"), 2)),
}


def program_of(name: str) -> tuple[str, int]:
    made, planned = CASES[name]
    module, args = made()
    graph = capture(module, args)
    plan = planned(graph)
    return torch_program(graph, plan, module, args).text(), plan.devices


def train(text: str, made: Made, rank: int, ranks: int) -> dict[str, Tensor]:
    """Three steps by an exported program, in one process of several: weights, and losses of the whole batch."""
    space: dict[str, object] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), space)
    module, args = made()
    module = module.double().train()
    for norm in (one for one in module.modules() if isinstance(one, nn.BatchNorm2d)):
        norm.eval()  # on CPUs torch has statistics of one copy only
    mesh, model = space["parallelize"](module)  # type: ignore[operator]
    part, parts = mesh["data"].get_local_rank(), mesh["data"].size()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    own = args[0].to(torch.float64) if args[0].is_floating_point() else args[0]
    own = own.tensor_split(parts)[part]
    for _ in range(3):
        if "train_step" in space:
            loss = space["train_step"](  # type: ignore[operator]
                model, lambda results, _: results.square().mean(), optimizer, own, own
            )
        else:
            optimizer.zero_grad()
            loss = model(own).square().mean()
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total / ranks)
    plain = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    state = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in plain.state_dict().items()}
    return {**state, "losses": torch.stack(losses)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_the_plain_models(name: str) -> None:
    text, devices = program_of(name)
    assert "import parplan" not in text
    check_trained(in_processes(devices, partial(train, text, CASES[name][0])), CASES[name][0])


def check_trained(found: Sequence[dict[str, Tensor]], made: Made) -> None:
    """That processes have the plain model's losses and weights."""
    module, args = made()
    plain = copy.deepcopy(module).double().train()
    for norm in (one for one in plain.modules() if isinstance(one, nn.BatchNorm2d)):
        norm.eval()
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), []
    x = args[0].to(torch.float64) if args[0].is_floating_point() else args[0]
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    for own in found:
        torch.testing.assert_close(own.pop("losses"), torch.stack(losses), rtol=1e-9, atol=1e-12)
        for key, tensor in plain.state_dict().items():
            torch.testing.assert_close(own[key], tensor, rtol=1e-8, atol=1e-11, msg=f"{key} differs")


def said(module: nn.Module, args: tuple[Tensor, ...], planned: Callable[[LayerGraph], Plan]) -> TorchProgram:
    graph = capture(module, args)
    return torch_program(graph, planned(graph), module, args)


def test_elementwise_ops_alone_keep_parts_between_two_cut_modules() -> None:
    """A result that the caller sees, or that a norm reads, is put together first."""
    styles = said(*perceptron(), cut(2)).styles
    assert styles == {"0": "ColwiseParallel()", "2": "RowwiseParallel()"}
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    styles = said(net, (torch.randn(8, 6),), columns).styles
    assert set(styles.values()) == {"ColwiseParallel(output_layouts=Replicate())"}
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    styles = said(net, (torch.randn(8, 6),), cut(2)).styles
    assert styles == {
        "0": "ColwiseParallel(output_layouts=Replicate())",
        "2": "RowwiseParallel(input_layouts=Replicate())",
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("counted", [False, True])
def test_attention_keeps_parts_where_its_code_has_the_plans_heads(counted: bool) -> None:
    """Code that says how many heads there are makes four narrow heads of one wide one."""
    found = said(*attention(counted), by_heads(4))
    assert found.styles["0.query"] == (
        "ColwiseParallel(output_layouts=Replicate())" if counted else "ColwiseParallel()"
    )
    assert found.styles["0.out"] == ("RowwiseParallel(input_layouts=Replicate())" if counted else "RowwiseParallel()")
    assert any("4 shards of heads in the plan, here whole" in sentence for sentence in found.otherwise) is counted


def test_embeddings_whose_rows_are_not_all_alike_are_left_whole_and_named() -> None:
    module, args = looked()
    assert said(module, args, cut(2)).styles["tokens"] == "RowwiseParallel(input_layouts=Replicate())"
    assert isinstance(module, Looked)
    module.tokens = nn.Embedding(12, 8, padding_idx=0)
    found = said(module, args, cut(2))
    assert found.styles.keys() == {"kinds", "up", "down"}
    assert any(
        "2 shards of vocabulary in the plan" in sentence and "tokens" in sentence for sentence in found.otherwise
    )


@pytest.mark.full
def test_packed_weights_are_left_whole_and_named() -> None:
    """q, k and v of one matrix are cut section by section, which DTensor's shards are not."""
    found = said(*decoder(), planner(spread(2, "out-features"), 2))
    assert not [path for path in found.styles if path.endswith("qkv")]
    assert any("h.0.attn.qkv" in sentence and "here whole in every process" in sentence for sentence in found.otherwise)


def test_most_of_the_work_decides_between_copies_and_shards() -> None:
    """AlexNet's convolutions on copies and its large layers in shards: torch has one of both for a process."""
    found = said(*alexnet.small(), planner(spread(2, "hybrid"), 2))
    assert (found.data, found.tensor, found.styles) == (2, 1, {})
    assert any("2 shards of " in sentence for sentence in found.otherwise)


@pytest.mark.full
def test_a_schedule_of_one_group_of_devices_is_gradient_accumulation() -> None:
    """Without stages, 1f1b is one micro-batch after another."""
    module, args = decoder()
    graph = capture(module, args)
    plan = replace(planner(spread(2, "data"), 2)(graph), micro_batches=2)
    assert torch_program(graph, replace(plan, schedule="1f1b"), module, args) == torch_program(
        graph, plan, module, args
    )
