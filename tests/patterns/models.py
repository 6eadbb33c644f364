"""Patterns of models: outputs of all kinds, shared and unused parameters, state, normalisation, recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from benchmarks.training import Run
from tests.patterns.nets import BATCH, Mlp, conv_net, sgd, steps, train
from tests.patterns.pattern import Section

SECTION = Section("Models")


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)


@dataclass
class Scores:
    """A result as a dataclass."""

    scores: Tensor
    hidden: Tensor


pytree.register_dataclass(Scores, serialized_type_name="tests.patterns.Scores")


@SECTION("results in dictionaries and tuples, `None` among them")
def nested_results(run: Run) -> None:
    class Net(_Two):
        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            return {"scores": self.head(h), "extra": (h, None), "name": "net"}

    model = run.compile(Net())
    seen = model(run.randn(BATCH, 6))
    run.same("structure", (sorted(seen), seen["extra"][1], seen["name"]))
    run.rows("hidden", seen["extra"][0])
    steps(run, model, sgd(model), loss_of=lambda r, c: F.cross_entropy(r["scores"], c) + r["extra"][0].mean())


@SECTION("a dataclass as the result")
def dataclass_result(run: Run) -> None:
    class Net(_Two):
        def forward(self, x: Tensor) -> Scores:
            h = torch.tanh(self.body(x))
            return Scores(self.head(h), h)

    model = run.compile(Net())
    steps(run, model, sgd(model), loss_of=lambda r, c: F.cross_entropy(r.scores, c) + r.hidden.mean())


class Unregistered:
    """A result of a class that torch knows nothing of."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


@SECTION(
    "an object of a class of the user's own as the result",
    refused={"*": "register"},
    why="torch does not know the tensors in it; register the class with torch's pytree, or return a dictionary",
)
def own_class_result(run: Run) -> None:
    class Net(_Two):
        def forward(self, x: Tensor) -> Unregistered:
            return Unregistered(self.head(torch.tanh(self.body(x))))

    model = run.compile(Net())
    steps(run, model, sgd(model), loss_of=lambda r, c: F.cross_entropy(r.scores, c))


@SECTION("the loss computed inside the model (a mean over samples)")
def loss_inside(run: Run) -> None:
    class Net(_Two):
        def forward(self, x: Tensor, classes: Tensor) -> Any:
            scores = self.head(torch.tanh(self.body(x)))
            return F.cross_entropy(scores, classes), scores

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss, scores = model(run.randn(BATCH, 6), run.randint(4, BATCH))
        loss.backward()
        optimizer.step()
        run.same("loss", loss)
        run.rows("scores", scores)
    run.state(model)


@SECTION("the loss computed inside the model, with ignored targets")
def masked_loss_inside(run: Run) -> None:
    class Net(_Two):
        def forward(self, x: Tensor, classes: Tensor) -> Any:
            return F.cross_entropy(self.head(torch.tanh(self.body(x))), classes, ignore_index=0)

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(run.randn(BATCH, 6), run.randint(4, BATCH))
        loss.backward()
        optimizer.step()
        run.same("loss", loss)
    run.state(model)


@SECTION("keyword inputs, with and without, and in another order")
def keyword_inputs(run: Run) -> None:
    class Net(_Two):
        def forward(self, x: Tensor, shift: Tensor | None = None, *, scale: float = 1.0) -> Any:
            h = self.body(x if shift is None else x + shift)
            return self.head(torch.tanh(h)) * scale

    model = run.compile(Net())
    optimizer = sgd(model)
    for kwargs in ({}, {"scale": 2.0}, {"shift": run.randn(BATCH, 6)}, {"scale": 0.5, "shift": run.randn(BATCH, 6)}):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x=run.randn(BATCH, 6), **kwargs), run.randint(4, BATCH))
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("parameters that no loss uses", free=("unused",))
def unused_parameters(run: Run) -> None:
    class Net(_Two):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.other = nn.Linear(3, 3), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            return self.head(h), self.other(h)

    model = run.compile(Net())
    steps(run, model, sgd(model), loss_of=lambda r, c: F.cross_entropy(r[0], c))


@SECTION("a gradient of some results only, of others in the next step")
def some_results(run: Run) -> None:
    class Net(_Two):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            return self.head(h), self.other(h)

    model = run.compile(Net())
    optimizer = sgd(model)
    for which in (0, 1, 0):

        def loss_of(results: Any, classes: Tensor, which: int = which) -> Tensor:
            return F.cross_entropy(results[which], classes)

        steps(run, model, optimizer, 1, loss_of=loss_of)


@SECTION("tied weights (embedding and decoder)")
def tied_weights(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body, self.decoder = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10)
            self.decoder.weight = self.embedding.weight

        def forward(self, words: Tensor) -> Any:
            return self.decoder(torch.tanh(self.body(self.embedding(words))))

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(3):
        words = run.randint(10, BATCH, 4)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("a module called twice in one forward")
def called_twice(run: Run) -> None:
    class Net(_Two):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            return self.head(self.inner(torch.tanh(self.inner(h))))

    model = run.compile(Net())
    steps(run, model, sgd(model))


@SECTION("batch norm in evaluation mode within a training model (`bn.eval()`), then trained again")
def frozen_norm(run: Run) -> None:
    model = run.compile(conv_net())
    optimizer = sgd(model)
    steps(run, model, optimizer, 2, shape=(3, 6, 6))
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    norm.eval()
    steps(run, model, optimizer, 2, shape=(3, 6, 6))
    model.train()
    steps(run, model, optimizer, 1, shape=(3, 6, 6))


