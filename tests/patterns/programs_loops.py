"""Whole programs: training schemes, each with the trick that it is known for."""

# mypy: disable-error-code="operator"
from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from benchmarks.training import Run
from tests.patterns.nets import BATCH, Mlp, conv_net, sgd, steps
from tests.patterns.pattern import Section

SECTION = Section("Programs: training schemes")


class _LowRank(nn.Linear):
    """A linear layer with a low-rank addition that is merged into the frozen weight for evaluation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(0.1 * torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode is self.merged:
            self.weight.data += (-2.0 if mode else 2.0) * (self.b @ self.a)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.merged else y + 2.0 * (x @ self.a.T @ self.b.T)


@SECTION("LoRA: frozen weights, a low-rank addition that `train(mode)` merges for evaluation and takes out again")
def lora(run: Run) -> None:
    model = run.compile(nn.Sequential(_LowRank(6, 8), nn.Tanh(), _LowRank(8, 4)))
    for name, p in model.named_parameters():
        p.requires_grad = name.endswith((".a", ".b"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        steps(run, model, optimizer, 2)
        model.eval()
        with torch.no_grad():
            run.rows("scores", model(run.randn(BATCH, 6)))
        run.state(model, "merged ")
        model.train()
    steps(run, model, optimizer, 1)


@SECTION("distillation: a teacher inside the model that `train()` leaves in evaluation, temperature, hints of features")
def distillation(run: Run) -> None:
    class Distiller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher, self.hint = conv_net(), conv_net(), nn.Conv2d(4, 4, 1)
            self.teacher[1].running_mean = torch.linspace(-0.2, 0.2, 4)
            self.teacher.requires_grad_(False)

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.teacher.eval()
            return self

        def forward(self, x: Tensor) -> Any:
            low = self.student[:3](x)
            if not self.training:
                return self.student[3:](low)
            with torch.no_grad():
                wanted = self.teacher[:3](x)
                soft = self.teacher[3:](wanted)
            scores = self.student[3:](low)
            soft_loss = F.kl_div((scores / 4).log_softmax(1), (soft / 4).softmax(1), reduction="batchmean") * 16
            return scores, soft_loss, F.mse_loss(self.hint(low), wanted)

    model = run.compile(Distiller().train())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
         torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)],
        [2],
    )  # fmt: skip
    for _ in range(2):
        model.train()
        for _ in range(2):
            scores, soft, hint = model(run.randn(BATCH, 3, 6, 6))
            loss = 0.3 * F.cross_entropy(scores, run.randint(4, BATCH)) + 0.7 * soft + hint
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.mean("loss", loss)
        model.eval()
        with torch.no_grad():
            run.rows("scores", model(run.randn(BATCH, 3, 6, 6)))
    run.state(model)


@SECTION("multi-task learning: losses weighed by learned uncertainties, parameters that only the loss uses")
def uncertainty(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
            self.heads = nn.ModuleDict({"class": nn.Linear(8, 4), "depth": nn.Linear(8, 1)})
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Any:
            h = self.body(x)
            return {name: head(h) for name, head in self.heads.items()}

    model = run.compile(Net())
    rest = [p for name, p in model.named_parameters() if name != "log_vars"]
    optimizer = torch.optim.Adam([{"params": rest, "lr": 0.01}, {"params": [model.log_vars], "lr": 0.1}])
    for _ in range(3):
        found = model(run.randn(BATCH, 6))
        losses = [
            F.cross_entropy(found["class"], run.randint(4, BATCH)),
            F.l1_loss(found["depth"], run.randn(BATCH, 1)),
        ]
        total = sum(torch.exp(-s) * loss + s for s, loss in zip(model.log_vars, losses, strict=True))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        run.mean("loss", total)
        run.same("weights", torch.exp(-model.log_vars))
    run.state(model)


class _Lookahead(torch.optim.Optimizer):
    """Slow weights that every k steps go a part of the way to those of another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.k, self.alpha, self.made = inner, k, alpha, 0

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.made += 1
        if self.made % self.k == 0:
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "slow" not in state:
                    state["slow"] = torch.empty_like(p.data).copy_(p.data)
                slow = state["slow"]
                slow += (p.data - slow) * self.alpha
                p.data.copy_(slow)
        return loss


