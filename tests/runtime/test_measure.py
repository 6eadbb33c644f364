"""`Compiled.measure`: what it returns, what it prints, and that it leaves no trace."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parplan.errors import RuntimeFailure
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Scheme
from parplan.runtime.measurement.measured_step import Figure, MeasuredStep, StepPart, slowest_of
from parplan.runtime.measurement.predicted import BothTimes, Expected, ExpectedLayer
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import compiled, planner, spread
from tests.runtime.nets import conv_net, mlp
from tests.runtime.ranks import run_case

SLEEP_S = 0.02


@torch.library.custom_op("parplan_tests::slow", mutates_args=())
def slow(x: Tensor) -> Tensor:
    """The same numbers, later."""
    time.sleep(SLEEP_S)
    return x.clone()


slow.register_fake(torch.empty_like)
slow.register_autograd(lambda ctx, gradient: gradient)


class Slow(nn.Module):
    """A layer that sleeps."""

    def forward(self, x: Tensor) -> Tensor:
        """The same numbers."""
        result: Tensor = slow(x)
        return result


class Dropping(nn.Module):
    """Batch norm, dropout and a sum over two inputs, one of them whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 12)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(12, 4)

    def forward(self, words: Tensor, x: Tensor) -> Tensor:
        """(N,) and (N, 12) to (N, 4)."""
        result: Tensor = self.fc(self.drop(self.norm(self.table(words) + x)))
        return result


def conv_case(kind: str = "hybrid", **options: Any) -> Compiled:
    """The convolutional net on two logical devices, called once."""
    model = compiled(conv_net(), spread(2, kind), 2, **options)
    model(torch.randn(6, 3, 8, 8, dtype=torch.float64))
    return model


def flat(*figures: float, source: str = "estimated") -> Callable[[LayerGraph, Plan], Expected]:
    """A prediction of the same for every layer."""

    def foresee(graph: LayerGraph, plan: Plan) -> Expected:
        each = ExpectedLayer(BothTimes(*figures), source)
        return Expected(dict.fromkeys(graph.layers, each), step_s=1.0, update_s=0.25, overhead_s=0.5)

    return foresee


def test_lines_add_up_to_the_step() -> None:
    found = conv_case().measure(steps=3, warmup=1)
    *lines, step = found.lines
    assert step.part is StepPart.STEP
    assert sum(line.measured.forward_s + line.measured.backward_s for line in lines) == pytest.approx(
        step.measured.forward_s, rel=1e-9
    )


def test_layers_and_transfers_have_the_plans_names() -> None:
    found = conv_case().measure(steps=2, warmup=0)
    assert [layer.name for layer in found.layers] == [
        "conv", "norm", "relu", "pool", "flatten", "fc1", "relu_1", "fc2",
    ]  # fmt: skip
    assert [transfer.label for transfer in found.transfers] == [
        "(inputs) -> conv", "norm -> norm", "flatten -> fc1", "fc1 -> relu_1", "relu_1 -> fc2", "fc2 -> (results)",
    ]  # fmt: skip
    assert all(layer.forward.seconds > 0 and layer.backward.seconds > 0 for layer in found.layers)
    assert (found.devices, found.processes, found.turns, found.batch, found.steps) == (2, 1, True, 6, 2)


@pytest.mark.parametrize("scheme", [Scheme.BROADCAST, Scheme.INTERLEAVE])
def test_passes_of_a_layer_count_as_one(scheme: Scheme) -> None:
    model = Compiled(conv_net(), planner(spread(2, "hybrid"), 2, scheme), devices=["cpu"] * 2)
    found = model.measure(torch.zeros(8, 3, 8, 8, dtype=torch.float64), steps=2)
    assert model.graph is not None
    assert [layer.name for layer in found.layers] == list(model.graph.layers)
    labels = [transfer.label for transfer in found.transfers]
    assert len(labels) == len(set(labels))
    assert labels[-1].endswith("-> (results)")


