"""Whole programs: training schemes, each with the trick that it is known for."""

# mypy: disable-error-code="operator"
from __future__ import annotations

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
    optimizer = torch.optim.Adam(
        [{"params": [p for n, p in model.named_parameters() if n != "log_vars"]},
         {"params": [model.log_vars], "lr": 0.1}], lr=0.01,
    )  # fmt: skip
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
            found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
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
