"""Pins against brute force: of all legal plans, those that keep the pins (read in another way), the fastest."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
import torch
from torch import nn

from parplan.cluster import Cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import InfeasiblePlan, PinError, RuleError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.stages import stages
from parplan.pins import Pin, parse_pin, read_pins
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.decide import PlanRequest, decide
from parplan.planner.decision import Decision, Pins
from parplan.planner.search_space.formulation import InfeasibleShape, formulate
from parplan.planner.search_space.pin_constraints import pinned
from parplan.planner.search_space.pin_search import candidates, masked, pin_questions
from parplan.planner.search_space.shape import Shape
from parplan.planner.search_space.strategies import strategies
from parplan.planner.search_space.verifier import check
from parplan.planner.solver.solve import solve
from tests.planner.graphs import classifier, perceptron
from tests.planner.oracle import brute_force

SLOW = "k20"


class Branches(nn.Module):
    """Two branches that meet: `join` takes `left` first."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(24, 12)
        self.right = nn.Linear(24, 12)
        self.out = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.left(x) + self.right(x))
        return y


@cache
def branches() -> LayerGraph:
    return capture(Branches(), (torch.randn(12, 24),))


def decided(graph: LayerGraph, cluster: Cluster, *pins: str, rules: str = "default") -> Decision:
    request = PlanRequest(pins=read_pins(pins), rules=rules, tolerance=0.0, started_ranks=True)
    return decide(graph, cluster, RooflineCosts(graph, cluster), request)


def prices(decision: Decision) -> Pins:
    assert decision.pins is not None
    return decision.pins


# ---- the slow truth -------------------------------------------------------------------------------------------------


def say(pins: Sequence[Pin], layer: str, word: str) -> object:
    """What the last pin that says anything says."""
    said = [getattr(pin, word) for pin in pins if pin.matches(layer) and getattr(pin, word) is not None]
    return said[-1] if said else None


def allowed(graph: LayerGraph, pins: Sequence[Pin], devices: int) -> dict[str, list[Strategy]]:
    """Every legal strategy of every layer that its pins and its first input's pinned devices leave."""
    places: dict[str, tuple[int, ...]] = {}
    found: dict[str, list[Strategy]] = {}
    blocks = [block for size in range(1, devices + 1) for block in combinations(range(devices), size)]
    blocks += [pin.devices for pin in pins if pin.devices is not None and pin.devices not in blocks]
    for name, layer in graph.layers.items():
        own = say(pins, name, "devices")
        sources = [graph.producer[value] for value in layer.inputs if value in graph.producer]
        given = places.get(sources[0], ()) if sources else ()
        every = strategies(layer, 12, blocks + [given[:k] for k in range(1, len(given) + 1)])
        legal = [s for s in dict.fromkeys(every) if keeps(s, pins, name)]
        if own is not None:
            legal = [s for s in legal if s.devices == own]
            places[name] = own  # type: ignore[assignment]
        elif given:
            legal = [s for s in legal if s.devices == given[: len(s.devices)]]
            most = max((len(s.devices) for s in legal), default=0)
            legal = [s for s in legal if len(s.devices) == most]
            places[name] = given
        found[name] = legal
    return found


def keeps(strategy: Strategy, pins: Sequence[Pin], layer: str) -> bool:
    words = [(word, say(pins, layer, word)) for word in ("replicas", "shards", "axis")]
    return all(value in (None, getattr(strategy, word)) for word, value in words)


def best_by_trying(graph: LayerGraph, cluster: Cluster, pins: Sequence[Pin], rules: str = "default") -> float:
    """T of the fastest plan in one pass on the first devices that keeps the pins; inf if there is none."""
    options, costs = allowed(graph, pins, cluster.count), RooflineCosts(graph, cluster)
    return brute_force(formulate(graph, cluster, costs, options, strict=rules == "strict").problem).objective


