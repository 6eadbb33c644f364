"""What nn.DataParallel's manual says, tried in parplan: hooks, buffers, numbers, packed sequences, a wrapped part.

    python examples/seeds/data_parallel.py                          # two logical CPU devices
    python examples/seeds/data_parallel.py --devices cuda:0,cuda:1  # GPUs

Every habit is compared with the plain model and says how far apart they are; more than rounding is an error.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import parplan

ROUNDING = 1e-9


class Images(nn.Module):
    """Batch norm has buffers; the block is what gets wrapped and hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 32), nn.Tanh())
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 8, 8) images to (N, 4) scores."""
        scores: Tensor = self.last(self.block(torch.relu(self.norm(self.conv(x)))))
        return scores


class Reader(nn.Module):
    """Pack, run, unpack: to the length before packing, so that every device returns equally long samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.cells = nn.LSTM(8, 8, batch_first=True)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """(N, time) words and (N) lengths to (N, time, 8)."""
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        result, _ = self.cells(packed)
        padded: Tensor = pad_packed_sequence(result, batch_first=True, total_length=words.shape[1])[0]
        return padded


def report(what: str, found: Tensor, wanted: Tensor) -> None:
    """Say how far apart two results are; too far is an error."""
    apart = (found.detach().to(wanted.device) - wanted.detach()).abs().max().item()
    print(f"{what}: {apart:.1e} from the plain model")
    if not apart <= ROUNDING:
        raise SystemExit(f"{what}: that is more than {ROUNDING:.0e}")


def wrap_all(devices: list[str], images: Tensor) -> None:
    """net = nn.DataParallel(model, device_ids, output_device): batch norm and hooks as there."""
    plain = Images().double()
    model = copy.deepcopy(plain)
    sizes: list[int] = []
    model.block.register_forward_hook(lambda module, args, result: sizes.append(len(result)))
    net = parplan.compile(model, devices=devices, output_device=devices[0])
    found, wanted = net(images), plain(images)
    report("scores", found, wanted)
    for one, other in ((found, net), (wanted, plain)):
        one.square().mean().backward()
        assert all(parameter.grad is not None for parameter in other.parameters())
    report("gradient of the convolution", model.conv.weight.grad, plain.conv.weight.grad)  # type: ignore[arg-type]
    report("running mean", model.norm.running_mean, plain.norm.running_mean)  # type: ignore[arg-type]
    print(f"the hook on block was called {len(sizes)} times, with {sizes} samples")


def one_number_per_device(devices: list[str], images: Tensor) -> None:
    """A model that returns its loss returns one for every device."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4))

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.net(x).square().mean()
            return loss

    plain = Loss().double()
    found = parplan.data_parallel(copy.deepcopy(plain), images, devices)
    report(f"{len(devices)} losses", found, torch.stack([plain(part) for part in images.chunk(len(devices))]))


def packed_sequences(devices: list[str]) -> None:
    """The manual's FAQ: a recurrent network with total_length."""
    plain = Reader().double()
    words, lengths = torch.randint(50, (6, 9)), torch.tensor([3, 9, 1, 5, 4, 2])
    net = parplan.compile(copy.deepcopy(plain), devices=devices)
    report("packed sequences", net(words, lengths), plain(words, lengths))


def wrap_a_part(devices: list[str], images: Tensor) -> None:
    """model.block = nn.DataParallel(model.block): one optimizer trains all, names in the state stay."""
    plain = Images().double()
    model = copy.deepcopy(plain)
    model.block = parplan.compile(model.block, devices=devices)  # type: ignore[assignment]
    assert list(model.state_dict()) == list(plain.state_dict())
    for net in (model, plain):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(images).square().mean().backward()
            optimizer.step()
    model.load_state_dict(model.state_dict())
    report("a wrapped part after 3 steps", model(images), plain(images))


def main(argv: Sequence[str] | None = None) -> None:
    """Try all of it."""
    parser = argparse.ArgumentParser(description="nn.DataParallel's manual, in parplan")
    parser.add_argument("--devices", default="cpu,cpu", help="devices by name; one may be named several times")
    devices = parser.parse_args(argv).devices.split(",")
    torch.manual_seed(0)
    images = torch.randn(8, 3, 8, 8).double()
    wrap_all(devices, images)
    one_number_per_device(devices, images)
    packed_sequences(devices)
    wrap_a_part(devices, images)


if __name__ == "__main__":
    main()
