"""Plans made of measurements alone: by hand, by brute force, and through the command line."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from examples.export_layer_profile import format_layer_profile
from parplan import api
from parplan.cli.main import main
from parplan.cluster import Cluster, Device, Link
from parplan.cost_models.costs import Moments, Source
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.layer_profile.costs import ProfileCosts
from parplan.cost_models.layer_profile.graph import profile_graph, profile_notes
from parplan.cost_models.layer_profile.records import (
    AxisCut,
    Effect,
    LayerProfile,
    ProfiledLayer,
    ProfileEdge,
    Samples,
    Times,
)
from parplan.cost_models.layer_profile.text import load_layer_profile
from parplan.errors import ClusterError, InfeasiblePlan, ParplanError
from parplan.pins import read_pins
from parplan.plan import Plan, Strategy
from parplan.planner.decide import PlanRequest, decide
from parplan.planner.decision import Decision
from parplan.planner.search.device_groups import placed
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.pin_constraints import pinned
from parplan.planner.search_space.strategies import strategies
from parplan.planner.search_space.verifier import check
from parplan.report import units
from parplan.report.sections.proof import claim
from tests.every_case import every_case
from tests.planner.graphs import perceptron
from tests.planner.oracle import brute_force

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples/alexnet.profile"
GB = 10**9
OUT = AxisCut("out-features", 64, Effect.OUTPUT)
IN = AxisCut("in-features", 64, Effect.INPUT)
FEATURES = AxisCut("features", 64, Effect.BOTH)


def cluster(count: int, memory_bytes: int = 1000 * GB, latency_s: float = 0.0) -> Cluster:
    """Devices on a link of 1 GB/s."""
    device = Device("box", memory_bytes, {"fp32": 1e12}, 1e12, 0.0, "made up", estimated=False)
    return Cluster.of(device, count, (Link("wire", count, latency_s, 1e9, estimated=False),) if count > 1 else ())


def one(name: str, seconds: float, activation: float = 0, parameters: float = 0, *cuts: AxisCut) -> ProfiledLayer:
    """A layer that takes `seconds` forward and twice as many backward for 2 samples; sizes in GB."""
    times = (Times(2, seconds, 2 * seconds),)
    return ProfiledLayer(name, times, round(activation * GB), round(parameters * GB), cuts=cuts)


def profile(*layers: ProfiledLayer, edges: str = "", batch: int = 2) -> LayerProfile:
    """Layers and edges such as "ab bc"; a chain by default."""
    pairs = edges.split() if edges else [a.name + b.name for a, b in pairwise(layers)]
    return LayerProfile("net", batch, "a box", layers, tuple(ProfileEdge(pair[0], pair[1]) for pair in pairs))


def decided(of: LayerProfile, devices: Cluster, batch: int | None = None, optimizer: str = "sgd") -> Decision:
    graph = profile_graph(of, batch)
    request = PlanRequest(optimizer=optimizer, scheme="gather")  # what is worked out by hand runs in one pass
    return decide(graph, devices, ProfileCosts(of, graph, devices, optimizer), request)


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_a_chain_planned_by_hand() -> None:
    """Compute is halved on two devices: 3 + 3 s. Replicas of b would wait 20 s for its gradients, its shards need the
    half of a's output that is elsewhere (0.2 GB, both ways) and send a quarter of the result (0.01 GB, both ways).
    """
    decision = decided(profile(one("a", 2, 0.4), one("b", 2, 0.04, 20, OUT)), cluster(2))
    assert decision.proof.status == "OPTIMAL"
    assert decision.plan.layers == {
        "a": Strategy(2, 1, None, (0, 1)),
        "b": Strategy(1, 2, "out-features", (0, 1)),
    }
    assert decision.prediction.step_s == pytest.approx(3 + 3 + 2 * 0.2 + 2 * 0.01)
    rivals = {rival.name: rival.step_s for rival in decision.baselines}
    assert rivals["one device"] == pytest.approx(12)
    # 2 (n - 1) / n of 20 GB over the ring while a runs backward for 2 s.
    assert rivals["pure data parallel"] == pytest.approx(3 + 3 + 20 - 2)


@pytest.mark.full
def test_stages_by_hand(tmp_path: Path) -> None:
    """48 s of work on two devices, of which eight micro-batches are 3 s each. Sums of 200 GB would take 200 s; of two
    stages on each device, one after another, the second waits for one micro-batch of the first: 1.5 s.
    """
    layers = [one(name, 1, 0, 50) for name in "abcd"]
    loss = replace(one("e", 0), kind="loss")
    path = tmp_path / "net.profile"
    path.write_text(format_layer_profile(profile(*layers, loss)))
    found = api.analyze_profile(path, cluster=cluster(2), optimizer="sgd", batch=8)
    assert (found.plan.schedule, found.plan.micro_batches) == ("1f1b", 8)
    assert [found.plan.layers[name].devices for name in "abcde"] == [(0,), (1,), (0,), (1,), (1,)]
    assert found.prediction.step_s == pytest.approx(24 + 1.5)
    # Weights and gradients of two layers, beside a few bytes of the loss.
    assert found.prediction.memory_bytes == pytest.approx((200 * GB, 200 * GB), abs=100)
    rivals = {rival.name: rival for rival in found.baselines}
    assert rivals["one device"].step_s == pytest.approx(48)
    # In one micro-batch: what hides the sums is the backward of 12 s without that of the last layer.
    assert rivals["pure data parallel"].micro_batches == 1
    assert rivals["pure data parallel"].step_s == pytest.approx(24 + 200 - 12)
    alone = api.analyze_profile(path, cluster=cluster(2), optimizer="sgd", batch=8, stages=1)
    assert alone.prediction.step_s == pytest.approx(48)
    assert "plans with sharded state or in stages not at all" in claim(alone)


def test_stages_that_are_compared_in_vain_are_told(tmp_path: Path) -> None:
    """What is between the layers takes longer to move than all work: one device is the fastest of those compared."""
    path = tmp_path / "net.profile"
    loss = replace(one("c", 0), kind="loss")
    path.write_text(format_layer_profile(profile(one("a", 0.1, 40), one("b", 0.1, 0.001, 20), loss)))
    found = api.analyze_profile(path, cluster=cluster(2), optimizer="sgd", batch=8)
    assert found.prediction.step_s == pytest.approx(4 * 0.6)
    assert "plans with sharded state not at all, and plans in stages by one cut each" in claim(found)


def test_branches_that_only_pass_on() -> None:
    """Parts of a result, as PipeDream's profiles have them: they take no time, on no device."""
    layers = [one("a", 1, 2), *(one(name, 0, 0.5) for name in "bcde"), one("f", 1)]
    of, devices = profile(*layers, edges="ab ac ad ae bf cf df ef"), cluster(8)
    graph = profile_graph(of)
    found = placed([(name,) for name in "bcde"], graph, devices, ProfileCosts(of, graph, devices), every=False)
    assert found
    for groups in (dict(one) for one in found):
        assert groups.keys() == {(name,) for name in "bcde"}
        assert all(a == b or not {*a} & {*b} for a, b in combinations(groups.values(), 2))