def best_in_passes(graph: LayerGraph, cluster: Cluster, pins: Sequence[Pin]) -> float:
    """T of the fastest plan in so many interleaved passes that all update periods divide them; inf if there is none."""
    options, costs, best_s = allowed(graph, pins, cluster.count), RooflineCosts(graph, cluster), np.inf
    for most, few in product(range(1, cluster.count + 1), repeat=2):
        if most > few and most % few == 0 and not any(most // few % period for period in periods_of(graph, pins)):
            # Pinned blocks need not have the first device, so every one is followed.
            shape = Shape(Scheme.INTERLEAVE, most, few, tuple(range(cluster.count)))
            with suppress(InfeasibleShape):
                problem = formulate(graph, cluster, costs, options, shape=shape, far_s=1.0).problem
                best_s = min(best_s, brute_force(problem).objective)
    return best_s


def periods_of(graph: LayerGraph, pins: Sequence[Pin]) -> set[int]:
    """The update periods that pins ask for."""
    weighted = [name for name, layer in graph.layers.items() if layer.parameters]
    return {period for name in weighted if (period := say(pins, name, "update_period")) is not None}  # type: ignore[misc]


def drawn(graph: LayerGraph, devices: int, seed: int) -> list[Pin]:
    """One to three random pins, legal or not."""
    generator = random.Random(seed)
    patterns = [*graph.layers, "*", "[12]", "l*"]
    patterns = [pattern for pattern in patterns if any(Pin(pattern).matches(name) for name in graph.layers)]
    return [_drawn(generator, generator.choice(patterns), graph, devices) for _ in range(seed % 3 + 1)]


def _drawn(generator: random.Random, pattern: str, graph: LayerGraph, devices: int) -> Pin:
    """One pin; update periods are for layers with weights."""
    weighted = any(Pin(pattern).matches(name) for name, layer in graph.layers.items() if layer.parameters)
    pin = parse_pin(f"{pattern}={_words(generator, devices)}", "drawn")
    return pin if weighted else replace(pin, update_period=None)


def _words(generator: random.Random, devices: int) -> str:
    order = generator.sample(range(devices), generator.randint(1, devices))
    words = {
        f"replicas:{generator.randint(1, devices)}": 0.3,
        f"shards:{generator.randint(1, devices)}": 0.3,
        f"axis:{generator.choice(['out-features', 'in-features'])}": 0.1,
        f"gpu:{','.join(map(str, order))}": 0.5,
        f"update:{generator.randint(1, devices)}": 0.2,
    }
    chosen = [word for word, chance in words.items() if generator.random() < chance]
    return " ".join(chosen) if any(word[0] != "u" for word in chosen) else " ".join(["replicas:1", *chosen])


def whole(options: Mapping[str, Sequence[Strategy]]) -> dict[str, list[Strategy]]:
    """Strategies with state that is not in slices, as brute force tries them."""
    return {name: [one for one in own if one.state == "replicated"] for name, own in options.items()}


def seeds() -> Iterator[tuple[str, int, int]]:
    yield from (("perceptron", 2, seed) for seed in range(30))
    yield from (("branches", 2, seed) for seed in range(100, 130))
    yield from (("branches", 3, seed) for seed in (205, 208, 211))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("model", "devices", "seed"), list(seeds()))
def test_no_legal_plan_that_keeps_the_pins_is_faster(model: str, devices: int, seed: int) -> None:
    graph, cluster = {"perceptron": perceptron, "branches": branches}[model](), cluster_preset(SLOW, devices)
    pins = drawn(graph, devices, seed)
    alone = [name for name, left in allowed(graph, pins, devices).items() if not left]
    if alone:
        with pytest.raises(PinError, match=r"\(R[15678]\)"):
            pinned(pins, graph, cluster)
        return
    costs, asked = RooflineCosts(graph, cluster), pin_questions(pins, graph, cluster)
    every = whole(candidates(asked, graph, cluster, everywhere=False))
    problem = formulate(graph, cluster, costs, {**every, **whole(asked.whole.allowed)}, far_s=1.0).problem
    expected = best_by_trying(graph, cluster, pins)
    if periods_of(graph, pins) - {1}:
        expected = best_in_passes(graph, cluster, pins)
        request = PlanRequest(pins=tuple(pins), tolerance=0.0, started_ranks=True, price_pins=False)
        if expected < np.inf:
            found = decide(graph, cluster, costs, request)
            assert found.proof.bound <= expected * (1 + 1e-6)
            assert found.proof.objective <= expected * (1 + 1e-6)  # T says too much of some plans in passes
        else:
            with pytest.raises((InfeasiblePlan, PinError)):
                decide(graph, cluster, costs, request)
        return
    assert solve(problem).objective == pytest.approx(expected, rel=1e-6)
    for part in asked.parts.values() if devices == 2 else ():
        others = list(part.pins)
        assert len(others) == len(pins) - 1
        without = best_by_trying(graph, cluster, others)
        problem = formulate(graph, cluster, costs, {**every, **whole(part.allowed)}, far_s=1.0).problem
        assert solve(problem).objective == pytest.approx(without, rel=1e-6)
    for group in asked.refused:
        left = [pin for pin in pins if not any(pin is one for one in group.pins)]
        assert not all(allowed(graph, left, devices).values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "devices", "seed"), [case for case in seeds() if case[2] % 3 == 0])
