"""Training code run twice, plain and compiled, and compared: what the pattern suite and the fuzzer share.

A `Script` is ordinary training code that gets its data, its model and its place for results from a `Run`. The same code
runs once with the plain model on whole batches, and once with the compiled model: in one process on whole batches, or
on every rank of a group on the rank's own samples. What the two recorded has to agree.
"""

from __future__ import annotations

import io
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import parplan
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import unit_of
from parplan.plan import Plan, Strategy

__all__ = ["TOLERANCE", "Outcome", "Run", "Script", "Verdict", "compare", "in_type", "judge", "worst"]

TOLERANCE = 1e-9  # relative, float64
# Relative, of results and of states: what steps of training make of rounding. A constant that is stale is off by more.
ROUNDING = {torch.float64: (0.0, 0.0), torch.float32: (1e-3, 0.2)}
WITH_WEIGHTS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.RNNBase)
SMALLEST = 1e-3  # a tensor whose largest entry is smaller counts as this large


class Verdict(Enum):
    """How a compiled run ended, from best to worst."""

    RIGHT = "right"
    REFUSED = "refused"
    CRASHED = "crashed"
    WRONG = "wrong"
    HUNG = "hung"


@dataclass(frozen=True)
class Outcome:
    """The verdict on one run, with the refusal's text, the differences or the traceback, and the processor time."""

    verdict: Verdict
    text: str = ""
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Record:
    """One recorded value.

    Attributes:
        kind: "same" on all ranks; "state", a parameter or buffer, which is so too; "mean" over ranks; or "rows":
            samples along `dim`, each rank its own.
    """

    kind: str
    value: Any
    dim: int = 0


