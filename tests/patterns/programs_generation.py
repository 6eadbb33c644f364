"""Whole programs: generative models, each with the trick that it is known for."""

# mypy: disable-error-code="operator"
from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.nn.utils.parametrizations import spectral_norm

from benchmarks.training import Run
from tests.patterns.nets import BATCH, sgd, steps, train
from tests.patterns.pattern import Section

SECTION = Section("Programs: vision and generation")


def _average(mean: nn.Module, model: nn.Module, keep: float = 0.9) -> None:
    """An exponential moving average of the parameters."""
    with torch.no_grad():
        for old, new in zip(mean.parameters(), model.parameters(), strict=True):
            old.mul_(keep).add_(new, alpha=1 - keep)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.enter, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.down, self.up = nn.Conv2d(4, 8, 4, 2, 1), nn.ConvTranspose2d(8, 4, 4, 2, 1)
        self.leave = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Any:
        angles = t[:, None] * torch.exp(torch.arange(4) * (-math.log(1e4) / 3))
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        skip = F.silu(self.norm(self.enter(x)))
        h = self.up(F.silu(self.down(skip) + time[:, :, None, None]))
        return self.leave(torch.cat([h, skip], 1))


@SECTION("DDPM: a U-Net with time embedding, the schedule in buffers, an averaged copy that samples")
def ddpm(run: Run) -> None:
    class Diffusion(nn.Module):
        kept: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.denoiser = _UNet()
            self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.2, 10), 0))

        def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Any:
            kept = self.kept.gather(0, t).view(-1, *[1] * (x.ndim - 1))
            return F.mse_loss(self.denoiser(kept.sqrt() * x + (1 - kept).sqrt() * noise, t), noise)

    model = run.compile(Diffusion())
    mean = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for _ in range(4):
        loss = model(run.randn(BATCH, 1, 8, 8), run.randint(10, BATCH), run.randn(BATCH, 1, 8, 8))
        optimizer.zero_grad()
        loss.backward()
        run.same("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        scheduler.step()
        _average(mean, model)
        run.same("loss", loss)
    x = run.randn(BATCH, 1, 8, 8)
    with torch.no_grad():
        for step in reversed(range(3)):
            x = x - 0.1 * mean.denoiser(x, torch.full((x.shape[0],), step))
    run.rows("samples", x)
    run.state(model)
    run.state(mean, "mean ")


@SECTION("VQ-VAE: nearest codes, straight-through, the codebook's averages kept through `.data`")
def vq_vae(run: Run) -> None:
    class Codes(nn.Module):
        codes: Tensor
        counts: Tensor
        sums: Tensor

        def __init__(self, width: int, number: int) -> None:
            super().__init__()
            codes = torch.randn(width, number)
            self.register_buffer("codes", codes)
            self.register_buffer("counts", torch.zeros(number))
            self.register_buffer("sums", codes.clone())

        def forward(self, z: Tensor) -> Any:
            flat = z.reshape(-1, z.shape[-1])
            far = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes + self.codes.pow(2).sum(0, keepdim=True)
            _, nearest = (-far).max(1)
            chosen = F.one_hot(nearest, self.codes.shape[1]).type(flat.dtype)
            code = F.embedding(nearest.view(z.shape[:-1]), self.codes.t())
            if self.training:
                self.counts.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.data.mul_(0.9).add_(flat.detach().t() @ chosen, alpha=0.1)
                n = self.counts.sum()
                counts = (self.counts + 1e-5) / (n + 1e-5 * self.counts.shape[0]) * n
                self.codes.data.copy_(self.sums / counts.unsqueeze(0))
            return z + (code - z).detach(), (code.detach() - z).pow(2).mean(), nearest.view(z.shape[:-1])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 1))
            self.codes = Codes(3, 6)
            self.decoder = nn.Sequential(
                nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(True), nn.ConvTranspose2d(4, 1, 4, 2, 1)
            )

        def forward(self, x: Tensor) -> Any:
            z, commitment, nearest = self.codes(self.encoder(x).permute(0, 2, 3, 1))
            return self.decoder(z.permute(0, 3, 1, 2)), commitment, nearest

    model = run.compile(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        x = run.randn(BATCH, 1, 8, 8)
        found, commitment, nearest = model(x)
        optimizer.zero_grad()
        loss = F.mse_loss(found, x) + 0.25 * commitment
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
        run.rows("nearest", nearest)
    model.eval()
    with torch.no_grad():
        run.rows("nearest in evaluation", model(run.randn(BATCH, 1, 8, 8))[2])
    run.state(model)


@SECTION(
    "DCGAN: transposed convolutions, a discriminator with spectral norm, one half frozen while the other trains",
    free=("0", "2"),
)
def dcgan(run: Run) -> None:
    def init(m: nn.Module) -> None:
        if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(m.weight, 0.0, 0.2)

    generator = nn.Sequential(
        nn.Linear(6, 32), nn.Unflatten(1, (8, 2, 2)), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
        nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Tanh(),
    ).apply(init)  # fmt: skip
    critic = nn.Sequential(
        spectral_norm(nn.Conv2d(1, 4, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True),
        spectral_norm(nn.Conv2d(4, 8, 4, 2, 1)), nn.LeakyReLU(0.2, True), nn.Flatten(), nn.Linear(32, 1),
    )  # fmt: skip
    g, d = run.compile(generator), run.compile(critic)
    steps_of = {m: torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.999)) for m in (g, d)}
    truth = nn.BCEWithLogitsLoss()
    for _ in range(3):
        d.requires_grad_(True)
        d.zero_grad()
        for images, label in ((run.randn(BATCH, 1, 8, 8), 0.9), (g(run.randn(BATCH, 6)).detach(), 0.0)):
            scores = d(images).view(-1)
            loss = truth(scores, torch.full_like(scores, label))
            loss.backward()
            run.mean("critic's loss", loss)
        steps_of[d].step()
        d.requires_grad_(False)
        g.zero_grad()
        scores = d(g(run.randn(BATCH, 6))).view(-1)
        loss = truth(scores, torch.ones_like(scores))
        loss.backward()
        steps_of[g].step()
        run.mean("generator's loss", loss)
    g.eval()
    with torch.no_grad():
        run.rows("images", g(run.randn(BATCH, 6)))
    run.state(g, "generator ")
    run.state(d, "critic ")