def test_what_is_slow_to_move_stays_on_one_device() -> None:
    decision = decided(profile(one("a", 0.1, 40), one("b", 0.1, 0.001, 20, OUT)), cluster(4))
    assert decision.advice.startswith("Use one device")


def test_parts_along_one_dimension_pass_on_and_along_another_do_not() -> None:
    """b takes its half of every sample as a leaves it, if both mean the same dimension."""
    alike = profile(one("a", 2, 40, 40, OUT), one("b", 2, 0, 40, IN))
    unlike = profile(one("a", 2, 40, 40, OUT), one("b", 2, 0, 40, replace(IN, takes=2)))
    costs = [decided(of, cluster(2)).prediction for of in (alike, unlike)]
    assert costs[0].step_s == pytest.approx(6)
    assert costs[0].transfer_s == 0
    assert costs[1].step_s == pytest.approx(12)  # on one device; a transfer would cost 10 s each way


def random_dag(seed: int) -> LayerProfile:
    """Four layers with branches, joins and random figures."""
    rng = random.Random(seed)
    layers = [
        ProfiledLayer(
            name,
            (Times(1, rng.random(), rng.random()), Times(4, 2 + rng.random(), 2 + rng.random())),
            rng.randrange(GB),
            rng.choice((0, rng.randrange(GB))),
            samples=rng.choice((Samples.SPLIT, Samples.SPLIT, Samples.TOGETHER, Samples.NONE)),
            cuts=tuple(rng.sample((OUT, IN, FEATURES), rng.randrange(3))),
            kind=rng.choice(("linear", "loss")) if name == "d" else "linear",
            update_s=rng.random(),
        )
        for name in "abcd"
    ]
    pairs = [(a, b) for a, b in combinations(layers, 2) if rng.random() < 0.7]
    edges = tuple(ProfileEdge(a.name, b.name, rng.choice((None, a.activation_bytes // 2))) for a, b in pairs)
    return LayerProfile("net", 4, "a box", tuple(layers), edges)


@pytest.mark.full
@every_case("devices", [2, 3])
@every_case("seed", range(6))
def test_no_combination_of_strategies_is_faster(seed: int, devices: int) -> None:
    of, on = random_dag(seed), cluster(devices, latency_s=0.01)
    graph = profile_graph(of, 6)
    costs = ProfileCosts(of, graph, on, "adam")
    candidates = {name: strategies(layer, 6, devices) for name, layer in graph.layers.items()}
    best = brute_force(formulate(graph, on, costs, candidates).problem)
    decision = decide(graph, on, costs, PlanRequest(tolerance=0))
    assert decision.proof.bound <= decision.prediction.step_s <= best.objective * (1 + 1e-6)  # of the first devices
    check(decision.plan, graph)


def test_strict_rules_hold_at_joins() -> None:
    of, on = random_dag(1), cluster(4)
    graph = profile_graph(of, 12)
    decision = decide(graph, on, ProfileCosts(of, graph, on), PlanRequest(rules="strict"))
    check(decision.plan, graph)
    assert all(not layer.bends for layer in decision.layers)


def test_layers_run_in_the_order_of_the_edges() -> None:
    of = profile(one("a", 1), one("b", 1), one("c", 1), one("d", 1), edges="dc ca cb")
    assert list(profile_graph(of).layers) == ["d", "c", "a", "b"]


def test_a_plan_that_does_not_fit_says_so() -> None:
    with pytest.raises(InfeasiblePlan, match="remedies"):
        decided(profile(one("a", 1, 1, 20)), cluster(2, memory_bytes=GB))


# ---- times ----------------------------------------------------------------------------------------------------------

MEASURED = ProfiledLayer("a", (Times(4, 1, 2), Times(16, 3, 8)), 0, 0, cuts=(OUT,), update_s=0.5)
SHARES = [  # batch, replicas -> forward, backward, source
    (16, 1, 3, 8, Source.SHIPPED),
    (16, 4, 1, 2, Source.SHIPPED),
    (16, 2, 1 + 2 / 3, 4, Source.INTERPOLATED),
    (16, 8, 0.5, 1, Source.ESTIMATED),
    (32, 1, 6, 16, Source.ESTIMATED),
    (32, 2, 3, 8, Source.SHIPPED),
    (10, 1, 2, 5, Source.INTERPOLATED),
]


@pytest.mark.parametrize(("batch", "replicas", "forward_s", "backward_s", "source"), SHARES)
def test_times_of_replicas(batch: int, replicas: int, forward_s: float, backward_s: float, source: Source) -> None:
    of = LayerProfile("net", 16, "a box", (MEASURED,))
    graph = profile_graph(of, batch)
    strategy = Strategy(replicas, devices=tuple(range(replicas)))
    cost = ProfileCosts(of, graph, cluster(8)).layer(graph.layers["a"], strategy)
    assert cost.forward_s == pytest.approx(forward_s)
    assert cost.backward_s == pytest.approx(backward_s)
    assert (cost.source, cost.update_s) == (source, 0.5)


def test_shards_divide_times_and_are_estimates() -> None:
    of = LayerProfile("net", 16, "a box", (MEASURED,))
    graph = profile_graph(of)
    cost = ProfileCosts(of, graph, cluster(4)).layer(graph.layers["a"], Strategy(1, 4, "out-features", (0, 1, 2, 3)))
    assert (cost.forward_s, cost.backward_s, cost.update_s, cost.source) == (0.75, 2, 0.125, Source.ESTIMATED)


def test_what_no_sample_reaches_costs_the_same_everywhere() -> None:
    mask = ProfiledLayer("m", (Times(2, 1, 2),), GB, 0, samples=Samples.NONE)
    of = LayerProfile("net", 2, "a box", (mask, one("a", 2)), (ProfileEdge("m", "a"),))
    graph = profile_graph(of, 8)
    costs = ProfileCosts(of, graph, cluster(2))
    two = costs.layer(graph.layers["m"], Strategy(2, devices=(0, 1)))
    assert (two.forward_s, two.backward_s, two.source) == (1, 2, Source.SHIPPED)
    assert graph.values["m"].nbytes == GB
    assert graph.layers["a"].layout("m", Strategy(2, devices=(0, 1))).batch_dim is None


def test_samples_that_depend_on_each_other_have_one_replica_and_a_loss_is_never_cut() -> None:
    together = replace(one("a", 2, 1, 0, OUT), samples=Samples.TOGETHER)
    loss = replace(one("b", 2, 1, 0, OUT), kind="loss")
    graph = profile_graph(profile(together, loss))
    found = {name: {(s.replicas, s.shards) for s in strategies(layer, 2, 2)} for name, layer in graph.layers.items()}
    assert found == {"a": {(1, 1), (1, 2)}, "b": {(1, 1), (2, 1)}}


def test_a_layer_of_a_profile_is_pinned_by_name() -> None:
    graph, cluster = profile_graph(profile(one("a", 2, 1, 0, OUT), one("b", 2, 1, 0))), cluster_preset("k20", 2)
    found = pinned(read_pins(["a=shards:2"]), graph, cluster)
    assert {strategy.shards for strategy in found.allowed["a"]} == {2}


def test_sizes_follow_the_batch_and_parameters_do_not() -> None:
    of = profile(one("a", 1, 1, 3), one("b", 1, 1))
    graph = profile_graph(of, 5)
    assert graph.values["a"].nbytes == 2.5 * GB
    assert graph.parameter_count == 750_000_000
    assert profile_graph(replace(of, precision="bf16")).parameter_count == 1_500_000_000


def test_an_edge_may_carry_a_part() -> None:
    edges = (ProfileEdge("a", "b", GB), ProfileEdge("a", "c"))
    graph = profile_graph(LayerProfile("net", 2, "a box", (one("a", 1, 4), one("b", 1), one("c", 1)), edges))
    carried = {(a, b): graph.values[values[0]].nbytes for a, b, values in graph.digraph.edges(data="values")}
    assert carried == {("a", "b"): GB, ("a", "c"): 4 * GB}


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_memory_by_hand() -> None:
    of = profile(one("a", 1, 4), one("b", 1, 2, 8, OUT))
    graph = profile_graph(of)
    costs, layer, moments = ProfileCosts(of, graph, cluster(2), "adam"), graph.layers["b"], Moments(2)
    whole = costs.memory(layer, Strategy())
    figures = (whole.weights_bytes, whole.gradients_bytes, whole.optimizer_bytes, whole.saved_bytes)
    assert figures == (8 * GB, 8 * GB, 16 * GB, 2 * GB)
    assert whole.transient_bytes == 6 * GB
    halves = costs.memory(layer, Strategy(2, devices=(0, 1)))
    assert (halves.weights_bytes, halves.saved_bytes, halves.transient_bytes) == (8 * GB, GB, 3 * GB)
    # A shard has half the weights and half the output, and keeps the input that was gathered for it.
    shards = costs.memory(layer, Strategy(1, 2, "out-features", (0, 1)))
    assert (shards.resident_bytes, shards.saved_bytes) == (16 * GB, (1 + 4) * GB)
    at_backward = sum(h.nbytes for h in shards.held if h.start <= moments.backward(1) < h.end)
    assert at_backward == (16 + 5 + 5) * GB


def test_saved_bytes_are_those_of_the_file() -> None:
    of = profile(replace(one("a", 1, 4), saved_bytes=6 * GB))
    graph = profile_graph(of, 4)
    costs = ProfileCosts(of, graph, cluster(2))
    assert costs.memory(graph.layers["a"], Strategy()).saved_bytes == 12 * GB
    assert costs.memory(graph.layers["a"], Strategy(2, devices=(0, 1))).saved_bytes == 6 * GB


@pytest.mark.parametrize(("optimizer", "resident"), [("sgd", 2), ("momentum", 3), ("adam", 4)])
def test_the_optimizer_counts(optimizer: str, resident: int) -> None:
    decision = decided(profile(one("a", 1, 0, 1)), cluster(1), optimizer=optimizer)
    assert decision.layers[0].memory_bytes == resident * GB


def test_unknown_optimizers_and_several_kinds_of_devices_are_refused() -> None:
    of = profile(one("a", 1))
    with pytest.raises(ParplanError, match="optimizer 'lion'"):
        ProfileCosts(of, profile_graph(of), cluster(1), "lion")
    box = cluster(2)
    mixed = replace(box, devices=(box.devices[0], replace(box.devices[1], kind="other")))
    with pytest.raises(ClusterError, match="a layer profile is of one kind of device"):
        ProfileCosts(of, profile_graph(of), mixed)


# ---- what the reader is told ----------------------------------------------------------------------------------------


def test_notes_say_what_was_not_measured() -> None:
    of = profile(one("a", 1), replace(one("b", 1), times=(Times(1, 1, 1), Times(2, 1, 1))), one("c", 1), edges="ab")
    said = profile_notes(of, "x.profile", 2, cluster(1))
    assert said == (
        "Times of layers are from x.profile, measured elsewhere: on a box, batch 2. Of box only memory and links "
        "count.",
        "No edge leads to or from c: nothing is moved there.",
    )
    assert profile_notes(of, "x.profile", 2, cluster(2))[1].startswith(
        "2 of 3 layers have no times for as few samples as 2 replicas have (1)"
    )
    assert profile_notes(of, "x.profile", 4, cluster(1))[1].startswith("The layers have no times for 4 samples")


def test_nothing_takes_no_time() -> None:
    decision = decided(profile(one("a", 0), one("b", 0)), cluster(2))
    assert decision.prediction.step_s == 0


# ---- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.full
def test_sixteen_devices_from_a_file(
    wide: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    out, facts = str(tmp_path / "plan.json"), tmp_path / "facts.json"
    words = ["analyze", "--profile-graph", "examples/alexnet.profile", "--gpus", "16", "--gpu", "cpu"]
    words += ["--link", "10gbe", "--tolerance", "0"]
    assert main([*words, "--out", out, "--json", str(facts)]) == 0
    text, errors = capsys.readouterr()
    flat = " ".join(text.split())
    assert errors == ""
    assert max(map(len, text.splitlines()[:-1])) <= 80
    assert "Times of layers are from examples/alexnet.profile, measured elsewhere: on one thread of an x86" in flat
    assert "AlexNet (layer profile): 61,100,840 parameters, batch 64, fp32, adam 16 x cpu, 10gbe" in flat
    assert "OPTIMAL: no plan of this model that has its layers on the first devices is faster" in flat
    assert "profile measured elsewhere, as examples/alexnet.profile gives them" in flat
    assert "roofline" not in flat
    assert "--measure" not in flat
    assert flat.endswith("for reading: a profile has no model that could run it.")
    report = json.loads(facts.read_text())
    assert {layer["source"] for layer in report["layers"]} <= {source.value for source in Source}
    assert any("measured elsewhere" in note for note in report["notes"])
    # The plan is reviewed with the profile, and is no model's.
    assert main([*words[:3], "--plan", out, *words[5:]]) == 0
    reviewed = " ".join(capsys.readouterr().out.split())
    step_s = report["predicted"]["step_s"]
    assert f"step {units.step(step_s).text(step_s)}" in reviewed
    assert main(["verify", "examples/alexnet.py", "--plan", out]) == 2
    assert "the plan is for AlexNet (layer profile)" in capsys.readouterr().err


def test_an_edited_plan_is_priced(tmp_path: Path) -> None:
    of = profile(one("a", 2, 0.4), one("b", 2, 0.04, 20, OUT))
    path, file = tmp_path / "net.profile", tmp_path / "plan.json"
    path.write_text(format_layer_profile(of))
    best = api.analyze_profile(path, gpus=2, gpu="k20", memory_bytes=1000 * GB)
    edited = best.plan.with_layers({"b": Strategy()})
    file.write_text(edited.to_json())
    priced = api.analyze_profile(path, gpu="k20", memory_bytes=1000 * GB, plan=file)
    assert priced.plan == edited
    assert priced.prediction.step_s > best.prediction.step_s
    assert priced.times_from == str(path)
    wrong = edited.with_layers({"a": Strategy(1, 2, "out-features", (0, 1))})
    with pytest.raises(ParplanError, match="R5"):
        api.analyze_profile(path, gpu="k20", plan=wrong)


def test_another_batch(wide: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["analyze", "--profile-graph", str(EXAMPLE), "--gpus", "4", "--gpu", "v100", "--batch", "256"]
    assert main([*words, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["batch"] == 256
    one_device = next(rival for rival in report["baselines"] if rival["name"] == "one device")
    layers = load_layer_profile(EXAMPLE).layers
    whole = sum(layer.times[-1].forward_s + layer.times[-1].backward_s for layer in layers)
    assert one_device["step_s"] == pytest.approx(4 * whole)  # in proportion, beyond the largest batch measured
    assert any("no times for 256 samples" in note for note in report["notes"])


REFUSED = [
    (["net.py"], "a model (net.py) and --profile-graph x.profile are both given; leave out one"),
    (["--measure"], "--measure needs a model, and --profile-graph x.profile has none; leave out --measure"),
    (["--input", "3x4"], "--input needs a model"),
    (["--precision", "bf16"], "--precision needs a model"),
    ([], "cannot read the profile x.profile: No such file or directory"),
]


@pytest.mark.parametrize(("more", "words"), REFUSED)
def test_refusals(
    more: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", "--profile-graph", "x.profile", *more]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"parplan: error: {words}")


def test_a_plan_of_a_profile_is_not_the_models(tmp_path: Path) -> None:
    plan = decided(load_layer_profile(EXAMPLE), cluster(2)).plan
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ParplanError, match="another model"):
        check(plan, perceptron())
