"""`train_step` with updates between passes, on nets that are no plain row of layers, against the same plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.errors import PlanError, RuntimeFailure
from parplan.graph.capture.capture import capture
from parplan.plan import Plan, Scheme, Strategy
from parplan.runtime.execution.program_function import run_program
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import differences, executor, outcome
from tests.runtime.module.test_train_step import Case, plain_step, same_parameters

WIDE = Strategy(2, 1, None, (0, 1))
SCHEMES = pytest.mark.parametrize("scheme", [Scheme.BROADCAST, Scheme.INTERLEAVE], ids=lambda scheme: scheme.value)


class Chain(nn.Module):
    """(..., 8) to (..., 8) through three linear layers; what happens between and behind them is a test's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.middle, self.last = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Folded(Chain):
    """Its first and last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight


class Skips(Chain):
    """The front's value is added to what one replica makes of it."""

    def forward(self, x: Tensor) -> Any:
        front = torch.tanh(self.first(x))
        return self.last(torch.relu(self.middle(front) + front))


class Shows(Chain):
    """Returns a value that the next layer reads too."""

    def forward(self, x: Tensor) -> Any:
        shown = self.middle(torch.tanh(self.first(x)))
        return self.last(shown), shown


class Tokens(Chain):
    """(N, 3, 8) to (3 N, 8): samples and tokens in one dimension."""

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)).reshape(-1, 8))))


class Turned(Chain):
    """(T, N, 8) to (N, 8): samples in another dimension than they came in."""

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))).mean(0))


class Tables(nn.Module):
    """Two tables that get one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(8, dtype=torch.float64)) for _ in range(2))

    def forward(self) -> Tensor:
        return self.left + self.right


class Added(Chain):
    """Adds tables to what the passes make."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))) + self.tables()))


class Counts(Chain):
    """Writes a buffer from a weight."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))
        self.table = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        y = self.last(self.first(x))
        table = self.table * 2
        self.seen.mul_(0.9).add_(table.detach())
        return y * table


def case_of(net: nn.Module, x: Tensor, narrow: Mapping[str, int | None], scheme: Scheme, dim: int = 0) -> Case:
    """Layers in `narrow` on one device, updated as it says; all others in two replicas."""
    graph = capture(net, (x,), dim=dim)
    table = {n: Strategy(devices=(1,), update_period=narrow[n]) if n in narrow else WIDE for n in graph.layers}
    return Case(graph, Plan(graph.model, graph.fingerprint, 8, 2, table, scheme=scheme))


def trained(case: Case, net: nn.Module, xs: Sequence[Tensor], loss_fn: Callable[..., Tensor]) -> None:
    """Train by the plan and by the plain loop, with targets of the shape of the first result."""
    plain = copy.deepcopy(net)
    model = Compiled(copy.deepcopy(net), lambda _: case.plan, devices=["cpu"] * 2)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for x in xs:
        y = torch.randn(x.shape[0], 8, dtype=torch.float64)
        loss = model.train_step(x, y, loss_fn, opts[0])
        wanted = plain_step(case, plain, x, y, loss_fn, opts[1])
        assert float(loss) == pytest.approx(wanted, rel=1e-9)
        same_parameters(model.module, plain)


def batches() -> list[Tensor]:
    return [torch.randn(size, 8, dtype=torch.float64) for size in (8, 5)]


def test_a_part_is_brought_to_the_rows_that_the_pass_wants() -> None:
    """A pass's samples lie with one replica, and a layer of the pass that has two wants half of them on each."""
    net, x = Skips(), torch.randn(8, 8, dtype=torch.float64)
    case = case_of(net, x.clone().requires_grad_(), {"middle": None}, Scheme.BROADCAST)
    plain, other = copy.deepcopy(net), copy.deepcopy(net)
    run = executor(other, case.graph, case.plan.layers, 2, 8, Scheme.BROADCAST)
    (name,) = run.program.inputs
    assert differences(outcome(other, lambda t: run_program(run, {name: t}), x), outcome(plain, plain, x)) == {}


@pytest.mark.sampled(1)
@SCHEMES
def test_a_value_of_the_front_read_in_the_passes(scheme: Scheme) -> None:
    net = Skips()
    trained(case_of(net, batches()[0], {"middle": 1, "last": 1}, scheme), net, batches(), functional.mse_loss)


@pytest.mark.sampled(1)
@SCHEMES
def test_a_weight_that_front_and_passes_share_is_updated_with_the_gradients_of_both(scheme: Scheme) -> None:
    net = Folded()
    trained(case_of(net, batches()[0], {"middle": 1, "last": None}, scheme), net, batches(), functional.mse_loss)


