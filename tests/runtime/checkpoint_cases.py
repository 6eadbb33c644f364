"""What checkpoints promise beside the matrix, on the ranks of one process group."""

from __future__ import annotations

import copy
import os
import re
import shutil
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode

import parplan
from parplan.compat import pytree
from parplan.errors import CheckpointError, RankAloneWarning, RuntimeFailure
from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor
from parplan.runtime.transport.rendezvous import RANK_WAIT
from tests.runtime.helpers import planner, spread
from tests.runtime.nets import conv_net, mlp

__all__ = ["ALONE", "WITH_FILES", "on_one_rank_alone"]

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def trained(rank: int, ranks: int, net: nn.Module | None = None, **options: Any) -> tuple[Compiled, torch.optim.Adam]:
    """A model with every linear layer cut, and its optimizer, after a step."""
    model = Compiled(net or mlp(), planner(spread(ranks, "out-features"), ranks), **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer, rank, ranks)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> None:
    """A training step on the rank's samples; a plain model is given all of them."""
    x = torch.randn(2 * ranks, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    optimizer.zero_grad()
    model(x.chunk(ranks)[rank] if isinstance(model, Compiled) else x).square().mean().backward()
    optimizer.step()


def same(model: nn.Module, wanted: nn.Module) -> None:
    """Refuse states that differ by more than rounding."""
    torch.testing.assert_close(dict(model.state_dict()), dict(wanted.state_dict()), rtol=1e-9, atol=1e-12)


def tensors(state: Any) -> dict[str, Tensor]:
    """The tensors of a nested state, by path."""
    leaves, _ = pytree.tree_flatten_with_path(state)
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def whole_and_plain(rank: int, ranks: int) -> None:
    """Ordinary states hold ordinary tensors of the plain model's shapes, and nothing else can be saved."""
    model, optimizer = trained(rank, ranks)
    plain = mlp()
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    step(plain, plain_optimizer, 0, 1)
    for found, wanted in ((model, plain), (optimizer, plain_optimizer)):
        states = tensors(found.state_dict()), tensors(wanted.state_dict())
        assert {n: t.shape for n, t in states[0].items()} == {n: t.shape for n, t in states[1].items()}
        assert {type(t) for t in states[0].values()} == {Tensor}
    for held in (model.module.state_dict(), optimizer.state[next(model.parameters())], list(model.parameters())):
        with pytest.raises(RuntimeFailure, match="is cut over processes"):
            torch.save(held, os.devnull)


def on_one_rank_alone(rank: int, ranks: int) -> None:
    """An error within the group's timeout that says what to do: of model, optimizer, buffers, and of our own file."""

    def normed(group: dist.ProcessGroup | None, batch_norm: str) -> Compiled:
        model = Compiled(conv_net(), planner(spread(ranks, "data"), ranks), group=group, batch_norm=batch_norm)
        model(torch.randn(2, 3, 8, 8, dtype=torch.float64))
        return model

    lone = normed(None, "global")
    if rank == 0:
        assert len(lone.state_dict()) == 11  # every rank has all of it, as with DistributedDataParallel
    for make in (
        lambda group: trained(rank, ranks, group=group)[0].state_dict,
        lambda group: trained(rank, ranks, group=group)[1].state_dict,
        lambda group: partial(parplan.save_checkpoint, os.devnull, model=normed(group, "global")),
        lambda group: normed(group, "local").state_dict,  # last: the ranks' numbers of groups differ from here on
    ):
        group = dist.new_group(timeout=timedelta(seconds=3))
        alone = make(group)
        if rank == 0:
            with pytest.raises(RuntimeFailure, match=r"every rank|another rank|all ranks"):
                alone()
        dist.barrier()


def saved_by_one_rank_first(folder: Path, rank: int, ranks: int) -> None:
    """Of replicas, `if rank == 0: save_checkpoint(...)` is said after some seconds, not at the group's timeout; a late
    rank is no error."""
    model = Compiled(mlp(), planner(spread(ranks, "data"), ranks))
    for wait, late in (("0.1", 1), ("0.1", 0), ("5", None)):
        with mock.patch.dict(os.environ, {RANK_WAIT: wait}), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if rank == late:
                time.sleep(1)
            parplan.save_checkpoint(folder / f"{rank}.pt" if rank else folder / "run.pt", model=model)
        texts = [str(one.message) for one in said if issubclass(one.category, RankAloneWarning)]
        assert len(texts) == (late == 1 and rank == 0)  # rank 0 may be late, as it writes
        assert all("1 of 2 ranks have come within 0.1 s; every rank has to call it" in text for text in texts)
    assert sorted(path.name for path in folder.iterdir()) == ["run.pt"]


def damaged_places(folder: Path, rank: int, ranks: int) -> None:
    """What one rank meets is raised on all."""
    model, optimizer = trained(rank, ranks)
    with pytest.raises(CheckpointError, match=r"^rank 0: cannot write .*: No such file or directory"):
        parplan.save_checkpoint(folder / "missing" / "run.pt", model=model, optimizer=optimizer)
    own = folder / f"only-on-{rank}.pt"
    parplan.save_checkpoint(folder / "run.pt", model=model, epoch=1)
    if rank == 0:
        shutil.copy(folder / "run.pt", own)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"^rank 1: cannot read .*: No such file"):
        parplan.load_checkpoint(own, model=model)
    lacking = mock.patch.object(torch, "load", side_effect=RuntimeError("no memory") if rank else torch.load)
    with lacking, pytest.raises(CheckpointError, match=r"^rank 1: cannot read .*run\.pt: no memory"):
        parplan.load_checkpoint(folder / "run.pt", model=model)
    parplan.save_checkpoint(folder / "other.pt", model=model, epoch=2)
    with pytest.raises(CheckpointError, match="ranks 1 read another file of that name than rank 0"):
        parplan.load_checkpoint(folder / ("run.pt" if rank == 0 else "other.pt"), model=model)


