"""analyze, compile and verify as a user calls them, on models of several kinds."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.errors import CaptureError, ClusterError, ParplanError, PlanError, RuleError, SelfCheckError
from parplan.plan import Plan, Strategy
from parplan.report.as_json import to_dict
from tests.planner.graphs import Loss
from tests.plans import PLANS, plan_by


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 12)).double()


def inputs(batch: int = 12) -> Tensor:
    return torch.randn(batch, 12, dtype=torch.float64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("home", [None, 0])
def test_one_process_with_several_memories_is_priced_with_inputs_on_its_first_device(
    monkeypatch: pytest.MonkeyPatch, home: int | None
) -> None:
    places = (0, 0) if home is None else (0, 1)  # as with two GPUs
    monkeypatch.setattr("parplan.runtime.programs.program_cache.memories", lambda transport: places)
    compiled = parplan.compile(perceptron(), inputs(), devices=["cpu"] * 2)
    decision = compiled.report
    assert decision is not None
    assert decision.cluster.home == compiled.home == home
    assert to_dict(decision)["cluster"]["home"] == home
    assert ("Inputs arrive on device 0" in " ".join(decision.notes)) is (home is not None)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_compile_plans_at_the_first_call_and_gives_the_same_numbers() -> None:
    plain, x = perceptron(), inputs()
    compiled = parplan.compile(perceptron(), devices=["cpu"] * 4)
    compiled.load_state_dict(plain.state_dict())
    expected, found = plain(x), compiled(x)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(compiled.module)[name], gradient, rtol=1e-9, atol=1e-12)
    assert compiled.plan is not None
    assert compiled.plan.devices == 4


def test_example_inputs_plan_at_once() -> None:
    compiled = parplan.compile(perceptron(), inputs(), devices=["cpu"] * 2)
    assert compiled.plan is not None
    assert compiled.plan.batch == 12
    assert "2 x cpu" in str(compiled.report)
    assert repr(compiled.report).startswith("<Analysis of Sequential on 2 x cpu")


def test_names_are_the_models_own() -> None:
    plain = perceptron()
    compiled = parplan.compile(plain, inputs(), devices=["cpu"] * 2)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_file_is_run(name: str, tmp_path: Path) -> None:
    plain, x = perceptron(), inputs()
    from parplan.graph.capture.capture import capture

    plan = plan_by(name, 4, capture(plain, (x,)))
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    compiled = parplan.compile(plain, x, devices=["cpu"] * 4, plan=path)
    assert compiled.plan == plan
    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-9, atol=1e-12)


@pytest.mark.full
def test_a_plan_for_other_devices_is_refused(tmp_path: Path) -> None:
    decision = parplan.analyze(perceptron(), inputs(), gpus=4)
    with pytest.raises(PlanError, match="the plan is for 4 devices, here are 2"):
        parplan.compile(perceptron(), inputs(), devices=["cpu"] * 2, plan=decision.plan)


def test_a_given_plan_is_held_to_what_is_asked_beside_it() -> None:
    from parplan.graph.capture.capture import capture

    plain, x = perceptron(), inputs(9)
    graph = capture(plain, (x,))
    layers = {name: Strategy(2, 1, None, (0, 1)) for name in graph.layers}
    plan = Plan(graph.model, graph.fingerprint, 9, 2, layers)
    with pytest.raises(RuleError, match="R1"):
        parplan.compile(plain, x, devices=["cpu"] * 2, plan=plan, rules="strict")
    with pytest.raises(PlanError, match="micro-batches is 1, and 3 were asked for"):
        parplan.compile(plain, x, devices=["cpu"] * 2, plan=plan, micro_batches=3)


@pytest.mark.full
def test_a_plan_for_another_batch_runs_and_says_so() -> None:
    from parplan.graph.capture.capture import capture

    plain = perceptron()
    plan = replace(plan_by("data parallel", 4, capture(plain, (inputs(8),))), model="Net")
    x = inputs(6)
    said = "made for 8 samples in a step, this step has 6: .*; 6 samples over the 4 replicas of 0 are unequal shares"
    with pytest.warns(UserWarning, match=said):
        compiled = parplan.compile(perceptron(), x, devices=["cpu"] * 4, plan=plan)
    compiled.load_state_dict(plain.state_dict())
    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-9, atol=1e-12)
    with pytest.warns(UserWarning, match="this step has 16: .*, times and memory are not those that were planned"):
        parplan.compile(perceptron(), inputs(16), devices=["cpu"] * 4, plan=plan)
    parplan.compile(perceptron(), inputs(4), devices=["cpu"] * 4, plan=plan)  # less, in equal shares
    named = "The plan was made for a model called Net, this is Sequential; layers and sizes are the same."
    assert parplan.verify(perceptron(), inputs(8), plan=plan).notes == (named,)
    notes = parplan.analyze(perceptron(), inputs(16), plan=plan).notes
    assert named in notes
    assert any("made for 8 samples in a step, this step has 16" in note for note in notes)


@pytest.mark.parametrize("error", [RuleError("R5", "fc", "3 features; use 4"), SelfCheckError("off", layer="fc")])
def test_errors_are_sent_from_process_to_process(error: ParplanError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_unknown_keywords_are_errors() -> None:
    with pytest.raises(TypeError, match="device_ids"):
        parplan.compile(perceptron(), device_ids=[0, 1])  # type: ignore[call-arg]


@pytest.mark.parametrize("call", [parplan.analyze, parplan.compile, parplan.verify])
def test_what_is_no_model_is_refused(call: Any) -> None:
    with pytest.raises(ParplanError, match=r"str is no model; give a torch\.nn\.Module"):
        call("net", torch.randn(4, 8))


class TrainsItself(nn.Linear):
    """A layer whose own method has the name of the one that sets modes, as in forward-forward training."""

    def train(self, x_pos: Tensor, x_neg: Tensor) -> Any:  # type: ignore[override]
        return self(x_pos) - self(x_neg)


@pytest.mark.parametrize("call", [parplan.analyze, parplan.compile, parplan.verify])
def test_a_method_in_place_of_train_is_refused(call: Any) -> None:
    with pytest.raises(ParplanError, match=r"^0 has a method TrainsItself\.train\(x_pos.*give it another name"):
        call(nn.Sequential(TrainsItself(8, 4)), torch.randn(4, 8))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("pins", "devices"),
    [
        pytest.param((), 2, id="none"),
        pytest.param(("*=gpu:2",), 3, id="device"),
        pytest.param(("*=replicas:4",), 4, id="replicas"),
        pytest.param(("*=replicas:3 shards:2",), 6, id="replicas x shards"),
    ],
)
def test_verify_has_as_many_devices_as_pins_need(pins: tuple[str, ...], devices: int) -> None:
    found = parplan.verify(nn.Linear(8, 6), torch.randn(12, 8), pins=pins)
    assert found.passed
    assert found.plan.devices == devices


def test_devices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ParplanError, match="cuda:63"):
        parplan.compile(perceptron(), devices=["cuda:63"])


def test_training_goes_the_same_way_as_the_plain_model() -> None:
    plain, twin = perceptron(), perceptron()
    twin.load_state_dict(plain.state_dict())
    compiled = parplan.compile(twin, devices=["cpu"] * 3)
    losses: list[list[float]] = []
    for model, owner in ((plain, plain), (compiled, twin)):
        optimizer = torch.optim.Adam(owner.parameters(), lr=1e-2)
        torch.manual_seed(0)
        losses.append([])
        for batch in (12, 12, 7, 2, 1):  # the last batches are uneven and tiny
            optimizer.zero_grad()
            loss = model(inputs(batch)).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.full
def test_evaluation_uses_the_running_statistics() -> None:
    model = Loss().double()
    compiled = parplan.compile(model, devices=["cpu"] * 3)
    x, target = torch.randn(12, 3, 6, 6, dtype=torch.float64), torch.arange(12)
    compiled(x, target)
    compiled.eval()
    assert not model.training
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, target), model(x, target), rtol=1e-9, atol=0)


def test_analyze_needs_no_gpu_and_says_what_it_planned_for() -> None:
    decision = parplan.analyze(perceptron(), inputs(), gpus=4, gpu="v100-sxm2")
    assert decision.cluster.device.kind == "v100-sxm2"
    assert decision.notes == ()
    if not torch.cuda.is_available():
        assert "No GPU here" in parplan.analyze(perceptron(), inputs(), gpus=2).notes[0]


def test_a_plan_is_reviewed_for_its_own_number_of_devices() -> None:
    plan = parplan.analyze(perceptron(), inputs(), gpus=3).plan
    assert parplan.analyze(perceptron(), inputs(), plan=plan).cluster.count == 3


@pytest.mark.full
def test_a_cluster_is_planned_for_and_its_plan_reviewed() -> None:
    cluster = Path(__file__).resolve().parent.parent / "examples" / "clusters" / "workstation.toml"
    decision = parplan.analyze(perceptron(), inputs(), cluster=cluster)
    assert decision.cluster.describe() == "workstation: 2 x rtx4090 + 1 x desktop-cpu, pcie4-staged"
    assert parplan.analyze(perceptron(), inputs(), cluster=decision.cluster, plan=decision.plan).plan == decision.plan
    with pytest.raises(PlanError, match="the plan is for 3 devices, to be priced for 2"):
        parplan.analyze(perceptron(), inputs(), gpus=2, plan=decision.plan)
    with pytest.raises(ClusterError, match="leave out --gpus"):
        parplan.analyze(perceptron(), inputs(), cluster=cluster, gpus=3)


def test_a_cpu_beside_gpus_computes_at_the_rate_it_has_and_the_reader_is_told() -> None:
    cluster = Path(__file__).resolve().parent.parent / "examples" / "clusters" / "workstation.toml"
    notes = parplan.analyze(perceptron(), inputs(), cluster=cluster, precision="tf32").notes
    assert "desktop-cpu has no tf32 rate: what it computes is priced at its fp32 rate." in notes


@pytest.mark.full
def test_batch_auto_takes_what_analyze_says_of_that_batch() -> None:
    found = parplan.analyze(perceptron(), inputs(), batch="auto", gpus=3, gpu="k20")
    assert [one.batch for one in found.batches[:3]] == [3, 6, 12]
    by_batch = {one.batch: one for one in found.batches}
    own = parplan.analyze(perceptron(), inputs(found.plan.batch), gpus=3, gpu="k20")
    assert own.prediction == found.prediction
    assert own.plan == found.plan
    assert by_batch[found.plan.batch].step_s == own.prediction.step_s
    assert "another training: from the example inputs' 12 samples to" in found.notes[-1]


@pytest.mark.full
def test_batch_auto_stays_within_memory() -> None:
    free = parplan.analyze(perceptron(), inputs(), batch="auto", gpus=2, gpu="k20")
    tight = parplan.analyze(perceptron(), inputs(), batch="auto", gpus=2, gpu="k20", memory_bytes=200_000)
    assert tight.plan.batch < free.plan.batch
    assert max(tight.prediction.memory_bytes) <= 200_000
    assert [one.batch for one in tight.batches if not one.fits]
    assert min(one.batch for one in tight.batches if not one.fits) > tight.plan.batch


@pytest.mark.full
def test_batch_auto_prices_a_plan_of_yours() -> None:
    plan = parplan.analyze(perceptron(), inputs(), gpus=2).plan
    found = parplan.analyze(perceptron(), inputs(), batch="auto", plan=plan)
    assert found.plan == replace(plan, batch=found.plan.batch)
    assert len(found.batches) > 3


class Averages(nn.Module):
    """Has the batch built into a number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) / x.shape[0]
        return y