@SECTION("super-resolution: `PixelShuffle`, scaled residual blocks, a bicubic skip, the L1 loss, PSNR in evaluation")
def super_resolution(run: Run) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU(True), nn.Conv2d(4, 4, 3, 1, 1))

        def forward(self, x: Tensor) -> Any:
            res = self.body(x).mul(0.1)
            res += x
            return res

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
            self.blocks = nn.Sequential(Block(), Block())
            self.tail = nn.Sequential(
                nn.Conv2d(4, 16, 3, 1, 1), nn.PixelShuffle(2), nn.PReLU(), nn.Conv2d(4, 3, 3, 1, 1)
            )

        def forward(self, x: Tensor) -> Any:
            skip = F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
            h = self.head(x)
            return self.tail(h + self.blocks(h)) + skip

    model = run.compile(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.5)
    for _ in range(3):
        wide = run.randn(BATCH, 3, 8, 8)
        optimizer.zero_grad()
        loss = F.l1_loss(model(F.avg_pool2d(wide, 2)), wide)
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.mean("loss", loss)
    model.eval()
    wide = run.randn(BATCH, 3, 8, 8)
    with torch.inference_mode():
        error = (model(F.avg_pool2d(wide, 2)).clamp(-1, 1) - wide).square().mean((1, 2, 3))
    run.rows("PSNR", -10 * error.log10())
    run.state(model)


class _Features(NamedTuple):
    low: Tensor
    high: Tensor


@SECTION(
    "Glow: activation norms set by the first samples (`.data.copy_` behind a flag), a 1x1 convolution's `slogdet`",
    refused={"*": "call the model once before it is captured"},
    why="call the plain model once, with the first samples",
)
def glow(run: Run) -> None:
    class ActNorm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.shift, self.scale = nn.Parameter(torch.zeros(1, width)), nn.Parameter(torch.zeros(1, width))
            self.inited = False

        def forward(self, x: Tensor) -> Any:
            if not self.inited and self.training:
                with torch.no_grad():
                    self.shift.data.copy_(-x.mean(0, keepdim=True))
                    self.scale.data.copy_(-(x.std(0, keepdim=True) + 1e-6).log())
                self.inited = True
            return (x + self.shift) * self.scale.exp(), self.scale.sum()

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix = ActNorm(6), nn.Parameter(torch.linalg.qr(torch.randn(6, 6))[0])
            self.net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))

        def forward(self, x: Tensor, logdet: Tensor) -> Any:
            x, more = self.norm(x)
            a, b = (x @ self.mix).chunk(2, 1)
            shift, scale = self.net(a).chunk(2, 1)
            scale = torch.sigmoid(scale + 2.0)
            logdet = logdet + more + torch.slogdet(self.mix)[1] + scale.log().sum(1)
            return torch.cat([a, (b + shift) * scale], 1), logdet

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList([Step(), Step()])

        def forward(self, x: Tensor) -> Any:
            logdet = torch.zeros(x.shape[0])
            for step in self.steps:
                x, logdet = step(x, logdet)
            return 0.5 * (x.square() + math.log(2 * math.pi)).sum(1) - logdet

    model = run.compile(Flow())
    train(run, model, torch.optim.Adamax(model.parameters(), lr=0.01), lambda: model(run.randn(BATCH, 6)).mean())


