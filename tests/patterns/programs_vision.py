"""Whole programs: image models and representations, each with the trick that it is known for."""

# mypy: disable-error-code="operator"
from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training import Run
from tests.patterns.nets import BATCH, sgd, steps, train
from tests.patterns.pattern import Section

SECTION = Section("Programs: vision and generation")


@SECTION("supervised contrast: two views of each sample in one batch, all against all")
def simclr(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            )
            self.project = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

        def forward(self, views: Tensor) -> Any:
            z = F.normalize(self.project(self.encoder(views.flatten(0, 1))), dim=1)
            z = torch.cat(torch.unbind(z.view(views.shape[0], 2, -1), 1))
            logits = (z @ z.T / 0.5).masked_fill(torch.eye(z.shape[0], dtype=torch.bool), float("-inf"))
            return F.cross_entropy(logits, torch.arange(z.shape[0]).roll(views.shape[0]))

    model = run.compile(Net())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for _ in range(3):
        loss = model(run.randn(BATCH, 2, 3, 8, 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.same("loss", loss)
    run.state(model)


@SECTION("ConvNeXt: layer scale, drop path off, LayerNorm on channels-last, mixed-up soft targets", free=("1.depth",))
def convnext(run: Run) -> None:
    class Block(nn.Module):
        drop = 0.0

        def __init__(self, width: int) -> None:
            super().__init__()
            self.depth, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width, 1e-6)
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.gamma = nn.Parameter(0.1 * torch.ones(width))

        def forward(self, x: Tensor) -> Any:
            h = self.norm(self.depth(x).permute(0, 2, 3, 1))
            h = (self.gamma * self.narrow(F.gelu(self.wide(h)))).permute(0, 3, 1, 2)
            if self.drop > 0 and self.training:
                h = h * h.new_empty(h.shape[0], 1, 1, 1).bernoulli_(1 - self.drop).div_(1 - self.drop)
            return x + h

    net = nn.Sequential(
        nn.Conv2d(3, 4, 2, 2), Block(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 4)
    )
    model = run.compile(net)
    groups = [[p for p in model.parameters() if (p.ndim <= 1) is flat] for flat in (False, True)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=0.01
    )

    def loss() -> Tensor:
        x, other = run.randn(BATCH, 3, 8, 8), run.randn(BATCH, 3, 8, 8)
        a, b = (F.one_hot(run.randint(4, BATCH), 4) * 0.9 + 0.025 for _ in range(2))
        return F.cross_entropy(model(0.7 * x + 0.3 * other), 0.7 * a + 0.3 * b)

    train(run, model, optimizer, loss)


@SECTION(
    "MobileNet: depthwise convolutions, squeeze and excitation, label smoothing, an average of buffers, too",
    free=("body.3",),
)
def mobilenet(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(inplace=True),
                nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True),
            )  # fmt: skip
            self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
            self.head = nn.Sequential(nn.Dropout(0.0), nn.Linear(8, 4))

        def forward(self, x: Tensor) -> Any:
            h = self.body(x)
            h = h * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(h, 1)))))
            return self.head(h.mean([2, 3]))

    model = run.compile(Net())
    mean = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, alpha=0.9, eps=1e-3)
    for _ in range(3):
        scores = model(run.randn(BATCH, 3, 8, 8))
        loss = F.cross_entropy(scores, run.randint(4, BATCH), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean.update_parameters(model)
        run.mean("loss", loss)
    mean.eval()
    with torch.no_grad():
        run.rows("scores", mean(run.randn(BATCH, 3, 8, 8)))
    run.state(model)
    run.state(mean.module, "mean ")


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        n, length, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(*qkv.unbind(0))
        return x + self.proj(h.transpose(1, 2).reshape(n, length, width))


@SECTION("masked autoencoder: patches shuffled by sorted noise, mask tokens, cls token, loss on masked patches")
def masked_autoencoder(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.encoder, self.decoder = nn.Conv2d(1, 8, 2, 2), _Attention(8, 2), _Attention(8, 2)
            self.cls, self.mask = nn.Parameter(0.02 * torch.randn(1, 1, 8)), nn.Parameter(torch.zeros(1, 1, 8))
            self.place = nn.Parameter(torch.randn(1, 17, 8), requires_grad=False)
            self.pred = nn.Linear(8, 4)

        def forward(self, x: Tensor, noise: Tensor, kept: int = 4) -> Any:
            h = self.embed(x).flatten(2).transpose(1, 2) + self.place[:, 1:]
            shuffle = torch.argsort(noise, dim=1)
            restore = torch.argsort(shuffle, dim=1)
            h = torch.gather(h, 1, shuffle[:, :kept].unsqueeze(-1).repeat(1, 1, h.shape[2]))
            h = self.encoder(torch.cat([(self.cls + self.place[:, :1]).expand(h.shape[0], -1, -1), h], 1))
            masks = self.mask.repeat(h.shape[0], restore.shape[1] + 1 - h.shape[1], 1)
            whole = torch.cat([h[:, 1:], masks], 1).gather(1, restore.unsqueeze(-1).repeat(1, 1, h.shape[2]))
            found = self.pred(self.decoder(torch.cat([h[:, :1], whole], 1) + self.place))[:, 1:]
            mask = torch.ones_like(noise)
            mask[:, :kept] = 0
            mask = mask.gather(1, restore)
            wanted = torch.einsum("nchpwq->nhwpqc", x.reshape(x.shape[0], 1, 4, 2, 4, 2)).reshape(x.shape[0], 16, 4)
            wanted = (wanted - wanted.mean(-1, keepdim=True)) / (wanted.var(-1, keepdim=True) + 1e-6) ** 0.5
            return ((found - wanted).square().mean(-1) * mask).sum() / mask.sum(), found, mask

    model = run.compile(Net())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, betas=(0.9, 0.95))
    for _ in range(3):
        optimizer.zero_grad()
        loss, found, mask = model(run.randn(BATCH, 1, 8, 8), run.own(torch.rand(BATCH, 16, generator=run.draws)))
        loss.backward()
        optimizer.step()
        run.same("loss", loss)
        run.rows("found", found)
        run.rows("mask", mask)
    run.state(model)


@SECTION("a detector with a feature pyramid: focal and box losses by the number of positives, in the model in training")
def detector(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)
            self.lateral = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1)])
            self.scores, self.boxes = nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            nn.init.constant_(self.scores.bias, -2.0)  # type: ignore[arg-type]

        def forward(self, x: Tensor, targets: dict[str, Tensor] | None = None) -> Any:
            low = F.relu(self.low(x))
            top = self.lateral[1](F.relu(self.high(low)))
            levels = [self.lateral[0](low) + F.interpolate(top, size=low.shape[-2:], mode="nearest"), top]
            scores, boxes = (
                torch.cat([head(level).permute(0, 2, 3, 1).flatten(1, 2) for level in levels], 1)
                for head in (self.scores, self.boxes)
            )
            if targets is None:
                best, kind = scores.sigmoid().max(-1)
                return {"score": best, "class": kind, "boxes": boxes}
            positive = targets["classes"] > 0
            truth = F.one_hot(targets["classes"], 4)[..., 1:].to(scores.dtype)
            p = scores.sigmoid()
            sure = p * truth + (1 - p) * (1 - truth)
            focal = F.binary_cross_entropy_with_logits(scores, truth, reduction="none") * (1 - sure) ** 2
            box = F.smooth_l1_loss(boxes, targets["boxes"], reduction="none", beta=0.1).sum(-1) * positive
            count = positive.sum().clamp(min=1)
            return {"class": focal.sum() / count, "box": box.sum() / count}

    model = run.compile(Net())
    optimizer = sgd(model, 0.01)
    for _ in range(3):
        targets = {"classes": run.randint(4, BATCH, 20), "boxes": run.randn(BATCH, 20, 4)}
        losses = model(run.randn(BATCH, 3, 8, 8), targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for name, loss in losses.items():
            run.same(name, loss)
    model.eval()
    with torch.no_grad():
        for name, found in model(run.randn(BATCH, 3, 8, 8)).items():
            run.rows(name, found)
    run.state(model)


@SECTION("segmentation: dilated convolutions, an auxiliary head, resized scores, `ignore_index`, polynomial decay")
def segmentation(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            self.wide = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=d, dilation=d) for d in (1, 2)])
            self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), nn.ReLU())
            self.head, self.aux = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Any:
            size, h = x.shape[-2:], self.stem(x)
            pooled = F.interpolate(self.pool(h), size=h.shape[-2:], mode="bilinear", align_corners=False)
            found = {"out": self.head(torch.cat([*(F.relu(conv(h)) for conv in self.wide), pooled], 1))}
            if self.training:
                found["aux"] = self.aux(h)
            return {k: F.interpolate(v, size=size, mode="bilinear", align_corners=False) for k, v in found.items()}

    model = run.compile(Net())
    optimizer = torch.optim.SGD(
        [{"params": model.stem.parameters(), "lr": 0.01}, {"params": model.head.parameters()},
         {"params": [*model.wide.parameters(), *model.pool.parameters(), *model.aux.parameters()]}],
        lr=0.1, momentum=0.9, weight_decay=1e-4,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, 5, 0.9)
    for _ in range(3):
        found, truth = model(run.randn(BATCH, 3, 8, 8)), run.randint(4, BATCH, 8, 8)
        truth[:, 0], truth[:, :, 0] = 255, 255
        losses = {name: F.cross_entropy(scores, truth, ignore_index=255) for name, scores in found.items()}
        loss = losses["out"] + 0.4 * losses["aux"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.mean("loss", loss)
    model.eval()
    with torch.no_grad():
        run.rows("classes", model(run.randn(BATCH, 3, 8, 8))["out"].argmax(1))
    run.state(model)


@SECTION("capsules: dynamic routing with detached predictions, margin loss, a decoder that sees the right capsule only")
def capsules(run: Run) -> None:
    def squash(s: Tensor) -> Tensor:
        n2 = s.square().sum(-1, keepdim=True)
        return n2 / (1 + n2) * s / (n2.sqrt() + 1e-8)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.primary = nn.Conv2d(1, 8, 3, 2)
            self.weight = nn.Parameter(0.3 * torch.randn(4, 18, 6, 4))
            self.decoder = nn.Sequential(nn.Linear(24, 16), nn.ReLU(inplace=True), nn.Linear(16, 64), nn.Sigmoid())

        def forward(self, x: Tensor, classes: Tensor) -> Any:
            u = squash(self.primary(x).view(x.size(0), -1, 4))
            votes = (self.weight @ u[:, None, :, :, None]).squeeze(-1)
            still = votes.detach()
            b = torch.zeros(x.size(0), 4, 18, 1)
            for turn in range(3):
                c = F.softmax(b, dim=1)
                if turn == 2:
                    v = squash((c * votes).sum(2))
                else:
                    b = b + still @ squash((c * still).sum(2)).unsqueeze(-1)
            chosen = torch.eye(4).index_select(0, classes)
            return v.norm(dim=-1), self.decoder((v * chosen[:, :, None]).view(x.size(0), -1)), chosen

    model = run.compile(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(3):
        x, classes = run.randn(BATCH, 1, 8, 8), run.randint(4, BATCH)
        lengths, found, chosen = model(x, classes)
        margin = chosen * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - chosen) * F.relu(lengths - 0.1) ** 2
        loss = margin.sum(1).mean() + 0.0005 * F.mse_loss(found, x.flatten(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION(
    "a spatial transformer: the localisation begins as the identity, `affine_grid` and `grid_sample`",
    refused={
        "one/replicas": "its samples depend on each other",
        "ranks/*": "does not know how aten.affine_grid_generator",
    },
    why="which dimension of these ops holds the samples is not known: `parplan.graph.axes.table.register_row` says so",
)
def spatial_transformer(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.local, self.pose = nn.Conv2d(1, 2, 3), nn.Linear(32, 6)
            self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(64, 4)
            self.pose.weight.data.zero_()
            self.pose.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

        def forward(self, x: Tensor) -> Any:
            theta = self.pose(F.relu(self.local(x)).view(-1, 32)).view(-1, 2, 3)
            x = F.grid_sample(x, F.affine_grid(theta, [*x.shape], align_corners=False), align_corners=False)
            return self.head(F.relu(self.conv(x)).view(-1, 64))

    model = run.compile(Net())
    steps(run, model, sgd(model, 0.01), shape=(1, 6, 6))


@SECTION(
    "ghost batch norm: the batch in chunks of a fixed size, each with statistics of its own",
    refused={
        "one/replicas": "its samples depend on each other",
        "one/mixed": "its samples depend on each other",
        "ranks/*": "no dimension of it is known to hold the samples",
    },
    why="a chunk may hold samples of several processes: run it in one process, in shards",
)
def ghost_norm(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            chunks = self.body(x).chunk(math.ceil(x.shape[0] / 4), 0)
            return self.head(torch.relu(torch.cat([self.norm(chunk) for chunk in chunks])))

    model = run.compile(Net())
    steps(run, model, sgd(model))
