"""A whole profile of a model: every part that a planner could use, once; a second run measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.measured import CORRECTION, OVERHEAD
from parplan.cost_models.measurement import measure_parts as measuring
from parplan.cost_models.measurement import optimizer_updates as updates
from parplan.cost_models.measurement.conditions import current_conditions
from parplan.cost_models.measurement.measure_parts import Outcome
from parplan.cost_models.measurement.runnable_parts import part_signature
from parplan.cost_models.profile.records import SessionProfile
from parplan.cost_models.profile.store import ProfileStore
from parplan.cost_models.roofline import RooflineCosts
from parplan.cost_models.sampling import StoppingRule
from parplan.errors import ParplanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.profiler import runtime_costs
from parplan.profiler.session import Settings, parts_by_devices, profile
from tests.cost_models.made_up import made_up_costs, made_up_profile
from tests.planner.graphs import classifier
from tests.processes import fork_ranks
from tests.profiler.prefilled import parts_kept, prefill

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Perceptron:
    """A small model, made anew in every process that asks."""

    batch: int = 12
    known: bool = True

    def load(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model, its positional and its keyword arguments."""
        if not self.known:
            raise ParplanError("net.py: no such file")
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.Linear(48, 12))
        return net, (torch.randn(self.batch, 24),), {}


@dataclass(frozen=True)
class Killed(Perceptron):
    """A model that is too much for its process."""

    def load(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Does not come back."""
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def graph() -> LayerGraph:
    model, args, _ = Perceptron().load()
    return capture(model, args)


def distinct(devices: int) -> set[tuple[int, str]]:
    """Every part that a planner could use, by how many devices are at work."""
    captured = graph()
    found = parts_by_devices(captured, this_cluster(devices, CPU))
    return {(busy, part_signature(captured, part)) for busy, parts in found.items() for part in parts}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store where everything but parts is known for two devices; processes that measure are forked."""
    fork_ranks(monkeypatch)
    with ProfileStore(tmp_path / "filled.sqlite") as store:
        prefill(store, 2)
    return tmp_path / "filled.sqlite"


def settings(file: Path, devices: int = 1, **options: Any) -> Settings:
    quick = StoppingRule(cap_s=0.0, least_runs=1)
    return replace(Settings(devices, optimizers=("adam",), stop=quick, store=str(file)), **options)


def test_parts_are_all_that_the_planner_prices() -> None:
    cluster = cluster_preset("cpu", 4)
    blocks = cluster_blocks(cluster, False)
    candidates = {name: strategies(layer, 12, blocks) for name, layer in classifier().layers.items()}
    parts = parts_by_devices(classifier(), cluster)
    profile = made_up_profile(classifier(), [part for own in parts.values() for part in own])
    formulation = formulate(classifier(), cluster, made_up_costs(classifier(), cluster, None, profile), candidates)
    assert {option.cost.source.value for options in formulation.options for option in options} == {"measured"}
    assert all(len(part.strategy.devices) == count for count, own in parts.items() for part in own)


@pytest.mark.full
def test_one_device(file: Path) -> None:
    first = profile(Perceptron().load, settings(file))
    assert first.outcome == Outcome(len(distinct(1)), 0, 0)
    assert first.conditions == (current_conditions(CPU, 1).describe(),)
    with ProfileStore(file) as store:
        kept = parts_kept(store, 1)
    assert kept.keys() == distinct(1)
    assert profile(Perceptron().load, settings(file)).outcome == Outcome(0, len(distinct(1)), 0)
    assert profile(Perceptron().load, settings(file, time_cap_s=60.0)).outcome.known == len(kept)


@pytest.mark.full
def test_two_devices(file: Path) -> None:
    first = profile(Perceptron().load, settings(file, 2))
    assert first.outcome == Outcome(len(distinct(2)), 0, 0)
    assert first.conditions == (current_conditions(CPU, 1).describe(), current_conditions(CPU, 2).describe())
    with ProfileStore(file) as store:
        assert parts_kept(store, 2).keys() == distinct(2)
        # what was known was not measured anew
        assert {entry.when for entry in store.under(current_conditions(CPU, 2)).links("gloo")} == {
            "2025-06-01T12:00:00Z"
        }


@pytest.mark.full
def test_updates_and_the_runtime_are_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "_SIZES", (4, 64))
    monkeypatch.setattr(runtime_costs, "CALIBRATION", {"small": lambda: (nn.Linear(8, 8), torch.ones(4, 8))})
    monkeypatch.setattr(runtime_costs, "_STEPS_S", 0.0)
    file = tmp_path / "new.sqlite"
    profile(Perceptron().load, settings(file, optimizers=("sgd", "adam")))
    with ProfileStore(file) as store:
        families = [entry.family for entry in store.under(current_conditions(CPU, 1)).all()]
        before = store.groups()
    assert [families.count(f"update {name} float32") for name in ("sgd", "adam")] == [3, 3]
    assert (families.count(OVERHEAD), families.count(CORRECTION)) == (2, 1)
    profile(Perceptron().load, settings(file, optimizers=("sgd", "adam")))
    with ProfileStore(file) as store:
        assert store.groups() == before


