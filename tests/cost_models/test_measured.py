"""Prices from profiles: what was measured, what is between, what is beyond, and that no guess passes for more."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import log

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from parplan.cluster import Cluster
from parplan.cost_models.communication.measured_links import BESIDE, MeasuredLinks
from parplan.cost_models.costs import CostModel, LayerCost, Source
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.measured import (
    AGREEMENT,
    BATCH_NORM,
    CORRECTION,
    OVERHEAD,
    Correction,
    MeasuredCosts,
    profiled_costs,
    step_cost,
)
from parplan.cost_models.measurement.runnable_parts import part_entry
from parplan.cost_models.profile.records import LinkEntry, PartEntry, SessionProfile
from parplan.cost_models.roofline import DOUBT, RooflineCosts, part_of
from parplan.cost_models.sampling import Measurement
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Strategy
from tests.cost_models.made_up import all_parts, drawn, made_up_costs, made_up_profile
from tests.cost_models.networks import network
from tests.cost_models.profiles import link
from tests.every_case import every_case
from tests.planner.graphs import classifier, perceptron

ONE, TWO = Strategy(), Strategy(2, 1, None, (0, 1))


def cpus(count: int = 4) -> Cluster:
    return cluster_preset("cpu", count)


def priced(graph: LayerGraph, profile: SessionProfile, **options: float) -> MeasuredCosts:
    return MeasuredCosts(RooflineCosts(graph, cpus()), {4: profile}, "cpu", **options)  # type: ignore[arg-type]


def times(cost: LayerCost) -> tuple[float, float]:
    return cost.forward_s, cost.backward_s


# ---- measured -------------------------------------------------------------------------------------------------------


def test_what_was_measured_costs_exactly_that() -> None:
    graph = classifier()
    costs: CostModel = made_up_costs(graph, cpus())
    for request in all_parts(graph, cpus()):
        own = drawn(part_entry(graph, part_of(graph, request.layer, request.strategy), Measurement(0, 0, 0, 0)))
        cost = costs.layer(request.layer, request.strategy)
        if len(request.strategy.devices) == 1:
            assert times(cost) == (own.forward_s, own.backward_s)
        assert (cost.spread, cost.source) == (own.spread, Source.MEASURED)


# Expected largest of n draws from a normal distribution, in standard deviations (tables of order statistics).
@every_case(("devices", "largest"), [(1, 0.0), (2, 0.564), (4, 1.029), (8, 1.424)])
@every_case(("spread", "counts"), [(0.0, 0.0), (0.1, 0.1), (0.2, 0.2), (1.0, 0.2)])
def test_all_wait_for_the_slowest(devices: int, largest: float, spread: float, counts: float) -> None:
    graph, cluster = perceptron(), cpus(8)
    requests = all_parts(graph, cluster)
    profile = made_up_profile(graph, requests, lambda _: Measurement(1.0, 2.0, spread, 5))
    costs = MeasuredCosts(RooflineCosts(graph, cluster), {8: profile}, "cpu")
    request = next(r for r in requests if len(r.strategy.devices) == devices)
    forward_s, backward_s = times(costs.layer(request.layer, request.strategy))
    assert forward_s == pytest.approx(1 + counts * largest, rel=0.01)
    assert backward_s == pytest.approx(2 * forward_s)


@pytest.mark.parametrize(
    ("then_s", "now_s", "factor"), [(2e-3, 3e-3, 1.5), (2e-3, 1e-3, 0.5), (2e-3, 0.0, 1.0), (0.0, 3e-3, 1.0)]
)
def test_times_follow_the_reference_kernel(then_s: float, now_s: float, factor: float) -> None:
    graph = perceptron()
    requests = all_parts(graph, cpus())
    profile = made_up_profile(graph, requests[:1], lambda _: Measurement(1.0, 4.0, 0.1, 3, then_s))
    costs = priced(graph, profile, reference_s=now_s)
    assert times(costs.layer(requests[0].layer, requests[0].strategy)) == pytest.approx((factor, 4 * factor))
    # what is priced by its likes follows too
    plain = priced(graph, profile)
    for request in requests[1:]:
        cost, other = (each.layer(request.layer, request.strategy) for each in (costs, plain))
        if request.layer.kind == "linear":
            assert times(cost) == pytest.approx((factor * other.forward_s, factor * other.backward_s))


def test_an_imported_figure_names_its_origin() -> None:
    graph, profile = perceptron(), SessionProfile()
    requests = all_parts(graph, cpus())
    profile.put(*(replace(entry, origin="theirs.json") for entry in made_up_profile(graph, requests).all()))
    costs = priced(graph, profile)
    assert {costs.layer(r.layer, r.strategy).source for r in requests} == {Source.SHIPPED}


# ---- not measured ---------------------------------------------------------------------------------------------------


def test_nothing_measured_is_the_roofline() -> None:
    graph = classifier()
    roofline = RooflineCosts(graph, cpus())
    for costs in (MeasuredCosts(roofline, {}, "cpu"), priced(graph, SessionProfile())):
        for request in all_parts(graph, cpus()):
            assert costs.layer(request.layer, request.strategy) == roofline.layer(request.layer, request.strategy)
        assert costs.step == roofline.step


@cache
def widths() -> LayerGraph:
    """Linear layers of many sizes that all pass a gradient on, the first apart."""
    sizes = (16, 8, 24, 64, 160, 400, 960, 500, 36, 12)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    return capture(nn.Sequential(*layers), (torch.randn(64, sizes[0]),))


def part(graph: LayerGraph, name: str) -> PartEntry:
    return part_entry(graph, part_of(graph, graph.layers[name], ONE), Measurement(0.0, 0.0, 0.0, 0))


LINEAR = [str(index) for index in range(1, 9)]
RATES = st.floats(0.1, 50.0)


@pytest.mark.full
@given(st.sampled_from(LINEAR), st.sampled_from(LINEAR), st.sampled_from(LINEAR), RATES, RATES, RATES)
def test_between_two_sizes_it_is_interpolated_and_beyond_them_never(
    one: str, other: str, asked: str, rate: float, another: float, backward: float
) -> None:
    graph = widths()
    assume(len({one, other, asked}) == 3)
    fallback = RooflineCosts(graph, cpus())
    rates = {part(graph, one).signature: rate, part(graph, other).signature: another}

    def figures(entry: PartEntry) -> Measurement:
        own_s = rates[entry.signature] * fallback.ideal_seconds(entry.flops, entry.nbytes)
        return Measurement(own_s, backward * own_s, 0.02, 9)

    requests = [part_of(graph, graph.layers[name], ONE) for name in (one, other)]
    cost = priced(graph, made_up_profile(graph, requests, figures)).layer(graph.layers[asked], ONE)
    size = {name: fallback.peak_seconds(part(graph, name).flops, part(graph, name).nbytes) for name in LINEAR}
    low, high = sorted((size[one], size[other]))
    ideal_s = fallback.ideal_seconds(part(graph, asked).flops, part(graph, asked).nbytes)
    ratio, ends = cost.forward_s / ideal_s, sorted((rate, another))
    assert ends[0] * (1 - 1e-9) <= ratio <= ends[1] * (1 + 1e-9)
    if low <= size[asked] <= high:
        assert cost.source is Source.INTERPOLATED
        assert cost.spread >= 0.05
        back = sorted((rate * backward, another * backward))
        assert back[0] * (1 - 1e-9) <= cost.backward_s / ideal_s <= back[1] * (1 + 1e-9)
    else:
        assert cost.source is Source.ESTIMATED
        assert cost.spread >= 0.1
        nearest = min((one, other), key=lambda name: abs(log(size[name] / size[asked])))
        assert ratio == pytest.approx(rate if nearest == one else another)


def test_the_further_the_neighbours_the_larger_the_doubt() -> None:
    graph = widths()
    fallback = RooflineCosts(graph, cpus())

    def spread(factor: float) -> float:
        largest = max(part(graph, name).flops for name in LINEAR)

        def figures(entry: PartEntry) -> Measurement:
            rate = factor if entry.flops == largest else 1.0
            return Measurement(rate * fallback.ideal_seconds(entry.flops, entry.nbytes), 0.0, 0.0, 9)

        ordered = sorted(LINEAR, key=lambda name: part(graph, name).flops)
        ends = [part_of(graph, graph.layers[name], ONE) for name in (ordered[0], ordered[-1])]
        cost = priced(graph, made_up_profile(graph, ends, figures)).layer(graph.layers[ordered[4]], ONE)
        assert cost.source is Source.INTERPOLATED
        return cost.spread

    assert spread(1.0) == 0.05 < spread(1.5) < spread(3.0)


def test_sizes_below_a_kernels_least_time_are_still_sizes() -> None:
    """All of these take the least time a kernel takes on paper; the smallest is no less outside for that."""
    graph = perceptron(4)
    smallest, largest = (choose(("2", "3"), key=lambda name: part(graph, name).flops) for choose in (min, max))
    profile = made_up_profile(graph, [part_of(graph, graph.layers[largest], ONE)])
    assert priced(graph, profile).layer(graph.layers[smallest], ONE).source is Source.ESTIMATED


def test_a_backward_with_fewer_gradients_is_no_neighbour() -> None:
    """The first layer passes no gradient on: its backward says nothing of the others', whatever its size."""
    graph = widths()
    around = [part_of(graph, graph.layers["0"], ONE), part_of(graph, graph.layers["5"], ONE)]
    assert part(graph, "0").family == part(graph, "5").family
    cost = priced(graph, made_up_profile(graph, around)).layer(graph.layers["2"], ONE)
    assert cost.source is Source.ESTIMATED


