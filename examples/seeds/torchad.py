"""What TorchAD-NN's README does with Torch7 and MPI, here: split the data, train, cut layers over the processes.

    python examples/seeds/torchad.py                              # one process, 2 logical CPU devices
    torchrun --nproc-per-node 2 examples/seeds/torchad.py         # one device per process

The same small network is trained on scikit-learn's 8 x 8 digits four times: plain, data parallel, data parallel with
gradients averaged by hand, and with its fully-connected layers cut. All four end with the same numbers, in one process
and in several, and say so.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import parplan
from parplan.runtime.module.compiled import Compiled

BATCH = 48  # samples per device in one step
LOGICAL = 2  # devices in one process
EPOCHS = 2


@dataclass(frozen=True)
class Place:
    """Which of how many processes this is, and how many devices they have together."""

    rank: int = 0
    processes: int = 1

    @property
    def devices(self) -> int:
        """Under torchrun one for each process."""
        return self.processes if self.processes > 1 else LOGICAL

    @property
    def batch(self) -> int:
        """Samples that this process brings to a step: those of all its devices."""
        return BATCH * self.devices // self.processes

    def say(self, text: str) -> None:
        """Print once."""
        if self.rank == 0:
            print(text, flush=True)


def join() -> Place:
    """The processes that torchrun started, or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Place()
    dist.init_process_group("gloo")
    return Place(dist.get_rank(), dist.get_world_size())


def network() -> nn.Module:
    """A small network of layers with the names they always had."""
    torch.manual_seed(0)
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(1, 16, 3, padding=1)),
        ("tanh1", nn.Tanh()),
        ("pool1", nn.AvgPool2d(2)),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(16 * 4 * 4, 240)),
        ("tanh2", nn.Tanh()),
        ("fc2", nn.Linear(240, 10)),
    ]
    return nn.Sequential(OrderedDict(layers)).double()


def digits() -> TensorDataset:
    """1,440 images (1, 8, 8) of digits and their labels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images / 16.0).unsqueeze(1)
    return TensorDataset(images[:1440], torch.from_numpy(bunch.target)[:1440])


def train(model: nn.Module, loader: DataLoader[Any], after: Callable[[], None] = lambda: None) -> list[float]:
    """A training loop like any other; the loss of every step. `after` runs between backward and update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            after()
            optimizer.step()
            losses.append(over_all(loss))
    return losses


def over_all(loss: Tensor) -> float:
    """The mean of a number over the processes."""
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total)


def average_gradients(model: nn.Module) -> None:
    """Synchronisation by hand: every gradient becomes its mean over the processes."""
    for parameter in model.parameters():
        if parameter.grad is not None and dist.is_initialized():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def difference(model: nn.Module, wanted: nn.Module) -> float:
    """The largest difference between the whole parameters of two models."""
    found, plain = model.state_dict(), wanted.state_dict()
    assert list(found) == list(plain), "layers and parameters keep their names"
    return max(float((found[name] - plain[name]).abs().max()) for name in plain)


def compiled(place: Place, pins: dict[str, str]) -> Compiled:
    """The network on all devices: what `pins` says by hand, the rest by the solver."""
    devices = None if place.processes > 1 else ["cpu"] * place.devices
    example = torch.zeros(place.batch, 1, 8, 8, dtype=torch.float64)
    return parplan.compile(network(), example, devices=devices, pins=pins)


def run(place: Place) -> None:
    """Train four times; rank 0 says how it went."""
    samples = digits()

    plain = network()
    losses = train(plain, DataLoader(samples, BATCH * place.devices))
    place.say(f"plain            {len(samples)} samples, loss {losses[0]:.6f} to {losses[-1]:.6f}")

    # Data parallel: every process its part of the data; gradients are synchronised by backward().
    model = compiled(place, {"*": f"replicas:{place.devices}"})
    part = parplan.shard_dataset(samples, model.plan)
    losses = train(model, DataLoader(part, place.batch))
    place.say(f"data parallel    {told(place, part, losses)}, {difference(model, plain):.1e} off")

    # The same by hand: a model that parplan never saw, on the same part of the data.
    alone = network()
    losses = train(alone, DataLoader(part, place.batch), after=lambda: average_gradients(alone))
    place.say(f"by hand          {told(place, part, losses)}, {difference(alone, plain):.1e} off")

    # Model parallel: fc1 and fc2 are cut over all devices; they are the nn.Linear they were.
    model = compiled(place, {"fc1": f"shards:{place.devices}", "fc2": f"shards:{place.devices}"})
    losses = train(model, DataLoader(part, place.batch))
    place.say(f"model parallel   {told(place, part, losses)}, {difference(model, plain):.1e} off")
    layers = dict(model.named_modules())
    for name in ("fc1", "fc2"):
        weight = layers[name].get_parameter("weight")  # its shape is the whole one under torchrun, too
        held = tuple(getattr(weight, "local", weight).shape)
        place.say(f"  {name} is a {type(layers[name]).__name__}, {cut(model, name)}; rank 0 holds {held} of weights")


def cut(model: Compiled, name: str) -> str:
    """How a layer is spread, in the plan's words."""
    return model.plan.layers[name].describe() if model.plan is not None else "no plan"


def told(place: Place, part: TensorDataset, losses: list[float]) -> str:
    """Who trained on what, and how it went."""
    processes = "1 process" if place.processes == 1 else f"each of {place.processes} processes"
    return f"{len(part)} samples in {processes}, loss {losses[0]:.6f} to {losses[-1]:.6f}"


def main() -> None:
    """Join the other processes, if any; train; leave."""
    torch.set_num_threads(1)
    place = join()
    run(place)
    if place.processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
