"""Pins that ask for passes, and pins that come by the dozen."""

from __future__ import annotations

import re

import pytest

from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import PinError
from parplan.pins import parse_pin, read_pins
from parplan.plan import Scheme
from parplan.planner.decide import PlanRequest, decide
from parplan.planner.decision import Decision
from parplan.planner.search_space.pin_search import grouped
from tests.planner.graphs import classifier
from tests.planner.simulation.test_timeline import alexnet


def narrowed(*pins: str, scheme: str = "auto", gpu: str = "k20") -> Decision:
    graph, cluster = alexnet(512), cluster_preset(gpu, 4)
    costs = RooflineCosts(graph, cluster)
    request = PlanRequest(pins=read_pins(pins), price_pins=False, scheme=scheme, tolerance=0.0, started_ranks=True)
    return decide(graph, cluster, costs, request)


HYBRID = ("conv*=replicas:4", "fc*=shards:4")


@pytest.mark.full
def test_weights_pinned_to_be_updated_between_passes_have_passes() -> None:
    """Where gather is faster, too: it would update them once."""
    for pins in ([], ["fc*=update:1"]):
        fast = narrowed("conv*=replicas:4", "fc*=shards:1 gpu:0", *pins, gpu="a100-80g-sxm")
        assert fast.passes is not None
        steps = {one.scheme: one.step_s for one in fast.passes.schemes}
        assert steps[Scheme.GATHER] is not None
        assert (fast.plan.scheme is Scheme.GATHER) is not bool(pins)
        assert [name[:2] for name in fast.passes.updated] == ["fc"] * 3 * bool(pins)
    assert fast.plan.layers["fc6"].update_period == 1
    # Broadcast is priced, and not searched unless it is asked for.
    taken_s = steps[fast.plan.scheme]
    assert taken_s is not None
    assert taken_s <= 1.005 * min(step for one, step in steps.items() if one is not Scheme.GATHER and step)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("period", "passes"), [(1, 1), (2, 4)])
def test_a_layer_in_front_of_the_passes_is_not_said_to_be_updated_between_them(period: int, passes: int) -> None:
    """It runs once: an update after each of its passes is one, and needs none; R8 has other periods divide passes."""
    pins = ("conv*=replicas:4", "fc*=shards:1 gpu:0", f"conv1=update:{period}")
    found = narrowed(*pins, gpu="a100-80g-sxm").passes
    assert found is not None
    assert (found.count, found.updated, found.in_front) == (passes, (), ("conv1",))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("scheme", "pin"), [("gather", "fc*=update:1"), ("gather", "fc6=update:2")])
def test_updates_that_the_scheme_asked_for_has_not_are_refused_with_the_pin(scheme: str, pin: str) -> None:
    text = f"pin {pin!r} (pins): fc6's weights are to be updated between 4 passes"
    with pytest.raises(PinError, match=re.escape(text)):
        narrowed(*HYBRID, pin, scheme=scheme)
    assert narrowed(*HYBRID, pin).plan.scheme is not Scheme.GATHER


def test_updates_where_no_scheme_has_passes_are_refused_with_the_reason() -> None:
    """Batch norm behind fewer replicas would see one pass's samples."""
    graph, cluster = classifier(), cluster_preset("k20", 2)
    request = PlanRequest(pins=read_pins(["conv=replicas:2", "norm=replicas:1", "fc=update:1"]), price_pins=False)
    with pytest.raises(PinError, match=r"'fc=update:1' .* there can be none: .*statistics are of the whole batch"):
        decide(graph, cluster, RooflineCosts(graph, cluster), request)


@pytest.mark.full
def test_many_pins_of_one_file_are_priced_together() -> None:
    layers = [f"conv{number}" for number in range(1, 6)] + ["fc6", "fc7", "fc8", "drop6", "drop7"]
    words = ["replicas:2" if "conv" in name else f"shards:1 gpu:{index % 2}" for index, name in enumerate(layers)]
    pins = [parse_pin(f"{name}={own}", f"a [{name}]") for name, own in zip(layers, words, strict=True)]
    groups = grouped(pins)
    assert [(group.describe(), group.origin, len(group.pins)) for group in groups] == [
        ("replicas:2", "a", 5),
        ("shards:1 gpu:1/0", "a", 5),
    ]
    assert [group.describe() for group in grouped(pins[:2])] == ["conv1=replicas:2", "conv2=replicas:2"]
    graph, cluster = alexnet(64), cluster_preset("k20", 2)
    decision = decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest(pins=tuple(pins)))
    assert decision.pins is not None
    assert [(one.pin, one.layers) for one in decision.pins.each] == [("replicas:2", 5), ("shards:1 gpu:1/0", 5)]
    assert decision.pins.each[0].patterns == tuple(layers[:5])
    assert next(facts.pinned for facts in decision.layers if facts.name == "conv2") == "pinned by replicas:2"
