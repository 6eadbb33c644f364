"""Measuring parts: each distinct one once, in sweeps, kept as they are done; what cannot be measured is said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

from parplan.cost_models.costs import Source
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.measured import MeasuredCosts
from parplan.cost_models.measurement import measure_parts as measuring
from parplan.cost_models.measurement.in_context_timing import ProcessGroup
from parplan.cost_models.measurement.measure_parts import Outcome, measure_parts
from parplan.cost_models.measurement.runnable_parts import LayerPart, part_entry, part_signature
from parplan.cost_models.ops.op_calls import op_calls
from parplan.cost_models.profile.records import SessionProfile
from parplan.cost_models.profile.store import ProfileStore
from parplan.cost_models.roofline import RooflineCosts, part_of
from parplan.cost_models.sampling import Measurement, StoppingRule
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer
from parplan.plan import Strategy
from tests.cost_models import made_up
from tests.cost_models.networks import NETWORKS, network
from tests.cost_models.profiles import CPU as CONDITIONS
from tests.planner.graphs import classifier, perceptron

ONE, CPU = Strategy(), torch.device("cpu")
QUICK = StoppingRule(cap_s=0.0, least_runs=1)


def all_parts(graph: LayerGraph, devices: int) -> list[LocalLayer]:
    """The parts of every layer under every strategy that a planner could use."""
    return made_up.all_parts(graph, cluster_preset("cpu", devices))


def signatures(graph: LayerGraph, parts: Sequence[LocalLayer]) -> set[str]:
    return {part_signature(graph, part) for part in parts}


def measure(graph: LayerGraph, parts: Sequence[LocalLayer], profile: SessionProfile, **options: object) -> Outcome:
    costs = RooflineCosts(graph, cluster_preset("cpu", 4))
    return measure_parts(graph, costs, parts, CPU, profile, **{"stop": QUICK, **options})  # type: ignore[arg-type]


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sweeps that take no time, each part 3 s forward and 5 s back; how many parts each had."""
    sizes: list[int] = []

    def swept(
        pieces: Sequence[LayerPart], device: torch.device, stop: StoppingRule, ranks: ProcessGroup
    ) -> list[Measurement]:
        sizes.append(len(pieces))
        return [Measurement(3.0, 5.0, 0.01, 7, 1e-3) for _ in pieces]

    monkeypatch.setattr(measuring, "time_in_context", swept)
    return sizes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "resnet50"])
def test_every_part_of_every_network_is_measured_and_only_once(name: str) -> None:
    graph, profile = network(name).graph, SessionProfile()
    parts = all_parts(graph, 2)
    distinct = signatures(graph, parts)
    outcome = measure(graph, parts, profile)
    assert outcome == Outcome(len(distinct), 0, 0)
    assert {entry.signature for entry in profile.all()} == distinct
    assert len(distinct) < len(parts)
    assert measure(graph, parts, profile) == Outcome(0, len(distinct), 0)
    costs = MeasuredCosts(RooflineCosts(graph, cluster_preset("cpu", 2)), {2: profile}, "cpu")
    assert {costs.layer(part.layer, part.strategy).source for part in parts} == {Source.MEASURED}


def test_repeated_blocks_are_measured_once() -> None:
    blocks = [layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.ReLU())]
    graph, profile = capture(nn.Sequential(*blocks), (torch.randn(4, 8),)), SessionProfile()
    parts = all_parts(graph, 1)
    # the first layer passes no gradient on
    assert (measure(graph, parts, profile).measured, len(parts)) == (3, 10)


def test_a_part_is_the_same_whichever_devices_have_it() -> None:
    graph = perceptron()
    layer = next(iter(graph.layers.values()))
    one, other = Strategy(2, 1, None, (0, 1)), Strategy(2, 1, None, (3, 2))
    assert len(signatures(graph, [part_of(graph, layer, one), part_of(graph, layer, other)])) == 1
    assert len(signatures(graph, [part_of(graph, layer, one), part_of(graph, layer, ONE)])) == 2


def test_parts_of_one_family_differ_in_size_only() -> None:
    graph = perceptron()
    taken = Measurement(1.0, 1.0, 0.0, 1)
    families = {n: part_entry(graph, part_of(graph, layer, ONE), taken).family for n, layer in graph.layers.items()}
    linear = {family for name, family in families.items() if graph.layers[name].kind == "linear"}
    assert len(linear) == 1 < len(set(families.values()))


