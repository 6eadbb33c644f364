"""Programs whose models or loops keep state: codebooks, normalisers, averages, targets, several tasks."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import Run
from tests.patterns.nets import BATCH, Mlp
from tests.patterns.pattern import Section
from tests.patterns.programs_science import SECTION as SCIENCE

SECTION = Section(SCIENCE.heading)


@SECTION("a VQ-VAE: nearest code, straight-through, codes as averages by `index_add_` under `no_grad`, perplexity")
def codebook_averages(run: Run) -> None:
    class Codebook(nn.Module):
        codes: Tensor
        counts: Tensor
        sums: Tensor

        def __init__(self) -> None:
            super().__init__()
            codes = torch.randn(5, 4)
            self.register_buffer("codes", codes)
            self.register_buffer("counts", torch.ones(5))
            self.register_buffer("sums", codes.clone())

        def forward(self, z: Tensor) -> Any:
            flat = z.permute(0, 2, 1).reshape(-1, 4)
            far = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.t() + self.codes.pow(2).sum(1)
            chosen = far.argmin(1)
            found = F.embedding(chosen, self.codes).view(z.size(0), z.size(2), 4).permute(0, 2, 1)
            if self.training:
                with torch.no_grad():
                    self.counts.mul_(0.9).add_(F.one_hot(chosen, 5).sum(0), alpha=0.1)
                    self.sums.mul_(0.9).add_(torch.zeros_like(self.sums).index_add_(0, chosen, flat), alpha=0.1)
                    self.codes.copy_(self.sums / (self.counts + 1e-5).unsqueeze(1))
            used = F.one_hot(chosen, 5).to(z.dtype).mean(0)
            perplexity = torch.exp(-(used * torch.log(used + 1e-10)).sum())
            return z + (found - z).detach(), F.mse_loss(found.detach(), z), perplexity

    class VqVae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.codebook, self.decode = nn.Conv1d(2, 4, 3), Codebook(), nn.ConvTranspose1d(4, 2, 3)

        def forward(self, x: Tensor) -> Any:
            z, commitment, perplexity = self.codebook(self.encode(x))
            return self.decode(z), commitment, perplexity

    model = run.compile(VqVae())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=False)
    for _ in range(3):
        x = run.randn(BATCH, 2, 6)
        optimizer.zero_grad()
        found, commitment, perplexity = model(x)
        loss = F.mse_loss(found, x) / 0.9
        (loss + 0.25 * commitment).backward()
        optimizer.step()
        run.mean("loss", loss)
        run.same("perplexity", perplexity)
    model.eval()
    with torch.no_grad():
        run.rows("found", model(run.randn(BATCH, 2, 6))[0])
    run.state(model)


@SECTION("PPO: observations normalised by running statistics in buffers (Welford), clipped ratios, entropy")
def proximal_policy(run: Run) -> None:
    class Normaliser(nn.Module):
        mean: Tensor
        var: Tensor
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("var", torch.ones(6))
            self.register_buffer("count", torch.tensor(1e-4))

        def forward(self, x: Tensor) -> Any:
            if self.training:
                mean, var, n = x.mean(0), x.var(0, unbiased=False), x.shape[0]
                off, total = mean - self.mean, self.count + n
                spread = self.var * self.count + var * n + off.square() * self.count * n / total
                self.mean, self.var, self.count = self.mean + off * n / total, spread / total, total
            return ((x - self.mean) / torch.sqrt(self.var + 1e-8)).clamp(-5, 5)

    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normalise, self.actor, self.critic = Normaliser(), Mlp(), Mlp()
            self.log_std = nn.Parameter(torch.zeros(4))
            for layer in (self.actor.body, self.critic.body):
                nn.init.orthogonal_(layer.weight, math.sqrt(2))

        def forward(self, x: Tensor) -> Any:
            x = self.normalise(x)
            mean = self.actor(x)
            return mean, self.log_std.exp().expand_as(mean), self.critic(x)[:, 0]

    model = run.compile(ActorCritic())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
    for _ in range(2):
        seen, noise, gains = run.randn(BATCH, 6) * 2 + 1, run.randn(BATCH, 4), run.randn(BATCH)
        with torch.no_grad():
            mean, std, _ = model(seen)
            actions = mean + std * noise
            before = torch.distributions.Normal(mean, std).log_prob(actions).sum(1)
        model.eval()
        for _ in range(2):
            mean, std, values = model(seen)
            policy = torch.distributions.Normal(mean, std)
            ratio = (policy.log_prob(actions).sum(1) - before).exp()
            gain = torch.max(-gains * ratio, -gains * torch.clamp(ratio, 0.8, 1.2)).mean()
            loss = gain + 0.5 * (values - gains).square().mean() - 0.01 * policy.entropy().sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            run.mean("loss", loss)
        model.train()
    run.state(model)


class _Average:
    """An average of parameters, put in their place for evaluation and taken out again."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}
        self.backup: dict[str, Tensor] = {}

    def update(self, model: nn.Module) -> None:
        """One step of the average."""
        for name, p in model.named_parameters():
            self.shadow[name] = (0.9 * self.shadow[name] + 0.1 * p.data).clone()

    def apply(self, model: nn.Module) -> None:
        """Put the average in place."""
        for name, p in model.named_parameters():
            self.backup[name] = p.data
            p.data = self.shadow[name]

    def restore(self, model: nn.Module) -> None:
        """Put the parameters back."""
        for name, p in model.named_parameters():
            p.data = self.backup[name]


