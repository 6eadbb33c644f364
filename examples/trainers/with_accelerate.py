"""A loop of accelerate's with a compiled model: accumulation, clipping, a schedule, evaluation, and a checkpoint.

    torchrun --nproc-per-node 2 examples/trainers/with_accelerate.py
    torchrun --nproc-per-node 2 examples/trainers/with_accelerate.py --pins 0=shards:2 2=shards:2
    torchrun --nproc-per-node 2 examples/trainers/with_accelerate.py --ddp

The last one is the same program without the line of parplan's: accelerate wraps the model in DistributedDataParallel,
and the numbers are the same.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import parplan
from parplan.integrations.accelerate import adopt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddp", action="store_true", help="without parplan")
    parser.add_argument("--bf16", action="store_true", help="under autocast")
    parser.add_argument("--pins", nargs="*", help="what of the plan is decided by hand; default: nothing")
    parser.add_argument("--out", type=Path, help="a file for the losses, and one beside it for the weights")
    options = parser.parse_args()

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        mixed_precision="bf16" if options.bf16 else "no",
    )
    dtype = torch.float32 if options.bf16 else torch.float64
    torch.manual_seed(0)
    features, labels = torch.randn(96, 12, dtype=dtype), torch.randint(0, 4, (96,))
    train = DataLoader(TensorDataset(features[:64], labels[:64]), batch_size=8, shuffle=True)
    test = DataLoader(TensorDataset(features[64:], labels[64:]), batch_size=8)
    model: Any = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))
    model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    if not options.ddp:
        model = adopt(accelerator, parplan.compile(model, pins=options.pins))  # the one line
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)

    def epoch() -> list[float]:
        losses = []
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        return losses

    def accuracy() -> float:
        model.eval()
        right = []
        for x, y in test:
            with torch.no_grad():
                right.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
        return torch.cat(right).double().mean().item()

    folder = accelerator.gather_for_metrics([tempfile.mkdtemp()], use_gather_object=True)[0]
    found: dict[str, Any] = {"losses": epoch(), "accuracy": accuracy()}
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    torch.manual_seed(1)
    found["losses"] += epoch()
    accelerator.load_state(folder)
    torch.manual_seed(1)
    found["resumed"] = epoch()
    found["final accuracy"] = accuracy()
    weights = accelerator.get_state_dict(model)
    if not options.ddp:
        found["shards"] = max(strategy.shards for strategy in model.plan.layers.values())
    if accelerator.is_main_process:
        print(json.dumps(found))
    if options.out is not None:
        accelerator.save(weights, options.out.with_suffix(".pt"))
        if accelerator.is_main_process:
            options.out.write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