def test_batch_auto_refuses_what_is_bound_to_its_batch() -> None:
    with pytest.raises(CaptureError, match=r"--batch auto: Averages has constants that depend on the batch, so .* N$"):
        parplan.analyze(Averages(), inputs(4).float(), batch="auto", gpus=2)


@pytest.mark.full
def test_batch_auto_prices_a_model_with_its_loss_inside() -> None:
    found = parplan.analyze(Loss(), (torch.zeros(4, 3, 6, 6), torch.zeros(4, dtype=torch.long)), batch="auto", gpus=2)
    assert found.plan.batch > 4
    assert len(found.batches) > 1


@pytest.mark.parametrize(
    ("given", "text"),
    [({"batch": "best"}, "batch is 'best'"), ({"batch": "auto", "measure": True}, "choose the batch first")],
)
def test_batches_that_make_no_sense_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ParplanError, match=text):
        parplan.analyze(perceptron(), inputs(), gpus=2, **given)


def test_hosts_of_gpus() -> None:
    found = parplan.analyze(perceptron(), inputs(), gpus="2x2", gpu="v100").cluster
    assert [(link.name, link.size) for link in found.links] == [("nvlink2", 2), ("100gbe", 4)]


def test_measuring_one_device_cannot_stand_for_another() -> None:
    with pytest.raises(ClusterError, match="cannot stand for v100"):
        parplan.analyze(perceptron(), inputs(), gpus=2, gpu="v100", measure=True)


