"""transformers' Trainer with a small GPT-2 that runs by a plan: accumulation, clipping, evaluation, and checkpoints.

    torchrun --nproc-per-node 2 examples/trainers/with_transformers.py
    torchrun --nproc-per-node 2 examples/trainers/with_transformers.py --pins '*.mlp.c_fc=shards:2'
    torchrun --nproc-per-node 2 examples/trainers/with_transformers.py --ddp

The last one is the same program with the Trainer of transformers itself, which wraps the model in
DistributedDataParallel, and the numbers are the same.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import parplan

LENGTH, VOCABULARY = 12, 40


class Sentences(Dataset):  # type: ignore[type-arg]
    """Random tokens, each sentence of another length, padded to one."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=draw)
        mask = (torch.arange(LENGTH) < 4 + (self.first + index) % (LENGTH - 3)).long()
        labels = tokens.masked_fill(mask == 0, -100)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels, "length": mask.sum()}  # one is not used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddp", action="store_true", help="without parplan")
    parser.add_argument("--pins", nargs="*", help="what of the plan is decided by hand; default: nothing")
    parser.add_argument("--out", type=Path, help="a file for the losses, and one beside it for the weights")
    options = parser.parse_args()

    transformers.set_seed(0)
    folder = [tempfile.mkdtemp()]
    arguments = TrainingArguments(
        output_dir=folder[0], max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=0.01, max_grad_norm=0.5, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
        logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(), seed=0,
    )  # fmt: skip
    if arguments.world_size > 1:
        dist.broadcast_object_list(folder)
        arguments.output_dir = folder[0]
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    if options.ddp:
        from transformers import Trainer
    else:
        from parplan.integrations.transformers import Trainer  # the one line
    if options.pins is not None:  # without this, the Trainer compiles the model itself
        model = parplan.compile(model, pins=options.pins, scalars="per_replica")

    def trainer() -> transformers.Trainer:
        return Trainer(model=model, args=arguments, train_dataset=Sentences(0, 64), eval_dataset=Sentences(64, 16))

    first = trainer()
    first.train()
    found: dict[str, Any] = {"losses": [entry["loss"] for entry in first.state.log_history if "loss" in entry]}
    found["norms"] = [entry["grad_norm"] for entry in first.state.log_history if "grad_norm" in entry]
    found["evaluated"] = [entry["eval_loss"] for entry in first.state.log_history if "eval_loss" in entry]
    model = first.model
    second = trainer()
    second.train(resume_from_checkpoint=f"{folder[0]}/checkpoint-3")
    found["resumed"] = [entry["loss"] for entry in second.state.log_history if "loss" in entry]
    found["evaluated"].append(second.evaluate()["eval_loss"])
    second.save_model(f"{folder[0]}/final")
    if not options.ddp:
        found["shards"] = max(strategy.shards for strategy in second.model.plan.layers.values())
    if arguments.process_index == 0:
        print(json.dumps(found))
        if options.out is not None:
            saved = GPT2LMHeadModel.from_pretrained(f"{folder[0]}/final", dtype=torch.float64)
            torch.save(saved.state_dict(), options.out.with_suffix(".pt"))
            options.out.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
