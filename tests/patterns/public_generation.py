"""Public training programs that generate images: their models at small sizes, and their loops."""

# mypy: disable-error-code="operator"
from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training import Run
from tests.patterns.nets import BATCH, loader, total
from tests.patterns.pattern import Section

SECTION = Section("Public training programs")


@SECTION("pytorch/examples `dcgan`: two networks and two optimizers, BCELoss of real and fake halves, fixed noise")
def dcgan_example(run: Run) -> None:
    def weights_init(m: nn.Module) -> None:
        classname = m.__class__.__name__
        if classname.find("Conv") != -1:
            nn.init.normal_(m.weight, 0.0, 0.1)  # type: ignore[arg-type]
        elif classname.find("BatchNorm") != -1:
            nn.init.normal_(m.weight, 1.0, 0.02)  # type: ignore[arg-type]
            nn.init.zeros_(m.bias)  # type: ignore[arg-type]

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main = nn.Sequential(
                nn.ConvTranspose2d(6, 8, 2, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
                nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
                nn.ConvTranspose2d(4, 3, 4, 2, 1, bias=False), nn.Tanh(),
            )  # fmt: skip

        def forward(self, x: Tensor) -> Any:
            return self.main(x)

    class Discriminator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(3, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(4, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(8, 1, 2, 1, 0, bias=False), nn.Sigmoid(),
            )  # fmt: skip

        def forward(self, x: Tensor) -> Any:
            return self.main(x).view(-1, 1).squeeze(1)

    generator, discriminator = Generator().apply(weights_init), Discriminator().apply(weights_init)
    net_g, net_d, criterion = run.compile(generator), run.compile(discriminator), nn.BCELoss()
    optimizer_d, optimizer_g = (
        torch.optim.Adam(net.parameters(), lr=0.002, betas=(0.5, 0.999)) for net in (net_d, net_g)
    )
    fixed_noise = run.randn(BATCH, 6, 1, 1)
    for _ in range(3):
        net_d.zero_grad()
        real = run.randn(BATCH, 3, 8, 8)
        label = torch.full((real.size(0),), 1.0)
        output = net_d(real)
        loss_real = criterion(output, label)
        loss_real.backward()
        fake = net_g(run.randn(BATCH, 6, 1, 1))
        label.fill_(0.0)
        output = net_d(fake.detach())
        loss_fake = criterion(output, label)
        loss_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        label.fill_(1.0)
        loss_g = criterion(net_d(fake), label)
        loss_g.backward()
        optimizer_g.step()
        run.mean("loss of D", loss_real + loss_fake)
        run.mean("loss of G", loss_g)
        run.rows("fixed", net_g(fixed_noise))
    run.state(net_g, "G ")
    run.state(net_d, "D ")


@SECTION("pytorch/examples `vae`: summed losses, samples from the method `decode` (its noise is an input here)")
def vae(run: Run) -> None:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(36, 16), nn.Linear(16, 4), nn.Linear(16, 4)
            self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 36)

        def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def decode(self, z: Tensor) -> Any:
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def forward(self, x: Tensor, eps: Tensor) -> Any:
            mu, logvar = self.encode(x.view(-1, 36))
            return self.decode(mu + eps * torch.exp(0.5 * logvar)), mu, logvar

    def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 36), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (bce + kld) / BATCH * run.ranks  # a mean over samples, as processes average gradients

    model = run.compile(Vae())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        model.train()
        for _ in range(2):
            data = run.randn(BATCH, 1, 6, 6).sigmoid()
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data, run.randn(BATCH, 4))
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            optimizer.step()
            run.mean("loss", loss)
        model.eval()
        with torch.no_grad():
            data = run.randn(BATCH, 1, 6, 6).sigmoid()
            recon_batch, mu, logvar = model(data, run.randn(BATCH, 4))
            run.mean("test", loss_function(recon_batch, data, mu, logvar))
            run.rows("sample", model.decode(run.randn(BATCH, 4)))
    run.state(model)