def test_which_operands_need_a_gradient_is_not_read_out_of_the_signature() -> None:
    graph, profile = widths(), SessionProfile()
    for number, name in enumerate(("1", "5")):
        entry = part(graph, name)
        signature = f"the same ops [by] other words {number}"
        profile.put(replace(entry, signature=signature, measurement=Measurement(1e-3, 1e-3, 0.0, 9)))
    assert priced(graph, profile).layer(graph.layers["2"], ONE).source is Source.INTERPOLATED


def test_ops_never_measured_get_the_median_of_their_like_marked_as_estimates() -> None:
    graph = classifier()
    fallback = RooflineCosts(graph, cpus())
    conv, fc, norm = (graph.layers[name] for name in ("mix", "fc", "norm"))

    def figures(entry: PartEntry) -> Measurement:
        own_s = fallback.ideal_seconds(entry.flops, entry.nbytes)
        return Measurement(7 * own_s, 11 * own_s, 0.01, 9)

    costs = priced(graph, made_up_profile(graph, [part_of(graph, conv, ONE)], figures))
    cost, entry = costs.layer(fc, ONE), part(graph, "fc")
    ideal_s = fallback.ideal_seconds(entry.flops, entry.nbytes)
    assert times(cost) == pytest.approx((7 * ideal_s, 11 * ideal_s))
    assert cost.source is Source.ESTIMATED
    assert DOUBT / 2 <= cost.spread <= DOUBT
    # no product was measured like this one, and products say nothing of it: the roofline
    assert times(costs.layer(norm, ONE)) == times(fallback.layer(norm, ONE))


