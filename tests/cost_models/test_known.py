"""Which costs are used: the user's own where devices and conditions are those at hand, and what is said otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parplan.cost_models.costs import Source
from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.known import KnownCosts, known_costs
from parplan.cost_models.measurement.conditions import current_conditions
from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.profile.records import Conditions, SessionProfile
from parplan.cost_models.profile.store import ProfileStore
from parplan.cost_models.roofline import RooflineCosts
from parplan.cost_models.sampling import Measurement
from parplan.errors import ProfileError
from parplan.plan import Strategy
from tests.cost_models.made_up import all_parts, made_up_profile
from tests.cost_models.profiles import H200, group, link, part
from tests.planner.graphs import perceptron

CPU = torch.device("cpu")
NOW_S = 2e-3
ONE, TWO = Strategy(), Strategy(2, 1, None, (0, 1))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProfileStore]:
    """An empty store, on a device whose reference kernel takes NOW_S."""
    monkeypatch.setattr(Reference, "seconds", lambda self, runs=1: NOW_S)
    with ProfileStore(tmp_path / "own.sqlite") as opened:
        yield opened


def parts(reference_s: float = NOW_S) -> SessionProfile:
    """All parts of the perceptron on two devices: 1 s forward, 2 s backward."""
    figures = Measurement(1.0, 2.0, 0.01, 7, reference_s, when="2025-06-01T12:00:00Z")
    requests = all_parts(perceptron(), this_cluster(2, CPU))
    return made_up_profile(perceptron(), requests, lambda _: figures)


def keep(store: ProfileStore, conditions: Conditions, profile: SessionProfile, origin: str = "") -> None:
    store.put(conditions, group(conditions, *profile.all(), origin=origin).entries)


def known(store: ProfileStore, devices: int = 2, **options: Any) -> KnownCosts:
    return known_costs(perceptron(), this_cluster(devices, CPU), device=CPU, store=store, **options)


def said(found: KnownCosts) -> str:
    return " / ".join(found.notes)


def sources(found: KnownCosts, strategy: Strategy = TWO) -> set[Source]:
    return {found.costs.layer(layer, strategy).source for layer in perceptron().layers.values()}


def test_an_empty_store_is_estimates_without_a_word(store: ProfileStore) -> None:
    found = known(store)
    assert isinstance(found.costs, RooflineCosts)
    assert found.notes == ()


def test_what_was_measured_is_used_and_said(store: ProfileStore) -> None:
    keep(store, current_conditions(CPU, 2), parts())
    store.put(current_conditions(CPU, 2), [link(1 << 20)])
    found = known(store)
    count = len(parts().all())
    assert sources(found) == {Source.MEASURED}
    assert found.costs.step.links is Source.MEASURED
    assert found.notes == (
        f"Costs from the profile of {current_conditions(CPU, 2).describe()}: {count} parts measured, "
        "the last on 2025-06-01.",
    )


def test_without_links_that_is_said(store: ProfileStore) -> None:
    keep(store, current_conditions(CPU, 2), parts())
    found = known(store)
    assert "; links were not." in said(found)
    assert found.costs.step.links is Source.ESTIMATED


def test_with_fewer_devices_at_work_that_is_said(store: ProfileStore) -> None:
    keep(store, current_conditions(CPU, 1), parts())
    assert "Measured with 1 device at work, planned for 2" in said(known(store))
    assert "at work" not in said(known(store, devices=1))


MISMATCHES = [
    pytest.param(replace(current_conditions(CPU, 2), torch="1.9.0"), "with torch 1.9.0", id="torch"),
    pytest.param(replace(current_conditions(CPU, 2), flags="bf16 matmul"), "with bf16 matmul", id="flags"),
    pytest.param(replace(current_conditions(CPU, 2), busy=64), "with 64 devices at once", id="busy"),
    pytest.param(H200, "only profiles of other devices (h200-sxm)", id="device"),
]


@pytest.mark.parametrize(("conditions", "words"), MISMATCHES)
def test_what_was_measured_elsewise_is_not_used_and_said(
    store: ProfileStore, conditions: Conditions, words: str
) -> None:
    keep(store, conditions, parts())
    found = known(store)
    assert isinstance(found.costs, RooflineCosts)
    assert words in said(found)


def test_a_device_that_runs_slower_now_is_scaled_and_said(store: ProfileStore) -> None:
    keep(store, current_conditions(CPU, 2), parts(reference_s=1.6e-3))
    found = known(store)
    assert "The reference kernel is 1.25 x slower now than when the profile was measured." in found.notes
    layer = perceptron().layers["2"]
    assert found.costs.layer(layer, TWO).forward_s == pytest.approx(1.25, rel=0.02)  # and the slower of two


def test_as_profiled_the_device_is_as_fast_as_it_was(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(store, current_conditions(CPU, 2), parts(reference_s=1.6e-3))
    layer, costs = perceptron().layers["2"], []
    for now_s in (2e-3, 8e-3):
        monkeypatch.setattr(Reference, "seconds", lambda self, runs=9, now_s=now_s: now_s)
        found = known(store, as_profiled=True)
        assert "(--as-profiled)" in said(found)
        assert "reference kernel is" not in said(found)
        costs.append(found.costs.layer(layer, TWO))
    assert costs[0] == costs[1]


@pytest.mark.parametrize(("then_s", "words"), [(2.5e-3, "1.25 x faster now"), (1.9e-3, ""), (0.0, "")])
def test_small_drifts_are_not_worth_a_word(store: ProfileStore, then_s: float, words: str) -> None:
    keep(store, current_conditions(CPU, 2), parts(reference_s=then_s))
    assert ("reference kernel" in said(known(store))) == bool(words)
    assert words in said(known(store))


def test_what_was_imported_says_so(store: ProfileStore) -> None:
    keep(store, current_conditions(CPU, 2), parts(), "theirs.json")
    assert sources(known(store)) == {Source.SHIPPED}


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_a_precision_that_was_not_measured_is_estimated(store: ProfileStore, precision: str) -> None:
    keep(store, current_conditions(CPU, 2), parts())
    found = known(store, precision=precision)
    assert isinstance(found.costs, RooflineCosts)
    assert f"nothing was measured in {precision}" in said(found)


def test_no_device_here_is_estimates_whatever_is_kept(store: ProfileStore) -> None:
    keep(store, H200, parts())
    found = known_costs(perceptron(), cluster_preset("v100", 2), store=store)
    assert isinstance(found.costs, RooflineCosts)
    assert found.notes == ()


def test_the_store_is_the_users_own_unless_given(store: ProfileStore) -> None:
    with ProfileStore() as own:
        keep(own, current_conditions(CPU, 2), parts())
    assert sources(known_costs_of_the_user()) == {Source.MEASURED}


def known_costs_of_the_user() -> KnownCosts:
    return known_costs(perceptron(), this_cluster(2, CPU), device=CPU)


def test_a_damaged_store_is_refused_not_passed_over(own_cache: Path, store: ProfileStore) -> None:
    (own_cache / "profiles.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(ProfileError, match="damaged or no profile store"):
        known_costs_of_the_user()


def test_reading_costs_makes_no_store(own_cache: Path, store: ProfileStore) -> None:
    assert known_costs_of_the_user().notes == ()
    assert not list(own_cache.iterdir())


def test_what_is_kept_stays_as_it_is(store: ProfileStore) -> None:
    keep(store, current_conditions(CPU, 2), parts())
    store.put(current_conditions(CPU, 2), [part("something else")])
    before = store.groups()
    sources(known(store))
    assert store.groups() == before


def test_the_store_is_read_once(store: ProfileStore) -> None:
    keep(store, current_conditions(CPU, 2), parts())
    found = known(store)
    store.close()  # a plan asks for thousands of parts: not one by one
    assert sources(found) == sources(found, ONE) == {Source.MEASURED}
