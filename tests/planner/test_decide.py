"""The whole planner against brute force: every combination of strategies, priced by `evaluate`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.cluster import Cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import InfeasiblePlan, PlanError, RuleError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.pins import read_pins
from parplan.plan import Plan, Strategy
from parplan.planner.decide import PlanRequest, decide, predict
from parplan.planner.decision import Baseline, Simpler
from parplan.planner.explain.advice import advice, advised
from parplan.planner.explain.reasons import alternatives
from parplan.planner.search.simpler import differences, plan_by_hand
from parplan.planner.search_space.formulation import Formulation, formulate
from parplan.planner.search_space.strategies import strategies
from parplan.planner.search_space.verifier import check
from parplan.planner.solver.problem import evaluate
from parplan.report.sections.verdict import verdict_lines
from tests.planner.decided import decided
from tests.planner.graphs import classifier, counted, perceptron
from tests.planner.oracle import brute_force
from tests.planner.random_plans import step_time_s

SLOW = "k20"


def formulated(graph: LayerGraph, cluster: Cluster, strict: bool = False) -> Formulation:
    candidates = {name: strategies(layer, graph.batch or 1, cluster.count) for name, layer in graph.layers.items()}
    return formulate(graph, cluster, RooflineCosts(graph, cluster), candidates, strict=strict)


def small_memory(cluster: Cluster, nbytes: int) -> Cluster:
    return cluster.with_memory(nbytes)


@pytest.mark.parametrize("rules", ["default", "strict"])
@pytest.mark.parametrize("devices", [2, 3])
def test_no_combination_of_strategies_is_faster(devices: int, rules: str) -> None:
    graph, cluster = perceptron(), cluster_preset(SLOW, devices)
    formulation = formulated(graph, cluster, rules == "strict")
    best = brute_force(formulation.problem).objective
    decision = decided(graph, cluster, PlanRequest(rules=rules, tolerance=0.0, started_ranks=True))
    assert decision.proof.status == "OPTIMAL"
    assert decision.prediction.step_s == pytest.approx(best, rel=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, *(pytest.param(n, marks=pytest.mark.full) for n in (6, 7, 8))])
def test_plans_are_proven_and_legal_for_any_number_of_devices(devices: int) -> None:
    decision = decided(classifier(), cluster_preset(SLOW, devices))
    assert decision.proof.status == "OPTIMAL"
    assert not decision.proof.given
    check(decision.plan, classifier())
    parts = decision.prediction
    found = (parts.forward_s, parts.backward_s, parts.transfer_s, parts.exposed_reduce_s, parts.update_s)
    assert parts.step_s == pytest.approx(sum(found) + parts.overhead_s)
    assert parts.low_s < parts.step_s < parts.high_s
    # One device by itself has its inputs at hand; on one of several they have to be brought to it.
    habits = [rival for rival in decision.baselines if rival.name != "one device"]
    legal = [rival.step_s for rival in habits if rival.step_s is not None and rival.fits]
    assert all(parts.step_s <= step_s * (1 + 1e-6) for step_s in legal)


@pytest.mark.full
def test_strict_plans_obey_r2_to_r4() -> None:
    decision = decided(classifier(), cluster_preset(SLOW, 4), PlanRequest(rules="strict"))
    assert decision.plan.rules == "strict"
    check(decision.plan, classifier())
    assert all(not layer.bends for layer in decision.layers)


def test_changes_by_alternatives_equal_a_full_evaluation() -> None:
    formulation = formulated(classifier(), cluster_preset(SLOW, 4))
    generator, problem = np.random.default_rng(3), formulation.problem
    for _ in range(20):
        choice = formulation.followed([int(generator.integers(size)) for size in problem.sizes])
        base, index = evaluate(problem, choice), int(generator.integers(len(formulation.options)))
        for k, change in alternatives(formulation, choice, (index,)).items():
            tried = formulation.followed([k if v == index else own for v, own in enumerate(choice)])
            assert base.objective + change.total_s == pytest.approx(evaluate(problem, tried).objective)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tolerance", [0.0, 0.03])
def test_alternatives_of_a_layer_are_priced_by_the_objective_and_end_in_the_reason(tolerance: float) -> None:
    graph, decision = classifier(), decided(classifier(), cluster_preset(SLOW, 4), PlanRequest(tolerance=tolerance))
    cluster = decision.cluster  # the inputs arrive at one device, where that is taken alone
    priced = partial(step_time_s, graph, cluster, RooflineCosts(graph, cluster))
    for layer in decision.layers:
        costs = [other.total_s for other in layer.alternatives]
        assert costs == sorted(costs)
        assert layer.strategy.describe() not in [other.strategy.describe() for other in layer.alternatives]
        for other in layer.alternatives:
            plan = decision.plan.with_layers({layer.name: other.strategy})
            assert priced(plan) == pytest.approx(decision.proof.objective + other.total_s)
    assert decided(graph, cluster, PlanRequest(plan=plan)).proof.objective == pytest.approx(priced(plan))
    assert {layer.name for layer in decision.layers if layer.parameters} == {
        name for name, layer in graph.layers.items() if layer.parameters
    }


def test_rules_that_leave_out_a_strategy_are_listed() -> None:
    decision = decided(perceptron(), cluster_preset(SLOW, 5))  # 12 samples
    layer = decision.layers[0]
    assert any("(R1)" in text and "5 replicas" in text for text in layer.refused)
    assert len(set(layer.refused)) == len(layer.refused)


@pytest.mark.parametrize(
    ("plan_s", "one_s", "data_s", "model_s", "tolerance", "name"),
    [
        (1.0, 1.02, 1.0, 1.0, 0.03, "one device"),
        (1.0, 4.0, 1.02, 1.0, 0.03, "pure data parallel"),
        (1.0, 4.0, 1.02, 1.0, 0.01, "pure model parallel"),
        (1.0, 4.0, 1.1, 1.02, 0.01, ""),
        (1.0, 4.0, 0.9, 0.5, 0.03, "pure model parallel"),
    ],
)
def test_the_simplest_plan_by_hand_within_the_tolerance_is_taken(
    plan_s: float, one_s: float, data_s: float, model_s: float, tolerance: float, name: str
) -> None:
    steps_s = {"one device": one_s, "pure data parallel": data_s, "pure model parallel": model_s}
    by_hand = [Baseline(baseline, step_s, 1, True) for baseline, step_s in steps_s.items()]
    found = plan_by_hand(by_hand, plan_s, tolerance)
    assert (found.name if found is not None else "") == name


def test_batch_norm_counts_as_the_plan_has_it() -> None:
    """Data parallelism with statistics of each device's own samples is another training."""
    by_hand = [Baseline("pure data parallel", 0.95, 1, True, batch_norm_s=0.1), Baseline("hybrid", 1.02, 1, True)]
    found = plan_by_hand(by_hand, 1.0, 0.03)
    assert found is by_hand[1]
    assert plan_by_hand([replace(by_hand[0], fits=False), replace(by_hand[1], fits=False)], 1.0, 0.03) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("link", ["nvlink2", "pcie2"])
