"""Python branches on the number of samples: each step takes the side that the plain model takes."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.errors import CaptureError, PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.resized import at_batch
from parplan.plan import Plan
from parplan.runtime.programs.program_cache import Captured
from tests.runtime.helpers import compiled, differences, outcome, spread

Condition = Callable[[Tensor], Any]
BATCHES = (6, 40, 8, 3, 2, 1, 6, 41, 7)


class Branched(nn.Module):
    """Two linear layers, between which the number of samples chooses what is computed."""

    def __init__(self, condition: Condition) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.condition = condition

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        result: Tensor = self.second(torch.relu(y) if self.condition(x) else torch.tanh(y))
        return result


CONDITIONS: dict[str, Condition] = {
    "shape": lambda x: x.shape[0] > 20,
    "size": lambda x: x.size(0) * 2 <= 30,
    "size of all": lambda x: x.size()[:1] == (6,),
    "len": lambda x: len(x) > 20,
    "numel": lambda x: x.numel() >= 80,
    "stride": lambda x: x.t().contiguous().stride(0) > 20,
    "unpacked": lambda x: operator.ge(*(x.shape[0], x.shape[1] * 5)),
    "of a result": lambda x: torch.cat([x, x]).shape[0] > 40,
    "remainder": lambda x: x.shape[0] % 4 == 2,
    "quotient": lambda x: x.shape[0] // 7,
    "fraction": lambda x: x.shape[0] / 2 > 10,
    "product": lambda x: x.shape[0] * 0.5 > 10,
    "rounded": lambda x: round(x.shape[0] / 3) > 7,
    "minimum": lambda x: min(x.shape[0], 20) == 20,
    "several": lambda x: x.shape[0] in (6, 12, 3),
    "one": lambda x: x.shape[0] == 1,
    "divmod": lambda x: divmod(x.shape[0], 5)[1] == 1,
    "int": lambda x: int(x.shape[0]) > 20,
    "root": lambda x: math.sqrt(x.shape[0]) > 4.5,
    "text": lambda x: str(x.shape[0]) == "6",
    "key": lambda x: x.shape[0] in {6: True},
    "a factor in front": lambda x: 0.5 * x.shape[0] > 10,
    "numel of a shape": lambda x: x.shape.numel() > 80,
    "list": lambda x: len([0] * x.shape[0]) > 20,
    "whole root": lambda x: math.isqrt(x.shape[0]) > 3,
    "formatted": lambda x: f"{x.shape[0]:03d}" > "020",
    "hidden": lambda x: (lambda n: n)(x.shape)[0] > 20,
}
# Of which a plain number is made: another number of samples is captured and compared.
OUT_OF_SIGHT = (
    "size of all", "len", "several", "int", "root", "text", "key", "numel of a shape", "list", "whole root",
    "formatted", "divmod",
)  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_branch_on_the_number_of_samples_is_taken_as_in_the_plain_model(name: str) -> None:
    plain = Branched(CONDITIONS[name]).double()
    model = compiled(plain, spread(2, "data"), 2)
    for batch in BATCHES:
        x = torch.randn(batch, 4, dtype=torch.float64)
        assert not differences(outcome(model, model, x), outcome(plain, plain, x)), batch
    graph = capture(plain, (torch.randn(6, 4, dtype=torch.float64),))
    assert bool(graph.size_branches.unknown) == (name in OUT_OF_SIGHT)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["shape", "int"])
def test_sides_are_captured_once_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, kept = Branched(CONDITIONS[name]), list[int | None]()
    model = compiled(plain, spread(2, "data"), 2)
    know = model._programs.know

    def noted(graph: LayerGraph, plan: Plan) -> Captured:
        kept.append(graph.batch)
        return know(graph, plan)

    monkeypatch.setattr(model._programs, "know", noted)
    for batch in (6, 40, 8, 3, 6, 41, 40, 7):
        model(torch.randn(batch, 4))
    assert kept == [6, 40]


def test_the_comparison_with_the_plain_model_is_on_the_same_side() -> None:
    model = compiled(Branched(CONDITIONS["shape"]), spread(2, "data"), 2)
    model(torch.randn(40, 4))  # of which few would do
    assert [record.samples for record in model.checked] == [40]


@pytest.mark.parametrize("name", ["shape", "remainder", "int", "root"])
def test_a_branch_that_twice_the_batch_takes_otherwise_leaves_replicas(name: str) -> None:
    """The other capture, which shows what grows with the samples, is one on the same side."""
    graph = capture(Branched(CONDITIONS[name]), (torch.randn(14, 4),))
    assert CONDITIONS[name](torch.randn(28, 4)) != CONDITIONS[name](torch.randn(14, 4))
    assert not graph.fixed_batch
    assert all(layer.batch is not None for layer in graph.layers.values())


def test_a_batch_on_another_side_is_not_priced_from_this_capture() -> None:
    graph = capture(Branched(CONDITIONS["shape"]), (torch.randn(6, 4),))
    assert at_batch(graph, 20).batch == 20
    with pytest.raises(
        CaptureError, match=r"another branch with 21 samples \(.*self.condition\(x\).*; capture it at 21"
    ):
        at_batch(graph, 21)


class Scaled(nn.Module):
    """A layer whose results are multiplied by a number that follows from the number of samples."""

    def __init__(self, factor: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.factor(x)
        return result


FACTORS: dict[str, Condition] = {
    "remainder": lambda x: x.shape[0] % 4,  # none at 4 and at 8
    "quotient": lambda x: 1 + x.shape[0] // 50,
    "power": lambda x: 1 + (x.shape[0] > 8) ** 2,
    "tensor": lambda x: torch.tensor(x.shape, dtype=torch.float64)[0],
    "number": lambda x: torch.tensor(len(x)),
    "rounded up": lambda x: -(-x.shape[0] // 4) * 4 - x.shape[0],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["one", "data"])
@pytest.mark.parametrize("name", FACTORS)
def test_a_number_that_follows_from_the_number_of_samples_is_that_of_every_batch(name: str, kind: str) -> None:
    plain = Scaled(FACTORS[name]).double()
    model = compiled(plain, spread(2, kind), 2)
    for batch in (4, 9, 8, 60, 2, 4, 1):
        x = torch.randn(batch, 4, dtype=torch.float64)
        try:
            found = outcome(model, model, x)
        except PlanError:  # a constant that depends on the samples leaves no replicas
            assert kind == "data"
            continue
        assert not differences(found, outcome(plain, plain, x)), batch


class Told(nn.Module):
    """Sizes among the results and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: Any = None

    def forward(self, x: Tensor) -> tuple[Tensor, int, torch.Size, dict[str, float]]:
        self.seen = [x.shape[1], x]
        return self.layer(x), x.shape[1] * 2, x.shape[1:], {"half": x.shape[1] / 2}