@pytest.mark.parametrize("training", [True, False])
def test_measuring_leaves_no_trace(training: bool) -> None:
    model = compiled(Dropping().double(), spread(2, "data"), 2)
    words, x = torch.randint(5, (6,)), torch.randn(6, 12, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    model(words, x).sum().backward()
    optimizer.step()
    model.module.get_submodule("norm").eval()  # a frozen part stays frozen
    if not training:
        model.eval()
    program, mode = model.program, [part.training for part in model.module.modules()]
    state, grads = copy.deepcopy(model.state_dict()), {n: p.grad for n, p in model.named_parameters()}
    values = {name: grad.clone() for name, grad in grads.items() if grad is not None}
    kept, random = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()

    found = model.measure(words, x, steps=2, warmup=1, optimizer=optimizer, loss_fn=lambda y: y.square().mean())

    assert found.updated
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is grads[n] for n, p in model.named_parameters())
    assert all(torch.equal(grads[name] if grads[name] is not None else g, g) for name, g in values.items())  # type: ignore[arg-type]
    torch.testing.assert_close(optimizer.state_dict(), kept, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert [part.training for part in model.module.modules()] == mode
    assert (model.training, model.program) == (training, program)


def test_a_fresh_optimizer_stays_fresh() -> None:
    model = conv_case()
    optimizer = torch.optim.Adam(model.parameters())
    model.measure(steps=1, warmup=0, optimizer=optimizer)
    assert not optimizer.state


def test_nothing_changes_when_a_loss_fails() -> None:
    model = conv_case()
    state = copy.deepcopy(model.state_dict())

    def fails(result: Tensor) -> Tensor:
        raise ValueError("no such loss")

    with pytest.raises(ValueError, match="no such loss"):
        model.measure(optimizer=torch.optim.SGD(model.parameters(), lr=1.0), loss_fn=fails)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", ["one", "data"])
def test_a_slow_layer_shows(kind: str) -> None:
    net = nn.Sequential(nn.Linear(6, 12), Slow(), nn.Linear(12, 4)).double()
    model = compiled(net, spread(2, kind), 2)
    model.prepare(torch.randn(4, 6, dtype=torch.float64))
    model.predict_times = flat(1e-4, 1e-4)
    found = model.measure(steps=3, warmup=1)
    ratios = {line.label: line.ratio or 0.0 for line in found.lines if line.part is StepPart.LAYER}
    slowest = max(found.layers, key=lambda layer: layer.forward.seconds)
    assert slowest.name == "1"
    assert slowest.forward.seconds >= SLEEP_S  # a sleep is never shorter
    assert ratios["1"] > 5 * max(ratios["0"], ratios["2"])
    assert slowest.backward.seconds < slowest.forward.seconds


def test_inputs_are_like_the_last_call() -> None:
    model = compiled(Dropping().double(), spread(2, "data"), 2)
    with pytest.raises(RuntimeFailure, match="nothing is known of the inputs"):
        model.measure()
    model.prepare(torch.arange(4) % 5, torch.randn(4, 12, dtype=torch.float64))
    assert model.measure(steps=1, warmup=0).batch == 4
    model(torch.arange(7) % 5, torch.randn(7, 12, dtype=torch.float64))
    assert model.measure(steps=1, warmup=0).batch == 7


@pytest.mark.parametrize(("steps", "warmup"), [(0, 0), (1, -1)])
def test_too_few_steps_are_refused(steps: int, warmup: int) -> None:
    with pytest.raises(RuntimeFailure, match="measure at least 1 step"):
        conv_case().measure(steps=steps, warmup=warmup)


def test_a_model_without_gradients_is_refused() -> None:
    model = conv_case().requires_grad_(False)
    with pytest.raises(RuntimeFailure, match="no result of the model needs a gradient"):
        model.measure(steps=1)


def test_predictions_stand_beside_the_measured_figures() -> None:
    model = conv_case()
    model.predict_times = flat(0.25, 0.5)
    found = model.measure(steps=2, warmup=0)
    by_label = {line.label: line for line in found.lines}
    assert by_label["conv"].predicted == BothTimes(0.25, 0.5)
    assert by_label["conv"].ratio == pytest.approx(
        (by_label["conv"].measured.forward_s + by_label["conv"].measured.backward_s) / 0.75
    )
    assert by_label["step"].predicted == BothTimes(0.75)  # without an optimizer there is no update
    assert by_label["step"].ratio is None  # two devices took turns
    assert by_label["runtime"].predicted == BothTimes(0.5)
    assert by_label["flatten -> fc1"].predicted is None


def test_what_was_priced_and_did_not_move_is_listed() -> None:
    model = conv_case("one")
    model.predict_times = lambda graph, plan: Expected(transfers={"conv2d": BothTimes(1.0, 2.0), "relu": BothTimes()})
    labels = [line.label for line in model.measure(steps=1, warmup=0).lines if line.part is StepPart.TRANSFER]
    assert labels[-1] == "conv2d (not moved)"
    assert "relu (not moved)" not in labels


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["one", "data", "hybrid"])
def test_the_table_is_narrow_and_says_what_it_compares(kind: str) -> None:
    model = conv_case(kind)
    model.predict_times = flat(0.25, 0.5)
    text = str(model.measure(steps=2, warmup=0, memory=True))
    assert max(map(len, text.splitlines())) <= 80
    for word in ("ConvNet: 2 training steps of 6 samples", "predicted", "measured", "conv ", "runtime", "Peak memory"):
        assert word in text