def test_the_plan_is_the_one_that_is_advised(link: str) -> None:
    """The plan's figures, its strategies and its name are those of one plan, which the fastest is compared with."""
    graph, cluster = perceptron(), cluster_preset(SLOW, 2, link)
    taken, fastest = decided(graph, cluster), decided(graph, cluster, PlanRequest(tolerance=0.0))
    same = next(one for one in taken.baselines if one.name == taken.advised)
    assert same.plan is not None
    assert taken.plan.layers == same.plan.layers
    assert taken.prediction.step_s == pytest.approx(same.whole_s, rel=1e-9)
    assert taken.prediction.step_s <= 1.03 * fastest.prediction.step_s
    assert sum(layer.forward_s for layer in taken.layers) == pytest.approx(taken.prediction.forward_s)
    assert not fastest.proof.simpler
    if taken.proof.simpler is not None:
        assert taken.proof.simpler.fastest_s == pytest.approx(fastest.prediction.step_s)
        assert taken.proof.simpler.by_hand == taken.advised


def test_one_device_that_is_advised_is_used_alone() -> None:
    """Its samples need not be gathered from processes that nobody starts; where they are started, they do."""
    graph, cluster = perceptron(), cluster_preset(SLOW, 2)
    alone, started = decided(graph, cluster), decided(graph, cluster, PlanRequest(started_ranks=True))
    one = next(one for one in alone.baselines if one.name == "one device")
    assert alone.advised == "one device"
    assert alone.cluster.home == 0
    assert alone.prediction.step_s == pytest.approx(one.step_s, rel=1e-9)
    assert alone.prediction.transfer_s == 0
    assert started.cluster.home is None
    assert started.prediction.step_s > alone.prediction.step_s
    fastest = decided(graph, cluster, PlanRequest(tolerance=0.0, started_ranks=True))
    assert started.prediction.step_s <= 1.03 * fastest.prediction.step_s