def other_states(rank: int, ranks: int) -> None:
    """States of other models are refused on every rank, before the first call as after it."""
    cut, _ = trained(rank, ranks)
    fresh = Compiled(mlp(), planner(spread(ranks, "out-features"), ranks))
    for model in (cut, fresh):
        with pytest.raises((RuntimeError, RuntimeFailure), match=r"0\.weight.*shape"):
            model.load_state_dict(mlp(24).state_dict())
        state = mlp().state_dict()
        bias = state.pop("4.bias")
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "4\.bias"'):
            model.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "more"'):
            model.load_state_dict({**state, "4.bias": bias, "more": bias})
        found = model.load_state_dict({"4.bias": torch.ones(4), "more": bias}, strict=False)
        assert (len(found.missing_keys), found.unexpected_keys) == (5, ["more"])
        assert model.state_dict()["4.bias"].tolist() == [1.0] * 4
    cut_optimizer = torch.optim.SGD(cut.parameters(), momentum=0.9, lr=0.1)
    step(cut, cut_optimizer, rank, ranks)
    states = cut_optimizer.state_dict()
    states["state"][0]["momentum_buffer"] = states["state"][0]["momentum_buffer"][:1]
    cut_optimizer.load_state_dict(states)
    with pytest.raises((RuntimeError, RuntimeFailure)):
        step(cut, cut_optimizer, rank, ranks)


def assigned(rank: int, ranks: int) -> None:
    """`assign=True` loads the same values, and the model runs with them."""
    model, _ = trained(rank, ranks)
    plain = mlp()
    model.load_state_dict({name: value.clone() for name, value in plain.state_dict().items()}, assign=True)
    updates = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for loaded, update in zip((model, plain), updates, strict=True):
        step(loaded, update, rank, ranks)
    same(model, plain)