def test_plans_keep_their_pins(model: str, devices: int, seed: int) -> None:
    graph, cluster = {"perceptron": perceptron, "branches": branches}[model](), cluster_preset(SLOW, devices)
    pins = drawn(graph, devices, seed)
    left = allowed(graph, pins, devices)
    request = PlanRequest(pins=tuple(pins), tolerance=0.0, started_ranks=True)
    if not all(left.values()) or np.isinf(best_by_trying(graph, cluster, pins)):
        with pytest.raises((PinError, InfeasiblePlan)):
            decide(graph, cluster, RooflineCosts(graph, cluster), request)
        return
    decision = decide(graph, cluster, RooflineCosts(graph, cluster), request)
    check(decision.plan, graph)
    for name, strategy in decision.plan.layers.items():
        assert replace(strategy, update_period=None) in left[name]
        assert strategy.update_period == (say(pins, name, "update_period") if graph.layers[name].parameters else None)
    free = decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest(tolerance=0.0, started_ranks=True))
    found = prices(decision)
    assert found.step_s == decision.prediction.step_s
    assert found.free_s == pytest.approx(free.prediction.step_s, rel=1e-6)
    assert [price.pin for price in found.each] == [pin.describe() for pin in pins]
    assert all(bool(price.why_not) == (price.without_s is None) for price in found.each)