@pytest.mark.full
def test_a_plan_that_the_user_decides_in_part_is_not_replaced() -> None:
    graph, cluster = perceptron(), cluster_preset(SLOW, 2)
    pinned = decided(graph, cluster, PlanRequest(pins=read_pins(["0=shards:2"])))
    assert pinned.plan.layers["0"].shards == 2
    strict = decided(graph, cluster, PlanRequest(rules="strict"))
    assert strict.plan.rules == "strict"
    check(strict.plan, graph)


def test_what_does_not_fit_says_which_layers_and_how_much_is_missing() -> None:
    with pytest.raises(InfeasiblePlan, match=r"device 0.*bytes|device 0.*iB") as caught:
        decided(perceptron(), small_memory(cluster_preset(SLOW, 2), 4096))
    assert "possible remedies" in str(caught.value)
    assert any(name in str(caught.value) for name in ("0", "2", "3"))


@pytest.mark.full
def test_memory_that_one_device_lacks_is_found_on_several() -> None:
    free = decided(perceptron(), cluster_preset(SLOW, 1))
    cluster = small_memory(cluster_preset(SLOW, 4), int(free.prediction.memory_bytes[0] * 0.6))
    decision = decided(perceptron(), cluster)
    assert max(decision.prediction.memory_bytes) <= cluster.device.memory_bytes
    assert not next(rival for rival in decision.baselines if rival.name == "one device").fits


def test_a_given_plan_is_priced_not_replaced() -> None:
    graph, cluster = perceptron(), cluster_preset(SLOW, 2)
    mine = Plan(graph.model, graph.fingerprint, 12, 2, {name: Strategy(devices=(1,)) for name in graph.layers})
    decision = decided(graph, cluster, PlanRequest(plan=mine))
    assert decision.plan == mine
    best = decided(graph, cluster)
    assert decision.prediction.step_s >= best.prediction.step_s * (1 - 1e-6)
    assert decision.proof.given