@SECTION("Lookahead around RAdam: an optimizer that wraps another, slow weights in its state")
def lookahead(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = _Lookahead(torch.optim.RAdam(model.parameters(), lr=0.05))
    steps(run, model, optimizer, 5)
    for p in model.parameters():
        run.same("slow", optimizer.state[p]["slow"])


@SECTION(
    "stochastic weight averaging: `SWALR`, `AveragedModel`, `update_bn` over a loader, evaluation",
    refused={"*": "update_bn sets None: run it on the plain model"},
    why="`update_bn` averages over all batches: run it on the plain model, `module` of the compiled one",
)
def weight_averaging(run: Run) -> None:
    model = run.compile(conv_net())
    optimizer = sgd(model)
    average, scheduler = AveragedModel(model), SWALR(optimizer, 0.05, anneal_epochs=2)
    for _ in range(3):
        steps(run, model, optimizer, 1, shape=(3, 6, 6))
        average.update_parameters(model)
        scheduler.step()
    update_bn([run.randn(BATCH, 3, 6, 6) for _ in range(2)], average)
    average.eval()
    with torch.no_grad():
        run.rows("scores", average(run.randn(BATCH, 3, 6, 6)))


@SECTION("the same, `update_bn` given the average's plain model and whole batches on every rank")
def weight_averaging_plain(run: Run) -> None:
    model = run.compile(conv_net())
    optimizer = sgd(model)
    average = AveragedModel(model)
    for _ in range(3):
        steps(run, model, optimizer, 1, shape=(3, 6, 6))
        average.update_parameters(model)
    inner: Any = average.module.module if run.compiled else average.module
    update_bn([torch.randn(BATCH, 3, 6, 6, generator=run.draws) for _ in range(2)], inner)
    average.eval()
    with torch.no_grad():
        run.rows("scores", average(run.randn(BATCH, 3, 6, 6)))
    run.state(average.module, "average ")


@SECTION("gradient surgery (PCGrad): two losses' gradients as vectors, conflicting parts projected off, written back")
def gradient_surgery(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            return self.a(h), self.b(h)

    model = run.compile(Net())
    parameters, optimizer = list(model.parameters()), torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        a, b = model(run.randn(BATCH, 6))
        losses = [F.cross_entropy(a, run.randint(4, BATCH)), F.mse_loss(b, run.randn(BATCH, 1))]
        flat = []
        for loss in losses:
            found: Any = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            given = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
            flat.append(torch.cat([g.reshape(-1) for g in given]))
            run.mean("loss", loss)
        dot = torch.dot(flat[0], flat[1])
        run.same("dot", dot)
        if dot < 0:
            flat = [mine - dot / other.norm() ** 2 * other for mine, other in (flat, flat[::-1])]
        merged, at = flat[0] + flat[1], 0
        for p in parameters:
            p.grad = merged[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
    run.state(model)


@SECTION("truncated backpropagation: LSTM cells, one backward through several calls, the state detached in between")
def truncated(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.head = nn.Embedding(10, 6), nn.LSTMCell(6, 8), nn.Linear(8, 10)

        def forward(self, word: Tensor, state: tuple[Tensor, Tensor]) -> Any:
            h, c = self.cell(self.embed(word), state)
            return self.head(h), (h, c)

    model = run.compile(Net())
    optimizer = sgd(model)
    words = run.randint(10, BATCH, 7)
    state: Any = tuple(torch.zeros(words.shape[0], 8) for _ in range(2))
    for start in (0, 2, 4):
        state = tuple(s.detach() for s in state)
        loss = torch.zeros(())
        for t in range(start, start + 2):
            scores, state = model(words[:, t], state)
            loss = loss + F.cross_entropy(scores, words[:, t + 1]) / 2
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        run.mean("loss", loss)
    run.rows("state", state[1])
    run.state(model)


@SECTION("early stopping: plateaus of a validation loss, the best `state_dict()` copied, restored with the optimizer's")
def early_stopping(run: Run) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    model = run.compile(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    held, classes = run.randn(BATCH, 3, 6, 6), run.randint(4, BATCH)
    best, kept, patience = math.inf, copy.deepcopy((model.state_dict(), optimizer.state_dict())), 2
    for _ in range(6):
        steps(run, model, optimizer, 1, shape=(3, 6, 6))
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(held), classes)
        model.train()
        if run.ranks > 1:
            torch.distributed.all_reduce(loss)
            loss /= run.ranks
        scheduler.step(loss)
        run.same("validation", loss)
        if loss.item() < best - 1e-4:
            best, kept, patience = loss.item(), copy.deepcopy((model.state_dict(), optimizer.state_dict())), 2
        else:
            patience -= 1
        if not patience:
            break
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    run.state(model, "best ")
    steps(run, model, optimizer, 1, shape=(3, 6, 6))


@SECTION("weights of samples as an input, steps skipped where the loss is not finite, a rolled-back optimizer")
def not_finite(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    skipped = 0
    for step in range(4):
        x, classes, weights = run.randn(BATCH, 6), run.randint(4, BATCH), run.randn(BATCH).exp()
        if step in (0, 2):
            x = x / 0.0
        loss = (F.cross_entropy(model(x), classes, reduction="none") * weights).mean()
        optimizer.zero_grad()
        if not torch.isfinite(loss):
            skipped += 1
            continue
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        run.mean("loss", loss)
    run.same("skipped", skipped)
    run.state(model)


@SECTION(
    "a hypernetwork: weights of `F.linear` generated from learned embeddings, without samples", free=("make", "give")
)
def hypernetwork(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randn(2, 3))
            self.make, self.give, self.head = nn.Linear(3, 8), nn.Linear(8, 42), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            for made in self.give(torch.tanh(self.make(self.codes))):
                x = x + torch.tanh(F.linear(x, made[:36].view(6, 6), made[36:]))
            return self.head(x)

    model = run.compile(Net())
    steps(run, model, torch.optim.Adam(model.parameters(), lr=0.01))


@SECTION("weights generated for every sample (dynamic convolution): kernels mixed, samples as groups of one `conv2d`")
def dynamic_convolution(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.kernels = nn.Linear(3, 2), nn.Parameter(0.2 * torch.randn(2, 4, 3, 3, 3))
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            n = x.shape[0]
            weights = torch.softmax(self.gate(x.mean((2, 3))) / 2.0, 1) @ self.kernels.view(2, -1)
            h = F.conv2d(x.reshape(1, n * 3, 6, 6), weights.view(n * 4, 3, 3, 3), padding=1, groups=n)
            return self.head(h.view(n, 4, 6, 6).relu().mean((2, 3)))

    model = run.compile(Net())
    steps(run, model, sgd(model), shape=(3, 6, 6))


@SECTION(
    "sequence to sequence: a decoder loop with attention, teacher forcing by a flag per step, padding ignored",
    free=("encoder",),
)
def teacher_forcing(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.encoder = nn.Embedding(10, 6), nn.GRU(6, 8, batch_first=True)
            self.cell, self.score, self.head = nn.GRUCell(14, 8), nn.Linear(16, 1), nn.Linear(8, 10)

        def forward(self, source: Tensor, target: Tensor, forced: list[bool]) -> Any:
            seen, h = self.encoder(self.embed(source))
            h, word, found = h.squeeze(0), target[:, 0], []
            for t, given in enumerate(forced, 1):
                energy = self.score(torch.cat([h.unsqueeze(1).expand(-1, seen.size(1), -1), seen], 2)).squeeze(2)
                weights = energy.masked_fill(source == 0, -1e10).softmax(1)
                context = torch.bmm(weights.unsqueeze(1), seen).squeeze(1)
                h = self.cell(torch.cat([self.embed(word), context], 1), h)
                found.append(self.head(h))
                word = target[:, t] if given else found[-1].argmax(1)
            return torch.stack(found, 1)

    model = run.compile(Net())
    optimizer = sgd(model)
    for step in range(3):
        source, target = run.randint(10, BATCH, 5), run.randint(9, BATCH, 4) + 1
        target[:, 3] = 0
        scores = model(source, target, [step < 2, step != 1, True])
        loss = F.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)
