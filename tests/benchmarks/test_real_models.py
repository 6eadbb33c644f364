"""Small models trained by processes under every kind of plan: plans are of their kind, and what differs is seen."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import real_models
from benchmarks.real_model_configs import MODELS, Subject
from benchmarks.real_models import KINDS, Rank, difference, forced_plan, of_kind, run_case
from benchmarks.training import Verdict
from benchmarks.workers import Workers
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.runtime.self_check.double_copy import double_casts
from tests.packed_models import GROUPED, PACKED
from tests.runtime.expert_nets import Mixture

WORDS, WIDTH, LENGTH, SAMPLES = 32, 16, 8, 4


class Decoder(nn.Module):
    """A language model with tied embeddings, grouped queries, packed gates, experts and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.attention, self.mlp = GROUPED["enabled"](), PACKED["gate_chunk"]()
        self.narrow, self.mixture, self.widen = nn.Linear(WIDTH, 6), Mixture("grouped"), nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        """[samples, length] to scores of the words, and the mean loss of each word given those before it."""
        x = self.embedding(words)
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        scores = self.head(self.norms[2](x + self.widen(self.mixture(self.narrow(x)))))
        loss = functional.cross_entropy(scores[:, :-1].reshape(-1, WORDS), words[:, 1:].reshape(-1))
        return {"scores": scores, "loss": loss}


def build() -> nn.Module:
    torch.manual_seed(0)
    return Decoder().double()


def batch(draw: torch.Generator) -> dict[str, Tensor]:
    return {"words": torch.randint(WORDS, (SAMPLES, LENGTH), generator=draw)}


def loss(result: dict[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return result["loss"]


DECODER = Subject(build, batch, loss)


def graph_of(subject: Subject) -> LayerGraph:
    with double_casts():
        return capture(subject.build(), (), subject.batch(torch.Generator()))


@pytest.mark.full
def test_plans_are_of_their_kind() -> None:
    graph = graph_of(DECODER)
    for devices in (2, 4):
        for kind, least in (("replicas", 0.9), ("shards", 0.7), ("sequence", 0.4)):
            plan = forced_plan(graph, kind, devices)
            known = [of_kind(graph.layers[name], own) for name, own in plan.layers.items()]
            assert sum(kind in one for one in known) > least * len(known), (devices, kind, known)
            assert kind == "replicas" or not {"shards", "sequence"} - {kind} & set(known)
        mixed = forced_plan(graph, "mixed-0", devices)
        assert mixed.layers != forced_plan(graph, "mixed-1", devices).layers
        assert mixed.layers == forced_plan(graph, "mixed-0", devices).layers


def test_differences_are_relative_and_of_own_samples() -> None:
    plain, mine = torch.tensor([4.0, 2.0, -1.0, 1.0]), Rank(1, 2)
    assert difference(plain.clone(), plain, mine) == 0
    assert difference(torch.tensor([-1.0, 1.5]), plain, mine) == 0.5
    assert difference(plain[:3], plain, mine) == float("inf")
    assert difference(torch.full((4,), float("nan")), plain, mine) == float("inf")


@pytest.mark.full
def test_every_kind_of_plan_trains_as_the_plain_model() -> None:
    with Workers(2, collective_s=120.0) as workers:
        for kind in KINDS:
            outcome = workers.run(run_case, DECODER, kind)
            assert outcome.verdict is Verdict.RIGHT, f"{kind}: {outcome.text}"
            assert json.loads(outcome.text)["compared"] > 100


@pytest.mark.full
@pytest.mark.parametrize("name", ["dlrm", "gpt2", "vit"])
def test_cases_are_run_and_resumed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = {"gpt2": "transformers", "vit": "timm"}.get(name)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    file = tmp_path / "results.json"
    given = ["--models", name, "--ranks", "2", "--kinds", "shards", "--json", str(file)]
    assert real_models.main(given) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert list(rows) == [f"{name}/2/shards"]
    file.write_text(json.dumps({key: {"verdict": "refused", "text": "as was said"} for key in rows}), encoding="utf-8")
    capsys.readouterr()
    assert real_models.main(given) == 1
    assert "refused  as was said" in capsys.readouterr().out
    assert name in MODELS