def test_figures_of_the_runtime_and_of_updates_are_no_parts() -> None:
    graph, profile = perceptron(), SessionProfile()
    for family in (OVERHEAD, AGREEMENT, "update adam float32"):
        profile.put(PartEntry(f"{family}, one", family, 0.0, 64.0, Measurement(9.0, 9.0, 0.0, 5)))
    costs, fallback = priced(graph, profile), RooflineCosts(graph, cpus())
    for layer in graph.layers.values():
        assert times(costs.layer(layer, ONE)) == times(fallback.layer(layer, ONE))


def test_a_time_too_short_to_be_seen_is_kept_and_nothing_rests_on_it() -> None:
    graph = widths()
    requests = [part_of(graph, graph.layers[name], ONE) for name in ("1", "5")]
    costs = priced(graph, made_up_profile(graph, requests, lambda _: Measurement(0.0, 0.0, 1.0, 1)))
    assert times(costs.layer(graph.layers["1"], ONE)) == (0.0, 0.0)
    assert costs.layer(graph.layers["3"], ONE) == RooflineCosts(graph, cpus()).layer(graph.layers["3"], ONE)


# ---- which devices --------------------------------------------------------------------------------------------------


def test_strategies_are_priced_from_as_many_devices_at_work() -> None:
    graph = perceptron()
    requests = all_parts(graph, cpus())

    def constant(seconds: float) -> SessionProfile:
        return made_up_profile(graph, requests, lambda _: Measurement(seconds, seconds, 0.0, 5))

    costs = MeasuredCosts(RooflineCosts(graph, cpus()), {4: constant(4.0), 1: constant(1.0)}, "cpu")
    found = {len(r.strategy.devices): costs.layer(r.layer, r.strategy).forward_s for r in requests}
    assert found == {1: 1.0, 2: 4.0, 3: 4.0, 4: 4.0}  # with 2 at work nothing was measured: the next larger
    alone = MeasuredCosts(RooflineCosts(graph, cpus()), {1: constant(1.0)}, "cpu")
    assert {alone.layer(r.layer, r.strategy).forward_s for r in requests} == {1.0}


