"""Configurations of torchtitan: the degrees of plans, set on a stand-in of its configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from parplan.errors import PlanError
from parplan.export.titan_config import TitanConfig, titan_config
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from tests.export.test_torch_program import cut, decoder, with_state
from tests.runtime.helpers import planner, spread

SAMPLES, TOKENS = 12, 12  # of the decoder's batch

Planned = Callable[[LayerGraph], Plan]


def staged(graph: LayerGraph) -> Plan:
    """The first block and all before it on two devices, the rest on two others."""
    names = list(graph.layers)
    second = next(index for index, name in enumerate(names) if name.startswith("h.1."))
    found = {
        name: Strategy(2, devices=(0, 1) if index < second else (2, 3)) if graph.layers[name].batch is not None
        else Strategy(devices=(0,) if index < second else (2,))
        for index, name in enumerate(names)
    }  # fmt: skip
    plan = Plan(graph.model, graph.fingerprint, graph.batch or 1, 4, found, micro_batches=2)
    return replace(plan, schedule="1f1b")


def made(planned: Planned) -> TitanConfig:
    module, args = decoder()
    assert args[0].shape == (SAMPLES, TOKENS)
    graph = capture(module, args)
    return titan_config(graph, planned(graph))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("planned", "degrees", "micro_batches"),
    [
        (planner(spread(2, "data"), 2), (2, 1, "never", 1, 1), 1),
        (cut(2), (2, 1, "never", 2, 1), 1),
        (cut(4), (1, 1, "never", 4, 1), 1),
        (with_state("gathered", "keep", 2), (1, 2, "always", 1, 1), 2),
        (with_state("sharded", "keep", 1), (1, 2, "never", 1, 1), 1),
        (staged, (2, 1, "never", 1, 2), 2),
    ],
    ids=["copies", "columns", "columns alone", "gathered", "sharded", "stages"],
)
def test_degrees_are_the_plans(planned: Planned, degrees: tuple[Any, ...], micro_batches: int) -> None:
    fields = made(planned).fields
    names = (
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
        "tensor_parallel_degree", "pipeline_parallel_degree",
    )  # fmt: skip
    assert tuple(fields[f"parallelism.{name}"] for name in names) == degrees
    copies = degrees[0] * degrees[1]
    assert fields["training.num_tokens_per_train_step"] == SAMPLES * TOKENS
    each = fields["training.num_tokens_per_microbatch_per_dp_rank"]
    assert each == SAMPLES * TOKENS / copies / micro_batches


@pytest.mark.full
def test_stages_have_torchs_schedule_and_their_first_layers_are_said() -> None:
    found = made(staged)
    assert found.fields["parallelism.pipeline_parallel_schedule"] == "1F1B"
    assert found.fields["parallelism.num_pp_microbatches"] == 2
    assert any("stage 1 at h.1." in sentence for sentence in found.otherwise)
    gpipe = made(lambda graph: replace(staged(graph), schedule="gpipe"))
    assert gpipe.fields["parallelism.pipeline_parallel_schedule"] == "GPipe"


@pytest.mark.full
def test_what_differs_between_layers_is_said() -> None:
    """Columns and rows of the perceptrons alone, and one block of two replayed."""
    assert any("layers with matrices have other shards in the plan than 2" in one for one in made(cut(2)).otherwise)
    half = made(with_state("gathered", "replay", 2))
    assert half.checkpoint == "SelectiveAC"
    assert any("are replayed in the plan; SelectiveAC is nearest" in one for one in half.otherwise)
    assert made(with_state("gathered", "keep", 2)).checkpoint == ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("saved", ["keep", "replay"])
def test_the_function_sets_the_fields(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = ModuleType("torchtitan.distributed.activation_checkpoint")
    policies.SelectiveAC = SimpleNamespace(Config=lambda: "selective")  # type: ignore[attr-defined]
    for name in ("torchtitan", "torchtitan.distributed", policies.__name__):
        monkeypatch.setitem(sys.modules, name, policies)
    found, space = made(with_state("gathered", saved, 2)), dict[str, Any]()
    exec(compile(found.text(), "planned.py", "exec"), space)
    config = SimpleNamespace(parallelism=SimpleNamespace(), training=SimpleNamespace(), activation_checkpoint="")
    assert space["planned"](config) is config
    own = {
        f"{part}.{name}": v for part in ("parallelism", "training") for name, v in vars(getattr(config, part)).items()
    }
    assert own == found.fields
    assert config.activation_checkpoint == ("selective" if saved == "replay" else None)
    assert max(map(len, found.text().splitlines())) <= 120


def test_models_without_tokens_are_refused() -> None:
    module, x = nn.Sequential(nn.Linear(6, 8)), torch.randn(8, 6)
    graph = capture(module, (x,))
    with pytest.raises(PlanError, match=r"takes no whole numbers .*--to torch"):
        titan_config(graph, planner(spread(2, "data"), 2)(graph))
