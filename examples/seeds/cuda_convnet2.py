"""A cuda-convnet2 layer file, trained by parplan: the towers, replicas and rates are the file's, the program is this.

    python examples/seeds/cuda_convnet2.py                                  # on logical CPU devices, or GPUs if here
    python examples/seeds/cuda_convnet2.py --layer-def layers.cfg --epochs 0   # what a file of yours says

The data are scikit-learn's bundled digits (1,797 scanned images of 8 x 8), a few hundred left out for the test. The
layer file is examples/seeds/cuda_convnet2/layers-digits.cfg with its layer-parameter file beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import parplan
from parplan.convnet2 import LayerFile, read
from parplan.plan import Scheme
from parplan.runtime.data import scaled_lr
from parplan.runtime.module.compiled import Compiled

HERE = Path(__file__).parent / "cuda_convnet2"
BATCH, BASE_BATCH = 96, 48  # the rates of the file are for the latter
TRAIN = 1440


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 8, 8) in -1..1 and their labels (N)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Result:
    """Mean cost of each epoch, and the share of test digits that is wrong after the last."""

    costs: tuple[float, ...]
    wrong: float


def main(argv: Sequence[str] | None = None) -> Result | None:
    """Read the file, say what it asks for, train."""
    options = parsed(argv)
    torch.manual_seed(0)
    found = read(options.layer_def)
    describe(found)
    if not options.epochs:
        return None
    compiled = planned(found)
    result = train(compiled, found, options.epochs)
    for epoch, cost in enumerate(result.costs):
        print(f"epoch {epoch + 1}: cost {cost:.3f}")
    print(f"test: {100 * result.wrong:.1f} % wrong")
    return result


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layer-def", default=str(HERE / "layers-digits.cfg"), help="a cuda-convnet2 layer file")
    parser.add_argument("--epochs", type=int, default=4, help="0 only reads the file")
    return parser.parse_args(argv)


def describe(found: LayerFile) -> None:
    """What the file says."""
    count = sum(parameter.numel() for parameter in found.network.parameters())
    print(f"{Path(found.path).name}: {count:,} parameters, GPUs named: {found.gpus or 'none'}")
    for pin in found.pins:
        print(f"  {pin.describe()}")
    for note in found.notes:
        print(f"note: {note}")


def planned(found: LayerFile) -> Compiled:
    """The file's plan; where weights have an updatePeriod, layers behind fewer replicas run in passes."""
    compiled = parplan.compile(
        found.network, found.example_inputs(BATCH), devices=places(found.gpus or 2), pins=found.pins
    )
    assert compiled.plan is not None
    counts = [pin.replicas or 1 for pin in found.pins] or [1]
    passes = 1 if compiled.plan.scheme is Scheme.GATHER else max(counts) // min(counts)
    print(f"plan: samples by {compiled.plan.scheme.value}, {passes} passes per batch")
    return compiled


def places(count: int) -> list[str]:
    """Where logical devices live: GPUs as far as there are, in turn, else the CPU."""
    cards = torch.cuda.device_count()
    return [f"cuda:{index % cards}" if cards else "cpu" for index in range(count)]


def train(compiled: Compiled, found: LayerFile, epochs: int) -> Result:
    """Some epochs at twice the batch of the file's rates, and at twice the rates."""
    data, test = digits()
    factor = scaled_lr(1.0, BATCH, BASE_BATCH)
    optimizer = torch.optim.SGD(found.parameter_groups(factor))
    costs = []
    for epoch in range(epochs):
        slow_down(optimizer, found, epoch / epochs, factor)
        losses = [
            compiled.train_step((images, labels), None, mean_cost, optimizer).item()
            for images, labels in zip(data.images.split(BATCH), data.labels.split(BATCH), strict=True)
        ]
        costs.append(sum(losses) / len(losses))
    found.network.eval()
    wrong = (found.network(test.images).argmax(1) != test.labels).float().mean().item()
    return Result(tuple(costs), wrong)


def mean_cost(costs: Tensor, _: None) -> Tensor:
    """The network gives the cost of every sample."""
    return costs.mean()


def slow_down(optimizer: torch.optim.Optimizer, found: LayerFile, progress: float, factor: float) -> None:
    """The schedules of the layer-parameter file."""
    for group in optimizer.param_groups:
        layer, _, part = group["name"].partition(" ")
        rates = found.rates[layer]
        group["lr"] = factor * (rates.weights if part == "weights" else rates.biases).at(progress)


def digits() -> tuple[Digits, Digits]:
    """To train on, and to test on."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.images, dtype=torch.float32)[order, None] / 8 - 1
    labels = torch.tensor(bunch.target)[order]
    return Digits(images[:TRAIN], labels[:TRAIN]), Digits(images[TRAIN:], labels[TRAIN:])


if __name__ == "__main__":
    main()
