"""Programs people train on tables, graphs, signals and state: models and loops as in well-known public code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import Run
from tests.patterns.nets import BATCH, train
from tests.patterns.pattern import SECOND_DERIVATIVES, Section

SECTION = Section("Programs: tables, graphs, signals, state")


@SECTION("DeepFM: one table of all fields with offsets in a buffer, square of the sum", free=("first", "deep.3"))
def factorisation(run: Run) -> None:
    class DeepFm(nn.Module):
        def __init__(self, fields: tuple[int, ...]) -> None:
            super().__init__()
            self.register_buffer("offsets", torch.tensor((0, *fields)).cumsum(0)[:-1], persistent=False)
            self.first, self.table = nn.Embedding(sum(fields), 1), nn.Embedding(sum(fields), 4)
            nn.init.xavier_uniform_(self.table.weight.data)
            self.bias = nn.Parameter(torch.zeros((1,)))
            self.deep = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Any:
            x = x + self.offsets.unsqueeze(0)  # type: ignore[operator]
            e = self.table(x)
            pairs = 0.5 * (e.sum(dim=1) ** 2 - (e**2).sum(dim=1)).sum(dim=1, keepdim=True)
            found = self.first(x).sum(dim=1) + self.bias + pairs + self.deep(e.view(-1, 12))
            return torch.sigmoid(found.squeeze(1))

    model = run.compile(DeepFm((4, 6, 5)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-6)
    best = 0.0

    def batch() -> Tensor:
        return torch.stack([run.randint(n, BATCH) for n in (4, 6, 5)], dim=1)

    for _ in range(3):
        loss = nn.BCELoss()(model(batch()), run.randint(2, BATCH).to(torch.get_default_dtype()))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
        model.eval()
        with torch.no_grad():
            run.rows("p", model(batch()))
        model.train()
        best = max(best, model.bias.item())
    run.same("best", best)
    run.state(model)


@SECTION(
    "FT-Transformer: a token for every column, a trained [CLS] token, `nn.TransformerEncoder`",
    free=("encoder.layers.0.self_attn.out_proj", "head"),
)
def column_tokens(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.randn(3, 8)), nn.Parameter(torch.randn(5, 8))
            self.table, self.cls = nn.Embedding(9, 8), nn.Parameter(torch.randn(1, 1, 8))
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(8), enable_nested_tensor=False)
            self.head = nn.Linear(8, 1)

        def forward(self, numbers: Tensor, words: Tensor) -> Any:
            x = torch.cat([numbers.unsqueeze(-1) * self.scale, self.table(words)], dim=1) + self.shift
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1)
            return self.head(F.relu(self.encoder(x)[:, 0])).squeeze(-1)

    model = run.compile(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    for _ in range(4):
        optimizer.zero_grad()
        found = model(run.randn(BATCH, 3), run.randint(9, BATCH, 2))
        loss = F.huber_loss(found, run.randn(BATCH), delta=0.5)
        loss.backward()
        optimizer.step()
        schedule.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("a sparse autoencoder: the transposed weight decodes, KL of mean activations, rows of norm one")
def tied_autoencoder(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.bias = nn.Linear(6, 8), nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Any:
            h = torch.sigmoid(self.encoder(x - self.bias))
            mean = h.mean(0).clamp(1e-6, 1 - 1e-6)
            kl = (0.1 * torch.log(0.1 / mean) + 0.9 * torch.log(0.9 / (1 - mean))).sum()
            return F.linear(h, self.encoder.weight.t(), self.bias), kl

    model = run.compile(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(3):
        x = run.randn(BATCH, 6)
        found, kl = model(x)
        loss = F.mse_loss(found, x)
        optimizer.zero_grad()
        (loss + 0.1 * kl).backward()
        with torch.no_grad():  # the gradient loses what changes the norms
            weight = model.encoder.weight
            weight.grad -= (weight.grad * weight).sum(1, keepdim=True) * weight / weight.square().sum(1, keepdim=True)
        optimizer.step()
        with torch.no_grad():
            model.encoder.weight.data = F.normalize(model.encoder.weight.data, dim=1)
        run.mean("loss", loss)
        run.same("kl", kl)
    run.state(model)


@SECTION("PointNet: transposed points, a learned transform near the identity, its penalty")
def point_clouds(run: Run) -> None:
    class Transform(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.Linear(8, 9)
            nn.init.zeros_(self.out.weight)

        def forward(self, x: Tensor) -> Any:
            h = torch.max(F.relu(self.norm(self.conv(x))), 2, keepdim=True)[0].view(-1, 8)
            return (self.out(h) + torch.eye(3).flatten().view(1, 9).repeat(x.size(0), 1)).view(-1, 3, 3)

    class PointNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn, self.head = Transform(), nn.Linear(8, 4)
            self.conv, self.norm = nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Any:
            turn = self.turn(x)
            x = torch.bmm(x.transpose(2, 1), turn).transpose(2, 1)
            x = self.norm(self.conv(x)).amax(2)
            return F.log_softmax(self.head(x), dim=1), turn

    model = run.compile(PointNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        scores, turn = model(run.randn(BATCH, 7, 3).transpose(2, 1))
        off = torch.bmm(turn, turn.transpose(2, 1)) - torch.eye(3)[None]
        loss = F.nll_loss(scores, run.randint(4, BATCH)) + 0.1 * torch.mean(torch.norm(off, dim=(1, 2)) ** 2)
        loss.backward()
        optimizer.step()
        schedule.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("graph attention over `[B, N, N]` bool adjacency, features of edges, a mean of the nodes that are there")
def dense_graphs(run: Run) -> None:
    class Gat(nn.Module):
        def __init__(self, inputs: int) -> None:
            super().__init__()
            self.w, self.a, self.b = nn.Linear(inputs, 8, bias=False), nn.Linear(4, 1), nn.Linear(4, 1)
            self.edge = nn.Parameter(torch.randn(2, 2))

        def forward(self, x: Tensor, adjacent: Tensor, edges: Tensor) -> Any:
            n = x.size(1)
            h = self.w(x).view(-1, n, 2, 4)
            pairs = self.a(h).squeeze(-1).unsqueeze(2) + self.b(h).squeeze(-1).unsqueeze(1)
            pairs = F.leaky_relu(pairs + torch.einsum("bije,eh->bijh", edges, self.edge), 0.2)
            seen = adjacent | torch.eye(n, dtype=torch.bool)
            weights = pairs.masked_fill(~seen.unsqueeze(-1), float("-inf")).softmax(dim=2)
            return F.elu(torch.einsum("bijh,bjhc->bihc", weights, h).flatten(2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList([Gat(5), Gat(8)]), nn.Linear(8, 4)

        def forward(self, x: Tensor, adjacent: Tensor, edges: Tensor, sizes: Tensor) -> Any:
            there = torch.arange(x.size(1)).unsqueeze(0) < sizes.unsqueeze(1)
            adjacent = adjacent & there.unsqueeze(1) & there.unsqueeze(2)
            for layer in self.layers:
                x = layer(x, adjacent, edges)
            return self.head((x * there.unsqueeze(-1)).sum(1) / sizes.unsqueeze(-1))

    model = run.compile(Net())

    def loss() -> Tensor:
        adjacent = run.randint(2, BATCH, 6, 6).bool()
        given = (run.randn(BATCH, 6, 5), adjacent | adjacent.mT, run.randn(BATCH, 6, 6, 2), run.randint(5, BATCH) + 2)
        return F.cross_entropy(model(*given), run.randint(4, BATCH))

    train(run, model, torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4), loss)


@SECTION(
    "a physics-informed net: a Laplacian of results by inputs, where a gradient that is not used counts as zero",
    refused=SECOND_DERIVATIVES,
    why="second derivatives are kept where each process has the whole model; else take the plain model for it",
)
def physics_informed(run: Run) -> None:
    model = run.compile(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))

    def slope(y: Tensor, x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True, materialize_grads=True)
        return found

    def loss() -> Tensor:
        at, edge = run.randn(BATCH, 2).requires_grad_(), run.randn(BATCH, 2)
        first = slope(model(at), at)
        laplacian = slope(first[:, :1], at)[:, 0] + slope(first[:, 1:], at)[:, 1]
        wanted: Tensor = torch.sin(at).prod(1)
        total: Tensor = (laplacian + wanted).square().mean() + model(edge).square().mean()
        return total

    train(run, model, torch.optim.Adam(model.parameters(), lr=0.01), loss)


@SECTION(
    "a critic with a gradient penalty, whose own gradients `torch.autograd.grad` computes for a step by hand",
    refused=SECOND_DERIVATIVES,
    why="second derivatives are kept where each process has the whole model; else take the plain model for it",
)
def penalised_critic(run: Run) -> None:
    model = run.compile(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 2)))
    velocity = [torch.zeros(p.shape) for p in model.parameters()]
    for _ in range(3):
        real, fake, part = run.randn(BATCH, 4), run.randn(BATCH, 4), run.randn(BATCH, 1).sigmoid()
        between = (part * real + (1 - part) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        loss = model(fake).mean() - model(real).mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        with torch.no_grad():
            for p, v, gradient in zip(model.parameters(), velocity, gradients, strict=True):
                if gradient is not None:
                    v.mul_(0.9).add_(gradient)
                    p.sub_(v, alpha=0.01)
        run.mean("loss", loss)
    run.state(model)
