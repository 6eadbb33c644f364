"""The training of `fsdp2.py` with parplan."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

import parplan
from examples.coming_from.tasks import Decoder, Text, join_processes


def main() -> None:
    parser = argparse.ArgumentParser(description="learn source code by heart, planned by parplan")
    parser.add_argument("--weights", help="start from a state of the model in this file")
    parser.add_argument(
        "--checkpoint", default="decoder", help="a folder with one for each epoch, to go on from and to save to"
    )
    parser.add_argument("--pins", nargs="*", help="what of the plan is decided by hand; default: nothing")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    device = join_processes()

    text = Text()
    sampler = DistributedSampler[Any](text, seed=1)
    batches = DataLoader(text, batch_size=16, sampler=sampler, drop_last=True)

    with torch.device("meta"):
        plain = Decoder().double()
    torch.manual_seed(0)
    codes, _ = next(iter(batches))
    model = parplan.compile(plain, codes.to(device), pins=options.pins, weights=options.weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    done = max(map(int, os.listdir(options.checkpoint)), default=0) if os.path.exists(options.checkpoint) else 0
    if done:
        weights, updates = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": updates}, checkpoint_id=f"{options.checkpoint}/{done}")  # type: ignore[attr-defined]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=updates)

    for epoch in range(done, options.epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros((), dtype=torch.float64, device=device)
        for codes, following in batches:
            scores = model(codes.to(device))
            loss = cross_entropy(scores.flatten(0, 1), following.to(device).flatten())
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses += loss.detach() / len(batches)
        dist.all_reduce(losses, dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {losses.item() / dist.get_world_size()!r}")

        weights, updates = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": updates}, checkpoint_id=f"{options.checkpoint}/{epoch + 1}")  # type: ignore[attr-defined]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
