"""Values of tensors on the meta device: the same under any plan, from any source, and refused where none gives them."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver

import parplan
from parplan.errors import CheckpointError, ModelError, RuntimeFailure
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.programs.start_values import StartValues
from tests.every_case import every_case
from tests.runtime.helpers import planner, spread
from tests.runtime.meta_cases import (
    agree,
    different_values,
    different_weights,
    early_state,
    made_plainly,
    on_meta,
    on_ranks,
    resumed_by_block,
    saved_by_block,
    started,
    train,
    weights_of_one_process,
)
from tests.runtime.ranks import Case, run_case


class Rotary(nn.Module):
    """A layer with a weight and no way to give it values, beside a buffer that is computed when it is made."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("frequencies", 1.0 / torch.arange(1, 5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.frequencies


class Forgets(Rotary):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Computes(Forgets):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.frequencies = 1.0 / torch.arange(1, 5)


def net_of(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), kind(), nn.BatchNorm1d(4))


def compiled(kind: type[nn.Module], **given: Any) -> Compiled:
    net = net_of(kind)
    return Compiled(net, planner(spread(2, "data"), 2), devices=["cpu"] * 2, start=StartValues.of(net, **given))


def written(part: nn.Module) -> None:
    """Through `.data`, which torch does not count, and of rotary layers alone."""
    if isinstance(part, Rotary):
        part.weight.data.fill_(3.0)
        part.frequencies.copy_(1.0 / torch.arange(1, 5))


def test_on_ranks() -> None:
    run_case(partial(on_ranks, ("gathered",)), 2)


@pytest.mark.full
def test_on_more_ranks() -> None:
    run_case(partial(on_ranks, ("sharded", "shards", "replicas", "gathered")), 4)


def test_in_one_process_as_by_hand() -> None:
    plain, model = made_plainly(), started(spread(2, "data"), 2)
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.01) for own in (model, plain)]
    state = torch.get_rng_state()
    found = train(model, optimizers[0], range(2))
    assert torch.equal(torch.get_rng_state(), state)
    agree(model, found, plain, train(plain, optimizers[1], range(2)))


@pytest.mark.full
def test_saved_by_block_and_resumed_in_one_process(tmp_path: Path) -> None:
    run_case(partial(saved_by_block, tmp_path), 2)
    resumed_by_block(tmp_path, 0, 1)


@pytest.mark.full
def test_saved_by_block_and_resumed_by_more_processes(tmp_path: Path) -> None:
    run_case(partial(saved_by_block, tmp_path), 2)
    run_case(partial(resumed_by_block, tmp_path), 4)


@pytest.mark.parametrize(
    "case",
    [different_weights, *(pytest.param(case, marks=pytest.mark.full) for case in (different_values, early_state))],
)
def test_refused_on_ranks(case: Case) -> None:
    run_case(case, 2)


def test_weights_that_one_process_cannot_read(tmp_path: Path) -> None:
    run_case(partial(weights_of_one_process, tmp_path), 2)