def test_each_sweep_has_every_layer_once_in_order_and_no_more_than_may_be_lost(
    sweeps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, profile = classifier(), SessionProfile()
    parts = all_parts(graph, 4)
    measure(graph, parts, profile)
    assert max(sweeps) <= len(graph.layers)
    assert sum(sweeps) == len(profile.all())
    monkeypatch.setattr(measuring, "MOST_PARTS", 2)
    del sweeps[:]
    measure(graph, parts, SessionProfile())
    assert max(sweeps) == 2


def test_the_order_of_a_sweep_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = perceptron()
    seen: list[list[torch.Size]] = []

    def swept(pieces: Sequence[LayerPart], *_: object) -> list[Measurement]:
        seen.append([piece.tensors[0].shape for piece in pieces])
        return [Measurement(1.0, 1.0, 0.0, 1) for _ in pieces]

    monkeypatch.setattr(measuring, "time_in_context", swept)
    measure(graph, [part_of(graph, layer, ONE) for layer in reversed(list(graph.layers.values()))], SessionProfile())
    assert seen == [[graph.values[layer.inputs[0]].shape for layer in graph.layers.values()]]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interrupt_loses_one_sweep_at_most_and_the_next_run_goes_on(
    store: ProfileStore, sweeps: list[int], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(measuring, "MOST_PARTS", 2)
    graph, profile = perceptron(), store.under(CONDITIONS)
    parts = all_parts(graph, 4)
    distinct = len(signatures(graph, parts))
    told: Iterator[int] = iter(range(100))

    def interrupted(done: int, total: int) -> None:
        if next(told) == after:
            raise KeyboardInterrupt

    costs = RooflineCosts(graph, cluster_preset("cpu", 4))
    with pytest.raises(KeyboardInterrupt):
        measure_parts(graph, costs, parts, CPU, profile, stop=QUICK, on_progress=interrupted)
    assert len(profile.all()) == sum(sweeps) > 2 * after - 2  # told before every sweep: all that were done are kept
    assert len(sweeps) == after
    kept = len(profile.all())
    assert measure_parts(graph, costs, parts, CPU, profile, stop=QUICK) == Outcome(distinct - kept, kept, 0)


def test_an_interrupt_in_a_sweep_keeps_the_ones_before(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MOST_PARTS", 2)
    graph, profile, calls = perceptron(), store.under(CONDITIONS), iter(range(9))

    def swept(pieces: Sequence[LayerPart], *_: object) -> list[Measurement]:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return [Measurement(1.0, 1.0, 0.0, 1) for _ in pieces]

    monkeypatch.setattr(measuring, "time_in_context", swept)
    costs = RooflineCosts(graph, cluster_preset("cpu", 4))
    with pytest.raises(KeyboardInterrupt):
        measure_parts(graph, costs, all_parts(graph, 4), CPU, profile, stop=QUICK)
    assert len(profile.all()) == 4


def test_time_runs_out_between_sweeps_and_what_is_left_is_said(
    sweeps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "MOST_PARTS", 2)
    clock = iter(range(100))
    monkeypatch.setattr(measuring, "perf_counter", lambda: next(clock))
    graph, profile = perceptron(), SessionProfile()
    told: list[tuple[int, int]] = []
    parts = all_parts(graph, 4)
    distinct = len(signatures(graph, parts))
    outcome = measure(graph, parts, profile, time_cap_s=3, on_progress=lambda *done: told.append(done))
    assert outcome == Outcome(4, 0, distinct - 4)
    assert told == [(0, distinct), (2, distinct), (4, distinct)]


def test_again_measures_what_is_known(sweeps: list[int]) -> None:
    graph, profile = perceptron(), SessionProfile()
    parts = [part_of(graph, layer, ONE) for layer in graph.layers.values()]
    first = measure(graph, parts, profile)
    assert measure(graph, parts, profile, again=True) == first


def test_what_does_not_run_is_said_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, profile = perceptron(), SessionProfile()
    parts = [part_of(graph, layer, ONE) for layer in graph.layers.values()]
    real = LayerPart.of

    def of(graph: LayerGraph, part: object, device: torch.device) -> LayerPart:
        piece = real(graph, part, device)  # type: ignore[arg-type]
        if part.layer is parts[1].layer:  # type: ignore[attr-defined]
            raise RuntimeError("no such kernel\nand a second line")
        return piece

    monkeypatch.setattr(LayerPart, "of", of)
    outcome = measure(graph, parts, profile)
    assert outcome == Outcome(3, 0, 0, (f"{parts[1].layer.name}: RuntimeError: no such kernel",))
    assert measure(graph, parts, profile).failed == outcome.failed  # not taken for measured


def test_what_does_not_fit_is_said_and_the_rest_is_measured(sweeps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = perceptron(48)
    parts = [part_of(graph, layer, ONE) for layer in graph.layers.values()]
    costs = RooflineCosts(graph, cluster_preset("cpu", 4))
    memories = [costs.memory(part.layer, ONE) for part in parts]
    sizes = sorted(m.weights_bytes + m.gradients_bytes + m.saved_bytes + 2 * m.transient_bytes for m in memories)
    monkeypatch.setattr(measuring, "device_memory_bytes", lambda device: sizes[-2] / measuring.ROOM)
    outcome = measure(graph, parts, SessionProfile())
    assert (outcome.measured, outcome.left) == (len(parts) - 1, 0)
    (reason,) = outcome.failed
    assert reason.startswith("2: to measure its part takes ")
    assert "MiB may be used" in reason
    # Two processes have half of it each.
    assert len(measure(graph, parts, SessionProfile(), sharing=2).failed) > 1


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    graph, profile = network("alexnet").graph, SessionProfile()
    parts = [part_of(graph, layer, ONE) for layer in graph.layers.values()]
    costs = RooflineCosts(graph, cluster_preset("h200", 2))
    outcome = measure_parts(graph, costs, parts, torch.device("cuda"), profile, stop=QUICK)
    assert outcome.failed == ()
    assert all(entry.measurement.forward_s > 0 for entry in profile.all() if entry.flops)


@pytest.mark.parametrize("name", ["alexnet", "perceptron"])
def test_an_entry_has_which_operands_need_a_gradient(name: str) -> None:
    graph = perceptron() if name == "perceptron" else network(name).graph
    for layer in graph.layers.values():
        part = part_of(graph, layer, ONE)
        needed = tuple(o.requires_grad for call in op_calls(graph, part) for o in (*call.inputs, *call.outputs))
        entry = part_entry(graph, part, Measurement(1.0, 1.0, 0.0, 1))
        assert entry.gradients == needed