@SECTION(
    "PixelCNN: convolutions that mask their weights (`self.weight.data *= self.mask`), sampled pixel by pixel",
    refused={"*": "changes '0.weight' in place"},
    why="multiply into a new tensor: `F.conv2d(x, self.weight * self.mask)`",
)
def pixel_cnn(run: Run) -> None:
    class Masked(nn.Conv2d):
        mask: Tensor

        def __init__(self, kind: str, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.register_buffer("mask", torch.ones_like(self.weight))
            middle = self.kernel_size[0] // 2
            self.mask[:, :, middle, middle + (kind == "B") :] = 0
            self.mask[:, :, middle + 1 :] = 0

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data *= self.mask
            return super().forward(x)

    net = nn.Sequential(Masked("A", 1, 8, 3, padding=1), nn.ReLU(), Masked("B", 8, 8, 3, padding=1), nn.Conv2d(8, 4, 1))
    model = run.compile(net)

    def loss() -> Tensor:
        levels = run.randint(4, BATCH, 4, 4)
        return F.cross_entropy(model(levels.unsqueeze(1) / 3.0), levels)

    train(run, model, torch.optim.Adam(model.parameters(), lr=0.01), loss)
    model.eval()
    image = run.own(torch.zeros(BATCH, 1, 4, 4))
    with torch.no_grad():
        for i, j in ((0, 0), (0, 1), (2, 3)):
            image[:, 0, i, j] = model(image)[:, :, i, j].argmax(1) / 3.0
    run.rows("image", image)


def _mixture(run: Run, **checked: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 12)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            logits, mean, spread = self.head(torch.tanh(self.body(x))).chunk(3, 1)
            parts = Normal(mean, F.softplus(spread) + 1e-3, **checked)
            return -MixtureSameFamily(Categorical(logits=logits, **checked), parts, **checked).log_prob(y)

    model = run.compile(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(run, model, optimizer, lambda: model(run.randn(BATCH, 3), run.randn(BATCH)).mean())


@SECTION(
    "a mixture density network with `torch.distributions` in the forward",
    refused={"*": "pass it validate_args=False"},
    why="distributions check their arguments by branches on values: give them `validate_args=False`",
)
def mixture_checked(run: Run) -> None:
    _mixture(run, validate_args=True)  # the default, which torch.compile switches off for the whole process


@SECTION("the same with `validate_args=False`")
def mixture(run: Run) -> None:
    _mixture(run, validate_args=False)


@SECTION("a neural ODE: one block integrated by Runge-Kutta steps, their number raised in training (`model.steps = 3`)")
def neural_ode(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave, self.steps = nn.Linear(6, 8), nn.Linear(8, 4), 1
            self.field = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 8))

        def slope(self, t: float, h: Tensor) -> Any:
            return self.field(torch.cat([h, torch.full_like(h[:, :1], t)], 1))

        def forward(self, x: Tensor) -> Any:
            h, dt = self.enter(x), 1.0 / self.steps
            for k in range(self.steps):
                a = self.slope(k * dt, h)
                b = self.slope((k + 0.5) * dt, h + dt / 2 * a)
                c = self.slope((k + 0.5) * dt, h + dt / 2 * b)
                h = h + dt / 6 * (a + 2 * b + 2 * c + self.slope((k + 1) * dt, h + dt * c))
            return self.leave(h)

    model = run.compile(Net())
    optimizer = sgd(model)
    for model.steps in (1, 2, 3, 2):
        steps(run, model, optimizer, 1)