class _ConvLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int, size: int, stride: int, upsample: int | None = None) -> None:
        super().__init__()
        self.upsample = upsample
        self.reflection_pad, self.conv2d = nn.ReflectionPad2d(size // 2), nn.Conv2d(inputs, outputs, size, stride)

    def forward(self, x: Tensor) -> Any:
        if self.upsample:
            x = F.interpolate(x, mode="nearest", scale_factor=self.upsample)
        return self.conv2d(self.reflection_pad(x))


class _TransformerNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.in1 = _ConvLayer(3, 4, 3, 2), nn.InstanceNorm2d(4, affine=True)
        self.res, self.in2 = _ConvLayer(4, 4, 3, 1), nn.InstanceNorm2d(4, affine=True)
        self.deconv, self.in3 = _ConvLayer(4, 4, 3, 1, upsample=2), nn.InstanceNorm2d(4, affine=True)
        self.deconv2, self.relu = _ConvLayer(4, 3, 3, 1), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.in1(self.conv1(x)))
        y = self.in2(self.res(y)) + y
        return self.deconv2(self.relu(self.in3(self.deconv(y))))


class _Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slice1 = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.slice2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        for param in self.parameters():
            param.requires_grad = False

    def forward(self, x: Tensor) -> Any:
        relu1_2 = self.slice1(x)
        vgg_outputs = namedtuple("vgg_outputs", ["relu1_2", "relu2_2"])
        return vgg_outputs(relu1_2, self.slice2(relu1_2))


@SECTION(
    "pytorch/examples `fast_neural_style`: a frozen loss network that gives a named tuple made in the forward, "
    "Gram matrices of one style image",
)
def fast_neural_style(run: Run) -> None:
    def gram_matrix(y: Tensor) -> Tensor:
        b, ch, h, w = y.size()
        features = y.view(b, ch, w * h)
        return features.bmm(features.transpose(1, 2)) / (ch * h * w)

    def normalize_batch(batch: Tensor) -> Tensor:
        mean, std = batch.new_tensor([0.485, 0.456, 0.406]), batch.new_tensor([0.229, 0.224, 0.225])
        return (batch.div(255.0) - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)

    transformer, vgg, mse_loss = run.compile(_TransformerNet()), run.compile(_Vgg()), nn.MSELoss()
    optimizer = torch.optim.Adam(transformer.parameters(), 1e-3)
    style = (torch.linspace(0, 1, 192).view(3, 8, 8) * 255).repeat(BATCH // run.ranks, 1, 1, 1)
    gram_style = [gram_matrix(y) for y in vgg(normalize_batch(style))]
    for _ in range(3):
        x = run.randn(BATCH, 3, 8, 8).sigmoid() * 255
        optimizer.zero_grad()
        y = transformer(x)
        features_y, features_x = vgg(normalize_batch(y)), vgg(normalize_batch(x))
        content_loss = 10 * mse_loss(features_y.relu2_2, features_x.relu2_2)
        style_loss = torch.zeros(())
        for ft_y, gm_s in zip(features_y, gram_style, strict=True):
            style_loss = style_loss + mse_loss(gram_matrix(ft_y), gm_s[: len(x), :, :])
        loss = content_loss + 100 * style_loss
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    transformer.eval()
    with torch.no_grad():
        run.rows("stylized", transformer(run.randn(BATCH, 3, 8, 8)).clamp(0, 255))
    run.state(transformer)


class _Quantize(nn.Module):
    embed: Tensor
    cluster_size: Tensor
    embed_avg: Tensor

    def __init__(self, dim: int, n_embed: int, summed: bool) -> None:
        super().__init__()
        embed = torch.randn(dim, n_embed)
        self.summed, self.n_embed = summed, n_embed
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(n_embed))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, x: Tensor) -> Any:
        flatten = x.reshape(-1, x.shape[-1])
        far = flatten.pow(2).sum(1, keepdim=True) - 2 * flatten @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        _, embed_ind = (-far).max(1)
        onehot = F.one_hot(embed_ind, self.n_embed).type(flatten.dtype)
        quantize = F.embedding(embed_ind.view(*x.shape[:-1]), self.embed.transpose(0, 1))
        if self.training:
            onehot_sum, embed_sum = onehot.sum(0), flatten.transpose(0, 1) @ onehot
            if self.summed and dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(onehot_sum)
                dist.all_reduce(embed_sum)
            self.cluster_size.data.mul_(0.9).add_(onehot_sum, alpha=0.1)
            self.embed_avg.data.mul_(0.9).add_(embed_sum.detach(), alpha=0.1)
            n = self.cluster_size.sum()
            cluster_size = (self.cluster_size + 1e-5) / (n + self.n_embed * 1e-5) * n
            self.embed.data.copy_(self.embed_avg / cluster_size.unsqueeze(0))
        diff = (quantize.detach() - x).pow(2).mean()
        return x + (quantize - x).detach(), diff, embed_ind.view(*x.shape[:-1])