@pytest.mark.full
def test_verify_finds_a_model_that_is_not_what_it_seems() -> None:
    turns = itertools.count()

    class Forgetful(nn.Module):
        """Computes something else every time, so no plan can keep its numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x) + next(turns)
            return y

    found = parplan.verify(Forgetful(), inputs())
    assert not found.passed


@pytest.mark.full
def test_verify_leaves_the_model_alone() -> None:
    model = Loss()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = parplan.verify(model, (torch.zeros(12, 3, 6, 6), torch.zeros(12, dtype=torch.long)), devices=3)
    assert found.passed
    assert {row.group for row in found.rows} == {"outputs", "loss", "gradients", "buffers"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_report_names_the_type_of_the_weights() -> None:
    found = [
        parplan.analyze(nn.Linear(8, 8).to(dtype), torch.zeros(4, 8, dtype=dtype), gpus=2, precision="tf32")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert [one.precision for one in found] == ["tf32", "bf16"]


@pytest.mark.full
def test_a_model_on_the_meta_device_is_planned_under_autocast() -> None:
    """Weights and their optimizer's state stay float32, activations are half of it, and the reader is told."""
    with torch.device("meta"):
        model, given = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))), torch.zeros(1 << 16, 512)
    wide, narrow = (parplan.analyze(model, given, gpus=2, gpu="a100", precision=p) for p in ("tf32", "bf16"))
    assert not torch.is_autocast_enabled("cpu")
    assert narrow.precision == "bf16"
    assert any(
        note.startswith("Priced as under torch.autocast to bf16") and "(16 bytes per parameter)" in note
        for note in narrow.notes
    )
    ratio = max(narrow.prediction.memory_bytes) / max(wide.prediction.memory_bytes)
    assert 0.4 < ratio < 0.7