@dataclass
class Run:
    """Where a script gets its data and its model from, and what it records.

    Attributes:
        rank, ranks: of the group of processes; 0 and 1 without one.
        compiled: whether `compile` compiles, or gives the plain model.
        plan: what decides the layers, see `pins`.
        free: modules that the plan leaves to the solver.
        options: more options of `parplan.compile`.
        seed: of parameters and data.
    """

    rank: int = 0
    ranks: int = 1
    compiled: bool = False
    plan: str = "solver"
    free: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    records: dict[str, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Seed everything, so that the plain and the compiled run start alike."""
        self.draws = torch.Generator().manual_seed(self.seed)
        self._models: list[nn.Module] = []
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed)

    # -- what a script asks for --

    def compile(self, module: nn.Module, *example: Any, **options: Any) -> Any:
        """The model that is trained: the module itself, or its compiled twin."""
        if not self.compiled:
            return module
        given = {"optimizer": "sgd", "pins": pins(self.plan, module, self.free), **self.options, **options}
        if self.ranks == 1:
            given.setdefault("devices", ["cpu"] * 2)
        if self.plan in CHANGED:
            model = parplan.compile(module, **given)
            model._captures._planner = partial(CHANGED[self.plan], model._captures._planner)
            if example:
                model.prepare(*example)
        else:
            model = parplan.compile(module, example or None, **given)
        self._models.append(model)
        return model

    @property
    def plans(self) -> list[str]:
        """The strategies of every compiled model, as text, for a report of a failure."""
        found = [getattr(model, "plan", None) for model in self._models]
        return [
            ", ".join(f"{name}={s.replicas}x{s.shards}" for name, s in plan.layers.items()) for plan in found if plan
        ]

    def randn(self, *shape: int, dim: int = 0) -> Tensor:
        """Normal numbers: this run's samples of a whole batch, along `dim`."""
        return self.own(torch.randn(shape, generator=self.draws), dim)

    def randint(self, high: int, *shape: int, dim: int = 0) -> Tensor:
        """Whole numbers below `high`: this run's samples of a whole batch, along `dim`."""
        return self.own(torch.randint(high, shape, generator=self.draws), dim)

    def own(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This run's samples of a whole batch: all of them, or the rank's."""
        size = whole.shape[dim] // self.ranks
        return whole.narrow(dim, self.rank * size, size).contiguous() if self.ranks > 1 else whole

    def from_first(self, build: Callable[[], Any]) -> Any:
        """An object that the first rank saves to a file and every rank loads, as checkpoints are.

        Raises:
            ParplanError: on every rank, where the first one is refused what it saves.
        """
        data: list[Any] = [None]
        if self.rank == 0:
            buffer = io.BytesIO()
            try:
                torch.save(build(), buffer)
                data = [buffer.getvalue()]
            except parplan.ParplanError as error:
                data = [error]
        if self.ranks > 1:
            dist.broadcast_object_list(data, 0)
        if isinstance(data[0], parplan.ParplanError):
            raise data[0]
        return torch.load(io.BytesIO(data[0] or b""), weights_only=False)

    # -- what a script leaves --

    def mean(self, name: str, value: Tensor) -> None:
        """Record a number that is a mean over samples, such as a loss."""
        value = value.detach().clone()
        if self.ranks > 1:
            dist.all_reduce(value)
            value /= self.ranks
        self._record(name, Record("mean", value))

    def rows(self, name: str, tensor: Tensor, dim: int = 0) -> None:
        """Record a tensor that has samples along `dim`."""
        self._record(name, Record("rows", tensor.detach().clone(), dim))

    def same(self, name: str, value: Any) -> None:
        """Record a value that is alike on all ranks."""
        self._alike(name, value, "same")

    def _alike(self, name: str, value: Any, kind: str) -> None:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        self._record(name, Record(kind, value.detach().clone() if isinstance(value, Tensor) else value))

    def state(self, model: nn.Module, name: str = "") -> None:
        """Record a model's parameters and buffers, and which parameters have gradients."""
        for key, value in model.state_dict().items():
            self._alike(f"{name}{key}", value, "state")
        self.same(f"{name}gradients", self._on_any_rank({k for k, p in model.named_parameters() if p.grad is not None}))

    def _on_any_rank(self, names: set[str]) -> list[str]:
        """Names that some rank has: a plan may put a layer on a part of the ranks."""
        if self.ranks == 1:
            return sorted(names)
        found: list[set[str]] = [set()] * self.ranks
        dist.all_gather_object(found, names)
        return sorted(set.union(*found))

    def _record(self, name: str, record: Record) -> None:
        numbered = name
        while numbered in self.records:
            stem, _, number = numbered.rpartition("#")
            numbered = f"{stem}#{int(number) + 1}" if stem else f"{name}#2"
        self.records[numbered] = record


Script = Callable[[Run], None]


def pins(plan: str, module: nn.Module, free: Sequence[str] = ()) -> list[str] | None:
    """Pins by the name of a plan.

    Args:
        plan: "replicas": two of every layer; "shards": two of every layer with weights; "mixed": replicas of the first
            half of the layers with weights, shards of the rest; "slices": two replicas of every layer, their state in
            slices, of every second one gathered twice; "replays": replicas, of which every unit is replayed; "stages":
            two, of one device each; "solver": nothing is decided by hand.
        free: names of layers that are left to the solver in any case.
    """
    names = [name or "*" for name, layer in module.named_modules() if isinstance(layer, WITH_WEIGHTS)]
    names = [name for name in names if name not in free]
    half = {
        "replicas": len(names),
        "shards": 0,
        "mixed": len(names) // 2,
        "slices": len(names),
        "replays": len(names),
    }.get(plan)
    if half is None or not names:
        return None
    states = (" state:sharded", " state:gathered") if plan == "slices" else ("", "")
    ways = ("replicas" if number < half else "shards" for number in range(len(names)))
    return [f"{name}={way}:2{states[number % 2]}" for number, (name, way) in enumerate(zip(names, ways, strict=True))]


def _replayed(planner: Callable[[LayerGraph], Plan], graph: LayerGraph) -> Plan:
    """A planner's plan with every unit replayed."""
    plan, known = planner(graph), unit_of(graph)
    layers = {name: replace(own, saved="replay") if name in known else own for name, own in plan.layers.items()}
    return replace(plan, layers=layers)


def _in_stages(planner: Callable[[LayerGraph], Plan], graph: LayerGraph) -> Plan:
    """The first half of a model's layers on one device and the second on another, in two micro-batches."""
    chosen = {
        name: Strategy(devices=(int(2 * number >= len(graph.layers)),)) for number, name in enumerate(graph.layers)
    }
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, 2, chosen, micro_batches=2, schedule="1f1b")


CHANGED = {"replays": _replayed, "stages": _in_stages}
"""Plans that no pins give, made of the planner's."""


def compare(found: Run, wanted: Run, tolerance: float = TOLERANCE, of_states: float = 0.0) -> list[str]:
    """Differences between what a compiled and the plain run recorded, a line each, in the order of recording.

    Args:
        tolerance: relative, of results.
        of_states: of parameters and buffers: an optimizer takes a step of full length along a gradient that is nothing
            but rounding (of a bias in front of batch norm, say).
    """
    lines = [f"{name}: not recorded" for name in wanted.records if name not in found.records]
    for name, record in found.records.items():
        if name not in wanted.records:
            lines.append(f"{name}: the plain run has none")
            continue
        value, plain = record.value, wanted.records[name].value
        if record.kind == "rows":
            plain = found.own(plain, record.dim)
        within = max(tolerance, of_states) if record.kind == "state" else tolerance
        lines += [f"{name}: {line}" for line in _difference(value, plain, within)]
    return lines


def _difference(value: Any, plain: Any, tolerance: float) -> Sequence[str]:
    if not isinstance(plain, Tensor) or not isinstance(value, Tensor):
        close = isinstance(plain, float) and isinstance(value, float) and abs(value - plain) <= tolerance * abs(plain)
        return [] if close or value == plain else [f"{value!r}, plain {plain!r}"]
    if value.shape != plain.shape:
        return [f"shape {tuple(value.shape)}, plain {tuple(plain.shape)}"]
    if not value.numel():
        return []
    exact = torch.complex128 if plain.is_complex() else torch.float64
    off = (value.to(exact) - plain.to(exact)).abs().max().item()
    scale = max(plain.to(exact).abs().max().item(), SMALLEST)
    return [] if off <= tolerance * scale else [f"{off / scale:.1e} off"]


def in_type(run: Callable[[], Outcome], dtype: torch.dtype = torch.float64) -> Outcome:
    """The outcome of a run whose tensors are of `dtype` by default; what it raises is an outcome, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return run()
    except parplan.ParplanError as error:
        return Outcome(Verdict.REFUSED, f"{type(error).__name__}: {error}")
    except Exception:
        return Outcome(Verdict.CRASHED, traceback.format_exc())
    finally:
        torch.set_default_dtype(before)


def judge(
    script: Script,
    run: Run,
    tolerance: float = TOLERANCE,
    dtype: torch.dtype = torch.float64,
) -> Outcome:
    """Run a script compiled and plain, with tensors of `dtype`, and compare."""

    of_results, of_states = ROUNDING[dtype]

    def compared() -> Outcome:
        plain = Run(seed=run.seed)
        script(plain)
        run.__post_init__()  # both start from the same random numbers
        script(run)
        lines = compare(run, plain, max(tolerance, of_results), of_states)
        return Outcome(Verdict.WRONG, "\n".join([*lines[:8], *run.plans])) if lines else Outcome(Verdict.RIGHT)

    return in_type(compared, dtype)


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The verdict on a group: that of the rank that fared worst; of refusals, one that is not about another rank."""
    order = list(Verdict)

    def badness(outcome: Outcome) -> tuple[int, bool]:
        return order.index(outcome.verdict), "another rank" not in outcome.text

    return max(outcomes, key=badness)
