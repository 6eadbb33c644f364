"""A training by DistributedDataParallel as many projects have it; `ddp_to_parplan.py` is the same one with parplan.

    torchrun --nproc-per-node 2 -m examples.coming_from.ddp
    torchrun --nproc-per-node 2 -m examples.coming_from.ddp_to_parplan
    diff examples/coming_from/ddp.py examples/coming_from/ddp_to_parplan.py

Both give the same numbers, and go on from each other's checkpoints.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from examples.coming_from.tasks import digits, join_processes, reader


def main() -> None:
    parser = argparse.ArgumentParser(description="read digits, under DistributedDataParallel")
    parser.add_argument("--checkpoint", default="digits.pt", help="the file to go on from and to save to")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    device = join_processes()
    rank = dist.get_rank()

    train, test = digits()
    sampler = DistributedSampler[Any](train, seed=1)
    batches = DataLoader(train, batch_size=30, sampler=sampler)
    unseen = DataLoader(test, batch_size=30, sampler=DistributedSampler(test, shuffle=False))

    model = DistributedDataParallel(reader().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    done = 0
    if os.path.exists(options.checkpoint):
        state = torch.load(options.checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        done = state["done"]

    for epoch in range(done, options.epochs):
        model.train()
        sampler.set_epoch(epoch)
        losses = torch.zeros((), dtype=torch.float64, device=device)
        for number, (images, labels) in enumerate(batches):
            last = number % 2 == 1
            with nullcontext() if last else model.no_sync():
                loss = cross_entropy(model(images.to(device)), labels.to(device))
                (loss / 2).backward()
            losses += loss.detach() / len(batches)
            if last:
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()

        model.eval()
        counts = torch.zeros(2, device=device)
        with torch.no_grad():
            for images, labels in unseen:
                right = model(images.to(device)).argmax(1) == labels.to(device)
                counts += torch.tensor([right.sum(), len(labels)], device=device)
        dist.all_reduce(counts)
        dist.all_reduce(losses, dist.ReduceOp.SUM)
        if rank == 0:
            print(
                f"epoch {epoch} loss {losses.item() / dist.get_world_size()!r} right {(counts[0] / counts[1]).item()!r}"
            )

        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "schedule": schedule.state_dict(), "done": epoch + 1}, options.checkpoint)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
