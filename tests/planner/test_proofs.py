"""T against simulated steps, and plans called OPTIMAL against all plans, on some of the models of `benchmarks.proofs`.

The ranges are those of today over some hundred models, which the benchmark prints.
"""

from __future__ import annotations

import json
import random
from math import inf
from pathlib import Path

import pytest

from benchmarks import proofs
from benchmarks.proof_cases import KINDS, drawn
from benchmarks.proof_memory import answered, tight
from benchmarks.proof_plans import CLASSES, EveryPlan, is_legal, simulated_s
from parplan.plan import Scheme

FIRST, ANYWHERE, BRANCHES, INTERLEAVE, BROADCAST = CLASSES
CHAINS = ("chain", "conv", "lstm")
RANGES = {FIRST: (-0.2, 0.6), ANYWHERE: (-0.15, 1.0), BRANCHES: (-0.25, 0.5), INTERLEAVE: (-0.15, 1.0)}
"""How far T is off at most; broadcast is not proven by default."""

NARROW, LIMIT = 3, 150
"""Most devices of models of which all plans are compared, and most plans that are simulated."""

GAIN = 0.001
"""Most of a step that a plan may save against one that is called OPTIMAL."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_t_is_off_by_no_more_than(kind: str, seed: int) -> None:
    """Layers that follow each other take T in one pass."""
    for one in proofs.compared(drawn(kind, seed)):
        if one.kind in (FIRST, ANYWHERE) and kind in CHAINS:
            assert abs(one.error) < proofs.EXACT, one
        elif one.kind in RANGES:
            least, most = RANGES[one.kind]
            assert least < one.error < most, one


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scheme", [Scheme.GATHER, Scheme.INTERLEAVE])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_no_simulated_step_is_below_its_bound(kind: str, seed: int, scheme: Scheme) -> None:
    problem, draw = drawn(kind, seed, NARROW), random.Random(seed)
    every = EveryPlan(problem)
    choices, _ = every.below(inf, scheme, LIMIT // 3, draw)
    bounds = {n: every.bounds_s(n).reshape(-1) for n in range(1, problem.cluster.count + 1)}
    for index in choices:
        plan = every.plan(index, scheme)
        if is_legal(plan, problem):
            counts = {own.replicas for own in plan.layers.values()}
            passes = 1 if scheme is Scheme.GATHER else max(counts) // min(counts)
            assert simulated_s(plan, problem) >= bounds[passes][index] * (1 - 1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_hardly_a_plan_beats_one_that_is_called_optimal(kind: str, seed: int) -> None:
    """None does of layers that follow each other; of others one might whose T counts too much (docs/objective.md)."""
    found = proofs.beaten(drawn(kind, seed, NARROW), LIMIT)
    assert found.below is None
    assert found.chosen.status != proofs.OPTIMAL or found.gain <= (0.0 if kind in CHAINS else GAIN)


@pytest.mark.full
def test_a_branch_on_all_devices_stands_beside_branches_that_have_one_each() -> None:
    """Two experts at the same time, the third cut over both devices: 4 % faster than what was called OPTIMAL once."""
    found = proofs.beaten(drawn("experts", 8, 2))
    assert found.chosen.kind == BRANCHES
    assert (found.chosen.status, found.whole, found.faster) == (proofs.OPTIMAL, True, ())


@pytest.mark.full
def test_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proofs.main(["--seeds", "2", "--kinds", "residual", "--json", str(tmp_path / "drawn.json")])
    found = json.loads((tmp_path / "drawn.json").read_text(encoding="utf-8"))
    assert {row["kind"] for row in found["drawn"]} >= {FIRST, ANYWHERE, INTERLEAVE}
    assert [row["model"] for row in found["chosen"]] == ["residual:0", "residual:1"]
    proofs.main(["--brute", "1", "--kinds", "chain", "--limit", "20", "--json", str(tmp_path / "beaten.json")])
    (one,) = json.loads((tmp_path / "beaten.json").read_text(encoding="utf-8"))
    assert one["chosen"]["model"] == "chain:0"
    assert "1 of 1 plans are called OPTIMAL; 0 of them are beaten" in capsys.readouterr().out


@pytest.mark.full
def test_a_bound_is_branched_on_by_choices_of_its_own_problem() -> None:
    """Cut off twice, so that fewer strategies are left than when prices were first combined."""
    found = proofs.chosen(drawn("towers", 2, 4))[1]
    assert found.bound_s is not None
    assert found.bound_s <= found.simulated_s * (1 + proofs.EXACT)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_no_claim_is_wrong_where_memory_is_short(kind: str, seed: int) -> None:
    """Bounds, and that no plan fits, in any number of micro-batches and state."""
    found = answered(tight(kind, seed, 2), 60)
    assert found is None or not found.wrong, found


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_no_claim_is_wrong_of_plans_in_stages(kind: str, seed: int) -> None:
    found = answered(tight(kind, seed, 2, loss=True), 40)
    assert found is None or not found.wrong, found


def test_stages_whose_layers_hold_most_at_different_moments_are_found() -> None:
    """What each layer holds at its own worst moment is more than fits; the plan without stages takes 27 % longer."""
    found = answered(tight("lstm", 4, 2, loss=True), 300)
    assert found is not None
    assert found.said.startswith(("1f1b", "gpipe"))
    assert found.gain < 0.03


def test_layers_on_devices_of_their_own_are_found_where_estimates_say_too_much() -> None:
    """Two of four layers on each device, whose transfers take less than layers estimate; "no plan fits" was said."""
    found = answered(tight("attention", 2, 2), 300)
    assert found is not None
    assert found.status
    assert found.faster == ""
    assert found.fit > 0


@pytest.mark.parametrize(("kind", "seed"), [("chain", 6), ("towers", 7)])
def test_plans_that_need_less_memory_in_one_micro_batch_are_found(kind: str, seed: int) -> None:
    """In several the sums of gradients are kept beside, and nothing fits; on the first devices nothing does in one."""
    found = answered(tight(kind, seed, 4), 100)
    assert found is not None
    assert (found.status, found.faster) == (proofs.OPTIMAL, "")


@pytest.mark.parametrize("seed", [1, 4, 9])
def test_fewer_micro_batches_with_layers_on_devices_of_their_own_are_found(seed: int) -> None:
    """The whole batch fits on no first devices; eight micro-batches, called OPTIMAL, took twice as long."""
    found = answered(tight("lstm", seed, 2), 300)
    assert found is not None
    assert found.said.startswith("1 micro-batches")
    assert (found.faster, found.wrong) == ("", False)