def test_another_kind_of_device_is_not_what_was_measured() -> None:
    graph = perceptron()
    costs = MeasuredCosts(RooflineCosts(graph, cpus()), {1: made_up_profile(graph, all_parts(graph, cpus()))}, "k20")
    layer = next(iter(graph.layers.values()))
    assert costs.layer(layer, TWO).source is Source.ESTIMATED


# ---- everything else is the fallback's ------------------------------------------------------------------------------


def test_memory_transfers_and_reductions_are_the_fallbacks() -> None:
    graph = perceptron()
    costs, fallback = made_up_costs(graph, cpus()), RooflineCosts(graph, cpus())
    layer = graph.layers["2"]
    value = graph.values[layer.inputs[0]]
    source, target = (layer.layout(layer.inputs[0], strategy) for strategy in (TWO, ONE))
    plan = dict.fromkeys(graph.layers, TWO)
    assert costs.memory(layer, TWO) == fallback.memory(layer, TWO)
    assert costs.peaks(plan) == fallback.peaks(plan)
    assert costs.reduction(layer, TWO) == fallback.reduction(layer, TWO) > 0
    assert costs.transfer(value, source, target) == fallback.transfer(value, source, target)
    assert costs.transfer_matrix(value, [source], [target]).forward_s > 0


# ---- updates --------------------------------------------------------------------------------------------------------


def with_updates(points: dict[int, float]) -> SessionProfile:
    profile = SessionProfile()
    for nbytes, seconds in points.items():
        family = "update adam float32"
        profile.put(PartEntry(f"{family}[{nbytes}]", family, 0.0, nbytes, Measurement(seconds, 0.0, 0.0, 5)))
    return profile


def test_each_parameter_is_updated_once_by_the_first_layer_that_uses_it() -> None:
    graph = network("attention").graph  # the classes' weights are the embedding's
    costs = priced(graph, with_updates({0: 5.0, 4: 1.0, 2**40: 1.0}))
    # one second for any parameter: seconds are parameters
    found = {name: costs.layer(layer, ONE).update_s for name, layer in graph.layers.items()}
    assert round(sum(found.values())) == len(graph.parameters)
    assert found["embed"] == pytest.approx(1.0, rel=1e-2)
    assert found["classes"] == 0.0
    assert costs.step.overhead_s == 5.0  # calling the optimizer, once in a step


def test_an_update_is_of_what_a_device_holds() -> None:
    graph = perceptron()
    costs = priced(graph, with_updates({0: 0.0, 1: 1.0, 2**40: 2.0**40}))
    layer = graph.layers["2"]
    axis = next(axis.name for axis in layer.axes if axis.units % 2 == 0)
    whole, cut = (costs.layer(layer, strategy).update_s for strategy in (ONE, Strategy(1, 2, axis, (0, 1))))
    nbytes = sum(graph.values[name].nbytes for name in layer.parameters)
    assert whole == pytest.approx(nbytes)
    assert nbytes / 2 <= cut <= 0.52 * nbytes
    assert costs.layer(layer, TWO).update_s == whole


