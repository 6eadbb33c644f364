"""Measured costs: what is measured, what is shared, what is scaled, and that no estimate passes for a measurement."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest
import torch

from parplan.cost_models import measure as measure_module
from parplan.cost_models import sampling
from parplan.cost_models.costs import CostModel, Source
from parplan.cost_models.measure import MeasuredCosts, Request
from parplan.cost_models.presets import cluster_preset
from parplan.cost_models.profile import SessionProfile
from parplan.cost_models.roofline import RooflineCosts, part_of
from parplan.cost_models.sampling import Effort, Measurement, Trial, sample
from parplan.cost_models.trials import part_signature
from parplan.errors import ParplanError
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Strategy
from tests.cost_models.networks import NETWORKS, full_alexnet, network

ONE, CPU = Strategy(), torch.device("cpu")
QUICK = Effort(cap_s=0.0)


def measured_costs(graph: LayerGraph) -> MeasuredCosts:
    return MeasuredCosts(RooflineCosts(graph, cluster_preset("cpu", 4)), CPU, effort=QUICK)


def requests(graph: LayerGraph, *strategies: Strategy) -> list[Request]:
    return [Request(layer, strategy) for layer in graph.layers.values() for strategy in strategies]


@dataclass
class FakeSampler:
    """Says that every part takes 3 s forward and 5 s back, and calling a piece nothing."""

    trials: list[Trial] = field(default_factory=list)

    def __call__(self, trial: Trial, device: torch.device, effort: Effort | None = None) -> Measurement:
        self.trials.append(trial)
        calling = len(self.trials) == 2  # the part first, then what calling it takes
        return Measurement(0.0, 0.0, 0.0, 1) if calling else Measurement(3.0, 5.0, 0.01, 7)


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> FakeSampler:
    fake = FakeSampler()
    monkeypatch.setattr(measure_module, "sample", fake)
    return fake


@pytest.mark.parametrize("name", NETWORKS)
def test_every_part_of_every_network_can_be_measured(name: str) -> None:
    graph = network(name).graph
    costs = measured_costs(graph)
    wanted = requests(graph, ONE, Strategy(2, 1, None, (0, 1)))
    wanted += [
        Request(lyr, Strategy(1, 2, a.name, (0, 1)))
        for lyr in graph.layers.values()
        for a in lyr.axes
        if a.units % 2 == 0
    ]
    outcome = costs.measure(wanted)
    distinct = {part_signature(graph, part_of(graph, request.layer, request.strategy)) for request in wanted}
    assert (outcome.failed, outcome.left, outcome.known) == ((), 0, 0)
    assert outcome.measured == len(distinct) < len(wanted)
    assert {costs.layer(request.layer, request.strategy).source for request in wanted} == {Source.MEASURED}
    assert costs.measure(wanted).known == len(distinct)


def test_a_measured_cost_says_so_with_its_spread(sampler: FakeSampler) -> None:
    graph = network("mlp").graph
    costs: MeasuredCosts = measured_costs(graph)
    model: CostModel = costs
    layer = next(iter(graph.layers.values()))
    assert model.layer(layer, ONE).source is Source.ESTIMATED
    costs.measure([Request(layer, ONE)])
    cost = model.layer(layer, ONE)
    assert (cost.forward_s, cost.backward_s, cost.spread, cost.source) == (3.0, 5.0, 0.01, Source.MEASURED)


def test_what_is_not_measured_is_scaled_by_its_own_kind_and_marked(sampler: FakeSampler) -> None:
    graph = full_alexnet()
    costs = MeasuredCosts(roofline := RooflineCosts(graph, cluster_preset("v100", 4)), CPU, effort=QUICK)
    conv2, conv3, fc8, relu1 = (graph.layers[name] for name in ("conv2", "conv3", "fc8", "relu1"))
    small = Strategy(4, 1, None, (0, 1, 2, 3))
    costs.measure([Request(conv2, small), Request(fc8, ONE)])
    for layer, like in ((conv3, Request(conv2, small)), (graph.layers["fc7"], Request(fc8, ONE))):
        basis, estimate = roofline.layer(like.layer, like.strategy), roofline.layer(layer, ONE)
        cost = costs.layer(layer, ONE)
        assert cost.forward_s == pytest.approx(estimate.forward_s * 3.0 / basis.forward_s)
        assert cost.backward_s == pytest.approx(estimate.backward_s * 5.0 / basis.backward_s)
        assert (cost.source, cost.spread) == (Source.INTERPOLATED, 1.0)
    between = costs.layer(relu1, ONE)  # nothing of its kind: the middle of what there is
    assert between.source is Source.INTERPOLATED
    assert between.forward_s > roofline.layer(relu1, ONE).forward_s


def test_the_dearest_parts_come_first_and_time_runs_out(sampler: FakeSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = full_alexnet()
    clock = count()
    monkeypatch.setattr(measure_module, "perf_counter", lambda: next(clock))
    costs, progress = measured_costs(graph), list[tuple[int, int]]()
    outcome = costs.measure(requests(graph, ONE), time_cap_s=3, on_progress=lambda *done: progress.append(done))
    found = [name for name, layer in graph.layers.items() if costs.layer(layer, ONE).source is Source.MEASURED]
    assert found == ["conv2", "conv4"]
    assert outcome.measured == 2
    assert progress == [(0, outcome.left + 2), (1, outcome.left + 2), (2, outcome.left + 2)]


def test_equal_parts_are_measured_once_and_profiles_can_be_shared(sampler: FakeSampler) -> None:
    graph = network("two_tower").graph
    first, second = graph.layers["conv2a"], graph.layers["conv2b"]
    profile = SessionProfile()
    fallback = RooflineCosts(graph, cluster_preset("cpu", 4))
    outcome = MeasuredCosts(fallback, CPU, profile).measure([Request(first, ONE), Request(second, ONE)])
    assert outcome.measured == 1
    again = MeasuredCosts(fallback, CPU, profile)
    assert again.layer(second, ONE).source is Source.MEASURED
    assert again.measure([Request(second, ONE)]).known == 1


def test_one_measured_step_corrects_the_sum(sampler: FakeSampler) -> None:
    graph = network("mlp").graph
    costs = measured_costs(graph)
    costs.measure(requests(graph, ONE))
    before = [costs.layer(layer, ONE) for layer in graph.layers.values()]
    total = sum(cost.forward_s + cost.backward_s for cost in before)
    assert costs.correct(0.75 * total) == pytest.approx(0.75)
    assert costs.correct(0.5 * total) == pytest.approx(0.5)  # always against what was measured
    after = [costs.layer(layer, ONE) for layer in graph.layers.values()]
    assert [cost.forward_s for cost in after] == pytest.approx([0.5 * cost.forward_s for cost in before])


def test_what_cannot_be_measured_here_is_the_fallbacks() -> None:
    graph = full_alexnet()
    costs = MeasuredCosts(roofline := RooflineCosts(graph, cluster_preset("k20", 4)), CPU)
    fc6, spread = graph.layers["fc6"], Strategy(4, 1, None, (0, 1, 2, 3))
    value = graph.values[fc6.inputs[0]]
    source, target = (fc6.layout(fc6.inputs[0], strategy) for strategy in (spread, ONE))
    assert costs.memory(fc6, spread) == roofline.memory(fc6, spread)
    assert costs.reduction(fc6, spread) == roofline.reduction(fc6, spread) > 0
    assert costs.transfer(value, source, target) == roofline.transfer(value, source, target)
    assert costs.transfer_matrix(value, [source], [target]).forward_s > 0


@pytest.mark.parametrize("name", ["mlp", "attention", "resnet50"])
def test_a_whole_step_can_be_measured(name: str) -> None:
    step = measured_costs(network(name).graph).measure_step()
    assert step.forward_s > 0
    assert step.backward_s > 0


def test_what_does_not_fit_or_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network("mlp").graph
    layer = next(iter(graph.layers.values()))
    costs = measured_costs(graph)
    monkeypatch.setattr(measure_module, "device_memory_bytes", lambda device: 2**10)
    assert "MiB may be used" in costs.measure([Request(layer, ONE)]).failed[0]
    with pytest.raises(ParplanError, match=r"to measure a step takes .* lower --batch"):
        costs.measure_step()
    monkeypatch.undo()

    def broken(*_: object) -> Trial:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(measure_module, "layer_trial", broken)
    outcome = costs.measure([Request(layer, ONE)])
    assert outcome.failed == (f"{layer.name}: RuntimeError: no such kernel",)
    assert outcome.measured == 0
    assert costs.layer(layer, ONE).source is Source.ESTIMATED


def ticking(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
    """A clock that shows the sums of `seconds`, and stands still once they are used up."""
    times = iter(torch.tensor([0.0, *seconds], dtype=torch.float64).cumsum(0).tolist())
    last = [0.0]

    def clock() -> float:
        last[0] = next(times, last[0])
        return last[0]

    monkeypatch.setattr(sampling, "perf_counter", clock)


def test_medians_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([(9.0, 9.0), (1.0, 2.0), (1.0, 2.0), (1.5, 2.0), (1.0, 2.0), (8.0, 1.0), (1.0, 2.0)])

    def fake(trial: Trial, number: int) -> list[sampling._Run]:
        return [sampling._Run(*next(runs)) for _ in range(number)]

    monkeypatch.setattr(sampling, "_cpu_runs", fake)
    found = sample(Trial(lambda: None, lambda _: None), CPU, Effort(error=0.02, cap_s=60, least_runs=4))
    assert found == Measurement(1.0, 2.0, 0.0, 4)  # the first was the warm-up


def test_a_run_longer_than_the_cap_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(monkeypatch, [0.0, 4.0, 0.0, 6.0, 0.0])
    calls: list[str] = []
    trial = Trial(lambda: calls.append("forward"), lambda _: calls.append("backward"))
    found = sample(trial, CPU, Effort(cap_s=5))
    assert calls == ["forward", "backward"]
    assert (found.spread, found.runs) == (1.0, 1)


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen: list[int] = []
        sample(Trial(lambda: seen.append(torch.get_num_threads()), lambda _: None), CPU, QUICK)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    graph = network("alexnet").graph
    costs = MeasuredCosts(RooflineCosts(graph, cluster_preset("h200", 2)), torch.device("cuda"), effort=QUICK)
    outcome = costs.measure(requests(graph, ONE))
    assert outcome.failed == ()
    assert all(costs.layer(layer, ONE).source is Source.MEASURED for layer in graph.layers.values())
    assert costs.measure_step().forward_s > 0