@SECTION("diffusion: schedule buffers in a plain wrapper, embedded times, an average swapped in by `p.data =`")
def diffusion(run: Run) -> None:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.enter, self.leave = nn.Linear(8, 16), nn.Linear(6, 8), nn.Linear(8, 6)
            self.label = nn.Embedding(4, 8)

        def forward(self, x: Tensor, t: Tensor, label: Tensor, kept: Tensor) -> Any:
            rates = torch.exp(torch.arange(4) * -(math.log(10000) / 3))
            angles = t[:, None].to(x.dtype) * rates[None, :]
            scale, shift = self.time(torch.cat((angles.sin(), angles.cos()), dim=-1)).chunk(2, dim=1)
            h = F.silu(self.enter(x)) * (scale + 1) + shift
            return self.leave(h + torch.where(kept[:, None], self.label(label), torch.zeros_like(h)))

    class Diffusion(nn.Module):
        kept: Tensor

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model
            self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-2, 0.3, 5), dim=0))

        def forward(self, x: Tensor, t: Tensor, noise: Tensor, *rest: Tensor) -> Any:
            kept = self.kept.gather(-1, t).reshape(-1, 1)
            return F.mse_loss(self.model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t, *rest), noise)

    model = run.compile(Denoiser())
    whole, average = Diffusion(model), _Average(model)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.02)
    for _ in range(2):
        for _ in range(2):
            given = run.randn(BATCH, 6), run.randint(5, BATCH), run.randn(BATCH, 6)
            loss = whole(*given, run.randint(4, BATCH), run.randint(2, BATCH).bool())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(model)
            run.mean("loss", loss)
        average.apply(model)
        x, label = run.randn(BATCH, 6), run.randint(4, BATCH)
        with torch.no_grad():
            for i in reversed(range(2)):
                t = torch.full((len(x),), i)
                on, off = (model(x, t, label, torch.full((len(x),), flag)) for flag in (True, False))
                x = x - 0.1 * (off + 2.0 * (on - off))
        run.rows("samples", x)
        average.restore(model)
    run.state(model)


@SECTION("a Cox model: samples sorted by time, `logcumsumexp` of risks, a loss over all that are still there")
def partial_likelihood(run: Run) -> None:
    class Cox(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 1, bias=False)

        def forward(self, x: Tensor, time: Tensor, died: Tensor) -> Any:
            risk = self.head(F.selu(self.body(x))).squeeze(-1)
            order = torch.argsort(time, descending=True)
            risk, died = risk[order], died[order]
            return -((risk - torch.logcumsumexp(risk, 0)) * died).sum() / died.sum().clamp(min=1)

    model = run.compile(Cox())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(run.randn(BATCH, 6), run.randn(BATCH).exp(), run.randint(2, BATCH).to(torch.get_default_dtype()))
        loss.backward()
        optimizer.step()
        run.same("loss", loss)
    run.state(model)


