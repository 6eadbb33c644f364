"""The trainers' examples, with one line of parplan's, give the numbers of their runs with DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.launch import Found, launch

# Example, its library, and pins of a plan that replicates, and of one that cuts parameters. transformers computes the
# loss in float32, whatever the model.
EXAMPLES = {
    "with_accelerate": ("accelerate", "*=replicas:2", "?=shards:2", 1e-12),
    "with_lightning": ("lightning", "*=replicas:2", "?o*=shards:2", 1e-12),
    "with_transformers": ("transformers", "transformer.h*=replicas:2", "*.mlp.c_*=shards:2", 1e-6),
}


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """Runs without parplan, by example; each is made once."""
    return {}


def _same(found: Found, wanted: Found, tolerance: float) -> None:
    assert found.weights.keys() == wanted.weights.keys()
    for name, numbers in wanted.numbers.items():
        assert found.numbers[name] == pytest.approx(numbers, rel=tolerance), name
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=100 * tolerance, atol=100 * tolerance)


@pytest.mark.parametrize("plan", ["replicas", "shards"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_trainer_gives_the_numbers_of_its_ddp_run(
    example: str, plan: str, with_ddp: dict[str, Found], tmp_path: Path
) -> None:
    library, replicas, shards, tolerance = EXAMPLES[example]
    pytest.importorskip(library)
    if example not in with_ddp:
        (tmp_path / "ddp").mkdir()
        with_ddp[example] = launch(example, tmp_path / "ddp", "--ddp")
    found = launch(example, tmp_path, "--pins", replicas if plan == "replicas" else shards)
    assert found.numbers["shards"] == (2 if plan == "shards" else 1)
    _same(found, with_ddp[example], tolerance)


def test_accelerate_runs_a_compiled_model_under_its_autocast(tmp_path: Path) -> None:
    """In bfloat16: without autocast, losses would differ from the third digit on."""
    pytest.importorskip("accelerate")
    (tmp_path / "ddp").mkdir()
    wanted = launch("with_accelerate", tmp_path / "ddp", "--ddp", "--bf16")
    _same(launch("with_accelerate", tmp_path, "--bf16"), wanted, 1e-6)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_trainer_in_one_process(example: str, tmp_path: Path) -> None:
    library, *_, tolerance = EXAMPLES[example]
    pytest.importorskip(library)
    (tmp_path / "ddp").mkdir()
    one = ("--processes", "1") if example == "with_lightning" else ()
    wanted = launch(example, tmp_path / "ddp", "--ddp", *one, processes=1)
    _same(launch(example, tmp_path, *one, processes=1), wanted, tolerance)