class Versioned(nn.Linear):
    """A layer whose weights were kept with the other sign by its first version."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = -state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)


def versions(rank: int, ranks: int) -> None:
    """Layers are told which version of theirs saved what they load, also inside of a larger model."""
    plain = nn.Sequential(Versioned(6, 4)).double()
    plain_state = plain.state_dict()
    model, _ = trained(rank, ranks, copy.deepcopy(plain))
    model.load_state_dict(plain_state)
    same(model, plain)
    larger, other = nn.ModuleDict({"part": model}), nn.ModuleDict({"part": copy.deepcopy(plain)})
    other.load_state_dict(larger.state_dict())
    same(other, larger)
    larger.load_state_dict(other.state_dict())
    same(model, plain)


def states_before_a_step(folder: Path, rank: int, ranks: int) -> None:
    """Optimizers that have made no step, but have a state of cut parameters, save whole tensors."""
    model, optimizer = trained(rank, ranks)
    early = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    assert {type(value) for value in tensors(early.state_dict()).values()} == {Tensor}
    other, other_optimizer = copy.deepcopy((model, optimizer))
    parplan.save_checkpoint(folder / "run.pt", model=other, optimizer=other_optimizer, early=early)
    torch.testing.assert_close(other_optimizer.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def resumed_with_a_scheduler(folder: Path, rank: int, ranks: int) -> None:
    """Optimizer and scheduler go on where they were, loaded before the first call."""

    def started() -> tuple[Compiled, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = Compiled(mlp(), planner(spread(ranks, "out-features"), ranks))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3)

    model, optimizer, scheduler = started()
    for number in range(6):
        if number == 3:
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            parplan.save_checkpoint(folder / "run.pt", **parts, number=number)
        step(model, optimizer, rank, ranks)
        scheduler.step()
    again, other_optimizer, other_scheduler = started()
    parts = {"model": again, "optimizer": other_optimizer, "scheduler": other_scheduler}
    for _ in range(parplan.load_checkpoint(folder / "run.pt", **parts)["number"], 6):
        step(again, other_optimizer, rank, ranks)
        other_scheduler.step()
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr()
    same(again, model)


class _Largest(TorchDispatchMode):
    """The largest ordinary tensor that any op makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, ShardedTensor) for kind in types):
            return NotImplemented  # first what is done with the blocks
        found = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(found):
            if type(tensor) is Tensor:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return found


def sharded(folder: Path, rank: int, ranks: int) -> None:
    """torch.distributed.checkpoint saves and loads while no rank makes a whole tensor, and one rank writes a block."""
    width = 512
    model, optimizer = trained(rank, ranks, mlp(width))
    block = width * width // ranks
    with _Largest() as largest:
        weights, updates = get_state_dict(model, optimizer)
        state_dict_saver.save({"model": weights, "optimizer": updates}, checkpoint_id=folder / "run")
    assert largest.elements <= block
    other, other_optimizer = trained(rank, ranks, mlp(width))
    with _Largest() as largest:
        weights, updates = get_state_dict(other, other_optimizer)
        state_dict_loader.load({"model": weights, "optimizer": updates}, checkpoint_id=folder / "run")
        set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=updates)
    assert largest.elements <= block
    same(other, model)
    torch.testing.assert_close(other_optimizer.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    written = sum(path.stat().st_size for path in (folder / "run").iterdir())
    assert written < 1.05 * 8 * 3 * sum(tensor.numel() for tensor in model.state_dict().values())
    whole = dict(model.state_dict())
    if rank == 0:
        dcp_to_torch_save(folder / "run", folder / "one.pt")
        found = torch.load(folder / "one.pt", weights_only=True)["model"]
        torch.testing.assert_close(found, whole, rtol=0, atol=0)
    dist.barrier()


def buffers_by_channels(folder: Path, rank: int, ranks: int) -> None:
    """Statistics of a batch norm cut by channels, or that one rank runs, are the plain model's on every rank."""
    everyone = tuple(range(ranks))
    nets = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double() for _ in range(2)]
    cut = {"0": Strategy(1, ranks, "out-channels", everyone), "1": Strategy(1, ranks, "channels", everyone)}
    last = {"0": Strategy(devices=(ranks - 1,)), "1": Strategy(devices=(ranks - 1,))}
    for number, strategies in enumerate((cut, last)):
        plain = copy.deepcopy(nets[number])
        model = Compiled(nets[number], planner(strategies, ranks))
        dist.broadcast_object_list(shared := [plain.state_dict()])
        plain.load_state_dict(shared[0])
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(2 * ranks, 3, 8, 8, dtype=torch.float64, generator=generator)
            model(x.chunk(ranks)[rank]).sum().backward()
            plain(x)
        wanted = dict(plain.state_dict())
        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), rtol=1e-9, atol=0)
        torch.testing.assert_close(dict(copy.deepcopy(model).state_dict()), wanted, rtol=1e-9, atol=0)
        torch.testing.assert_close(model.module.eval()(x), plain.eval()(x), rtol=1e-9, atol=1e-9)
        for given in (model, model.module):
            place = folder / f"{type(given).__name__} {number}"
            state_dict_saver.save(get_model_state_dict(given), checkpoint_id=place)
            dist.barrier()
            if rank == 0:
                dcp_to_torch_save(place, folder / "one.pt")
                torch.testing.assert_close(torch.load(folder / "one.pt", weights_only=True), wanted, rtol=1e-9, atol=0)
            dist.barrier()