@dataclass
class Watcher:
    """Progress that is recorded, and interrupts after so many reports."""

    interrupt_after: int = 10**9
    phases: list[str] = field(default_factory=list)
    advances: list[tuple[int, int]] = field(default_factory=list)

    @contextmanager
    def __call__(self) -> Iterator[Watcher]:
        yield self

    def phase(self, name: str) -> None:
        """Recorded."""
        self.phases.append(name)

    def advance(self, done: int, total: int) -> None:
        """Recorded, or the end."""
        if len(self.advances) >= self.interrupt_after:
            raise KeyboardInterrupt
        self.advances.append((done, total))


@pytest.mark.full
def test_progress_and_an_interrupt(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MOST_PARTS", 2)
    everything = len(distinct(1))
    with pytest.raises(KeyboardInterrupt):
        profile(Perceptron().load, settings(file), Watcher(interrupt_after=1))
    with ProfileStore(file) as store:
        assert len(parts_kept(store, 1)) == 2
    watcher = Watcher()
    assert profile(Perceptron().load, settings(file), watcher).outcome == Outcome(everything - 2, 2, 0)
    assert watcher.phases[0] == "parts, 1 at work"
    assert watcher.advances[-1] == (everything - 2, everything - 2)


def test_out_of_time(file: Path) -> None:
    found = profile(Perceptron().load, settings(file, time_cap_s=0.0))
    assert found.outcome == Outcome(0, 0, len(distinct(1)))
    assert found.left == ("updates of adam, 1 at work", "the runtime's own time, 1 at work")


@pytest.mark.full
def test_two_processes_agree_that_the_time_is_over(file: Path) -> None:
    found = profile(Perceptron().load, settings(file, 2, time_cap_s=0.0))
    assert (found.outcome.measured, found.outcome.known) == (0, 0)
    assert found.outcome.left > 0
    assert "the runtime's own time, 2 at work" in found.left


@pytest.mark.full
def test_what_a_process_refuses_is_the_refusal(file: Path) -> None:
    with pytest.raises(ParplanError, match=r"^net\.py: no such file$"):
        profile(Perceptron(known=False).load, settings(file, 2))


@pytest.mark.full
def test_a_process_that_is_killed_is_a_refusal(file: Path) -> None:
    with pytest.raises(ParplanError, match=r"ended from outside .*SIGKILL.* smaller --batch"):
        profile(Killed().load, settings(file, 2))


def test_the_parts_of_a_profile_price_the_model_without_a_guess(file: Path) -> None:
    profile(Perceptron().load, settings(file))
    kept, own = SessionProfile(), graph()
    with ProfileStore(file) as store:
        for entry in store.under(current_conditions(CPU, 1)).all():
            kept.put(entry)
    cluster = this_cluster(1, CPU)
    costs = made_up_costs(own, cluster, None, kept)
    estimates = RooflineCosts(own, cluster)
    for layer in own.layers.values():
        for strategy in strategies(layer, 12, cluster_blocks(cluster, False)):
            assert costs.layer(layer, strategy).source.value == "measured"
            assert estimates.layer(layer, strategy).source.value == "estimated"
