"""The adapters' one sentence for what they do not keep, and for a library that is not there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import parplan
from parplan.errors import RuntimeFailure
from parplan.integrations import library
from tests.integrations.launch import ROOT


def _compiled() -> Any:
    return parplan.compile(nn.Linear(4, 2), devices=["cpu"])


@pytest.fixture
def alone() -> Iterator[None]:
    """Libraries may join a group of one process; it is left afterwards."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_missing_library_is_named_with_its_extra() -> None:
    with pytest.raises(ImportError, match=r"^no_such_library cannot be imported .*pip install 'parplan\[lightning\]'$"):
        library("no_such_library", "lightning")


@pytest.mark.full
def test_parplan_imports_no_trainer() -> None:
    code = "import sys, parplan.api, parplan.runtime.module.compiled as c; c; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "parplan.runtime.module.compiled" in found.split()
    assert {"accelerate", "transformers", "lightning"}.isdisjoint(found.split())


@pytest.mark.parametrize(
    ("told", "given"),
    [
        ("the plugin FSDP", {"distributed_type": SimpleNamespace(name="FSDP")}),
        ("the plugin DEEPSPEED", {"distributed_type": SimpleNamespace(name="DEEPSPEED")}),
        ('mixed_precision="fp8"', {"mixed_precision": "fp8"}),
        ("dynamo_backend=INDUCTOR", {"dynamo_plugin": SimpleNamespace(backend=SimpleNamespace(name="INDUCTOR"))}),
    ],
)
def test_accelerates_own_ways_to_split_a_model(told: str, given: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from parplan.integrations.accelerate import adopt

    real = Accelerator(cpu=True).state
    names = ("distributed_type", "mixed_precision", "dynamo_plugin")
    state = SimpleNamespace(**{name: getattr(real, name) for name in names} | given)
    with pytest.raises(RuntimeFailure, match=f"^accelerate is asked for {told}, which does not go with a compiled"):
        adopt(SimpleNamespace(state=state), _compiled())


def test_accelerate_leaves_an_adopted_model_and_refuses_one_of_too_few_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("accelerate")
    import accelerate

    from parplan.integrations.accelerate import adopt

    accelerator, model = accelerate.Accelerator(cpu=True), _compiled()
    assert adopt(accelerator, model) is model
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model) is model
    assert not hasattr(model.module, "_is_accelerate_prepared")
    several = SimpleNamespace(num_processes=2, mixed_precision="no")
    monkeypatch.setattr(accelerate.state, "AcceleratorState", lambda: several)
    with pytest.raises(RuntimeFailure, match=r"compiled for one process before accelerate joined 2; make the Accel"):
        accelerator.prepare(_compiled())


def test_the_trainer_wants_each_processs_own_loss(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from parplan.integrations.transformers import Trainer

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    model = parplan.compile(nn.Linear(4, 2), devices=["cpu"], scalars="per_replica")
    with pytest.raises(RuntimeFailure, match=r'^the Trainer runs 1 processes and .* with scalars="whole"$'):
        Trainer(model, arguments)
    with pytest.raises(RuntimeFailure, match=r"^model_init makes models one after another; give the Trainer one"):
        Trainer(args=arguments, model_init=lambda: nn.Linear(4, 2))


def _module(parts: int, forward: bool, calls: bool) -> Any:
    """A LightningModule of some layers, with or without a forward over all of them that its training calls."""
    from lightning import pytorch as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)
            if parts > 1:
                self.head = nn.Linear(4, 4)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            hidden = self(batch[0]) if calls else self.net(batch[0])
            loss: Tensor = (self.head(hidden) if parts > 1 and not forward else hidden).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    if forward:
        Module.forward = lambda self, x: self.net(x)
    return Module()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "part", "told"),
    [
        ((2, False, False), "", r"^Module has no forward of its own, and its parts are net, head: name the one"),
        ((2, False, False), "nett", r"^Module has no forward of its own, and its parts are net, head: name the one"),
        ((2, False, False), "net", r"^head.weight is trained outside of the part that parplan plans"),
        ((1, True, False), "", r"^training_step never called the part that parplan plans"),
        ((1, True, True), "", ""),
        ((1, False, False), "", ""),
    ],
)
def test_lightnings_module_has_to_call_the_part_that_is_planned(
    module: tuple[int, bool, bool], part: str, told: str, alone: None, tmp_path: Any
) -> None:
    pytest.importorskip("lightning")
    from lightning import pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    from parplan.integrations.lightning import ParplanStrategy

    def fitted(strategy: Any) -> Any:
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, fast_dev_run=2, logger=False, default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, samples)
        return strategy.compiled

    model, samples = _module(*module), DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
    if told:
        with pytest.raises(RuntimeFailure, match=told):
            fitted(ParplanStrategy(part))
        return
    strategy = ParplanStrategy(part, check="always")
    compiled = fitted(strategy)
    assert compiled.program is not None
    assert {*strategy.lightning_module_state_dict()} == {"net.weight", "net.bias"}
    assert fitted(ParplanStrategy(part, check="always")) is compiled
    assert fitted(ParplanStrategy(part)) is compiled
    with pytest.raises(RuntimeFailure, match=r"^the module is compiled already, with other options than check of this"):
        fitted(ParplanStrategy(part, check="off"))


def test_lightnings_hooks_change_what_the_planned_forward_reads(alone: None) -> None:
    """An attribute that is set on the module between epochs is the planned forward's, and one that it writes stays."""
    pytest.importorskip("lightning")
    from lightning import pytorch as pl

    from parplan.integrations.lightning import ParplanStrategy

    class Annealed(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.beta, self.seen = nn.Linear(4, 1), 0.0, list[float]()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.net(x) * self.beta
            return found

        def on_train_epoch_start(self) -> None:
            self.beta = float(self.current_epoch + 1)

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = (self(batch[0]) - 1).square().mean()
            self.seen.append(float(loss.detach()))
            return loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    found = []
    for strategy in ("auto", ParplanStrategy()):
        torch.manual_seed(0)
        module = Annealed()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4)), batch_size=4)
        trainer = pl.Trainer(
            max_epochs=3, accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, loader)
        found.append(module.seen)
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert len(set(found[0])) == 3