@SECTION("running statistics reset, and their momentum changed, between steps")
def reset_statistics(run: Run) -> None:
    model = run.compile(conv_net())
    optimizer = sgd(model)
    steps(run, model, optimizer, 2, shape=(3, 6, 6))
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    norm.reset_running_stats()
    norm.momentum = 0.3
    steps(run, model, optimizer, 2, shape=(3, 6, 6))


@SECTION("group, layer and instance norms")
def other_norms(run: Run) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.InstanceNorm2d(4, affine=True), nn.Flatten(),
        nn.LayerNorm(64), nn.Linear(64, 4),
    )  # fmt: skip
    model = run.compile(net)
    steps(run, model, sgd(model), shape=(3, 6, 6))


@SECTION("batch norm of features, whose statistics mix samples, and a loss across samples (contrastive)")
def contrastive(run: Run) -> None:
    class Net(_Two):
        def forward(self, x: Tensor) -> Any:
            h = F.normalize(self.head(torch.tanh(self.body(x))), dim=1)
            similar = h @ h.T
            return torch.logsumexp(similar, 1).mean() - similar.diagonal().mean()

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(run.randn(BATCH, 6))
        loss.backward()
        optimizer.step()
        run.same("loss", loss)
    run.state(model)


@SECTION("dropout whose probability changes to and from zero")
def dropout_schedule(run: Run) -> None:
    model = run.compile(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = sgd(model)
    (dropout,) = (m for m in model.modules() if isinstance(m, nn.Dropout))
    dropout.p = 0.0
    steps(run, model, optimizer, 2)
    dropout.p = 1.0
    steps(run, model, optimizer, 1)
    dropout.p = 0.0
    steps(run, model, optimizer, 1)


@SECTION("an LSTM whose hidden state is carried from batch to batch, detached", free=("rnn",))
def carried_state(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Any:
            # Samples lie in the first dimension of all that goes in and out.
            given = None if state is None else (state[0].transpose(0, 1), state[1].transpose(0, 1))
            out, (h, c) = self.rnn(x, given)
            return self.head(out[:, -1]), (h.transpose(0, 1), c.transpose(0, 1))

    model = run.compile(Net())
    optimizer = sgd(model)
    state = None
    for _ in range(3):
        optimizer.zero_grad()
        scores, state = model(run.randn(BATCH, 5, 6), state)
        loss = F.cross_entropy(scores, run.randint(4, BATCH))
        loss.backward()
        optimizer.step()
        state = tuple(s.detach() for s in state)
        run.mean("loss", loss)
        run.rows("state", state[0])
    run.state(model)


@SECTION("a transformer encoder layer with a causal mask, dropout off", free=("layer.self_attn.out_proj",))
def transformer(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)

        def forward(self, words: Tensor) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
            return self.head(self.layer(self.embedding(words), src_mask=mask)[:, -1])

    model = run.compile(Net())
    train(run, model, sgd(model), lambda: F.cross_entropy(model(run.randint(10, BATCH, 5)), run.randint(4, BATCH)))


@SECTION("a mixture of experts: all computed, weighted by a gate of the top two")
def experts(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(4))
            self.gate = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            weights, chosen = self.gate(x).topk(2, 1)
            full = torch.zeros(x.shape[0], 4).scatter(1, chosen, weights.softmax(1))
            return torch.stack([expert(x) for expert in self.experts], 1).mul(full.unsqueeze(-1)).sum(1)

    model = run.compile(Net())
    steps(run, model, sgd(model))


@SECTION("a compiled part of a larger plain model")
def compiled_part(run: Run) -> None:
    class Outer(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part, self.last = part, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.part(x))

    part, last = run.compile(Mlp()), nn.Linear(4, 4)
    model = Outer(part)
    model.last = last
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(run.randn(BATCH, 6)), run.randint(4, BATCH))
        loss.backward()
        for p in last.parameters():
            if run.ranks > 1 and p.grad is not None:  # the plain rest is the user's to keep in step
                torch.distributed.all_reduce(p.grad)
                p.grad.div_(run.ranks)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("`compiled.module` called while the plan runs the compiled model")
def inner_module(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    steps(run, model, optimizer, 2)
    inner = model.module if run.compiled else model
    run.rows("scores", inner(run.randn(BATCH, 6)))


@SECTION("results written to in place by the script")
def written_results(run: Run) -> None:
    model = run.compile(Mlp())

    def loss() -> Tensor:
        scores = model(run.randn(BATCH, 6))
        scores[:, 0] = 0
        scores.mul_(2)
        return F.cross_entropy(scores, run.randint(4, BATCH))

    train(run, model, sgd(model), loss)


@SECTION(
    "an input written to in place by the forward",
    refused={"*": "changes 'x' in place"},
    why="a replica would not see what another one writes; compute a new tensor",
)
def written_inputs(run: Run) -> None:
    class Net(_Two):
        def forward(self, x: Tensor) -> Any:
            x.mul_(0.5)
            return self.head(torch.tanh(self.body(x)))

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(2):
        x = run.randn(BATCH, 6)
        loss = F.cross_entropy(model(x), run.randint(4, BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.rows("input after", x)
    run.state(model)