def test_without_a_prediction_the_table_says_so() -> None:
    assert "Nothing was predicted" in str(conv_case().measure(steps=1, warmup=0))


def test_the_largest_differences_are_named() -> None:
    found = conv_case().measure(steps=1, warmup=0)
    expected = Expected({row.name: ExpectedLayer(row.times, "measured") for row in found.layers}, step_s=1.0)
    first, second, *_ = found.layers
    off = {
        first.name: ExpectedLayer(BothTimes(first.forward.seconds + 3.0, first.backward.seconds), "estimated"),
        second.name: ExpectedLayer(BothTimes(second.forward.seconds + 5.0, second.backward.seconds), "estimated"),
    }
    wrong = replace(found, expected=replace(expected, layers={**expected.layers, **off}))
    told = " ".join(str(wrong).split())
    assert (
        f"Farthest from what was predicted: {second.name} by -5000.000 ms (0.00 of it); {first.name} by -3000.000 ms"
        in told
    )
    assert "Farthest" not in str(replace(found, expected=expected))


def test_what_is_between_steps_is_called_after_each_one() -> None:
    calls: list[int] = []
    conv_case().measure(steps=3, warmup=2, between=lambda: calls.append(1))
    assert len(calls) == 5


def test_of_several_processes_the_slowest_layer_and_the_shortest_wait_count() -> None:
    first, second = (conv_case().measure(steps=1, warmup=0) for _ in range(2))
    both = slowest_of([first, second])
    for one, a, b in zip(both.layers, first.layers, second.layers, strict=True):
        assert one.forward.seconds == max(a.forward.seconds, b.forward.seconds)
    for moved, x, y in zip(both.transfers, first.transfers, second.transfers, strict=True):
        assert moved.forward.seconds == min(x.forward.seconds, y.forward.seconds)
    assert both.step.seconds == max(first.step.seconds, second.step.seconds)


def test_time_that_no_part_has_taken_does_not_count_to_the_runtime() -> None:
    found = conv_case().measure(steps=3, warmup=1)
    (runtime,) = found.of(StepPart.RUNTIME)
    longer = [
        replace(row, forward=Figure(row.forward.seconds + 1.0)) if row.part is StepPart.STEP else row
        for row in found.parts
    ]
    lost = replace(found, parts=tuple(longer))
    lines = {line.part: line.measured.forward_s for line in lost.lines}
    assert lines[StepPart.RUNTIME] == runtime.forward.seconds > 0
    assert lines[StepPart.UNACCOUNTED] == pytest.approx(1.0 + found.unaccounted_s)
    assert "leave" in " ".join(str(lost).split())
    assert "ms of the step's" in " ".join(str(lost).split())


# -- two gloo processes --


def hybrid_ranks(rank: int, ranks: int) -> None:
    """Every rank has its own figures, and the step of the slowest."""
    model = Compiled(conv_net(), planner(spread(ranks, "hybrid"), ranks))
    model(torch.randn(3, 3, 8, 8, dtype=torch.float64))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = model.measure(steps=2, warmup=1, optimizer=torch.optim.Adam(model.parameters()))
    assert [layer.name for layer in found.layers] == list(model.graph.layers if model.graph is not None else ())
    assert [transfer.label for transfer in found.transfers] == [
        "norm -> norm", "flatten -> fc1", "fc1 -> relu_1", "relu_1 -> fc2", "fc2 -> (results)",
    ]  # fmt: skip
    assert (found.devices, found.processes, found.turns, found.batch) == (ranks, ranks, False, 3 * ranks)
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, found)
    assert found.slowest_step_s == pytest.approx(max(other.step.seconds for other in told), abs=1e-9)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def first_call_ranks(rank: int, ranks: int) -> None:
    """The first call cuts the parameters; measuring then restores the cut ones."""
    plain = mlp()
    model = Compiled(copy.deepcopy(plain), planner(spread(ranks, "out-features"), ranks))
    found = model.measure(torch.randn(4, 6, dtype=torch.float64), steps=1, warmup=0)
    assert isinstance(found, MeasuredStep)
    reference = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    for name, tensor in reference.items():
        dist.broadcast(tensor, 0)
        assert torch.equal(model.state_dict()[name], tensor), name


CASES = {"hybrid": hybrid_ranks, "first call": first_call_ranks}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_ranks_measure_together(case: str) -> None:
    run_case(CASES[case], 2)