class _VqVae2(nn.Module):
    def __init__(self, summed: bool) -> None:
        super().__init__()
        self.enc_b = nn.Sequential(nn.Conv2d(3, 4, 4, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1))
        self.enc_t = nn.Sequential(nn.Conv2d(4, 4, 4, 2, 1), nn.ReLU(inplace=True))
        self.quantize_conv_t, self.quantize_t = nn.Conv2d(4, 4, 1), _Quantize(4, 6, summed)
        self.dec_t = nn.ConvTranspose2d(4, 4, 4, 2, 1)
        self.quantize_conv_b, self.quantize_b = nn.Conv2d(8, 4, 1), _Quantize(4, 6, summed)
        self.upsample_t, self.dec = nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> Any:
        enc_b = self.enc_b(x)
        quant_t = self.quantize_conv_t(self.enc_t(enc_b)).permute(0, 2, 3, 1)
        quant_t, diff_t, _ = self.quantize_t(quant_t)
        quant_t = quant_t.permute(0, 3, 1, 2)
        enc_b = torch.cat([self.dec_t(quant_t), enc_b], 1)
        quant_b, diff_b, _ = self.quantize_b(self.quantize_conv_b(enc_b).permute(0, 2, 3, 1))
        quant = torch.cat([self.upsample_t(quant_t), quant_b.permute(0, 3, 1, 2)], 1)
        return self.dec(quant), diff_t.unsqueeze(0) + diff_b.unsqueeze(0)


def _train_codes(run: Run, plain: nn.Module) -> None:
    """The loop of `train_vqvae.py`: a latent loss given as a vector, and what it was over all images."""
    model, criterion = run.compile(plain), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=6)
    data = loader(run, torch.randn(16, 3, 8, 8, generator=run.draws), shuffle=False)
    for _ in range(2):
        seen, summed = 0, 0.0
        for (image,) in data:
            model.zero_grad()
            out, latent_loss = model(image)
            recon_loss = criterion(out, image)
            loss = recon_loss + 0.25 * latent_loss.mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            seen, summed = seen + image.shape[0], summed + recon_loss.item() * image.shape[0]
        run.same("mse", total(run, summed, seen))
        model.eval()
        with torch.no_grad():
            found, _ = model(next(iter(data))[0])
        run.mean("sample", found.square().mean())
        model.train()
    run.state(model)


@SECTION(
    "VQ-VAE-2: two levels of codes, averages of codes summed over processes by `all_reduce` in the forward",
    refused={"ranks/*": "the forward calls a collective itself"},
    why="sums over the batch are those of all processes' samples already; leave `all_reduce` out",
)
def vq_vae_2(run: Run) -> None:
    _train_codes(run, _VqVae2(summed=True))


@SECTION("the same without `all_reduce`: sums over the batch are those of all processes' samples")
def vq_vae_2_plain_sums(run: Run) -> None:
    _train_codes(run, _VqVae2(summed=False))
