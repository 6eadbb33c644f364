"""More programs people train on signals, series and state: forecasts, filters, survival, control, diffusion, flows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import Run
from tests.patterns.nets import BATCH, train
from tests.patterns.pattern import Section
from tests.patterns.programs_language import SINGLE
from tests.patterns.programs_science import SECTION as SCIENCE

SECTION = Section(SCIENCE.heading)


@SECTION("a 1-D U-Net: transposed convolutions, the skip padded to an odd length, soft Dice and cross-entropy")
def signal_unet(run: Run) -> None:
    def pair(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv1d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)
        )

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.down, self.pool = pair(2, 4), pair(4, 8), nn.MaxPool1d(2)
            self.up, self.mix, self.out = nn.ConvTranspose1d(8, 4, 2, stride=2), pair(8, 4), nn.Conv1d(4, 2, 1)

        def forward(self, x: Tensor) -> Any:
            a = self.enter(x)
            b = self.up(self.down(self.pool(a)))
            short = a.size()[2] - b.size()[2]
            b = F.pad(b, [short // 2, short - short // 2])
            return self.out(self.mix(torch.cat([a, b], dim=1)))

    model = run.compile(UNet())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, weight_decay=1e-8, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        scores, wanted = model(run.randn(BATCH, 2, 9)), run.randint(2, BATCH, 9)
        masks = F.one_hot(wanted, 2).permute(0, 2, 1).to(scores.dtype)
        p = F.softmax(scores, dim=1)
        dice = (2 * (p * masks).sum((1, 2)) + 1) / (p.sum((1, 2)) + masks.sum((1, 2)) + 1)
        loss = F.cross_entropy(scores, wanted) + 1 - dice.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


_UNKNOWN = {"one/replicas": "its samples depend on each other", "one/mixed": "its samples depend on each other"}


@SECTION(
    "a WaveNet: one-hot mu-law samples, dilated gated convolutions, a sum of skips, generation",
    refused={**_UNKNOWN, "ranks/*": "parplan does not know how aten.one_hot treats samples"},
    why="the axes of `one_hot` are not known; encode in front of the model, or use an embedding",
    free=("rests.2",),
)
def dilated_gates(run: Run) -> None:
    class WaveNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Conv1d(8, 4, 1)
            self.gates = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=d) for d in (1, 2, 4))
            self.skips, self.rests = (nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3)) for _ in range(2))
            self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(4, 8, 1), nn.ReLU(), nn.Conv1d(8, 8, 1))

        def forward(self, samples: Tensor) -> Any:
            x = self.enter(F.one_hot(samples, 8).transpose(1, 2).to(self.enter.weight.dtype))
            total: Any = 0
            for i, (gate, skip, rest) in enumerate(zip(self.gates, self.skips, self.rests, strict=True)):
                a, b = gate(F.pad(x, (2**i, 0))).chunk(2, dim=1)
                h = torch.tanh(a) * torch.sigmoid(b)
                total, x = total + skip(h), x + rest(h)
            return self.out(total)

    model = run.compile(WaveNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(3):
        wave = torch.tanh(run.randn(BATCH, 9))
        coded = ((wave.sign() * torch.log1p(7 * wave.abs()) / math.log(8) + 1) / 2 * 7 + 0.5).long()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(coded[:, :-1]), coded[:, 1:])
        loss.backward()
        optimizer.step()
        schedule.step()
        run.mean("loss", loss)
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            coded = torch.cat([coded[:, 1:], model(coded[:, 1:])[:, :, -1].argmax(1, keepdim=True)], dim=1)
    run.rows("coded", coded)
    run.state(model)


@SECTION(
    "speech enhancement in float32: a mask between `stft` and `istft`, spectral losses",
    refused={**_UNKNOWN, "ranks/*": "parplan does not know how aten.stft and aten.istft treats samples"},
    why="the axes of `stft` and `istft` are not known; transform in front of the model and behind it",
    tolerance=SINGLE,
)
def spectral_mask(run: Run) -> None:
    class Enhance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.hann_window(16))
            self.body, self.mask = nn.Conv1d(9, 8, 3, padding=1), nn.Conv1d(8, 9, 3, padding=1)

        def forward(self, wave: Tensor) -> Any:
            seen = torch.stft(wave, 16, 8, window=self.window, return_complex=True)  # type: ignore[arg-type]
            mask = torch.sigmoid(self.mask(F.leaky_relu(self.body(seen.abs().log1p()), 0.2)))
            return torch.istft(seen * mask, 16, 8, window=self.window, length=wave.size(-1))  # type: ignore[arg-type]

    model = run.compile(Enhance().float())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss() -> Tensor:
        clean = run.randn(BATCH, 64).float()
        found, total = model(clean + 0.3 * run.randn(BATCH, 64).float()), torch.zeros(())
        for size in (8, 16):
            window = torch.hann_window(size, dtype=torch.float32)
            a, b = (torch.stft(z, size, size // 2, window=window, return_complex=True).abs() for z in (found, clean))
            total = total + (a - b).abs().mean() + (torch.log(a + 1e-3) - torch.log(b + 1e-3)).abs().mean()
        return total

    train(run, model, optimizer, loss)


@SECTION("N-BEATS: residual backcasts, fixed bases as parameters without gradients, sMAPE")
def basis_expansion(run: Run) -> None:
    class Block(nn.Module):
        def __init__(self, basis: Tensor) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
            self.coefficients = nn.Linear(8, 2 * basis.shape[0])
            self.backcast = nn.Parameter(basis[:, :6].clone(), requires_grad=False)
            self.forecast = nn.Parameter(basis[:, 6:].clone(), requires_grad=False)

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = torch.relu(layer(x))
            theta = self.coefficients(x)
            cut = self.forecast.shape[0]
            return torch.einsum("bp,pt->bt", theta[:, cut:], self.backcast), theta[:, :cut] @ self.forecast

    class NBeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            t = torch.arange(9) / 9
            seasons = torch.cat([torch.cos(2 * math.pi * t)[None], torch.sin(2 * math.pi * t)[None]])
            self.blocks = nn.ModuleList([Block(torch.stack([t**i for i in range(3)])), Block(seasons)])

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            rest, mask = x.flip(dims=(1,)), mask.flip(dims=(1,))
            forecast = x[:, -1:]
            for block in self.blocks:
                backcast, part = block(rest)
                rest, forecast = (rest - backcast) * mask, forecast + part
            return forecast

    model = run.compile(NBeats())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        x, wanted = run.randn(BATCH, 6), run.randn(BATCH, 3)
        optimizer.zero_grad()
        found = model(x, run.randint(2, BATCH, 6).to(x.dtype))
        loss = (200 * (found - wanted).abs() / (found.abs() + wanted.abs()).detach().clamp(min=0.1)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.5 ** (step // 2)
        run.mean("loss", loss)
    run.state(model)


@SECTION("DLinear with RevIN: statistics kept on `self` between two calls of a module, moving average, quantiles")
def reversible_norm(run: Run) -> None:
    class RevIn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor, mode: str) -> Any:
            if mode == "norm":
                self.mean = torch.mean(x, dim=1, keepdim=True).detach()
                self.stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
                return (x - self.mean) / self.stdev * self.weight + self.bias
            x = (x - self.bias.unsqueeze(-1)) / (self.weight.unsqueeze(-1) + 1e-10)
            return x * self.stdev.unsqueeze(-1) + self.mean.unsqueeze(-1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.revin, self.average = RevIn(), nn.AvgPool1d(3, stride=1)
            self.seasonal, self.trend = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("quantiles", torch.tensor([0.1, 0.9]))

        def forward(self, x: Tensor, wanted: Tensor | None = None) -> Any:
            x = self.revin(x, "norm")
            padded = torch.cat([x[:, 0:1].repeat(1, 1, 1), x, x[:, -1:].repeat(1, 1, 1)], dim=1)
            trend = self.average(padded.permute(0, 2, 1)).permute(0, 2, 1)
            y = self.seasonal((x - trend).permute(0, 2, 1)) + self.trend(trend.permute(0, 2, 1))
            found = self.revin(y.view(-1, 3, 4, 2).permute(0, 2, 1, 3), "denorm")
            if wanted is None:
                return found
            off = wanted.unsqueeze(-1) - found
            return found, torch.max(off * self.quantiles, off * (self.quantiles - 1)).mean((1, 2, 3))  # type: ignore[operator]

    model = run.compile(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        _, losses = model(5 + 3 * run.randn(BATCH, 8, 3), run.randn(BATCH, 4, 3))
        losses.mean().backward()
        optimizer.step()
        run.rows("losses", losses)
    model.eval()
    with torch.no_grad():
        run.rows("found", model(run.randn(BATCH, 8, 3)))
    run.state(model)


@SECTION("a Kalman filter that is trained: a loop over time, `linalg.solve` and `logdet` per sample")
def kalman(run: Run) -> None:
    class Kalman(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.noise = nn.Linear(3, 2), nn.Linear(3, 2)
            self.move, self.log_q = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4)), nn.Parameter(torch.zeros(4))
            self.register_buffer("seen", torch.eye(4)[:2])

        def forward(self, frames: Tensor) -> Any:
            b, seen = frames.size(0), self.seen
            mean, cov = frames.new_zeros(b, 4), torch.eye(4).expand(b, 4, 4)
            total = frames.new_zeros(b)
            for frame in frames.unbind(1):
                mean = mean @ self.move.T
                cov = self.move @ cov @ self.move.T + torch.diag(self.log_q.exp())
                z, r = self.encode(frame), torch.diag_embed(F.softplus(self.noise(frame)) + 0.1)
                s = seen @ cov @ seen.T + r  # type: ignore[operator]
                gain = torch.linalg.solve(s, seen @ cov).transpose(1, 2)  # type: ignore[operator]
                off = z - mean @ seen.T  # type: ignore[operator]
                total = total + torch.logdet(s) + (off.unsqueeze(1) @ torch.linalg.solve(s, off.unsqueeze(2))).flatten()
                mean = mean + (gain @ off.unsqueeze(-1)).squeeze(-1)
                cov = (torch.eye(4) - gain @ seen) @ cov
            return mean, total

    model = run.compile(Kalman())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        mean, total = model(run.randn(BATCH, 3, 3))
        loss = total.mean() + F.smooth_l1_loss(mean[:, :2], run.randn(BATCH, 2))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION(
    "whitening of features by a Cholesky factor of the batch's covariance, a running one in evaluation",
    refused={"one/replicas": "its samples depend on each other", "ranks/*": "linalg_solve_triangular"},
    why="samples are the columns of a triangular system; multiply them by the factor's inverse",
)
def whitening(run: Run) -> None:
    class Whiten(nn.Module):
        mean: Tensor
        covariance: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("covariance", torch.eye(4))

        def forward(self, x: Tensor) -> Any:
            if self.training:
                mean = x.mean(0)
                covariance = (x - mean).T @ (x - mean) / x.shape[0]
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(mean.detach(), alpha=0.1)
                    self.covariance = 0.9 * self.covariance + 0.1 * covariance.detach()
            else:
                mean, covariance = self.mean, self.covariance
            factor = torch.linalg.cholesky(covariance + 1e-3 * torch.eye(4))
            return torch.linalg.solve_triangular(factor, (x - mean).T, upper=False).T

    model = run.compile(nn.Sequential(nn.Linear(6, 4), Whiten(), nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        model.train()
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(run.randn(BATCH, 6)), run.randint(4, BATCH))
            loss.backward()
            optimizer.step()
            run.mean("loss", loss)
        model.eval()
        with torch.no_grad():
            run.rows("scores", model(run.randn(BATCH, 6)))
    run.state(model)
