"""The fuzzer: a slice of its cases, that it is resumed and repeats cases, and that it sees wrong numbers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import fuzz, fuzz_loops, fuzz_models
from benchmarks.training import Outcome, Run, Verdict, judge
from benchmarks.workers import Workers

FIRST = 9000  # seeds of the slice, which the whole run does not have
ALONE, OVER_RANKS = 26, {2: 2, 4: 2}


@pytest.fixture(scope="module")
def one() -> Iterator[Workers]:
    """A process for cases of one process."""
    with Workers(1) as workers:
        yield workers


@pytest.mark.full
@pytest.mark.parametrize(
    "seeds", [range(FIRST, FIRST + 2), pytest.param(range(FIRST + 2, FIRST + ALONE), marks=pytest.mark.full)]
)
def test_no_case_of_a_slice_is_wrong(one: Workers, seeds: range) -> None:
    outcomes = {seed: one.run(fuzz.run_spec, fuzz.drawn(seed, 1)) for seed in seeds}
    failed = {seed: found for seed, found in outcomes.items() if found.verdict not in fuzz.PASSED}
    assert not failed, [f"{fuzz.drawn(seed, 1).command}\n{found.text}" for seed, found in failed.items()]
    assert sum(found.verdict is Verdict.REFUSED for found in outcomes.values()) < len(seeds) / 2


@pytest.mark.full
@pytest.mark.parametrize("ranks", OVER_RANKS)
def test_no_case_over_processes_is_wrong(ranks: int) -> None:
    with Workers(ranks) as workers:
        for seed in range(FIRST, FIRST + OVER_RANKS[ranks]):
            spec = fuzz.drawn(seed, ranks)
            outcome = workers.run(fuzz.run_spec, spec)
            assert outcome.verdict in fuzz.PASSED, f"{spec.command}\n{outcome.text}"


def test_a_case_is_its_seed_and_its_command_repeats_it() -> None:
    for seed in range(20):
        spec = fuzz.drawn(seed, 2)
        assert spec == fuzz.drawn(seed, 2)
        words = shlex.split(spec.command)
        assert words[:4] == ["python", "-m", "benchmarks.fuzz", "--spec"]
        assert fuzz.Spec.of(json.loads(words[4])) == spec


def test_every_block_keeps_the_shape_of_every_family_it_has() -> None:
    for family in fuzz_models.FAMILIES:
        for name in fuzz_models.blocks_of(family):
            model = fuzz_models.Drawn(family, [name], "scores", words=False)
            assert model(torch.randn(fuzz_models.sample(family, False, 4))).shape == (4, 4)


@pytest.mark.full
def test_results_are_kept_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "results.json")
    given = ["--json", file, "--rank-cases", "0", "--seed", str(FIRST)]
    assert fuzz.main([*given, "--cases", "1"]) == 0
    kept = json.loads(Path(file).read_text(encoding="utf-8"))
    assert list(kept["cases"]) == [f"1/{FIRST}"]
    kept["cases"][f"1/{FIRST}"] = {"verdict": "refused", "text": "PlanError: as was said", "cpu_s": 0.5}
    Path(file).write_text(json.dumps(kept), encoding="utf-8")
    capsys.readouterr()
    assert fuzz.main([*given, "--cases", "1", "--resume"]) == 0
    assert "1 refused" in capsys.readouterr().out


def _wrong(run: Run) -> None:
    run.same("number", torch.ones(()) * (1 + run.compiled))


def _fails(run: Run) -> None:
    if run.compiled:
        raise ValueError("not an error of parplan's")


def test_wrong_numbers_and_foreign_errors_are_seen() -> None:
    assert judge(_wrong, Run(compiled=True)) == Outcome(Verdict.WRONG, "number: 1.0e+00 off")
    assert judge(_fails, Run(compiled=True)).verdict is Verdict.CRASHED


def _fails_with_reversal(rank: int, ranks: int, spec: fuzz.Spec) -> Outcome:
    return Outcome(Verdict.WRONG if "Reversed" in spec.blocks and "clamp" in spec.actions else Verdict.RIGHT)


@pytest.mark.full
def test_a_failure_is_shrunk(one: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "run_spec", _fails_with_reversal)
    spec = replace(fuzz.drawn(3, 1), blocks=("Plain", "Reversed", "Normed"), actions=("clip norm", "clamp"))
    small = fuzz.shrunk(one, spec, Outcome(Verdict.WRONG))
    assert (small.blocks, small.actions) == (("Reversed",), ("clamp",))
    assert (small.optimizer, small.plan, small.head, small.devices) == ("sgd", "solver", "scores", 2)


def test_every_action_and_optimizer_is_drawn() -> None:
    specs = [fuzz.drawn(seed, 1) for seed in range(500)]
    assert {name for spec in specs for name in spec.actions} == set(fuzz_loops.ACTIONS)
    assert {spec.optimizer for spec in specs} == set(fuzz_loops.OPTIMIZERS)
    assert {name for spec in specs for name in spec.blocks} == set(fuzz_models.BLOCKS)
