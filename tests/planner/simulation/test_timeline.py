"""Steps played through: the same as the objective where that is exact, less where branches run side by side, and what
passes prefetch on the machine of Krizhevsky 2014."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from examples.alexnet import build
from parplan.cluster import Cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.resized import at_batch
from parplan.lowering.stages import Stage, stages
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.search.context import needs_simulation
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.strategies import device_blocks, strategies
from parplan.planner.simulation.timeline import Kind, Lane, PassPolicy, Timeline, simulate
from parplan.planner.solver.problem import evaluate
from tests.planner.graphs import classifier, perceptron

IN_PASSES = (Scheme.BROADCAST, Scheme.INTERLEAVE)


class Seen(NamedTuple):
    kind: Kind
    what: str
    number: int | None
    start_s: float
    end_s: float
    computes: bool


def activities(found: Timeline) -> list[Seen]:
    """By start; equal tasks of several devices at the same time are one."""
    seen = dict.fromkeys(
        Seen(
            part.kind, part.what, part.number, span.start_s, span.end_s,
            any(one.lane is Lane.COMPUTE for one in part.exclusive),
        )
        for part, span in zip(found.parts, found.spans, strict=True)
        if part.kind is not None and part.seconds > 0
    )  # fmt: skip
    return sorted(seen, key=lambda one: (one.start_s, one.end_s))


def timeline_of(plan: Plan, graph: LayerGraph, cluster: Cluster, manner: PassPolicy = PassPolicy()) -> Timeline:  # noqa: B008
    return simulate(graph, cluster, RooflineCosts(graph, cluster, optimizer="momentum"), plan, manner)


def objective(plan: Plan, graph: LayerGraph, cluster: Cluster) -> float:
    costs = RooflineCosts(graph, cluster, optimizer="momentum")
    formulation = formulate(graph, cluster, costs, {name: (own,) for name, own in plan.layers.items()})
    return evaluate(formulation.problem, [0] * len(formulation.problem.nodes)).objective


def plan_of(graph: LayerGraph, devices: int, layers: dict[str, Strategy], scheme: Scheme = Scheme.GATHER) -> Plan:
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, devices, layers, scheme=scheme)


class Shared(nn.Module):
    """Three layers that read one value, and a sum that reads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        return self.q(h) * self.k(h) + self.v(h)  # type: ignore[no-any-return]


@cache
def shared() -> LayerGraph:
    return capture(Shared(), (torch.zeros(24, 16),))


def test_a_value_that_three_layers_read_in_one_layout_is_moved_and_priced_once() -> None:
    graph, cluster = shared(), cluster_preset("k20", 2)
    cut = Strategy(1, 2, "out-features", (0, 1))
    layers = {name: Strategy(2, devices=(0, 1)) for name in graph.layers} | dict.fromkeys(("q", "k", "v"), cut)
    plan = plan_of(graph, 2, layers)
    found = timeline_of(plan, graph, cluster)
    stem = [
        one for one in activities(found) if one.kind is Kind.TRANSFER and one.what == graph.layers["stem"].outputs[0]
    ]
    assert len(stem) == 2  # there and back
    assert found.step_s == pytest.approx(objective(plan, graph, cluster), rel=1e-9)


def test_where_three_layers_read_a_value_the_price_among_all_strategies_is_that_of_the_plan_alone() -> None:
    graph, cluster = shared(), cluster_preset("k20", 2)
    costs = RooflineCosts(graph, cluster, optimizer="momentum")
    every = {name: strategies(layer, graph.batch or 1, 2) for name, layer in graph.layers.items()}
    formulation, random = formulate(graph, cluster, costs, every), Random(0)
    for _ in range(50):
        layers = {name: random.choice(own) for name, own in every.items()}
        found = evaluate(formulation.problem, formulation.choice(layers)).objective
        assert found == pytest.approx(objective(plan_of(graph, 2, layers), graph, cluster), rel=1e-9)


@st.composite
def plans(draw: st.DrawFn, all_devices: bool) -> tuple[LayerGraph, int, dict[str, Strategy]]:
    """Any strategies of a small model, on all devices where there is one; readers of one value only there, as elsewhere
    what a device does out of order may hold up a transfer that several wait for."""
    models = [perceptron, classifier, shared] if all_devices else [perceptron, classifier]
    graph, devices = draw(st.sampled_from(models))(), draw(st.sampled_from([2, 3, 4]))
    layers = {}
    for name, layer in graph.layers.items():
        known = strategies(layer, graph.batch or 1, device_blocks(devices, everywhere=not all_devices))
        everywhere = [one for one in known if len(one.devices) == devices]
        layers[name] = draw(st.sampled_from(everywhere if all_devices and everywhere else known))
    return graph, devices, layers


