"""A training by `fully_shard` as many projects have it; `fsdp2_to_parplan.py` is the same one with parplan.

    torchrun --nproc-per-node 2 -m examples.coming_from.fsdp2
    torchrun --nproc-per-node 2 -m examples.coming_from.fsdp2_to_parplan
    diff examples/coming_from/fsdp2.py examples/coming_from/fsdp2_to_parplan.py

Both give the same numbers, and go on from each other's checkpoints.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from examples.coming_from.tasks import Decoder, Text, join_processes


def main() -> None:
    parser = argparse.ArgumentParser(description="learn source code by heart, under fully_shard")
    parser.add_argument("--weights", help="start from a state of the model in this file")
    parser.add_argument(
        "--checkpoint", default="decoder", help="a folder with one for each epoch, to go on from and to save to"
    )
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    device = join_processes()

    text = Text()
    sampler = DistributedSampler[Any](text, seed=1)
    batches = DataLoader(text, batch_size=16, sampler=sampler, drop_last=True)

    with torch.device("meta"):
        model = Decoder().double()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    if options.weights:
        state = torch.load(options.weights, mmap=True, weights_only=True)
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    else:
        torch.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
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
