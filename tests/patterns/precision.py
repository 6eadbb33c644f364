"""Patterns of mixed precision, compared as closely as their precision allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn import functional as F

from benchmarks.training import Run
from tests.patterns.nets import BATCH, Mlp, train
from tests.patterns.pattern import Section

SECTION = Section("Precision")

BF16 = 0.03  # about four units in the last place of bf16, over three steps


@SECTION("autocast (bf16) around the model", tolerance=BF16)
def autocast_around(run: Run) -> None:
    model = run.compile(Mlp().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x, classes = run.randn(BATCH, 6).float(), run.randint(4, BATCH)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(x)
            loss = F.cross_entropy(scores, classes)
        run.same("type", str(scores.dtype))
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("autocast (bf16) inside the forward", free=("inner.body", "inner.head"), tolerance=BF16)
def autocast_inside(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp().float()

        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x).float()

    model = run.compile(Net())
    train(
        run,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda: F.cross_entropy(model(run.randn(BATCH, 6).float()), run.randint(4, BATCH)),
    )


@SECTION("autocast in training, none in evaluation, one model", tolerance=BF16)
def autocast_switched(run: Run) -> None:
    model = run.compile(Mlp().float())
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            scores = model(run.randn(BATCH, 6).float())
        run.same("type", str(scores.dtype))
        run.rows("scores", scores)


@SECTION("`torch.amp.GradScaler`, with unscaled and clipped gradients, and a step skipped for an overflow")
def grad_scaler(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        x, classes = run.randn(BATCH, 6), run.randint(4, BATCH)
        if step == 2 and run.rank == run.ranks - 1:
            x = x.clone()
            x[-1] = torch.finfo(x.dtype).max  # the overflow is in one rank's samples
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x * 1e3 if step == 2 else x), classes)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        run.same("scale", scaler.get_scale())
    run.state(model)


@SECTION("float32 training", tolerance=1e-5)
def single(run: Run) -> None:
    model = run.compile(Mlp().float())
    train(
        run,
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        lambda: F.cross_entropy(model(run.randn(BATCH, 6).float()), run.randint(4, BATCH)),
    )


@SECTION("a model in bf16 throughout (`model.bfloat16()`)", tolerance=BF16)
def half_model(run: Run) -> None:
    model = run.compile(Mlp().bfloat16())
    train(
        run,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda: F.cross_entropy(model(run.randn(BATCH, 6).bfloat16()).float(), run.randint(4, BATCH)),
    )


class _Quantised(nn.Module):
    """An Mlp between observers, as `prepare_qat` puts fake quantisation into it."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.inner, self.dequant = quantization.QuantStub(), Mlp(), quantization.DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.inner(self.quant(x)))


def _train_quantised(run: Run, calls: int) -> None:
    plain: Any = _Quantised().float().train()
    plain.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(plain, inplace=True).float()
    for _ in range(calls):
        plain(torch.linspace(-2, 2, 6 * BATCH).view(BATCH, 6).float())
    model = run.compile(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(run, model, optimizer, lambda: F.cross_entropy(model(run.randn(BATCH, 6).float()), run.randint(4, BATCH)))


@SECTION(
    "quantisation-aware training (`prepare_qat`)",
    free=("inner.body", "inner.head"),
    refused={"*": "empty buffer"},
    why="observers make their buffers at the first call; call the plain model once before `compile`",
)
def quantised(run: Run) -> None:
    _train_quantised(run, 0)


@SECTION(
    "quantisation-aware training, after a call of the plain model",
    free=("inner.body", "inner.head"),
    refused={"ranks/*": "treats samples"},
    why="observers see all samples at once; run it in one process",
    tolerance=1e-5,
)
def calibrated(run: Run) -> None:
    _train_quantised(run, 1)
