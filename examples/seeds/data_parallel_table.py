"""What DataParallelTable's README trains, in parplan: a convolutional network on two devices, a thread for each.

    python examples/seeds/data_parallel_table.py                          # two logical CPU devices
    python examples/seeds/data_parallel_table.py --devices cuda:0,cuda:1  # GPUs

Beside it the plain model is trained on the same batches; the program says how far they are apart, and fails if that is
more than rounding.
"""

from __future__ import annotations

import argparse
import copy
import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import parplan

STEPS = 4
LEARNING_RATE = 0.1
ROUNDING = 1e-9


def make_conv_net() -> nn.Module:
    """(N, 3, 16, 16) images to (N, 10) scores, in float64 so that differences are rounding."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    ).double()


def init_thread(device: int) -> None:
    """DataParallelTable's initFunc: what each device's thread does first."""
    print(f"device {device} has its work dispatched by {threading.current_thread().name}")


def train(net: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[float]:
    """The README's loop; the loss of every step."""
    criterion = nn.CrossEntropyLoss()
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        loss = criterion(net(x), y)
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.sub_(LEARNING_RATE * parameter.grad)
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> None:
    """Train both, compare, and say what happened; a difference beyond rounding is an error."""
    parser = argparse.ArgumentParser(description="DataParallelTable's example, in parplan")
    parser.add_argument("--devices", default="cpu,cpu", help="devices by name; one may be named several times")
    devices = parser.parse_args(argv).devices.split(",")
    torch.manual_seed(0)
    plain = make_conv_net()
    # The same samples in every step, so that the loss falls.
    inputs = torch.randn(12, 3, 16, 16).double().expand(STEPS, 12, 3, 16, 16)
    targets = torch.randint(10, (12,)).expand(STEPS, 12)
    conv_net = copy.deepcopy(plain)
    # Data parallelism, whatever would be fastest: without pins parplan decides for each layer.
    pins = {"*": f"replicas:{len(devices)}"}
    net = parplan.compile(conv_net, inputs[0], devices=devices, pins=pins, threads=init_thread)
    losses = train(net, list(inputs), list(targets))
    wanted = train(plain, list(inputs), list(targets))
    pairs = zip((*net.parameters(), torch.tensor(losses)), (*plain.parameters(), torch.tensor(wanted)), strict=True)
    apart = max((found - other).abs().max().item() for found, other in pairs)
    replicas = {strategy.replicas for strategy in net.plan.layers.values()} if net.plan else set()
    print(f"every layer has {', '.join(map(str, sorted(replicas)))} replicas")
    print(f"{STEPS} steps on {len(devices)} devices, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"losses and parameters differ from the plain model's by at most {apart:.1e}")
    if apart > ROUNDING:
        raise SystemExit(f"that is more than {ROUNDING:.0e}: not the same numbers")


if __name__ == "__main__":
    main()
