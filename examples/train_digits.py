"""Trains a small convolutional network on real digits: plain, on several devices in one process, or under torchrun.

The data are scikit-learn's bundled digits: 1,797 scanned 8 x 8 images (Alpaydin and Kaynak, UCI, 1998). A fixed
permutation gives 1,440 to train on and 357 to test on. The three runs see the same batches in the same order and start
from the same weights, so their loss curves can be laid over each other:

    python examples/train_digits.py                                            # the plain model
    python examples/train_digits.py --devices 4                                # one process, 4 logical CPU devices
    python examples/train_digits.py --devices cuda:0,cuda:0                    # one process, devices by name
    torchrun --nproc-per-node 2 examples/train_digits.py                       # one device per process

The fully-connected layers hold 99 % of the weights. There is no dropout, and nothing has a kink (GELU, mean pooling):
with ReLU and max pooling a last-bit difference now and then takes the other branch, and two float32 runs that only sum
in different order drift 1e-2 apart (measured: samples permuted within each batch); here they stay within 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

TRAIN_SAMPLES = 1440  # divides into equal batches (of 48, 60, 96, ...), and those into 2, 3 and 4 equal parts


class DigitsNet(nn.Sequential):
    """Two convolutions with batch norm, three fully-connected layers: (N, 1, 8, 8) to class scores (N, 10)."""

    def __init__(self) -> None:
        layers: list[tuple[str, nn.Module]] = [
            ("conv1", nn.Conv2d(1, 16, 3, padding=1)),
            ("bn1", nn.BatchNorm2d(16)),
            ("gelu1", nn.GELU()),
            ("conv2", nn.Conv2d(16, 32, 3, padding=1)),
            ("bn2", nn.BatchNorm2d(32)),
            ("gelu2", nn.GELU()),
            ("pool2", nn.AvgPool2d(2)),
            ("flatten", nn.Flatten()),
            ("fc3", nn.Linear(32 * 4 * 4, 512)),
            ("gelu3", nn.GELU()),
            ("fc4", nn.Linear(512, 512)),
            ("gelu4", nn.GELU()),
            ("fc5", nn.Linear(512, 10)),
        ]
        super().__init__(OrderedDict(layers))


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 8, 8) in 0..1 and their labels (N)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Place:
    """Which of how many processes this is, and the device it works on."""

    rank: int = 0
    processes: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def own(self, rows: Tensor) -> Tensor:
        """This process's equal share of `rows`."""
        return rows.tensor_split(self.processes)[self.rank]

    def total(self, value: Tensor) -> float:
        """The sum of a scalar over all processes."""
        value = value.detach().clone()
        if self.processes > 1:
            dist.all_reduce(value)
        return value.item()


@dataclass(frozen=True)
class History:
    """The loss of every step, over the whole batch, and the share of test digits that were read correctly."""

    losses: list[float]
    accuracy: float


def build() -> nn.Module:
    """The network, from the default random state."""
    return DigitsNet()


def example_inputs() -> tuple[Tensor]:
    """One batch of 48 blank digits."""
    return (torch.zeros(48, 1, 8, 8),)


def load(dtype: torch.dtype, device: torch.device) -> tuple[Digits, Digits]:
    """The digits to train on and those to test on, split by a fixed permutation."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(bunch.images / 16.0).to(device, dtype).unsqueeze(1)[order]
    labels = torch.from_numpy(bunch.target).to(device)[order]
    train = Digits(images[:TRAIN_SAMPLES], labels[:TRAIN_SAMPLES])
    return train, Digits(images[TRAIN_SAMPLES:], labels[TRAIN_SAMPLES:])


def batches(epochs: int, batch: int) -> Iterator[Tensor]:
    """The rows of each step's batch, shuffled anew every epoch, the same in every run."""
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        yield from torch.randperm(TRAIN_SAMPLES, generator=generator).split(batch)


def train(model: nn.Module, digits: Digits, place: Place, args: argparse.Namespace) -> list[float]:
    """SGD with momentum over all epochs; the loss of every step.

    Each process takes the mean over its own samples, as with DistributedDataParallel; shares are equal, so the mean of
    those means is the mean over the batch.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    losses = []
    model.train()
    for rows in batches(args.epochs, args.batch):
        own = place.own(rows)
        loss = cross_entropy(model(digits.images[own]), digits.labels[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(place.total(loss) / place.processes)
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits, place: Place, batch: int) -> float:
    """The share of digits read correctly.

    The last batch is filled up from the first samples, which are not counted again: every process then gets as many
    samples in every batch.
    """
    samples = len(digits.labels)
    right = torch.zeros((), device=place.device)
    model.eval()
    for start in range(0, samples, batch):
        own = place.own(torch.arange(start, start + batch))
        read = model(digits.images[own % samples]).argmax(dim=1)
        fresh = (own < samples).to(place.device)
        right += ((read == digits.labels[own % samples]) & fresh).sum()
    return place.total(right) / samples


def join_processes() -> Place:
    """Under torchrun, the process group as for DistributedDataParallel; else this process alone.

    Processes take a GPU each where there are enough of them, and the CPU otherwise.
    """
    if "WORLD_SIZE" not in os.environ:
        return Place()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Place(dist.get_rank(), dist.get_world_size(), device)


def parallel(model: nn.Module, example: tuple[Tensor], args: argparse.Namespace) -> nn.Module:
    """The model on the devices asked for, the model itself where none are and there is no torchrun."""
    if not args.devices and not dist.is_initialized():
        return model
    import parplan

    compiled: nn.Module = parplan.compile(model, example, devices=args.devices, plan=args.plan)
    return compiled


def run(args: argparse.Namespace, place: Place) -> History:
    """One whole training run from fixed seeds."""
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, args.dtype)
    model = build().to(place.device, dtype)
    digits, unseen = load(dtype, place.device)
    model = parallel(model, (place.own(digits.images[: args.batch]),), args)
    losses = train(model, digits, place, args)
    return History(losses, accuracy(model, unseen, place, args.batch))


def devices(text: str) -> list[str]:
    """`4` for four logical CPU devices, else device names: `cuda:0,cuda:1`."""
    return ["cpu"] * int(text) if text.isdigit() else text.split(",")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a batch that does not divide the training set is refused."""
    parser = argparse.ArgumentParser(description="train a small convolutional network on 1,797 real digits")
    parser.add_argument("--devices", type=devices, help="how many logical CPU devices, or device names: cuda:0,cuda:1")
    parser.add_argument("--plan", type=Path, help="run this plan instead of planning")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=48, help="samples per step, over all processes")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--history", type=Path, help="write the losses and the accuracy here, as JSON")
    args = parser.parse_args(argv)
    if args.batch < 1 or TRAIN_SAMPLES % args.batch:
        parser.error(f"--batch {args.batch} does not divide the {TRAIN_SAMPLES} training samples; try 48, 60 or 96")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Train, then say how it went; under torchrun only rank 0 speaks."""
    args = parse(argv)
    place = join_processes()
    torch.set_num_threads(1)  # so small a net only waits for its threads, and sums then have one order
    if args.batch % place.processes:
        raise SystemExit(f"--batch {args.batch} cannot be shared equally by {place.processes} processes")
    history = run(args, place)
    if place.rank == 0:
        losses = history.losses
        print(f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, test accuracy {history.accuracy:.2%}")
        if args.history:
            args.history.write_text(json.dumps(asdict(history), indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
