"""The multi-GPU examples of PyTorch's early tutorials, in parplan: a wrapped block, data_parallel(), CPU and GPU.

    python examples/seeds/multi_gpu_examples.py                          # two logical CPU devices
    python examples/seeds/multi_gpu_examples.py --devices cpu,cuda:0     # the tutorial's own pair

Every example is compared with the plain model; more than rounding apart is an error.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import parplan
from parplan.runtime import gather, parallel_apply, scatter

ROUNDING = 1e-9


class Blocks(nn.Module):
    """Three layers; the second is the one to wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Linear(10, 20)
        self.block2 = nn.Linear(20, 20)
        self.block3 = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 10) to (N, 20)."""
        result: Tensor = self.block3(self.block2(self.block1(x)))
        return result


class Words(nn.Module):
    """The tutorial's DistributedModel, with its move to the GPU: the plan has the last word on where layers run."""

    def __init__(self, move: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 10)
        self.rnn = nn.Linear(10, 10)
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        """(N) words to (N, 10)."""
        found: Tensor = self.embedding(x)
        result: Tensor = self.rnn(found.to("cuda:0") if self.move else found)
        return result


def report(what: str, found: Tensor, wanted: Tensor) -> None:
    """Say how far apart two results are; too far is an error."""
    apart = (found.detach().to(wanted.device) - wanted.detach()).abs().max().item()
    print(f"{what}: {apart:.1e} from the plain model")
    if not apart <= ROUNDING:
        raise SystemExit(f"{what}: that is more than {ROUNDING:.0e}")


def wrap_a_block(devices: list[str], x: Tensor) -> None:
    """DataParallelModel: only block2 runs on all devices."""
    plain = Blocks().double()
    model = copy.deepcopy(plain)
    model.block2 = parplan.compile(model.block2, devices=devices)  # type: ignore[assignment]
    report("a wrapped block", model(x), plain(x))


def data_parallel(devices: list[str], x: Tensor) -> None:
    """The function that the tutorial composes: from our primitives, and ready-made in one call."""
    net = Blocks().double()
    parts = scatter(x, ["cpu"] * len(devices))
    outputs = parallel_apply([net] * len(parts), [(part,) for part in parts])
    report("scatter, parallel_apply, gather", gather(outputs, "cpu"), net(x))
    report("data_parallel in one call", parplan.data_parallel(net, x, devices), net(x))


def split(devices: list[str]) -> None:
    """DistributedModel: the embedding on the first device, the rest on the second, pinned by hand."""
    plain = Words(move=False).double()
    x = torch.randint(1000, (8,))
    pins = {"embedding": "gpu:0", "rnn": "gpu:1"}
    model = parplan.compile(copy.deepcopy(plain), x, devices=devices, output_device="cpu", pins=pins)
    report(f"embedding on {devices[0]}, rnn on {devices[1]}", model(x), plain(x))
    # The tutorial's code says cuda:0 in its forward. Where there is none, a plan can still run it.
    moving = Words(move=True).double()
    moving.load_state_dict(plain.state_dict())
    if torch.cuda.is_available():
        moving.rnn.cuda(0)
    # The module by itself cannot run there, so that there is nothing to compare the plan with before its first step.
    check = "first" if torch.cuda.is_available() else "off"
    model = parplan.compile(moving, x, devices=devices, output_device="cpu", pins=pins, check=check)
    report("the same with the move in its code", model(x), plain(x))


def main(argv: Sequence[str] | None = None) -> None:
    """Try all of it."""
    parser = argparse.ArgumentParser(description="the multi-GPU examples, in parplan")
    parser.add_argument("--devices", default="cpu,cpu", help="two devices by name")
    devices = parser.parse_args(argv).devices.split(",")
    torch.manual_seed(0)
    x = torch.randn(8, 10).double()
    wrap_a_block(devices, x)
    data_parallel(devices, x)
    split(devices)


if __name__ == "__main__":
    main()
