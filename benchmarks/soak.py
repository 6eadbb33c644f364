"""Long trainings: thousands of steps on processes of one thread, beside the plain model in float64.

    python -m benchmarks.soak [--steps 5000] [--processes 4] [--kinds data,hybrid,gathered,stages,own] [--json FILE]

Every process trains its part of the compiled model, and the plain one on the samples of all, with AdamW, clipping and a
schedule; every 500 steps the model is evaluated, its state is taken and loaded again. A line per plan: the largest
difference of the losses from the plain model's, relative to these, in all steps; and by how much the process that grew
most has grown since step 500, in memory and in Python's objects. Exit 1 where losses differ by more than 1e-6, or a
process has grown by more than 1 byte per step and 8 MiB.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import parplan
from benchmarks.large_start import status_bytes
from benchmarks.training import Outcome, Verdict
from benchmarks.workers import Workers
from parplan.runtime.module.compiled import Compiled
from tests.runtime.fault_cases import KINDS, loss_of, net_and_inputs, plan_of

SAMPLES = 4  # of a process; of one that has a pipeline, in as many micro-batches
EVERY = 500  # steps between two looks
LIMIT = 1e-6
ROOM = 8 << 20  # bytes that arenas and caches may take after the first look


def main() -> int:
    """Print a line per plan; 1 where one differs or grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kinds", default=",".join((*KINDS, "own")))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows, wrong = [], 0
    print(f"{'plan':10} {'steps':>6}  {'loss off by':>11}  {'grown, KiB':>10}  {'objects':>8}")
    for kind in arguments.kinds.split(","):
        with Workers(arguments.processes, limit_s=3600.0) as workers:
            outcomes = workers.outcomes(soak, kind, arguments.steps)
        failed = [outcome.text for outcome in outcomes if outcome.verdict is not Verdict.RIGHT]
        if failed:
            print(f"{kind:10} {failed[0]}")
            wrong += 1
            continue
        found = [json.loads(outcome.text) for outcome in outcomes]
        off, grown, objects = (max(row[key] for row in found) for key in ("off", "grown", "objects"))
        print(f"{kind:10} {arguments.steps:6}  {off:11.1e}  {grown / 1024:10.0f}  {objects:8}", flush=True)
        rows.append({"plan": kind, "steps": arguments.steps, "off": off, "grown": grown, "objects": objects})
        wrong += off > LIMIT or grown > ROOM + arguments.steps
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1), encoding="utf-8")
    return int(wrong > 0)


def soak(rank: int, ranks: int, kind: str, steps: int) -> Outcome:
    """One process of a training; the figures as text."""
    net, example = net_and_inputs("data" if kind == "own" else kind, SAMPLES * ranks)
    plain = copy.deepcopy(net)
    own = tuple(tensor[rank * SAMPLES : (rank + 1) * SAMPLES] for tensor in example)
    model: nn.Module = parplan.compile(net, own) if kind == "own" else Compiled(net, plan_of(kind, ranks))
    steppers = [_stepper(module) for module in (model, plain)]
    off, looks = 0.0, list[tuple[int, int]]()
    for step in range(1, steps + 1):
        losses = [train(given) for train, given in zip(steppers, _shuffled(example, step, rank), strict=True)]
        total = losses[0].clone()
        dist.all_reduce(total)
        off = max(off, float((total / ranks - losses[1]).abs() / losses[1].abs()))
        if step % EVERY == 0:
            model.eval()
            with torch.no_grad():
                model(*own)
            model.train()
            model.load_state_dict(model.state_dict())
            gc.collect()
            looks.append((status_bytes("VmRSS"), len(gc.get_objects())))
    first, last = looks[0], looks[-1]
    found = {"off": off, "grown": last[0] - first[0], "objects": last[1] - first[1]}
    return Outcome(Verdict.RIGHT, json.dumps(found))


def _shuffled(example: Sequence[Tensor], step: int, rank: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The samples of a step: those of a process, and all, which every step has in another order."""
    order = torch.randperm(len(example[0]), generator=torch.Generator().manual_seed(step))
    every = tuple(tensor[order] for tensor in example)
    return tuple(tensor[rank * SAMPLES : (rank + 1) * SAMPLES] for tensor in every), every


def _stepper(module: nn.Module) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """A function that trains a module for one step and gives the loss."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 100)

    def train(inputs: tuple[Tensor, ...]) -> Tensor:
        results: Any = module(*inputs)
        loss = loss_of(results)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss.detach()

    return train


if __name__ == "__main__":
    sys.exit(main())
