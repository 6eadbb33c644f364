"""Networks and data of the programs in this folder: real digits, and real text."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import Dataset, TensorDataset

__all__ = ["Decoder", "Text", "digits", "join_processes", "reader"]


def join_processes() -> torch.device:
    """Join the processes that torchrun started; the device of this one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.set_num_threads(1)  # several processes share the CPU
    return device


def reader() -> nn.Module:
    """Reads digits: (N, 1, 8, 8) to class scores (N, 10), in float64."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(16 * 4 * 4, 128), nn.GELU(), nn.Linear(128, 10),
    ).double()  # fmt: skip


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Scikit-learn's 1,797 scanned digits, of which 1,440 are to train on."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.from_numpy(bunch.images / 16.0)[order].unsqueeze(1), torch.from_numpy(bunch.target)[order]
    return TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text, each with the character that follows every character: source code of the standard library."""

    LENGTH = 32

    def __init__(self) -> None:
        codes = Path(textwrap.__file__).read_bytes()
        self._codes = torch.tensor([code if code < Decoder.CODES else 0 for code in codes])

    def __len__(self) -> int:
        return (len(self._codes) - 1) // self.LENGTH

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        begin = number * self.LENGTH
        return self._codes[begin : begin + self.LENGTH], self._codes[begin + 1 : begin + self.LENGTH + 1]


class Block(nn.Module):
    """Causal attention of two heads and a perceptron, each beside the identity: (N, L, 32) to the same."""

    WIDTH, HEADS = 32, 2

    def __init__(self) -> None:
        super().__init__()
        width = self.WIDTH
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (self.HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        made: Tensor = x + self.mlp(self.norm2(x))
        return made


class Decoder(nn.Module):
    """Characters (N, L) to scores of the next one (N, L, 128)."""

    CODES = 128

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(self.CODES, Block.WIDTH), nn.Embedding(Text.LENGTH, Block.WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(Block.WIDTH), nn.Linear(Block.WIDTH, self.CODES)

    def forward(self, codes: Tensor) -> Tensor:
        """All scores."""
        x = self.words(codes) + self.places(torch.arange(codes.shape[1], device=codes.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores
