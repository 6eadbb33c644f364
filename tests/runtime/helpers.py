"""Plans made by hand or drawn, and the comparison with the plain model that most tests end in."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.repeated import unit_of
from parplan.lowering.lower import lower
from parplan.lowering.step_setting import StepSetting
from parplan.plan import SAVED, STATES, Plan, Scheme, Strategy
from parplan.runtime.compat import memory_in_use
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.parameter_store import Store
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.transport.local import LocalTransport

__all__ = [
    "CLOSE", "Made", "Outcome", "Planner", "Rule", "compiled", "differences", "executor", "outcome", "planner",
    "random_passes", "random_strategies", "spread", "spread_all",
]  # fmt: skip

CLOSE = 1e-9  # relative, float64

Rule = Callable[[Layer], Strategy]
Planner = Callable[[Rule, int, Scheme, int], Callable[[LayerGraph], Plan]]


def spread(devices: int, kind: str) -> Rule:
    """A rule that gives every layer as much as it can take: "data", "hybrid", "one", or the name of an axis."""

    def rule(layer: Layer) -> Strategy:
        everyone = tuple(range(devices))
        if kind == "hybrid" and layer.kind not in ("linear",):
            return _replicated(layer, everyone)
        wanted = {"hybrid": ("out-features", "in-features")}.get(kind, (kind,))
        for axis in layer.axes:
            if axis.name in wanted and axis.units % devices == 0:
                return Strategy(1, devices, axis.name, everyone)
        return _replicated(layer, everyone) if kind == "data" else Strategy()

    return rule


def spread_all(devices: int) -> Rule:
    """Every layer on all devices, also those that no sample reaches, redundantly."""
    everyone = tuple(range(devices))
    return lambda layer: Strategy(devices, 1, None, everyone) if layer.batch or layer.constant else Strategy()


def _replicated(layer: Layer, everyone: tuple[int, ...]) -> Strategy:
    return Strategy(len(everyone), 1, None, everyone) if layer.batch is not None else Strategy()


def planner(
    rule: Rule | Mapping[str, Strategy], devices: int, scheme: Scheme = Scheme.GATHER, micro_batches: int = 1
) -> Callable[[LayerGraph], Plan]:
    """A planner that follows a rule, or a table of strategies by layer name (device 0 for all others)."""

    def plan(graph: LayerGraph) -> Plan:
        chosen = {
            name: rule(layer) if callable(rule) else rule.get(name, Strategy()) for name, layer in graph.layers.items()
        }
        batch = graph.batch or 1
        return Plan(graph.model, graph.fingerprint, batch, devices, chosen, "default", scheme, micro_batches)

    return plan


def compiled(module: nn.Module, rule: Rule | Mapping[str, Strategy], devices: int, **options: Any) -> Compiled:
    """A compiled copy of `module` on logical CPU devices."""
    return Compiled(copy.deepcopy(module), planner(rule, devices), devices=["cpu"] * devices, **options)


def random_strategies(graph: LayerGraph, devices: int, draw: random.Random) -> dict[str, Strategy]:
    """A legal strategy for every layer, on random devices in random order, its state in any way, and replayed or not
    where it is in a unit of recomputation."""
    found = {name: draw.choice(_options(layer, devices, draw)) for name, layer in graph.layers.items()}
    half = random.Random(f"{found}")  # beside `draw`, whose numbers decide cases that are known
    found = {name: replace(own, state=half.choice(STATES)) for name, own in found.items()}
    saved = {name: half.choice(SAVED) for name in graph.layers if name in unit_of(graph)}
    return {name: replace(own, saved=saved.get(name, "keep")) for name, own in found.items()}


def random_passes(graph: LayerGraph, devices: int, draw: random.Random) -> dict[str, Strategy]:
    """Legal strategies with fewer replicas from some layer on, so that layers behind can run in passes."""
    most = draw.randrange(2, devices + 1)
    able = [number for number, layer in enumerate(graph.layers.values()) if layer.batch is not None]
    start = draw.choice(able[1:] or [len(graph.layers)])
    fewer = [n for n in range(1, most) if most % n == 0]
    found: dict[str, Strategy] = {}
    narrow: set[str] = set()
    for number, (name, layer) in enumerate(graph.layers.items()):
        behind = not narrow.isdisjoint(graph.digraph.predecessors(name))
        # Batch norm in training needs the whole batch.
        if behind or (number >= start and not layer.mixes_batch and not _norm_behind(graph, name)):
            narrow.add(name)
        wanted = [most] if name not in narrow else [most, *fewer] if behind else fewer
        options = [s for s in _options(layer, devices, draw) if s.replicas in wanted or layer.batch is None]
        found[name] = draw.choice(options)
    return found


def _norm_behind(graph: LayerGraph, name: str) -> bool:
    return any(graph.layers[other].mixes_batch for other in nx.descendants(graph.digraph, name))


def _options(layer: Layer, devices: int, draw: random.Random) -> list[Strategy]:
    cuts: list[tuple[int, str | None]] = [(1, None)]
    cuts += [(s, axis.name) for axis in layer.axes for s in range(2, devices + 1) if axis.units % s == 0]
    found = []
    for shards, axis in cuts:
        most = devices // shards if layer.batch is not None or layer.constant else 1
        for replicas in range(1, most + 1):
            chosen = draw.sample(range(devices), replicas * shards)
            found.append(Strategy(replicas, shards, axis, tuple(chosen)))
    return found


def executor(
    module: nn.Module,
    graph: LayerGraph,
    strategies: Mapping[str, Strategy],
    devices: int,
    batch: int,
    scheme: Scheme = Scheme.GATHER,
) -> Executor:
    """An executor on logical CPU devices, for a graph captured before."""
    transport = LocalTransport([torch.device("cpu")] * devices)
    program = lower(graph, strategies, StepSetting(devices, (batch,), (0,) * devices, scheme=scheme))
    return Executor(graph, program, Store(module, graph, program, transport, False), transport)


@dataclass(frozen=True)
class Outcome:
    """Everything a step leaves, by name: results, gradients of inputs and parameters, buffers."""

    tensors: Mapping[str, Tensor]


def outcome(module: nn.Module, call: Callable[..., Any], *args: Any) -> Outcome:
    """One step of `call` on `args`, with random but fixed output gradients."""
    leaves, spec = pytree.tree_flatten(args)
    own = [t.clone().requires_grad_(t.is_floating_point()) if isinstance(t, Tensor) else t for t in leaves]
    module.zero_grad(set_to_none=True)
    results = [r for r in pytree.tree_leaves(call(*pytree.tree_unflatten(own, spec))) if isinstance(r, Tensor)]
    pulled, generator = [r for r in results if r.requires_grad], torch.Generator().manual_seed(7)
    pulls = [torch.randn(r.shape, dtype=torch.float64, device="cpu", generator=generator) for r in pulled]
    torch.autograd.backward(pulled, [pull.to(r.device) for pull, r in zip(pulls, pulled, strict=True)])
    found = {f"result {i}": r.detach() for i, r in enumerate(results)}
    found |= {f"input {i}": t.grad for i, t in enumerate(own) if isinstance(t, Tensor) and t.grad is not None}
    found |= {f"gradient of {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
    found |= {f"buffer {n}": b.detach().clone() for n, b in module.named_buffers()}
    return Outcome(found)


def differences(found: Outcome, wanted: Outcome) -> dict[str, float]:
    """Largest relative difference of every tensor that is further off than rounding; names must agree."""
    assert sorted(found.tensors) == sorted(wanted.tensors)
    off = {}
    for name, tensor in wanted.tensors.items():
        assert found.tensors[name].shape == tensor.shape, name
        scale = max(1.0, float(tensor.double().abs().max())) if tensor.numel() else 1.0
        error = (found.tensors[name].double() - tensor.double()).abs().max().item() if tensor.numel() else 0.0
        if not error <= CLOSE * scale:
            off[name] = error / scale
    return off


class Made(TorchDispatchMode):
    """Memory that ops make, and how much of it is in use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[Callable[[], bool], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in (one for one in pytree.tree_leaves(found) if isinstance(one, Tensor)):
            memory = one.untyped_storage()
            self._made[memory._cdata] = memory_in_use(one), memory.nbytes()
        return found

    @property
    def live_bytes(self) -> int:
        return sum(size for used, size in self._made.values() if used())