@pytest.mark.full
@settings(max_examples=60)
@given(plans(all_devices=True), st.sampled_from([None, "10gbe"]))
def test_on_all_devices_the_clock_shows_the_objective(
    drawn: tuple[LayerGraph, int, dict[str, Strategy]], link: str | None
) -> None:
    """The same sums in another order: floats agree to rounding."""
    graph, devices, layers = drawn
    assume(all(len(own.devices) == devices for own in layers.values()))
    cluster, plan = cluster_preset("k20", devices, link), plan_of(graph, devices, layers)
    assert timeline_of(plan, graph, cluster).step_s == pytest.approx(objective(plan, graph, cluster), rel=1e-9)


@settings(max_examples=60)
@given(plans(all_devices=False), st.sampled_from(Scheme), st.sampled_from([None, True, False]))
def test_parts_add_up_on_every_device_and_no_plan_is_slower_than_its_sum(
    drawn: tuple[LayerGraph, int, dict[str, Strategy]], scheme: Scheme, one_f_one_b: bool | None
) -> None:
    graph, devices, layers = drawn
    cluster, plan = cluster_preset("k20", devices), plan_of(graph, devices, layers, scheme)
    try:
        passes = stages(graph, layers, scheme).passes
    except PlanError:
        return
    found = timeline_of(plan, graph, cluster, PassPolicy(one_f_one_b))
    for spent_s in map(found.spent_s, range(devices)):
        assert sum(spent_s.values()) == pytest.approx(found.step_s)
    assert all(seconds >= 0 for seconds in found.critical_s.values())
    if passes == 1:
        # What a device does out of order may hold up a transfer, as for a layer cut over devices 2 and 3 of four
        # between layers on device 0: 0.03 % there.
        assert found.step_s <= objective(plan, graph, cluster) * (1 + 1e-3)


def test_the_gradient_of_what_passes_give_a_loss_comes_back_once_per_pass() -> None:
    graph, cluster = classifier(), cluster_preset("k20", 2)
    layers = {name: Strategy(2, devices=(0, 1)) if layer.batch else Strategy() for name, layer in graph.layers.items()}
    plan = plan_of(graph, 2, layers | {"fc": Strategy(1, 2, "out-features", (0, 1))}, Scheme.INTERLEAVE)
    assert stages(graph, plan.layers, plan.scheme).of["loss.batch_mean"] is Stage.AFTER
    (rows,) = graph.layers["loss.row_losses"].outputs
    moved = [one for one in timeline_of(plan, graph, cluster).parts if one.kind is Kind.TRANSFER and one.what == rows]
    assert [one.number for one in moved] == [0, 1, 1, 0]


class Branches(nn.Module):
    """Two towers of equal work that meet at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
        self.right = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)  # type: ignore[no-any-return]


def test_branches_on_disjoint_devices_run_at_the_same_time() -> None:
    graph, cluster = capture(Branches(), (torch.zeros(1024, 512),)), cluster_preset("a100-80g-sxm", 2)
    own = {name: Strategy(devices=(1,) if name.startswith("right") else (0,)) for name in graph.layers}
    plan = plan_of(graph, 2, own)
    found = timeline_of(plan, graph, cluster)
    assert needs_simulation(plan, graph)
    assert found.step_s < 0.75 * objective(plan, graph, cluster)
    left, right = (
        [one for one in activities(found) if one.kind is Kind.FORWARD and one.what.startswith(side)]
        for side in ("left", "right")
    )
    assert left[0].start_s < right[-1].end_s
    assert right[0].start_s < left[-1].end_s


# ---- the paper's machine ---------------------------------------------------------------------------------------------


@cache
def alexnet(batch: int) -> LayerGraph:
    return capture(build(), (torch.zeros(8, 3, 224, 224),)) if batch == 8 else at_batch(alexnet(8), batch)


def hybrid(gpus: int, scheme: Scheme, period: int | None = None) -> Plan:
    """cuda-convnet2's: convolutions replicated, fc6, fc7 and fc8 cut by out-features."""
    graph, everywhere = alexnet(128 * gpus), tuple(range(gpus))
    behind = [*graph.layers][[*graph.layers].index("fc6") :]

    def strategy(layer: Layer) -> Strategy:
        if layer.name not in behind:
            return Strategy(gpus, devices=everywhere)
        axis = "out-features" if layer.kind == "linear" else "features"
        return Strategy(1, gpus, axis, everywhere, period if layer.parameters else None)

    layers = {name: strategy(layer) for name, layer in graph.layers.items()}
    return plan_of(graph, gpus, layers, scheme)


def on_paper(gpus: int, scheme: Scheme, period: int | None = None) -> Timeline:
    return timeline_of(hybrid(gpus, scheme, period), alexnet(128 * gpus), cluster_preset("k20", gpus))


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_passes_hide_transfers_on_the_papers_machine(gpus: int) -> None:
    gather, broadcast, interleave = (on_paper(gpus, scheme).exposed_transfer_s for scheme in Scheme)
    assert interleave < gather
    assert interleave < broadcast
    if gpus > 2:
        assert broadcast < gather
    else:
        # A lone sender takes as long for its samples as both do for theirs at once.
        assert broadcast == pytest.approx(gather, rel=0.02)


