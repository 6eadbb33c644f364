"""One cell of the checkpoint matrix: trained and saved by one plan and number of processes, continued by another.

Every process of a group runs `write` or `read` for the same cell. The oracle is the plain model, trained without a
pause in float64: the three losses after loading, and the state after them, have to be its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional

import parplan
from parplan.graph.layer_graph import Layer
from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import planner
from tests.runtime.nets import conv_net
from tests.runtime.pipeline_cases import Staging

__all__ = ["OPTIMIZERS", "PLANS", "PROCESSES", "ROUTES", "Cell", "Setup", "read", "write"]

CLOSE = 1e-9  # relative, float64
STEPS = 3  # before the checkpoint, and as many after it
SAMPLES = 8
# Logical devices of a setup with one process.
LOCAL_DEVICES = 2

PROCESSES = (1, 2, 4)
PLANS = ("plain", "data", "hybrid", "sharded", "slices", "stages")
ROUTES = ("torch.save", "save_checkpoint", "dcp")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@dataclass(frozen=True)
class Setup:
    """A plan, and the number of processes that run it; one process has two logical devices."""

    plan: str
    processes: int

    def __str__(self) -> str:
        return f"{self.plan}x{self.processes}"


@dataclass(frozen=True)
class Cell:
    """What saved, what loads, by which optimizer and which functions.

    Attributes:
        cut_first: the loading model runs a step before, so that its parameters are cut and its optimizer has a state.
    """

    source: Setup
    target: Setup
    optimizer: str
    route: str
    cut_first: bool = False

    def __str__(self) -> str:
        return f"{self.source}-{self.target}-{self.optimizer}-{self.route}{'-cut' if self.cut_first else ''}"

    def place(self, folder: Path) -> Path:
        """The file, or the folder, of the checkpoint; cells that differ in the target share it."""
        return folder / f"{self.source}-{self.optimizer}-{self.route}"


def write(cell: Cell, folder: Path, rank: int, ranks: int) -> None:
    """Train by the cell's source and save, unless an earlier cell has."""
    assert ranks == cell.source.processes
    if cell.place(folder).exists():
        return
    model, optimizer = _build(cell.source, cell.optimizer, seed=0)
    _train(model, optimizer, range(STEPS), rank, ranks)
    _SAVE[cell.route](cell.place(folder), model, optimizer)
    if ranks > 1:
        dist.barrier()


def read(cell: Cell, folder: Path, rank: int, ranks: int) -> float:
    """Load into the cell's target and train on; the largest relative difference to the plain model.

    Raises:
        AssertionError: it is more than rounding.
    """
    assert ranks == cell.target.processes
    model, optimizer = _build(cell.target, cell.optimizer, seed=1)
    if cell.cut_first:
        _train(model, optimizer, range(1), rank, ranks)
    _LOAD[cell.route](cell.place(folder), model, optimizer)
    found = _train(model, optimizer, range(STEPS, 2 * STEPS), rank, ranks)
    losses, wanted = _plain(cell.optimizer)
    state = model.state_dict()
    assert list(state) == list(wanted)
    pairs = [(f"loss {i}", a, b) for i, (a, b) in enumerate(zip(found, losses, strict=True))]
    pairs += [(name, state[name].double(), value.double()) for name, value in wanted.items()]
    off = {name: float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for name, a, b in pairs}
    worst = max(off, key=lambda name: off[name])
    assert off[worst] <= CLOSE, f"{worst} is {off[worst]:.1e} off"
    return off[worst]


@cache
def _plain(optimizer: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses after the checkpoint's moment, and the last state, of the model that never stopped."""
    model, update = _build(Setup("plain", 1), optimizer, seed=0)
    losses = _train(model, update, range(2 * STEPS), 0, 1)
    return losses[STEPS:], {name: value.clone() for name, value in model.state_dict().items()}


def _build(setup: Setup, optimizer: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net: nn.Module = conv_net()
    # Batch norm takes a bias's gradient away: all that is left is rounding, which AdamW makes as large as any other.
    net.conv = nn.Conv2d(3, 12, 3, padding=1, bias=False, dtype=torch.float64)
    devices = setup.processes if setup.processes > 1 else LOCAL_DEVICES
    if setup.plan != "plain":
        local = ["cpu"] * devices if setup.processes == 1 else None
        by_layer = planner(lambda layer: _strategy(setup.plan, layer, devices), devices)
        net = Compiled(net, Staging(2, devices, 1).plan if setup.plan == "stages" else by_layer, devices=local)
    return net, OPTIMIZERS[optimizer](net.parameters())


def _strategy(plan: str, layer: Layer, devices: int) -> Strategy:
    """Hybrid: fully-connected layers in two shards, as many replicas as that leaves. Sharded: every layer in shards.
    Slices: replicas, whose state is gathered for each layer."""
    everyone = tuple(range(devices))
    replicas = Strategy(devices, devices=everyone) if layer.batch is not None else Strategy()
    if plan == "data" or (plan == "hybrid" and layer.kind != "linear"):
        return replicas
    if plan == "slices":
        return replace(replicas, state="gathered") if layer.parameters else replicas
    if plan == "hybrid":
        return Strategy(devices // 2, 2, "out-features", everyone)
    axis = next((a for a in layer.axes if not a.partial and a.units % devices == 0), None)
    return replicas if axis is None else Strategy(1, devices, axis.name, everyone)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, ranks: int) -> list[Tensor]:
    """Losses of the whole batch, step by step; a plain model takes whole batches on every rank."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(SAMPLES, 3, 8, 8, dtype=torch.float64, generator=generator)
        y = torch.randint(12, (SAMPLES,), generator=generator)
        if isinstance(model, Compiled):
            x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        whole = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(whole)
        losses.append(whole / ranks)
    return losses


def _torch_save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The usual code: every rank asks for the state, rank 0 writes it."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(state, path)


def _torch_load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _dcp_save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, updates = get_state_dict(model, optimizer)
    with _alone():
        state_dict_saver.save({"model": weights, "optimizer": updates}, checkpoint_id=path)


def _dcp_load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, updates = get_state_dict(model, optimizer)
    with _alone():
        state_dict_loader.load({"model": weights, "optimizer": updates}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=updates)


@contextmanager
def _alone() -> Iterator[None]:
    """torch.distributed.checkpoint warns where there is no process group, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


_SAVE: dict[str, Callable[[Path, nn.Module, torch.optim.Optimizer], None]] = {
    "torch.save": _torch_save,
    "save_checkpoint": lambda path, model, optimizer: parplan.save_checkpoint(path, model=model, optimizer=optimizer),
    "dcp": _dcp_save,
}
_LOAD: dict[str, Callable[[Path, nn.Module, torch.optim.Optimizer], object]] = {
    "torch.save": _torch_load,
    "save_checkpoint": lambda path, model, optimizer: parplan.load_checkpoint(path, model=model, optimizer=optimizer),
    "dcp": _dcp_load,
}