def test_a_given_plan_is_held_to_what_is_asked_beside_it() -> None:
    class Classifier(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.cross_entropy(x, y)

    graph = capture(Classifier(), (torch.zeros(8, 16, requires_grad=True), torch.zeros(8, dtype=torch.long)))
    cluster, (loss, *_) = cluster_preset(SLOW, 2), graph.layers.values()
    layers = {name: Strategy() for name in graph.layers} | {loss.name: Strategy(1, 2, loss.axes[0].name, (0, 1))}
    mine = Plan(graph.model, graph.fingerprint, 8, 2, layers)
    with pytest.raises(PlanError, match=r"number of micro-batches is 1, and 2 were asked for"):
        decided(graph, cluster, PlanRequest(plan=mine, micro_batches=2))
    with pytest.raises(PlanError, match="R7"):
        decided(graph, cluster, PlanRequest(plan=mine, rules="strict"))


def test_a_given_plan_that_does_not_fit_is_neither_advised_nor_proven() -> None:
    """The bound was of plans that fit, of which there are none below it."""
    graph, cluster = perceptron(), cluster_preset(SLOW, 2)
    names = tuple(graph.layers)
    mine = Plan(graph.model, graph.fingerprint, 12, 2, {name: Strategy() for name in names})
    full = decided(graph, cluster, PlanRequest(plan=mine)).prediction.memory_bytes[0]
    small = cluster.with_memory(full - 1)
    decision = decided(graph, small, PlanRequest(plan=mine))
    assert decision.advice.endswith("instead of this plan, which does not fit.")
    assert not decision.advice.startswith("Use one device")
    assert decision.proof.bound < 0.99 * decision.prediction.step_s
    assert "does not fit" in verdict_lines(decision)[0].text
    none = decided(graph, cluster.with_memory(1), PlanRequest(plan=mine))
    assert none.advice == "Use another plan instead of this plan, which does not fit."


def test_a_given_plan_that_one_by_hand_beats_is_not_advised() -> None:
    graph, cluster = perceptron(), cluster_preset(SLOW, 5)  # 12 samples: not data parallel
    names = list(graph.layers)
    spread = {name: Strategy(devices=(index,)) for index, name in enumerate(names)}
    mine = Plan(graph.model, graph.fingerprint, 12, 5, spread)
    assert decided(graph, cluster, PlanRequest(plan=mine)).advice.startswith("Use one device instead of this plan: ")
    by_hand = (Baseline("pure data parallel", 1.0, 1, False), Baseline("pure model parallel", 1.0, 1, True))
    assert advice(mine, 2.0, by_hand) == "Use pure model parallel instead of this plan: 2.00 x as fast."
    words = "Use this plan: pure model parallel, the best of the usual ways, is about as fast."
    assert advice(mine, 1.01, by_hand) == words
    assert advised(mine, 2.0, by_hand) == "pure model parallel"
    assert advised(mine, 1.01, by_hand) == ""


def test_a_given_plan_that_is_one_by_hand_is_called_so() -> None:
    graph, cluster = perceptron(), cluster_preset(SLOW, 2)
    data = next(one for one in decided(graph, cluster).baselines if one.name == "pure data parallel")
    assert data.plan is not None
    by_hand = (replace(data, step_s=1.0), Baseline("pure model parallel", 2.0, 1, True))
    assert advice(data.plan, 1.0, by_hand) == "Use plain data parallel on all 2 devices."
    faster = (by_hand[0], replace(by_hand[1], step_s=0.5))
    assert advice(data.plan, 1.0, faster) == "Use pure model parallel instead of this plan: 2.00 x as fast."
    close = Simpler(0.98, 2, 1, data.name)
    words = "Use plain data parallel on all 2 devices, within 2.0 % of the fastest plan found."
    assert advice(data.plan, 1.0, by_hand, close) == words


def test_a_given_plan_is_priced_at_the_batch_at_hand() -> None:
    graph, cluster = perceptron(), cluster_preset(SLOW, 2)
    mine = Plan(graph.model, graph.fingerprint, 1000, 2, {name: Strategy(devices=(1,)) for name in graph.layers})
    assert decided(graph, cluster, PlanRequest(plan=mine)).plan == replace(mine, batch=12)
    odd = replace(mine, devices=5, layers={name: Strategy(5, 1, None, tuple(range(5))) for name in graph.layers})
    found = decided(graph, cluster_preset(SLOW, 5), PlanRequest(plan=odd))
    assert found.notes[-1].startswith("5 replicas have 3, 2, 3, 2, 2 samples; bends R1")
    with pytest.raises(RuleError, match=r"R1"):
        decided(graph, cluster_preset(SLOW, 5), PlanRequest(plan=replace(odd, rules="strict")))


@pytest.mark.parametrize("devices", [1, 8])
def test_a_given_plan_for_other_devices_is_refused(devices: int) -> None:
    graph = perceptron()
    mine = Plan(graph.model, graph.fingerprint, 12, 2, {name: Strategy(devices=(1,)) for name in graph.layers})
    with pytest.raises(PlanError, match=f"for 2 devices, to be priced for {devices}; say --gpus 2"):
        decided(graph, cluster_preset(SLOW, devices), PlanRequest(plan=mine))


def test_a_given_plan_for_another_model_is_refused() -> None:
    other = Plan("Other", "0" * 16, 12, 2, {"a": Strategy()})
    with pytest.raises(PlanError, match="another model"):
        decided(perceptron(), cluster_preset(SLOW, 2), PlanRequest(plan=other))


def test_every_layer_has_a_reason() -> None:
    decision = decided(classifier(), cluster_preset(SLOW, 4))
    assert all(layer.why for layer in decision.layers)
    mean = next(layer for layer in decision.layers if layer.name == "loss.batch_mean")
    assert mean.why == "it adds up one number per sample, so one device is enough"


class Scored(nn.Module):
    """One layer of scores for many classes, and their loss."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.scores = nn.Linear(8, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(x), target)


@pytest.mark.full
def test_strict_rules_keep_a_loss_whole() -> None:
    """R7: a vocabulary that dwarfs the rest is cut by default, and the report says so; never by the strict rules."""
    net = Scored(96 * 48)
    graph = capture(net, (torch.randn(48, 8), torch.zeros(48, dtype=torch.long)))
    cluster = cluster_preset(SLOW, 4)
    free = decided(graph, cluster, PlanRequest(tolerance=0.0, started_ranks=True))
    strict = decided(graph, cluster, PlanRequest(rules="strict", tolerance=0.0, started_ranks=True))
    assert free.plan.layers["loss"].axis == "vocabulary"
    assert [text for layer in free.layers if layer.name == "loss" for text in layer.bends if text.startswith("R7")]
    assert strict.plan.layers["loss"].shards == 1
    assert free.prediction.step_s < strict.prediction.step_s


@pytest.mark.full
def test_statistics_are_exchanged_of_what_a_batch_norm_normalises_not_of_what_its_layer_reads_first() -> None:
    graph = counted()
    assert graph.layers["norm@1"].inputs[0] == "add"  # the counter
    first, second = (options for options in formulated(graph, cluster_preset(SLOW, 2)).options[:2])
    by_strategy = {option.strategy: option.batch_norm_sync_s for option in second}
    assert [by_strategy[option.strategy] for option in first] == [option.batch_norm_sync_s for option in first]
    assert any(option.batch_norm_sync_s > 0 for option in first)


@pytest.mark.full
def test_one_device_costs_the_same_however_many_there_are_to_plan_for() -> None:
    alone = decided(perceptron(), cluster_preset(SLOW, 1)).prediction
    for devices in (2, 5, 8):
        rivals = {rival.name: rival for rival in decided(perceptron(), cluster_preset(SLOW, devices)).baselines}
        assert rivals["one device"].step_s == pytest.approx(alone.step_s)
        assert rivals["one device"].memory_bytes == max(alone.memory_bytes)


@pytest.mark.full
def test_one_device_is_one_device_when_memory_makes_plans_spread() -> None:
    graph, cluster = classifier(), cluster_preset(SLOW, 3)
    needed = max(decided(graph, cluster_preset(SLOW, 1)).prediction.memory_bytes)
    decision = decided(graph, small_memory(cluster, 2 * needed // 3))
    one = next(rival for rival in decision.baselines if rival.name == "one device")
    assert one.plan is not None
    assert {strategy.devices for strategy in one.plan.layers.values()} == {(0,)}
    assert (one.memory_bytes, one.fits) == (needed, False)


@pytest.mark.full
def test_data_parallel_has_unequal_parts_when_the_batch_does_not_divide() -> None:
    graph, cluster = perceptron(), cluster_preset(SLOW, 5)
    strict, free = (
        next(one for one in decided(graph, cluster, PlanRequest(rules=rules)).baselines if "data" in one.name)
        for rules in ("strict", "default")
    )
    assert (strict.step_s, strict.why_not) == (None, "R1: a batch of 12 does not divide by 5; 15 does")
    assert (free.step_s is not None, free.bends) == (True, "R1: 3, 2, 3, 2, 2 samples")


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "step"),
    [(1, 3), (2, 18), (3, 27)],  # a search just below what the fastest plan takes is the longest
)
def test_at_every_memory_a_plan_fits_with_its_transfers_or_is_refused(devices: int, step: int) -> None:
    """The solver estimates transfers; whatever it takes them for, a plan that would run out of memory is no answer."""
    graph, roomy = classifier(), cluster_preset(SLOW, devices)
    needed = max(decided(graph, roomy).prediction.memory_bytes)
    outcomes = set()
    for percent in range(40, 104, step):
        limit = needed * percent // 100
        try:
            decision = decided(graph, small_memory(roomy, limit))
        except InfeasiblePlan:
            outcomes.add("refused")
            continue
        outcomes.add("fits")
        assert max(decision.prediction.memory_bytes) <= limit
        assert not [note for note in decision.notes if "with its transfers" in note]
    assert outcomes == {"refused", "fits"}


@pytest.mark.full
def test_a_search_that_ends_with_a_plan_that_does_not_fit_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, cluster = classifier(), cluster_preset(SLOW, 2)
    limit = cluster.devices[0].memory_bytes
    monkeypatch.setattr(RooflineCosts, "peaks", lambda self, layers: (limit // 2, limit + 2**20))
    with pytest.raises(InfeasiblePlan, match=r"nearest one needs .* on device 1, .* lacks 1 MiB\n  possible remedies"):
        decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest())


@pytest.mark.full
def test_baselines_are_held_to_the_same_memory_as_the_plan() -> None:
    """A baseline that would run out of memory with its transfers must not be said to fit, and so be advised."""
    graph, cluster = classifier(), cluster_preset(SLOW, 2)
    costs = RooflineCosts(graph, cluster)
    several = [one for one in decided(graph, cluster).baselines if one.plan is not None and one.name != "one device"]
    assert several
    for baseline in several:
        assert baseline.plan is not None
        peaks = costs.peaks(baseline.plan.layers)
        assert peaks is not None
        assert baseline.memory_bytes == max(peaks)
        tight = decided(graph, cluster.with_memory(max(peaks) - 1))
        assert [one.fits for one in tight.baselines if one.name == baseline.name] == [False]


@pytest.mark.full
def test_tensor_shards_inside_hosts_are_a_baseline_on_several() -> None:
    graph, cluster = classifier(), cluster_preset(SLOW, 2)
    assert "tensor x data parallel" not in {one.name for one in decided(graph, cluster).baselines}
    wide, narrow = (replace(cluster.links[0], size=size) for size in (4, 2))
    hosts = Cluster.of(cluster.device, 4, (narrow, wide))
    found = {one.name: one for one in decided(graph, hosts).baselines}["tensor x data parallel"]
    assert found.plan is not None
    spread = {(own.replicas, own.shards) for name, own in found.plan.layers.items() if graph.layers[name].parameters}
    assert (2, 2) in spread
    assert spread <= {(2, 2), (4, 1)}
    assert found.step_s == pytest.approx(predict(graph, hosts, RooflineCosts(graph, hosts), found.plan).step_s)


@pytest.mark.full
def test_a_model_of_one_batch_size_is_told_why_it_has_no_replicas() -> None:
    graph = replace(classifier(), one_batch="for 32: Net cannot be captured: RuntimeError: shape '[16, 4]' is invalid")
    notes = decided(graph, cluster_preset(SLOW, 2)).notes
    assert [note for note in notes if "No layer can have replicas" in note and "shape '[16, 4]' is invalid" in note]


def test_differences_name_the_layers_with_the_most_weights() -> None:
    graph = perceptron()
    first, *_, last = [name for name, layer in graph.layers.items() if layer.parameters]
    whole = Plan(graph.model, graph.fingerprint, 12, 2, {name: Strategy() for name in graph.layers})
    cut = whole.with_layers({first: Strategy(1, 2, "out-features", (0, 1)), last: Strategy(2, 1, None, (0, 1))})
    sizes = {n: sum(graph.values[p].elements for p in graph.layers[n].parameters) for n in (first, last)}
    expected = f"2 shards of {first}" if sizes[first] > sizes[last] else f"2 replicas of {last}"
    assert differences(cut, whole, graph) == expected
    assert differences(whole, cut.with_layers({last: Strategy()}), graph) == f"{first} on one device"
    assert differences(whole, whole, graph) == ""


def test_advice_compares_steps_of_the_same_batch_norm() -> None:
    """Statistics of each device's own samples are another training: a plan that has them is not called faster."""
    plan = decided(perceptron(), cluster_preset(SLOW, 2)).plan
    data = Baseline("pure data parallel", 0.5, 1, True, batch_norm_s=0.6)
    assert advised(plan, 1.0, (data,)) == ""
    assert (
        advice(plan, 1.0, (data,)) == "Use this plan: 1.10 x as fast as pure data parallel, the best of the usual ways."
    )
    assert advised(plan, 1.0, (replace(data, batch_norm_s=0.1),)) == "pure data parallel"


def test_a_plan_that_a_wide_tolerance_takes_is_the_one_that_is_advised() -> None:
    net = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))
    taken = decided(capture(net, (torch.randn(512, 2048),)), cluster_preset(SLOW, 4), PlanRequest(tolerance=5.0))
    same = next(one for one in taken.baselines if one.plan is not None and one.plan.layers == taken.plan.layers)
    assert taken.proof.simpler is not None
    assert taken.proof.simpler.fastest_s < 0.97 * taken.prediction.step_s
    assert taken.advised == same.name
    assert " instead of this plan" not in taken.advice