def test_what_is_exposed_of_an_interleaved_boundary_by_hand() -> None:
    """The first pass's samples on the way in and the last one's on the way back; and all that shards exchange."""
    gpus = 4
    gather, interleave = (on_paper(gpus, scheme) for scheme in (Scheme.GATHER, Scheme.INTERLEAVE))

    def taken_s(found: Timeline, value: str) -> list[float]:
        own = [one for one in activities(found) if one.kind is Kind.TRANSFER and one.what == value]
        return [one.end_s - one.start_s for one in own]

    whole = taken_s(gather, "flatten")
    parts = taken_s(interleave, "flatten")
    between = sum(sum(taken_s(interleave, value)) for value in ("dropout", "dropout_1"))
    last_delivery = taken_s(interleave, "linear_2")
    assert (len(whole), len(parts)) == (2, 2 * gpus)
    # 3 x 4.7 MB a lane, a quarter of it per pass; each with three messages of latency.
    each = 128 * 9216 * 4 * 3 / 6e9
    assert whole[0] == pytest.approx(each, rel=0.02)
    assert min(parts) == pytest.approx(each / gpus, rel=0.05)
    exposed = parts[0] + min(parts) + between
    assert interleave.exposed_transfer_s == pytest.approx(exposed, abs=2 * max(last_delivery) + 1e-9)


def test_compute_goes_on_beside_the_next_samples() -> None:
    found = on_paper(4, Scheme.INTERLEAVE)
    coming = [
        one for one in activities(found) if one.kind is Kind.TRANSFER and one.what == "flatten" and not one.computes
    ]
    assert len(coming) == 8
    first = [one for one in activities(found) if one.kind is Kind.FORWARD and one.what == "fc6"]
    assert [one.number for one in (*coming[:4], *first)] == [0, 1, 2, 3] * 2
    for number, (before, after) in enumerate(pairwise(coming[:4])):
        assert after.start_s == first[number].start_s >= before.end_s


def test_nothing_hidden_takes_longer() -> None:
    for gpus in (4, 8):
        graph, cluster = alexnet(128 * gpus), cluster_preset("k20", gpus)
        plan = hybrid(gpus, Scheme.BROADCAST)
        hidden, bare = (timeline_of(plan, graph, cluster, PassPolicy(prefetch=prefetch)) for prefetch in (True, False))
        direct = timeline_of(plan, graph, cluster, PassPolicy(prefetch=False, scatter_allgather=False))
        assert hidden.exposed_transfer_s < bare.exposed_transfer_s < direct.exposed_transfer_s


class Carrying(RooflineCosts):
    """Costs of processors that compute and carry: only a share of what travels hides behind compute."""

    def __init__(self, graph: LayerGraph, cluster: Cluster, overlap: float) -> None:
        super().__init__(graph, cluster)
        self.step = replace(self.step, overlap=overlap)


def test_processors_that_carry_hide_less() -> None:
    graph, cluster, plan = alexnet(512), cluster_preset("k20", 4), hybrid(4, Scheme.INTERLEAVE)
    found = [simulate(graph, cluster, Carrying(graph, cluster, share), plan) for share in (-0.5, 0.0, 0.5, 1.0)]
    exposed = [one.exposed_transfer_s for one in found]
    assert exposed[0] == exposed[1] > exposed[2] > exposed[3]
    bare = simulate(graph, cluster, Carrying(graph, cluster, 0.0), plan, PassPolicy(prefetch=False))
    assert exposed[1] == pytest.approx(bare.exposed_transfer_s)
    assert exposed[3] == pytest.approx(on_paper(4, Scheme.INTERLEAVE).exposed_transfer_s)


@pytest.mark.parametrize("scheme", IN_PASSES)
def test_updates_between_passes(scheme: Scheme) -> None:
    once, twice, each = (on_paper(4, scheme, period) for period in (4, 2, 1))

    def updates(found: Timeline) -> int:
        return len({(one.start_s, one.end_s) for one in activities(found) if one.kind is Kind.UPDATE})

    assert [updates(found) for found in (once, twice, each)] == [1, 2, 4]
    assert once.critical_s[Kind.UPDATE] < twice.critical_s[Kind.UPDATE]


def test_passes_have_smaller_products() -> None:
    """A layer's part in one of four passes is that of a batch a fourth as large."""
    gpus, scheme = 4, Scheme.INTERLEAVE
    graph, quarter = alexnet(512), alexnet(128)
    cluster = cluster_preset("k20", gpus)
    whole, small = RooflineCosts(graph, cluster), RooflineCosts(quarter, cluster)
    plan = hybrid(gpus, scheme)
    for name in stages(graph, plan.layers, scheme).layers(Stage.PASSES):
        one = whole.layer(graph.layers[name], plan.layers[name], gpus)
        other = small.layer(quarter.layers[name], plan.layers[name])
        assert replace(one, update_s=0.0) == replace(other, update_s=0.0)