def test_state_that_is_loaded_before_there_are_values_is_refused() -> None:
    """Momentum on the meta device moved nothing, and nothing was said."""
    plain, x = nn.Linear(4, 4), torch.randn(6, 4)
    trained = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    plain(x).sum().backward()
    trained.step()
    with torch.device("meta"):
        net = nn.Linear(4, 4)
    model = parplan.compile(net, weights=plain.state_dict(), devices=["cpu"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(trained.state_dict())
    model(x).sum().backward()
    with pytest.raises(
        RuntimeFailure, match=r"\(momentum_buffer\) was made, or loaded, while it was on the meta device"
    ):
        optimizer.step()


def test_a_damaged_checkpoint_gives_no_values(tmp_path: Path) -> None:
    path, plain = tmp_path / "model.pt", nn.Linear(4, 4)
    parplan.save_checkpoint(path, model=plain)
    data = bytearray(path.read_bytes())
    data[data.index(plain.weight.detach().numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with torch.device("meta"):
        net = nn.Linear(4, 4)
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256 is"):
        parplan.compile(net, weights=path)


def test_a_damaged_folder_gives_no_values(tmp_path: Path) -> None:
    """torch's error is no Exception, so that handlers of users did not see it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        state_dict_saver.save(nn.Linear(4, 4).state_dict(), checkpoint_id=tmp_path, no_dist=True)
    for part in tmp_path.glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:20])
    with torch.device("meta"):
        model = parplan.compile(nn.Linear(4, 4), weights=tmp_path, devices=["cpu"])
    with pytest.raises(CheckpointError, match=r"rank 0: .*; the folder is damaged or incomplete"):
        model.prepare(torch.randn(6, 4))


@pytest.mark.parametrize("given", [["weights.pt"], {"weight": None, "bias": torch.zeros(4)}], ids=["a list", "None"])
def test_weights_of_a_wrong_type_are_refused(given: Any) -> None:
    with torch.device("meta"):
        net = nn.Linear(4, 4)
    with pytest.raises(
        CheckpointError, match=r"cannot read the weights|weight is NoneType in the weights; give tensors"
    ):
        parplan.compile(net, weights=given)


# ---- what gives values -----------------------------------------------------------------------------------------------


@every_case("kind", [Computes, Rotary])
def test_a_module_computes_its_buffers(kind: type[nn.Module]) -> None:
    model = compiled(kind, initialise=None if kind is Computes else written)
    x = torch.randn(6, 4)
    model(x)
    assert torch.equal(model.module.get_buffer("1.frequencies"), 1.0 / torch.arange(1, 5))
    assert torch.equal(model.module.get_parameter("1.weight"), torch.full((4,), 1.0 if kind is Computes else 3.0))
    assert model.module.get_buffer("2.num_batches_tracked") == 1


@every_case("file", ["mapping", "torch.save", "save_checkpoint"])
def test_saved_weights_are_taken_as_they_are(tmp_path: Path, file: str) -> None:
    saved = nn.Sequential(nn.Linear(4, 4), Computes(), nn.BatchNorm1d(4))
    with torch.no_grad():
        for number, tensor in enumerate([*saved.parameters(), *saved.buffers()]):
            tensor.fill_(number + 1)
    weights: Any = saved.state_dict()
    if file != "mapping":
        path = tmp_path / file
        if file == "torch.save":
            torch.save(weights, path)
        else:
            parplan.save_checkpoint(path, model=saved, epoch=3)
        weights = path
    model = compiled(Computes, weights=weights)
    model.prepare(torch.randn(6, 4))
    for name, tensor in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert torch.equal(model.module.get_buffer("1.frequencies"), 1.0 / torch.arange(1, 5))  # is not saved


def test_values_that_are_there_stay() -> None:
    with torch.device("meta"):
        net = nn.Linear(4, 4)
    net.bias = nn.Parameter(torch.full((4,), 7.0))
    model = Compiled(net, planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    model.prepare(torch.randn(6, 4))
    assert torch.equal(model.module.get_parameter("bias"), torch.full((4,), 7.0))


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_a_module_that_nothing_initialises_is_refused() -> None:
    with pytest.raises(ModelError, match=r"1\.weight, 1\.frequencies: on the meta device, and Rotary has no reset_par"):
        parplan.compile(net_of(Rotary))


def test_a_buffer_that_is_not_written_is_refused() -> None:
    with pytest.raises(
        RuntimeFailure, match=r"1\.frequencies is on the meta device, and reset_parameters\(\) of Forgets"
    ):
        compiled(Forgets).prepare(torch.randn(6, 4))


def test_weights_of_another_model_are_refused() -> None:
    state = nn.Sequential(nn.Linear(4, 4)).state_dict()
    with pytest.raises(
        CheckpointError, match=r"the weights is no state of Sequential: it lacks 1\.weight, 2\.weight, 2\.bias \(6 in"
    ):
        parplan.compile(net_of(Computes), weights=state)


@every_case(("width", "device"), [(5, "cpu"), (4, "meta")])
def test_weights_of_another_shape_or_without_values_are_refused(width: int, device: str) -> None:
    with torch.device("meta"):
        net = nn.Linear(4, 4)
    model = parplan.compile(net, weights=nn.Linear(width, 4, device=device).state_dict(), devices=["cpu"])
    told = rf"weight has shape \(4, {width}\) in the weights, on {device}, and \(4, 4\) in the model"
    with pytest.raises(CheckpointError, match=told):
        model.prepare(torch.randn(6, 4))


def test_a_model_with_values_takes_no_others() -> None:
    with pytest.raises(ModelError, match="initialise is for tensors on the meta device, and Linear has none"):
        parplan.compile(nn.Linear(4, 4), initialise=written)


def test_state_before_there_are_values_is_refused() -> None:
    model = parplan.compile(on_meta())
    for ask in (model.state_dict, lambda: model.load_state_dict(made_plainly().state_dict())):
        with pytest.raises(RuntimeFailure, match=r"has no values yet; call prepare\(inputs\) first"):
            ask()