def test_without_measured_updates_they_are_estimates() -> None:
    graph = perceptron()
    costs, fallback = made_up_costs(graph, cpus()), RooflineCosts(graph, cpus())
    for layer in graph.layers.values():
        assert costs.layer(layer, TWO).update_s == fallback.layer(layer, TWO).update_s


# ---- the whole step -------------------------------------------------------------------------------------------------


def runtime_profile(overheads: dict[int, float], told_s: float = 0.0, reference_s: float = 0) -> SessionProfile:
    """What the runtime takes, by the number of parameters, and what processes take to tell each other."""
    profile = SessionProfile()
    for parameters, seconds in overheads.items():
        measured = Measurement(seconds, 0.0, 0.0, 5, reference_s)
        profile.put(PartEntry(f"{OVERHEAD}, {parameters} parameters", OVERHEAD, 0.0, parameters, measured))
    if told_s:
        profile.put(PartEntry(AGREEMENT, AGREEMENT, 0.0, 0.0, Measurement(told_s, 0.0, 0.0, 5, reference_s)))
    return profile


class Chain(nn.Sequential):
    """As many parameters as asked for, in pairs."""

    def __init__(self, parameters: int) -> None:
        super().__init__(*(nn.Linear(2, 2) for _ in range(parameters // 2)), nn.ReLU())


@cache
def roofline(parameters: int) -> RooflineCosts:
    graph = capture(Chain(parameters), (torch.zeros(4, 2),))
    assert len(graph.parameters) == parameters
    return RooflineCosts(graph, cpus(2))


@pytest.mark.parametrize(
    ("points", "parameters", "found_s"),
    [
        ({4: 1.0, 24: 3.0}, 4, 1.0),
        ({4: 1.0, 24: 3.0}, 24, 3.0),
        ({4: 1.0, 24: 3.0}, 14, 2.0),
        ({4: 1.0, 24: 3.0}, 64, 7.0),
        ({4: 0.1, 24: 3.0}, 0, 0.0),  # not below nothing
        ({4: 3.0, 24: 1.0}, 64, 3.0),  # noise: more parameters do not take less
        ({4: 2.0}, 64, 2.0),
        ({}, 64, 0.0),
    ],
)
def test_the_runtime_takes_time_by_the_number_of_parameters(
    points: dict[int, float], parameters: int, found_s: float
) -> None:
    profile = runtime_profile(points, reference_s=2e-3)
    costs = roofline(parameters)
    assert step_cost(profile, costs, None).overhead_s == pytest.approx(found_s)
    assert step_cost(profile, costs, None, reference_s=3e-3).overhead_s == pytest.approx(1.5 * found_s)
    told = runtime_profile(points, told_s=0.5, reference_s=2e-3)
    assert step_cost(told, costs, None).overhead_s == pytest.approx(found_s + 0.5)


@pytest.mark.parametrize(("taken_s", "overlap"), [(0.0, 1.0), (0.5, 0.75), (2.0, 0.0), (3.0, -0.5), (None, 1.0)])
def test_what_a_sum_takes_from_compute_does_not_overlap(taken_s: float | None, overlap: float) -> None:
    """Of a sum of 2 s; more than all of it where both hinder each other."""
    entries = [LinkEntry("gloo", "all-reduce", 2, 1024, 2.0, 0.0, 5)]
    entries += [LinkEntry("gloo", BESIDE, 2, 1024, taken_s, 0.0, 5)] if taken_s is not None else []
    found = step_cost(SessionProfile(), roofline(4), MeasuredLinks(entries))
    assert found.overlap == pytest.approx(overlap)


def corrected(*steps: tuple[float, float, int]) -> SessionProfile:
    """Networks by their whole step, the sum of their parts, and how many these are."""
    profile = SessionProfile()
    for index, (step_s, parts_s, parts) in enumerate(steps):
        measured = Measurement(step_s, parts_s, 0.0, 5)
        profile.put(PartEntry(f"{CORRECTION}, {index}", CORRECTION, 0.0, parts, measured))
    return profile


CORRECTIONS = [
    pytest.param((), (2.0, 6.0), id="not measured"),
    pytest.param(((10.0, 10.0, 4),), (2.0, 6.0), id="steps are their parts"),
    pytest.param(((16.0, 10.0, 4),), (2.5, 7.0), id="longer: as much for every layer, a third of it forward"),
    pytest.param(((8.0, 10.0, 4),), (1.6, 4.8), id="shorter: scaled"),
    pytest.param(((16.0, 10.0, 4), (8.0, 10.0, 4), (16.0, 10.0, 4)), (2.5, 7.0), id="the middle of several"),
]


@pytest.mark.parametrize(("steps", "expected"), CORRECTIONS)
def test_layers_add_up_to_measured_steps(
    steps: tuple[tuple[float, float, int], ...], expected: tuple[float, float]
) -> None:
    graph, profile = perceptron(), corrected(*steps)
    request = part_of(graph, graph.layers["2"], ONE)
    for entry in made_up_profile(graph, [request], lambda _: Measurement(2.0, 6.0, 0.01, 9)).all():
        profile.put(entry)
    assert times(priced(graph, profile).layer(request.layer, ONE)) == pytest.approx(expected)


def test_a_layer_without_a_backward_gets_none_and_one_without_work_nothing() -> None:
    still, view = (LayerCost(seconds, 0.0, Source.MEASURED) for seconds in (2.0, 0.0))
    assert times(Correction(per_layer_s=1.5).apply(still)) == (3.5, 0.0)
    assert times(Correction(per_layer_s=1.5).apply(view)) == (0.0, 0.0)


def test_batch_norms_over_replicas_take_what_they_took_in_a_step() -> None:
    """A step of three took 6 s more than predicted, so that each takes 2 s; less is noise."""
    profile, measured = SessionProfile(), Measurement(10.0, 4.0, 0.0, 5, 1e-3)
    assert step_cost(profile, roofline(4), None).batch_norm_s == 0.0
    profile.put(PartEntry(BATCH_NORM, BATCH_NORM, 0.0, 3.0, measured))
    assert step_cost(profile, roofline(4), None).batch_norm_s == pytest.approx(2.0)
    assert step_cost(profile, roofline(4), None, reference_s=2e-3).batch_norm_s == pytest.approx(4.0)
    profile.put(PartEntry(BATCH_NORM, BATCH_NORM, 0.0, 3.0, replace(measured, forward_s=3.0)))
    assert step_cost(profile, roofline(4), None).batch_norm_s == 0.0


def test_all_of_it_together() -> None:
    graph, cluster = perceptron(), cpus(2)
    profile = runtime_profile({2: 1.0, 12: 2.0}, told_s=0.1)  # perceptron has 6 parameters
    for entry in made_up_profile(graph, all_parts(graph, cluster)).all():
        profile.put(entry)
    profile.put(link(1 << 10, 3e-3))
    profile.put(replace(link(1 << 10, 0.75e-3), kind=BESIDE))
    costs = profiled_costs(graph, cluster, {2: profile}, backend="gloo")
    assert costs.step.overhead_s == pytest.approx(1.5)
    assert costs.step.overlap == pytest.approx(0.75)
    assert costs.step.links is Source.MEASURED
    assert costs.layer(graph.layers["2"], TWO).source is Source.MEASURED
    everything = sum(graph.values[name].nbytes for name in graph.parameters)
    own = sum(graph.values[name].nbytes for name in graph.layers["2"].parameters)
    assert costs.reduction(graph.layers["2"], TWO) == pytest.approx(3e-3 * own / everything)
    other = profiled_costs(graph, cluster, {2: profile}, backend="nccl")
    assert other.step.links is Source.ESTIMATED
