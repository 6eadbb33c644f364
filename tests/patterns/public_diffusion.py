"""Public training programs: diffusion, codebooks, momentum contrast, quantization-aware training."""

# mypy: disable-error-code="operator"
from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training import Run
from tests.patterns.nets import BATCH
from tests.patterns.pattern import Section

SECTION = Section("Public training programs")


class _ResnetBlock2D(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inputs), nn.Conv2d(inputs, width, 3, padding=1)
        self.time_emb_proj, self.norm2 = nn.Linear(16, width), nn.GroupNorm(2, width)
        self.dropout, self.conv2 = nn.Dropout(0.0), nn.Conv2d(width, width, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(inputs, width, 1) if inputs != width else None

    def forward(self, x: Tensor, temb: Tensor) -> Any:
        h = self.conv1(F.silu(self.norm1(x))) + self.time_emb_proj(F.silu(temb))[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + h


class _Attention2D(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(2, width)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(width, width), nn.Dropout(0.0)])

    def forward(self, x: Tensor) -> Any:
        b, c, height, width = x.shape
        h = self.group_norm(x.view(b, c, height * width)).transpose(1, 2)
        q, k, v = (f(h).view(b, -1, 2, c // 2).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0).transpose(1, 2).reshape(b, -1, c)
        h = self.to_out[1](self.to_out[0](h))
        return h.transpose(-1, -2).reshape(b, c, height, width) + x


class _UNet2D(nn.Module):
    """diffusers' UNet2DModel of two levels, the lower with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, 4, 3, padding=1)
        self.time_embedding = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down_blocks = nn.ModuleList([_ResnetBlock2D(4, 4), _ResnetBlock2D(4, 8)])
        self.downsample, self.upsample = nn.Conv2d(4, 4, 3, stride=2), nn.Conv2d(8, 8, 3, padding=1)
        self.attentions = nn.ModuleList([_Attention2D(8), _Attention2D(8)])
        self.mid_block = _ResnetBlock2D(8, 8)
        self.up_blocks = nn.ModuleList([_ResnetBlock2D(16, 8), _ResnetBlock2D(12, 4)])
        self.conv_norm_out, self.conv_act, self.conv_out = nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor | int) -> Any:
        timesteps = timestep
        if not torch.is_tensor(timesteps):
            timesteps = torch.tensor([timesteps], dtype=torch.long, device=sample.device)
        elif len(timesteps.shape) == 0:
            timesteps = timesteps[None].to(sample.device)
        timesteps = timesteps * torch.ones(sample.shape[0], dtype=timesteps.dtype)
        angles = timesteps[:, None].to(sample.dtype) * torch.exp(-math.log(10000) * torch.arange(2.0) / 2)[None, :]
        temb = self.time_embedding(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1))
        x = self.conv_in(sample)
        residuals: tuple[Tensor, ...] = (x,)
        x = self.down_blocks[0](x, temb)
        residuals += (x,)
        x = self.attentions[0](self.down_blocks[1](self.downsample(F.pad(x, (0, 1, 0, 1))), temb))
        residuals += (x,)
        x = self.mid_block(x, temb)
        x = self.attentions[1](self.up_blocks[0](torch.cat([x, residuals[-1]], dim=1), temb))
        x = self.upsample(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = self.up_blocks[1](torch.cat([x, residuals[-2]], dim=1), temb)
        return (self.conv_out(self.conv_act(self.conv_norm_out(x))),)


class _EmaModel:
    """diffusers' average: shadows in a list, put into the model for sampling, and its own weights back after it."""

    def __init__(self, parameters: Any) -> None:
        self.shadow_params, self.optimization_step = [p.clone().detach() for p in parameters], 0
        self.kept: list[Tensor] = []

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        self.optimization_step += 1
        decay = min(0.9999, (1 + self.optimization_step) / (10 + self.optimization_step))
        for s_param, param in zip(self.shadow_params, parameters, strict=True):
            s_param.sub_((1 - decay) * (s_param - param))

    def store(self, parameters: Any) -> None:
        self.kept = [param.detach().cpu().clone() for param in parameters]

    def copy_to(self, parameters: Any) -> None:
        for s_param, param in zip(self.shadow_params, parameters, strict=True):
            param.data.copy_(s_param.to(param.device).data)

    def restore(self, parameters: Any) -> None:
        for kept, param in zip(self.kept, parameters, strict=True):
            param.data.copy_(kept.data)


@SECTION(
    "diffusers `train_unconditional`: UNet2D with attention and embedded times, accumulation, cosine with warm-up, "
    "`EMAModel` put in for sampling and taken out"
)
def diffusers_unet(run: Run) -> None:
    alphas_cumprod = torch.cumprod(1.0 - torch.linspace(1e-4, 0.2, 10), dim=0)

    def add_noise(x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        kept = alphas_cumprod[t].view(-1, 1, 1, 1)
        found: Tensor = kept**0.5 * x + (1 - kept) ** 0.5 * noise
        return found

    model = run.compile(_UNet2D())
    ema_model = _EmaModel(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / 2 if step < 1 else max(0.0, 0.5 * (1 + math.cos(math.pi * step / 4)))
    )
    for step in range(4):
        model.train()
        clean, noise, t = run.randn(BATCH, 3, 8, 8), run.randn(BATCH, 3, 8, 8), run.randint(10, BATCH).long()
        model_output = model(add_noise(clean, noise, t), t)[0]
        loss = F.mse_loss(model_output, noise)
        (loss / 2).backward()
        run.mean("loss", loss)
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            ema_model.step(model.parameters())
    ema_model.store(model.parameters())
    ema_model.copy_to(model.parameters())
    model.eval()
    image = run.randn(BATCH, 3, 8, 8)
    with torch.no_grad():
        for at in torch.arange(2, -1, -1):
            image = image - 0.1 * model(image, at)[0]
    run.rows("images", image)
    run.state(model, "average ")
    ema_model.restore(model.parameters())
    run.state(model)


class _LinearAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.g, self.to_qkv = nn.Parameter(torch.ones(1, dim, 1, 1)), nn.Conv2d(dim, 24, 1, bias=False)
        self.mem_kv, self.to_out = nn.Parameter(torch.randn(2, 2, 4, 2)), nn.Conv2d(8, dim, 1)

    def forward(self, x: Tensor) -> Any:
        b, c, height, width = x.shape
        x = F.normalize(x, dim=1) * self.g * c**0.5
        q, k, v = (z.reshape(b, 2, 4, height * width) for z in self.to_qkv(x).chunk(3, dim=1))
        mk, mv = (z.unsqueeze(0).expand(b, -1, -1, -1) for z in self.mem_kv)
        k, v = torch.cat((mk, k), dim=-1), torch.cat((mv, v), dim=-1)
        q, k = q.softmax(dim=-2) * 4**-0.5, k.softmax(dim=-1)
        out = torch.einsum("b h d e, b h d n -> b h e n", torch.einsum("b h d n, b h e n -> b h d e", k, v), q)
        return self.to_out(out.reshape(b, 8, height, width))


class _DenoisingUnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.init_conv, self.time_mlp = nn.Conv2d(1, 4, 7, padding=3), nn.Sequential(nn.Linear(4, 16), nn.GELU())
        self.scale_shift, self.block, self.attn = nn.Linear(16, 8), nn.Conv2d(4, 4, 3, padding=1), _LinearAttention(4)
        self.down, self.up = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 4, 3, padding=1)
        self.final = nn.Conv2d(12, 1, 1)

    def forward(self, x: Tensor, time: Tensor) -> Any:
        x = self.init_conv(x)
        r, h = x.clone(), []
        angles = time[:, None] * torch.exp(torch.arange(2) * -math.log(10000))[None, :]
        scale, shift = self.scale_shift(self.time_mlp(torch.cat((angles.sin(), angles.cos()), dim=-1))).chunk(2, dim=1)
        x = F.silu(self.block(x) * (scale[:, :, None, None] + 1) + shift[:, :, None, None])
        x = self.attn(x) + x
        h.append(x)
        b, c, height, width = x.shape
        x = x.reshape(b, c, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, height // 2, -1)
        x = self.up(F.interpolate(self.down(x), scale_factor=2, mode="nearest"))
        return self.final(torch.cat((x, h.pop(), r), dim=1))


class _GaussianDiffusion(nn.Module):
    sqrt_kept: Tensor
    sqrt_rest: Tensor
    loss_weight: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.num_timesteps = model, 10
        kept = torch.cumprod(1.0 - torch.linspace(1e-4, 0.2, 10), dim=0)
        self.register_buffer("sqrt_kept", torch.sqrt(kept))
        self.register_buffer("sqrt_rest", torch.sqrt(1.0 - kept))
        self.register_buffer("loss_weight", (kept / (1 - kept)).clamp(max=5.0))

    def forward(self, img: Tensor, t: Tensor, noise: Tensor) -> Any:
        height, width = img.shape[2:]
        assert height == width == 8, "height and width of image must be 8"
        img = img * 2 - 1
        sqrt_kept, sqrt_rest = (a.gather(-1, t).reshape(-1, 1, 1, 1) for a in (self.sqrt_kept, self.sqrt_rest))
        target = sqrt_kept * noise - sqrt_rest * img
        loss = F.mse_loss(self.model(sqrt_kept * img + sqrt_rest * noise, t), target, reduction="none")
        loss = loss.flatten(1).mean(1) * self.loss_weight.gather(-1, t)
        return loss.mean()

    @torch.inference_mode()
    def sample(self, img: Tensor) -> Tensor:
        for t in reversed(range(2)):
            times = torch.full((img.shape[0],), t, dtype=torch.long)
            v = self.model(img, times)
            img = self.sqrt_kept[t] * img - self.sqrt_rest[t] * v
        return (img + 1) * 0.5


@SECTION(
    "denoising-diffusion-pytorch: linear attention, weighted losses of single images inside, an EMA copy that samples "
    "by a method (times and noise are inputs here)"
)
def denoising_diffusion(run: Run) -> None:
    plain = _GaussianDiffusion(_DenoisingUnet())
    ema_model = copy.deepcopy(plain).requires_grad_(False)
    model = run.compile(plain)
    opt = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.99))
    for step in range(3):
        model.train()
        for _ in range(2):
            loss = model(run.randn(BATCH, 1, 8, 8).sigmoid(), run.randint(10, BATCH), run.randn(BATCH, 1, 8, 8)) / 2
            loss.backward()
            run.same("loss", loss)
        run.same("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        opt.step()
        opt.zero_grad()
        for ma, current in zip(ema_model.parameters(), model.parameters(), strict=True):
            ma.data.lerp_(current.data, 1.0 if step == 0 else 0.3)
    ema_model.eval()
    run.rows("samples", ema_model.sample(run.randn(BATCH, 1, 8, 8)))
    run.state(model)
    run.state(ema_model, "average ")


class _Codebook(nn.Module):
    """vector-quantize-pytorch's codebook: a flag in a buffer, averages in place, smoothing."""

    initted: Tensor
    cluster_size: Tensor
    embed_avg: Tensor
    embed: Tensor

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        embed = torch.empty(1, size, dim)
        nn.init.kaiming_uniform_(embed)
        self.register_buffer("initted", torch.tensor([True]))
        self.register_buffer("cluster_size", torch.ones(1, size))
        self.register_buffer("embed_avg", embed.clone())
        self.register_buffer("embed", embed)

    def init_embed(self, flatten: Tensor) -> None:
        if self.initted:
            return
        means = flatten[:, : self.embed.size(1)]
        self.embed.data.copy_(means)
        self.embed_avg.data.copy_(means)
        self.initted.data.copy_(torch.tensor([True]))

    def forward(self, x: Tensor) -> Any:
        flatten = x.reshape(1, -1, x.shape[-1])
        self.init_embed(flatten)
        squares, norms = (flatten**2).sum(-1), (self.embed**2).sum(-1)
        products = torch.einsum("b i d, b j d -> b i j", flatten, self.embed) * -2
        dist = -(squares[:, :, None] + norms[:, None, :] + products).clamp(min=0).sqrt()
        embed_ind = dist.argmax(dim=-1)
        onehot = F.one_hot(embed_ind, self.embed.size(1)).type(x.dtype)
        quantize = torch.gather(self.embed, 1, embed_ind.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        if self.training:
            self.cluster_size.data.lerp_(onehot.sum(dim=1), 0.2)
            self.embed_avg.data.lerp_(torch.einsum("h n d, h n c -> h c d", flatten.detach(), onehot), 0.2)
            total_size = self.cluster_size.sum(dim=-1, keepdim=True)
            smoothed = (self.cluster_size + 1e-5) / (total_size + self.embed.size(1) * 1e-5) * total_size
            self.embed.data.copy_(self.embed_avg / smoothed.unsqueeze(-1))
        return quantize.view(x.shape), embed_ind.view(x.shape[:-1])


def _quantized_autoencoder(run: Run, python_flag: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.project_in, self.vq = nn.Conv2d(1, 8, 4, 2, 1), nn.Linear(8, 4), _Codebook(4, 6)
            self.project_out, self.decoder = nn.Linear(4, 8), nn.ConvTranspose2d(8, 1, 4, 2, 1)

        def forward(self, x: Tensor) -> Any:
            h = self.project_in(self.encoder(x).flatten(2).transpose(1, 2))
            quantize, indices = self.vq(h)
            commit_loss = torch.zeros(1)
            if self.training:
                commit_loss = commit_loss + 0.25 * F.mse_loss(quantize.detach(), h)
                quantize = h + (quantize - h).detach()
            y = self.project_out(quantize).transpose(1, 2).reshape(x.size(0), 8, 4, 4)
            return self.decoder(y).clamp(-1, 1), indices, commit_loss

    plain = Net()
    if python_flag:
        del plain.vq.initted
        plain.vq.initted = True  # type: ignore[assignment]
    model = run.compile(plain)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(3):
        opt.zero_grad()
        x = run.randn(BATCH, 1, 8, 8).clamp(-1, 1)
        out, indices, cmt_loss = model(x)
        rec_loss = (out - x).abs().mean()
        (rec_loss + 10 * cmt_loss.sum()).backward()
        opt.step()
        run.mean("rec loss", rec_loss)
        run.rows("indices", indices)
    model.eval()
    with torch.no_grad():
        run.rows("evaluated", model(x)[1])
    run.state(model)


@SECTION(
    "vector-quantize-pytorch: an autoencoder with `VectorQuantize`, averages by `lerp_`",
    refused={"*": "the buffer 'initted' decides it"},
    why="the forward branches by a flag in a buffer, whose value may change; make it a Python attribute before "
    "`compile`: `del codebook.initted; codebook.initted = True`",
)
def vector_quantize(run: Run) -> None:
    _quantized_autoencoder(run, python_flag=False)


@SECTION("the same with its flag as a Python attribute")
def vector_quantize_flag(run: Run) -> None:
    _quantized_autoencoder(run, python_flag=True)