def test_the_draw_covers_what_can_happen() -> None:
    """Legal, refused and inherited pins, and pins that combine, are all among the seeds."""
    kinds = set()
    for model, devices, seed in seeds():
        graph = {"perceptron": perceptron, "branches": branches}[model]()
        pins = drawn(graph, devices, seed)
        legal = all(allowed(graph, pins, devices).values())
        kinds.add("legal" if legal else "refused")
        if legal:
            found = pinned(pins, graph, cluster_preset(SLOW, devices)).layers.values()
            kinds |= {"inherited" for pin in found if pin.inherited} | {"several" for pin in found if len(pin.pins) > 1}
    assert kinds == {"legal", "refused", "inherited", "several"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pins", [["0=replicas:2"], ["3=shards:2"], ["0=gpu:1", "3=gpu:0,1"]])
def test_strict_rules_hold_beside_pins(pins: list[str]) -> None:
    graph, cluster = perceptron(), cluster_preset(SLOW, 2)
    costs, asked = RooflineCosts(graph, cluster), pin_questions(read_pins(pins), graph, cluster)
    options = candidates(asked, graph, cluster, everywhere=False)
    found = solve(masked(formulate(graph, cluster, costs, options, strict=True), asked.whole))
    expected = best_by_trying(graph, cluster, read_pins(pins), "strict")
    assert found.objective == pytest.approx(expected, rel=1e-6)
    check(decided(graph, cluster, *pins, rules="strict").plan, graph)


def test_layers_on_as_many_devices_as_can_share_them_and_where_pins_say() -> None:
    graph, cluster = perceptron(), cluster_preset(SLOW, 4)
    asked = pin_questions(read_pins(["0=gpu:0,1"]), graph, cluster)
    every, widest = (whole(candidates(asked, graph, cluster, False, widest=only)) for only in (False, True))
    for name, own in every.items():
        most = max(len(one.devices) for one in own)
        kept = {one for one in own if len(one.devices) in (1, most)} | ({*asked.whole.allowed.get(name, ())} & {*own})
        assert kept == {*widest[name]} <= {*own}


# ---- inheritance and combination ------------------------------------------------------------------------------------


def devices_of(decision: Decision) -> dict[str, tuple[int, ...]]:
    return {name: strategy.devices for name, strategy in decision.plan.layers.items()}


@pytest.mark.full
def test_devices_are_inherited_from_the_first_input_until_pinned_otherwise() -> None:
    found = devices_of(decided(branches(), cluster_preset(SLOW, 4), "left=gpu:3,1", "right=gpu:2", "out=gpu:0,2"))
    assert found == {"left": (3, 1), "right": (2,), "add": (3, 1), "out": (0, 2)}
    found = devices_of(decided(branches(), cluster_preset(SLOW, 4), "left=gpu:2,3"))
    assert (found["left"], found["add"], found["out"]) == ((2, 3),) * 3


@pytest.mark.full
def test_only_pinned_devices_are_inherited() -> None:
    """A layer pinned to some replicas leaves the one after it free."""
    free, cluster = decided(perceptron(), cluster_preset(SLOW, 4)), cluster_preset(SLOW, 4)
    found = pinned(read_pins(["0=replicas:2"]), perceptron(), cluster)
    assert set(found.layers) == {"0"}
    assert free.pins is None


@pytest.mark.full
def test_a_loss_takes_over_the_first_of_several_devices() -> None:
    decision = decided(classifier(), cluster_preset(SLOW, 4), "fc=gpu:2,3")
    assert decision.plan.layers["loss"].devices == (2, 3)
    assert decision.plan.layers["loss.batch_mean"].devices == (2,)
    mean = next(layer for layer in decision.layers if layer.name == "loss.batch_mean")
    assert mean.pinned == "on the devices of its first input, fc=gpu:2,3"


@pytest.mark.full
def test_a_pin_of_a_loss_is_of_its_rows_and_not_of_their_mean() -> None:
    plan = decided(classifier(), cluster_preset(SLOW, 4), "loss=shards:2 replicas:2").plan
    assert (plan.layers["loss"].replicas, plan.layers["loss"].axis) == (2, "vocabulary")
    assert len(plan.layers["loss.batch_mean"].devices) == 1
    with pytest.raises(PinError, match=r"loss\.batch_mean: its samples depend on each other"):
        decided(classifier(), cluster_preset(SLOW, 4), "loss.batch_mean=replicas:2")


def test_later_pins_win_and_the_rest_combines() -> None:
    cluster = cluster_preset(SLOW, 4)
    found = pinned(
        read_pins(["*=gpu:0,1,2,3", "0=replicas:4", "0=replicas:2 shards:2", "2=gpu:1"]), perceptron(), cluster
    )
    one = found.layers["0"]
    assert (one.replicas, one.shards, one.devices) == (2, 2, (0, 1, 2, 3))
    assert [pin.describe() for pin in one.pins] == ["*=gpu:0,1,2,3", "0=replicas:2 shards:2"]
    assert found.layers["2"].devices == (1,)
    assert found.layers["3"].devices == (0, 1, 2, 3)


def test_a_later_single_shard_takes_back_an_axis_and_the_other_way_round() -> None:
    cluster = cluster_preset(SLOW, 2)
    cut = "0=shards:2 axis:in-features"
    assert pinned(read_pins([cut, "0=shards:1"]), perceptron(), cluster).layers["0"].axis is None
    found = pinned(read_pins(["0=shards:1", "0=axis:in-features"]), perceptron(), cluster)
    assert {s.axis for s in found.allowed["0"]} == {"in-features"}


def test_a_pin_without_a_split_leaves_it_to_the_solver() -> None:
    found = pinned(read_pins(["0=gpu:3,1"]), perceptron(), cluster_preset(SLOW, 4)).allowed["0"]
    assert {(s.replicas, s.shards, s.axis) for s in found} == {
        (2, 1, None),
        (1, 2, "out-features"),
        (1, 2, "in-features"),
    }
    assert {s.devices for s in found} == {(3, 1)}


def test_an_update_period_is_for_layers_with_weights() -> None:
    decision = decided(perceptron(), cluster_preset(SLOW, 2), "*=update:2", "0=replicas:2", "3=replicas:1")
    periods = {name: strategy.update_period for name, strategy in decision.plan.layers.items()}
    assert periods == {"0": 2, "1": None, "2": 2, "3": 2}
    assert Plan.from_json(decision.plan.to_json()) == decision.plan


@pytest.mark.full
def test_an_update_period_makes_the_solver_find_passes_it_divides() -> None:
    """The fastest plan has one pass; the fastest one with two is another."""
    graph, cluster = perceptron(), cluster_preset(SLOW, 2)
    free, decision = decided(graph, cluster), decided(graph, cluster, "0=update:2")
    counts = [stages(graph, one.plan.layers, one.plan.scheme).passes for one in (free, decision)]
    assert counts == [1, 2]
    assert decision.prediction.step_s > free.prediction.step_s
    assert prices(decision).each[0].price_s == pytest.approx(decision.prediction.step_s - free.prediction.step_s)


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSED = {
    "close name": (["fcc=shards:2"], r"'fcc=shards:2' \(pins\): Loss has no layer or module 'fcc'; did you mean fc\?"),
    "no close name": (["zzzzzz*=shards:2"], r"its layers are conv, norm, mix, "),
    "R1 loss": (["loss.batch_mean=replicas:2"], r"mean: its samples depend on each other, .* use 1 replica \(R1\)"),
    "R5 axis": (["fc=axis:heads"], r"fc: it cannot be cut along 'heads'; its axes are .*out-features \(24\).*\(R5\)"),
    "R5 shards": (["fc=shards:5 axis:out-features"], r"24 out-features cannot be cut in 5; use 3 or 4 or 6 .*\(R5\)"),
    "R5 any axis": (["fc=shards:5"], r"432 in-features cannot be cut in 5.*; or fc: 24 out-features.*\(R5\)"),
    "R5 one shard": (["fc=axis:out-features shards:1"], r"cutting out-features needs 2 shards or more, 1 is pinned"),
    "R6 there": (["fc=gpu:0,6"], r"device 6 does not exist; the plan has devices 0 to 5 \(R6\); plan for 7"),
    "R6 twice": (["fc=gpu:1,1"], r"devices \[1, 1\] name one device twice; .*\(R6\)"),
    "R6 product": (["fc=replicas:2 shards:2 gpu:0,1"], r"2 replicas x 2 shards need 4 devices, it has 2; .*\(R6\)"),
    "R6 too many": (["fc=replicas:4 shards:4"], r"4 replicas x 4 shards need 16 devices, there are 6; .*\(R6\)"),
    "R6 no divisor": (["conv=replicas:2 gpu:0,1,2"], r"2 replicas cannot occupy 3 devices; use 1 or 3 \(R6\)"),
    "R6 axis on one": (["fc=axis:out-features gpu:3"], r"cutting out-features needs 2 shards or more, 1 device"),
    "R6 inherited": (
        ["conv=gpu:0,1", "fc=shards:3"],
        r"pins 'fc=shards:3' \(pins\), 'conv=gpu:0,1' \(pins\): fc: 3 shards cannot occupy 2 devices; use 1 or 2, or "
        r"give it devices with gpu: \(R6\); it takes over devices \[0, 1\] from add",
    ),
    "R5 or R1": (["loss.batch_mean=gpu:0,1"], r"\(R5\); or loss\.batch_mean: .*\(R1\)"),
    "R8": (["fc=update:7"], r"6 devices allow at most 6 passes, an update period of 7 divides none of them.*\(R8\)"),
    "no weights": (["add=update:2"], r"add has no weights to update"),
}  # fmt: skip


@pytest.mark.parametrize(("pins", "text"), REFUSED.values(), ids=REFUSED)
def test_an_impossible_pin_is_refused_with_its_rule(pins: list[str], text: str) -> None:
    with pytest.raises(PinError, match=text) as caught:
        decided(classifier(), cluster_preset(SLOW, 6), *pins)
    assert f"{parse_pin(pins[-1]).describe()!r}" in str(caught.value)


@pytest.mark.full
def test_pins_that_memory_forbids_together_are_named() -> None:
    graph = perceptron()
    needed = max(decided(graph, cluster_preset(SLOW, 1)).prediction.memory_bytes)
    cluster = cluster_preset(SLOW, 2).with_memory(int(needed * 0.8))
    decided(graph, cluster, "0=gpu:0", "2=gpu:1")
    with pytest.raises(InfeasiblePlan) as caught:
        decided(graph, cluster, "0=gpu:0", "2=gpu:0")
    text = str(caught.value)
    assert "each pin is legal, but no plan keeps together '0=gpu:0' (pins), '2=gpu:0' (pins)" in text
    assert "device 0 has" in text
    assert "leave out '0=gpu:0' (pins)" in text


def test_strict_rules_refuse_a_pin_that_shards_a_loss() -> None:
    with pytest.raises(PinError, match=r"loss: a loss is never sharded, the plan cuts it in 2; use 1 shard \(R7\)"):
        decided(classifier(), cluster_preset(SLOW, 6), "loss=shards:2", rules="strict")


def test_pins_that_strict_rules_forbid_together_are_named() -> None:
    graph, cluster = branches(), cluster_preset(SLOW, 2)
    with pytest.raises(InfeasiblePlan, match=r"(?s)'left=replicas:2'.*R2 at add.*leave out 'left=replicas:2'"):
        decided(graph, cluster, "left=replicas:2", "right=replicas:1", rules="strict")


def test_update_periods_that_no_number_of_passes_suits_are_named() -> None:
    graph, cluster = perceptron(), cluster_preset(SLOW, 2)
    with pytest.raises(InfeasiblePlan, match=r"(?s)update period 2 \(R8\).*leave out '\*=replicas:2'"):
        decided(graph, cluster, "*=replicas:2", "0=update:2")


def test_a_limit_that_nothing_fits_is_not_blamed_on_pins() -> None:
    with pytest.raises(InfeasiblePlan, match=r"^no plan fits"):
        decided(perceptron(), cluster_preset(SLOW, 2).with_memory(4096), "0=gpu:0")


def test_a_plan_leaves_nothing_to_pin() -> None:
    graph, cluster = perceptron(), cluster_preset(SLOW, 2)
    plan = decided(graph, cluster).plan
    with pytest.raises(PinError, match="a plan decides every layer"):
        decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest(plan=plan, pins=read_pins(["0=gpu:0"])))


