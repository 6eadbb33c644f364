"""Lightning's Trainer with a module that runs by a plan: accumulation, clipping, a schedule, validation, checkpoints.

    torchrun --nproc-per-node 2 examples/trainers/with_lightning.py
    torchrun --nproc-per-node 2 examples/trainers/with_lightning.py --pins 'body=shards:2' 'head=shards:2'
    torchrun --nproc-per-node 2 examples/trainers/with_lightning.py --ddp

The last one is the same program with Lightning's own strategy "ddp", and the numbers are the same.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import pytorch as pl
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from parplan.integrations.lightning import ParplanStrategy


class Classifier(pl.LightningModule):  # type: ignore[misc]
    """Two layers, with the methods that Lightning calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 32), nn.Linear(32, 4)
        self.found: dict[str, list[float]] = {"losses": [], "validated": []}

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.body(features)))
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.found["losses"].append(self.all_gather(loss.detach()).mean().item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("validation", cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.found["validated"].append(self.trainer.callback_metrics["validation"].item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddp", action="store_true", help="without parplan")
    parser.add_argument("--processes", type=int, default=2, help="where there are no GPUs")
    parser.add_argument("--pins", nargs="*", help="what of the plan is decided by hand; default: nothing")
    parser.add_argument("--out", type=Path, help="a file for the losses, and one beside it for the weights")
    options = parser.parse_args()

    torch.manual_seed(0)
    features, labels = torch.randn(96, 12, dtype=torch.float64), torch.randint(0, 4, (96,))
    train = DataLoader(TensorDataset(features[:64], labels[:64]), batch_size=8, shuffle=True)
    test = DataLoader(TensorDataset(features[64:], labels[64:]), batch_size=8)
    folder = tempfile.mkdtemp()

    def trainer(epochs: int) -> pl.Trainer:
        return pl.Trainer(
            strategy="ddp" if options.ddp else ParplanStrategy(pins=options.pins),  # the one line
            accelerator="auto", devices="auto" if torch.cuda.is_available() else options.processes, precision="64-true",
            max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=0.1, default_root_dir=folder,
            num_sanity_val_steps=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

    pl.seed_everything(0)
    model = Classifier()
    first = trainer(epochs=2)
    first.fit(model, train, test)
    checkpoint = first.strategy.broadcast(first.checkpoint_callback.best_model_path)
    pl.seed_everything(1)
    again = Classifier()
    second = trainer(epochs=3)
    second.fit(again, train, test, ckpt_path=checkpoint)
    found: dict[str, Any] = {
        **model.found,
        "resumed": again.found["losses"],
        "validated again": again.found["validated"],
    }
    found["tested"] = [entry["validation"] for entry in second.validate(again, test, verbose=False)]
    if not options.ddp:
        found["shards"] = max(strategy.shards for strategy in first.strategy.compiled.plan.layers.values())
    second.save_checkpoint(f"{folder}/final.ckpt")
    if second.is_global_zero:
        print(json.dumps(found))
        if options.out is not None:
            torch.save(
                torch.load(f"{folder}/final.ckpt", weights_only=False)["state_dict"], options.out.with_suffix(".pt")
            )
            options.out.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