def full_states(rank: int, ranks: int) -> None:
    """The options of torch.distributed.checkpoint that ask for whole tensors, on all ranks or on rank 0 alone."""
    model, optimizer = trained(rank, ranks)
    wanted = model.state_dict(), optimizer.state_dict()
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        found: Any = get_state_dict(model, optimizer, options=options)
        if offload and rank:
            assert found == ({}, {})
            continue
        torch.testing.assert_close(found[0], dict(wanted[0]), rtol=0, atol=0)
        moments = [entry["exp_avg"] for entry in found[1]["state"].values()]
        torch.testing.assert_close(moments, [entry["exp_avg"] for entry in wanted[1]["state"].values()], rtol=0, atol=0)
    for from_first in (False, True):
        torch.manual_seed(2)
        other, other_optimizer = trained(rank, ranks)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
        weights, updates = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        if from_first and rank:
            weights, updates = {}, {}
        set_model_state_dict(other, weights, options=options)
        set_optimizer_state_dict(other, other_optimizer, updates, options=options)
        same(other, model)
        torch.testing.assert_close(other_optimizer.state_dict(), wanted[1], rtol=0, atol=0)
        step(other, other_optimizer, rank, ranks)


def flat_states(folder: Path, rank: int, ranks: int) -> None:
    """`flatten_optimizer_state_dict` and `cpu_offload` keep blocks."""
    model, optimizer = trained(rank, ranks)
    options = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
    weights, updates = get_state_dict(model, optimizer, options=options)
    kinds = [type(found) for found in (weights["0.weight"], updates["state.0.weight.exp_avg"])]
    assert kinds == [ShardedTensor] * 2
    state_dict_saver.save({"model": weights, "optimizer": updates}, checkpoint_id=folder / "flat")
    torch.manual_seed(2)
    other, other_optimizer = trained(rank, ranks)
    weights, updates = get_state_dict(other, other_optimizer, options=options)
    state_dict_loader.load({"model": weights, "optimizer": updates}, checkpoint_id=folder / "flat")
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=updates, options=options)
    same(other, model)
    torch.testing.assert_close(other_optimizer.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def saved_meanwhile(folder: Path, rank: int, ranks: int) -> None:
    """`async_save` saves what was there when it was called, or is refused; it never saves anything else."""
    model, _ = trained(rank, ranks)
    weights = get_model_state_dict(model)
    with pytest.raises(RuntimeFailure, match="cut over processes"):
        state_dict_saver.async_save({"model": weights}, checkpoint_id=folder / "later")


def page(folder: Path, rank: int, ranks: int) -> None:
    """The code of docs/checkpoints.md: what is saved by a block is loaded by the next one, into a fresh model."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 6
    os.chdir(folder)
    inputs = torch.randn(2, 6, dtype=torch.float64)
    for saving, loading in zip(blocks[::2], blocks[1::2], strict=True):
        model, optimizer = trained(rank, ranks)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scheduler.step()
        names: dict[str, Any] = {"torch": torch, "parplan": parplan, "rank": rank, "inputs": inputs}
        exec(saving, names | {"model": model, "optimizer": optimizer, "scheduler": scheduler})
        dist.barrier()
        again = Compiled(mlp(), planner(spread(ranks, "out-features"), ranks))
        other = torch.optim.Adam(again.parameters(), lr=0.5)
        names |= {"model": again, "optimizer": other, "scheduler": torch.optim.lr_scheduler.StepLR(other, 1)}
        exec("\n".join(line for line in saving.splitlines() if "import" in line) + "\n" + loading, names)
        for trains, optimizes in ((model, optimizer), (again, other)):
            step(trains, optimizes, rank, ranks)
        same(again, model)


ALONE = (whole_and_plain, other_states, assigned, versions, full_states, on_one_rank_alone)
WITH_FILES = (
    damaged_places, saved_by_one_rank_first, states_before_a_step, resumed_with_a_scheduler, sharded,
    buffers_by_channels, flat_states, saved_meanwhile, page,
)  # fmt: skip