# ---- prices ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_pinning_what_the_solver_chooses_costs_nothing() -> None:
    graph, cluster = classifier(), cluster_preset(SLOW, 3)
    free = decided(graph, cluster)
    pins = [_pin_of(name, strategy) for name, strategy in free.plan.layers.items()]
    decision = decided(graph, cluster, *pins)
    assert decision.plan == free.plan
    # Readers of one kind are priced approximately while plans are searched (docs/limits.md), and of four devices pins
    # open subsets to the search that it does not try without.
    assert prices(decision).price_s == pytest.approx(0.0, abs=1e-3 * free.prediction.step_s)


def _pin_of(name: str, strategy: Strategy) -> str:
    axis = f" axis:{strategy.axis}" if strategy.axis else ""
    where = ",".join(map(str, strategy.devices))
    return f"{name}=replicas:{strategy.replicas} shards:{strategy.shards}{axis} gpu:{where}"


def test_a_pin_without_which_the_others_cannot_be_kept_has_no_price() -> None:
    decision = decided(perceptron(), cluster_preset(SLOW, 2), "0=replicas:2", "*=gpu:0", "0=gpu:0,1")
    last = prices(decision).each[-1]
    assert (last.without_s, last.price_s) == (None, None)
    assert "(R6)" in last.why_not


@pytest.mark.full
def test_a_pinned_plan_is_legal_for_the_verifier_and_breaks_without_its_devices() -> None:
    graph, cluster = perceptron(), cluster_preset(SLOW, 4)
    plan = decided(graph, cluster, "0=gpu:3,1 shards:2").plan
    check(plan, graph)
    with pytest.raises(RuleError, match="R6"):
        check(replace(plan, devices=3), graph)
