"""Training that may be preempted or lose a process: it goes on from its last checkpoint, on as many processes as start.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/preemptible.py --checkpoint run.pt
    torchrun --standalone --nproc-per-node 2 examples/preemptible.py --checkpoint run.pt  # goes on, by a plan for two

When a process dies, torchrun ends the others and starts all of them again; without the variable they may find addresses
of processes that are gone, and fail again or wait (https://github.com/pytorch/pytorch/issues/135712). On SIGTERM, which
a scheduler sends before it takes the machine away and torchrun hands on to its processes, all save at the end of the
same step and exit. Batches are drawn by the number of the step, so that every start brings the same ones, and losses
are those of a training that was never stopped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import parplan

SAMPLES, FEATURES, TARGETS = 16, 12, 4


def net() -> nn.Module:
    """A perceptron in float64, with the same weights at every start."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 48), nn.Tanh(), nn.Linear(48, TARGETS)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs (SAMPLES, FEATURES) and targets (SAMPLES, TARGETS) of all processes, drawn by the number of the step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    return x, x[:, :TARGETS].sin()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, from the checkpoint on where there is one; prints the loss of this process's samples per step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint", default="run.pt", help="the file to go on from and to save to")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5, help="steps between two checkpoints")
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = parplan.compile(net())  # plans for as many processes as there are
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    done = 0
    if os.path.exists(options.checkpoint):
        done = parplan.load_checkpoint(options.checkpoint, model=model, optimizer=optimizer)["done"]
    with parplan.save_on_signal(options.checkpoint, model=model, optimizer=optimizer) as saving:
        for step in range(done, options.steps):
            x, y = (part.tensor_split(ranks)[rank] for part in batch(step))
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            print(f"step {step} rank {rank} of {ranks} loss {loss.item()!r}", flush=True)
            if (step + 1) % options.save_every == 0:
                parplan.save_checkpoint(options.checkpoint, model=model, optimizer=optimizer, done=step + 1)
            saving.step(done=step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
