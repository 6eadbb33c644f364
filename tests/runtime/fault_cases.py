"""One rank that is killed, raises, leaves or is stuck at some moment of a training, and ranks that start unlike."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import parplan
from parplan.errors import RuntimeFailure
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.transport.rendezvous import RANK_WAIT
from tests.runtime.helpers import planner, spread
from tests.runtime.nets import mlp
from tests.runtime.pipeline_cases import Staging, Tower, tokens
from tests.runtime.slice_cases import sharded

__all__ = ["FAULTS", "KINDS", "MOMENTS", "UNLIKE", "not_a_number", "train_with_a_fault"]

KINDS = ("data", "hybrid", "gathered", "stages")


def plan_of(kind: str, ranks: int) -> Callable[[LayerGraph], Plan]:
    """Data parallelism, tensor shards, state that is gathered for each layer, or pipeline stages."""
    if kind == "stages":
        return Staging(2, ranks, 4).plan
    return planner(sharded(spread(ranks, "data"), "gathered") if kind == "gathered" else spread(ranks, kind), ranks)


def net_and_inputs(kind: str, samples: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model for a kind of plan, and inputs for it."""
    torch.manual_seed(0)
    if kind == "stages":
        return Tower(), tokens(samples)
    return mlp(), (torch.randn(samples, 6, dtype=torch.float64),)


def loss_of(results: Any) -> Tensor:
    """A number from a model's results, of which the first is the loss where it has one inside."""
    loss: Tensor = results[0] if isinstance(results, tuple) else results.square().mean()
    return loss


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ValueError("bad data")


def _leave() -> None:
    raise SystemExit(0)


def _sleep() -> None:
    time.sleep(3600)


FAULTS = {"killed": _kill, "raising": _raise, "leaving": _leave, "stuck": _sleep}
MOMENTS = ("start", "forward", "backward", "save")


def train_with_a_fault(
    rank: int, ranks: int, folder: str, kind: str, fault: str, moment: str, faulty: int, timeout_s: float
) -> None:
    """Four steps with a checkpoint after each; `faulty` fails at a moment of the third. Leaves its error in a file."""
    torch.set_num_threads(1)
    os.environ[RANK_WAIT] = "2"

    def come_to(reached: str, step: int = 2) -> None:
        if (rank, reached, step) == (faulty, moment, 2):
            FAULTS[fault]()

    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=timeout_s), rank=rank, world_size=ranks)
    dist.barrier()  # a rank that dies while another one still connects to it is torch's to notice
    try:
        net, inputs = net_and_inputs(kind, 4)
        come_to("start")
        model = Compiled(net, plan_of(kind, ranks))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            come_to("forward", step)
            loss = loss_of(model(*inputs))
            come_to("backward", step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (rank, moment, step) == (faulty, "save", 2) and not rank:
                setattr(os, "replace", lambda *_: FAULTS[fault]())  # noqa: B010  (the last moment before the new file)
            come_to("save", step if rank else -1)
            parplan.save_checkpoint(f"{folder}/run.pt", model=model, optimizer=optimizer, step=step)
    except Exception as error:
        (Path(folder) / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)


# ---- ranks that start unlike, on workers that go on -----------------------------------------------------------------


def _other_model(rank: int, ranks: int) -> None:
    Compiled(mlp(24 if rank else 12), plan_of("data", ranks))


def _frozen(rank: int, ranks: int) -> None:
    net = mlp()
    net[4].bias.requires_grad_(rank == 0)
    Compiled(net, plan_of("data", ranks))


def _other_version(rank: int, ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parplan, "__version__", f"9.{rank}")
        Compiled(mlp(), plan_of("data", ranks))


def _other_torch(rank: int, ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", f"2.{rank}.0+cpu")
        Compiled(mlp(), plan_of("data", ranks))


def _other_plan(rank: int, ranks: int) -> None:
    inputs = torch.randn(4, 6, dtype=torch.float64)
    parplan.compile(mlp(), plan=plan_of("hybrid" if rank else "data", ranks)(capture(mlp(), (inputs,), {})))


def _other_pins(rank: int, ranks: int) -> None:
    parplan.compile(mlp(), pins={"0": "replicas:1" if rank else "shards:2"})


def _other_option(rank: int, ranks: int) -> None:
    Compiled(mlp(), plan_of("data", ranks), scalars="per_replica" if rank else "whole")


Unlike = tuple[Callable[[int, int], None], str]

# What differs, and the words of the error on every rank.
UNLIKE: dict[str, Unlike] = {
    "model": (
        _other_model,
        r"the model differs: 0\.weight: float64\[12, 6\] on rank 0, 0\.weight: float64\[24, 6\] on",
    ),
    "frozen": (
        _frozen,
        r"the model differs: 4\.bias: float64\[4\] on rank 0, 4\.bias: float64\[4\] \(no gradient\) on",
    ),
    "version": (_other_version, r"the version of parplan differs: 9\.0 on rank 0, 9\.1 on rank 1.*; install the same"),
    "torch": (_other_torch, r"the version of torch differs: 2\.0\.0 on rank 0, 2\.1\.0 on rank 1.*; install the same"),
    "plan": (_other_plan, r'the plan differs: "0": .*"axis": null.* on rank 0, "0": .*features.* on rank'),
    "pins": (_other_pins, r"the pins differs: .*shards.* on rank 0, .*replicas.* on rank"),
    "option": (_other_option, r"the scalars differs: whole on rank 0, per_replica on rank"),
}


def unlike(rank: int, ranks: int, name: str) -> None:
    """An error on every rank that says what differs; what is compiled alike afterwards trains."""
    make, words = UNLIKE[name]
    with pytest.raises(RuntimeFailure, match=rf"^rank {rank}: all ranks have to compile the same, and {words}"):
        make(rank, ranks)
    model = Compiled(mlp(), plan_of("data", ranks))
    model(torch.randn(2, 6, dtype=torch.float64)).sum().backward()


# ---- numbers that are none -----------------------------------------------------------------------------------------


def not_a_number(rank: int, ranks: int, kind: str) -> None:
    """A loss that is NaN, on the last rank and on all: so are all gradients, on every rank; the next step has numbers.

    Stages have gone back before one rank's loss is multiplied, and refuse that on every rank.
    """
    net, inputs = net_and_inputs(kind, 4)
    model = Compiled(net, plan_of(kind, ranks))
    for bad in (range(0), range(ranks - 1, ranks), range(0), range(ranks), range(0)):
        model.zero_grad()
        loss = loss_of(model(*inputs)) * (float("nan") if rank in bad else 1.0)
        if kind == "stages" and len(bad) == 1:
            with pytest.raises(RuntimeFailure, match=r"processes multiply the loss by different numbers \(1, .*nan\)"):
                loss.backward()
            continue
        loss.backward()
        found = torch.stack([p.grad.sum() for p in model.parameters() if p.grad is not None])
        assert found.isnan().tolist() == [len(bad) > 0] * len(found)