def test_results_and_attributes_are_plain_numbers() -> None:
    plain = Told()
    model = parplan.compile(plain, devices=["cpu"] * 2)
    _, *numbers = model(torch.randn(6, 4))
    assert [type(one) for one in (*numbers[:2], *numbers[1], *numbers[2].values())] == [int, tuple, int, float]
    assert numbers == [8, (4,), {"half": 2.0}]
    assert type(plain.seen[0]) is int


def formula(draw: random.Random, size: Any, depth: int) -> Any:
    """A random formula of a size, with branches of its own."""
    if not depth:
        return draw.choice([size, size, draw.randint(1, 9)])
    one, other = (formula(draw, size, depth - 1) for _ in range(2))
    operation: Any = draw.choice([operator.add, operator.sub, operator.mul, operator.neg, operator.abs, min, "/"])
    if operation == "/":
        parted = draw.choice([operator.floordiv, operator.mod, operator.truediv])
        return size + parted(one, draw.choice([1, 3, 5, 2.5]))
    return operation(*([one] if operation in (operator.neg, operator.abs) else [one, other]))


COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(60))
def test_branches_are_those_of_the_formula_at_every_number_of_samples(seed: int) -> None:
    def sides(size: Any) -> list[bool]:
        draw, taken = random.Random(seed), list[bool]()
        for _ in range(3):
            one, other = formula(draw, size, 2), formula(draw, size, 1)
            taken.append(bool(draw.choice(COMPARISONS)(one, other)))
        return taken

    graph = capture(
        Scaled(lambda x: 1 + sum(2**i for i, side in enumerate(sides(3 * x.shape[0] + 1)) if side)),
        (torch.randn(6, 4),),
    )
    for batch in range(1, 80):
        if graph.size_branches.hold(batch):  # else it is captured anew
            assert sides(3 * batch + 1) == sides(19), batch
    if not graph.size_branches.unknown:  # a guard is of one side of one branch
        assert graph.size_branches.hold(6)


@pytest.mark.full
def test_blocks_that_are_traced_once_have_the_branches_of_all() -> None:
    plain = nn.Sequential(*(Branched(CONDITIONS["shape"]) for _ in range(4)), nn.Linear(4, 4)).double()
    graph = capture(plain, (torch.randn(6, 4, dtype=torch.float64),))
    assert not graph.size_branches.unknown
    assert [graph.size_branches.hold(batch) for batch in (1, 20, 21, 1000)] == [True, True, False, False]
    model = compiled(plain, spread(2, "data"), 2)
    for batch in (6, 40, 8):
        x = torch.randn(batch, 4, dtype=torch.float64)
        assert not differences(outcome(model, model, x), outcome(plain, plain, x)), batch