@pytest.mark.sampled(1)
@SCHEMES
def test_a_result_that_a_later_layer_reads_where_it_is_delivered(scheme: Scheme) -> None:
    net = Shows()
    case = case_of(net, batches()[0], {"middle": 1, "last": 1}, scheme)
    at_home = {"last": Strategy(devices=(0,), update_period=1)}
    shown = Case(case.graph, case.plan.with_layers(at_home))
    trained(shown, net, batches(), lambda out, y: functional.mse_loss(out[0], y) + out[1].square().mean())


@pytest.mark.sampled(1)
@SCHEMES
@pytest.mark.parametrize(("net", "shape", "dim"), [(Tokens(), (8, 3, 8), 0), (Turned(), (3, 8, 8), 1)])
def test_targets_are_cut_where_the_results_have_samples(
    net: nn.Module, shape: tuple[int, ...], dim: int, scheme: Scheme
) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    case = case_of(net, x, {"middle": 1, "last": 1}, scheme, dim)
    model = Compiled(copy.deepcopy(net), lambda _: case.plan, devices=["cpu"] * 2, dim=dim)
    seen = []

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        seen.append(y)
        return functional.mse_loss(out, y)

    with torch.no_grad():
        y = net(x)  # the first pass has not been updated, and meets its own targets
    assert float(model.train_step(x, y, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0))) < 1e-20
    assert [len(part) for part in seen] == [len(y) // 2] * 2


def test_gradients_of_two_parameters_do_not_share_memory() -> None:
    net, x = Added(), batches()[0]
    case = case_of(net, x, {"tables": None, "middle": 1, "last": 1}, Scheme.BROADCAST)
    model = Compiled(net, lambda _: case.plan, devices=["cpu"] * 2)
    model.train_step(x, x, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    left, right = net.tables.left.grad, net.tables.right.grad
    assert left is not None
    assert right is not None
    assert torch.equal(left, right)
    assert left.data_ptr() != right.data_ptr()  # else clip_grad_norm_ would clip both twice


def refused(net: nn.Module, x: Tensor, narrow: Mapping[str, int | None], optimizer: type = torch.optim.SGD) -> None:
    case = case_of(net, x.detach(), narrow, Scheme.BROADCAST)
    model = Compiled(net, lambda _: case.plan, devices=["cpu"] * 2)
    model.train_step(x, x.detach(), functional.mse_loss, optimizer(model.parameters(), lr=0.1))


@pytest.mark.full
def test_what_cannot_be_updated_between_passes_is_refused() -> None:
    x, back = batches()[0], {"middle": 1, "last": 1}
    with pytest.raises(PlanError, match="results or buffers are made in front of the passes"):
        refused(Counts(), x, {"last": 1, "mul": 1, "mul_1": 1, "mul_2": 1})
    with pytest.raises(RuntimeFailure, match="an input needs a gradient"):
        refused(Chain(), x.clone().requires_grad_(), back)
    with pytest.raises(RuntimeFailure, match=r"LBFGS calls the model again within its step \(a closure\)"):
        refused(Chain(), x, back, torch.optim.LBFGS)


def test_a_loss_that_raises_leaves_a_model_that_trains_on() -> None:
    net, x = Chain(), batches()[0]
    case = case_of(net, x, {"middle": 1, "last": 1}, Scheme.INTERLEAVE)
    plain, model = copy.deepcopy(net), Compiled(net, lambda _: case.plan, devices=["cpu"] * 2)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    with pytest.raises(RuntimeFailure, match=r"a tensor of shape \(4,\); it has to give one number"):
        model.train_step(x, x, lambda out, y: (out - y).square().mean(1), opts[0])
    model.train_step(x, x, functional.mse_loss, opts[0])
    plain_step(case, plain, x, x, functional.mse_loss, opts[1])
    same_parameters(model.module, plain)


def test_one_update_draws_as_the_usual_loop_does() -> None:
    """Where nothing is updated between passes, random numbers are those of the loop that everybody writes."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)).double()
    x, cut = batches()[0], Strategy(1, 2, "features", (0, 1))
    plan = case_of(net, x, {}, Scheme.GATHER).plan.with_layers({"1": cut})
    models = [Compiled(copy.deepcopy(net), lambda _: plan, devices=["cpu"] * 2) for _ in range(2)]
    torch.manual_seed(1)
    loss = models[0].train_step(x, x, functional.mse_loss, torch.optim.SGD(models[0].parameters(), lr=0.1))
    torch.manual_seed(1)
    assert float(loss) == float(functional.mse_loss(models[1](x), x).detach())