@SECTION(
    "a flow: masked affine couplings, log-determinants, sampled through `reverse=True`",
    refused={"ranks/stages": "is held as"},
)
def coupling_flow(run: Run) -> None:
    class Coupling(nn.Module):
        def __init__(self, odd: int) -> None:
            super().__init__()
            self.register_buffer("mask", (torch.arange(6) % 2 == odd).to(torch.get_default_dtype()))
            self.scale, self.body, self.out = nn.Parameter(torch.zeros(6)), nn.Linear(6, 8), nn.Linear(8, 12)

        def forward(self, x: Tensor, reverse: bool = False) -> Any:
            mask: Any = self.mask
            s, t = self.out(torch.tanh(self.body(x * mask))).chunk(2, dim=1)
            s, t = torch.tanh(s) * self.scale.exp() * (1 - mask), t * (1 - mask)
            return ((x - t) * torch.exp(-s), -s.sum(1)) if reverse else (x * torch.exp(s) + t, s.sum(1))

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.couplings = nn.ModuleList(Coupling(i % 2) for i in range(3))
            self.log_scale, self.shift = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor, *, reverse: bool = False) -> Any:
            total = torch.zeros(x.shape[0])
            x = x if reverse else (x + self.shift) * self.log_scale.exp()
            for coupling in reversed(self.couplings) if reverse else self.couplings:
                x, part = coupling(x, reverse)
                total = total + part
            total = total + (-1 if reverse else 1) * self.log_scale.sum()
            return x * torch.exp(-self.log_scale) - self.shift if reverse else x, total

    model = run.compile(Flow())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    prior = torch.distributions.Normal(0.0, 1.0)
    for _ in range(3):
        optimizer.zero_grad()
        z, total = model(run.randn(BATCH, 6))
        loss = -(prior.log_prob(z).sum(1) + total).mean()
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    with torch.no_grad():
        run.rows("samples", model(run.randn(BATCH, 6), reverse=True)[0])
    run.state(model)


@SECTION(
    "several tasks: heads in a `ModuleDict` by a string, weights of losses in a `ParameterDict`",
    free=("heads.size",),
)
def task_heads(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = nn.Linear(6, 8), nn.ModuleDict({"kind": nn.Linear(8, 4), "size": nn.Linear(8, 2)})
            self.weights = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in ("kind", "size")})

        def forward(self, x: Tensor, task: str) -> Any:
            return self.heads[task](torch.tanh(self.trunk(x)))

    model = run.compile(Net())
    groups = [{"params": model.trunk.parameters(), "lr": 0.05}, {"params": model.weights.parameters(), "lr": 0.1}]
    groups += [{"params": head.parameters()} for head in model.heads.values()]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    for task in ("kind", "size", "kind", "size"):
        optimizer.zero_grad()
        scores, weight = model(run.randn(BATCH, 6), task), model.weights[task]
        loss = F.cross_entropy(scores, run.randint(2, BATCH)) * torch.exp(-weight) + weight
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("a DQN: duelling heads, double targets from a copy that follows, weights of samples, priorities")
def value_learning(run: Run) -> None:
    class Duelling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.value, self.gain = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            h = F.relu(self.body(x))
            gain = self.gain(h)
            return self.value(h).mean(1, keepdim=True) + gain - gain.mean(1, keepdim=True)

    model = run.compile(Duelling())
    target = copy.deepcopy(model)
    for p in target.parameters():
        p.requires_grad = False
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True)
    for step in range(4):
        now, then, action = run.randn(BATCH, 6), run.randn(BATCH, 6), run.randint(4, BATCH, 1)
        reward, ended = run.randn(BATCH), run.randint(2, BATCH)
        with torch.no_grad():
            best = model(then).argmax(1, keepdim=True)
            wanted = reward + 0.9 * target(then).gather(1, best).squeeze(1) * (1 - ended)
        off = wanted - model(now).gather(1, action).squeeze(1)
        loss = (run.randn(BATCH).exp() * F.smooth_l1_loss(off, torch.zeros_like(off), reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.data.clamp_(-1, 1)
        optimizer.step()
        run.rows("priorities", off.abs() + 1e-5)
        with torch.no_grad():
            if step % 2:
                target.load_state_dict(model.state_dict())
            else:
                for mean, p in zip(target.parameters(), model.parameters(), strict=True):
                    mean.data.copy_(0.5 * p.data + 0.5 * mean.data)
    run.state(target, "target ")
    run.state(model)
