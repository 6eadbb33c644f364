"""Patterns of inputs whose samples do not lie along the first dimension of everything, or point at one another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import Run
from tests.patterns.nets import BATCH, sgd, steps, train
from tests.patterns.pattern import Section

SECTION = Section("Inputs and samples")

POSITIONS = "each process counts its own samples from 0, and layers may see those of all; run it in one process"


@SECTION(
    "`nn.EmbeddingBag` with offsets, each rank its own",
    free=("bag",),
    refused={"ranks/*": "positions along the samples", "one/replicas": "its samples depend on each other"},
    why=POSITIONS,
)
def bag_offsets(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(10, 6, mode="mean"), nn.Linear(6, 4)

        def forward(self, words: Tensor, offsets: Tensor) -> Any:
            return self.head(self.bag(words, offsets))

    model = run.compile(Net())

    def loss() -> Tensor:
        lengths = torch.tensor([3, 1, 2, 2, 4, 1, 1, 2])  # as many words on each of two ranks
        words, own = run.randint(10, 16), run.own(lengths)
        offsets = own.cumsum(0) - own
        scores = model(words, offsets)
        run.rows("scores", scores)
        return F.cross_entropy(scores, run.randint(4, BATCH))

    train(run, model, sgd(model), loss)


@SECTION("`nn.EmbeddingBag` of bags of one length (2-d indices)", free=("bag",))
def bag_of_rows(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(10, 6), nn.Linear(6, 4)

        def forward(self, words: Tensor) -> Any:
            return self.head(torch.tanh(self.bag(words)))

    model = run.compile(Net())
    train(run, model, sgd(model), lambda: F.cross_entropy(model(run.randint(10, BATCH, 3)), run.randint(4, BATCH)))


@SECTION(
    "an input that indexes samples (`h + h[neighbour]`), each rank its own",
    refused={"ranks/*": "positions along the samples"},
    why=POSITIONS,
)
def neighbours(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, neighbour: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            return self.head(h + h[neighbour])

    model = run.compile(Net())

    def loss() -> Tensor:
        half = torch.randint(4, (2, BATCH // 2), generator=run.draws)
        whole = torch.cat([half[0], half[1] + BATCH // 2])  # neighbours are among a rank's own samples
        neighbour = whole if run.ranks == 1 else half[run.rank]
        x, classes = run.randn(BATCH, 6), run.randint(4, BATCH)
        scores = model(x, neighbour)
        run.rows("scores", scores)
        return F.cross_entropy(scores, classes)

    train(run, model, sgd(model), loss)


@SECTION("an input that indexes positions within each sample (`h[torch.arange(B), last]`)")
def positions(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, last: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            return self.head(h[torch.arange(x.shape[0]), last])

    model = run.compile(Net())
    train(
        run,
        model,
        sgd(model),
        lambda: F.cross_entropy(model(run.randn(BATCH, 5, 6), run.randint(5, BATCH)), run.randint(4, BATCH)),
    )


@SECTION("the same with `gather` along the sequence")
def gathered_positions(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, last: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            return self.head(h.gather(1, last.view(-1, 1, 1).expand(-1, 1, 8)).squeeze(1))

    model = run.compile(Net())
    train(
        run,
        model,
        sgd(model),
        lambda: F.cross_entropy(model(run.randn(BATCH, 5, 6), run.randint(5, BATCH)), run.randint(4, BATCH)),
    )


@SECTION(
    "a graph's edges (`index_add` of messages between nodes)",
    refused={"ranks/*": "positions along the samples", "one/replicas": "its samples depend on each other"},
    why=POSITIONS,
)
def graph_edges(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            return self.head(h.index_add(0, target, h[source]))

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(2):
        parts = torch.randint(4, (2, 2, 5), generator=run.draws)  # rank, end, edge
        ends = [torch.cat([parts[0, e], parts[1, e] + 4]) if run.ranks == 1 else parts[run.rank, e] for e in (0, 1)]
        scores = model(run.randn(BATCH, 6), *ends)
        loss = F.cross_entropy(scores, run.randint(4, BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.rows("scores", scores)
    run.state(model)


class Language(nn.Module):
    """Words as [T, B] to scores as [T x B, words]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.decoder = nn.Embedding(10, 6), nn.GRU(6, 8), nn.Linear(8, 10)

    def forward(self, words: Tensor) -> Any:
        """Scores of the next word."""
        out, _ = self.rnn(self.embedding(words))
        return self.decoder(out).view(-1, 10)


@SECTION("a language model of [T, B] words with `.view(-1, V)` scores, `dim=1`", free=("rnn",))
def time_first(run: Run) -> None:
    model = run.compile(Language(), dim=1)
    optimizer = sgd(model)
    for _ in range(3):
        words = run.randint(10, 5, BATCH, dim=1)
        optimizer.zero_grad()
        scores = model(words)
        loss = F.cross_entropy(scores, words.roll(1, 0).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        run.rows("scores", scores.view(5, -1, 10), dim=1)
        run.mean("loss", loss)
    run.state(model)


@SECTION("the same with the hidden state of the last batch, [1, B, H]", free=("rnn",))
def time_first_state(run: Run) -> None:
    class Net(Language):
        def forward(self, words: Tensor, state: Tensor) -> Any:  # type: ignore[override]
            out, state = self.rnn(self.embedding(words), state)
            return self.decoder(out).view(-1, 10), state

    model = run.compile(Net(), dim=1)
    optimizer = sgd(model)
    state = torch.zeros(1, BATCH // run.ranks, 8)
    for _ in range(3):
        words = run.randint(10, 5, BATCH, dim=1)
        optimizer.zero_grad()
        scores, state = model(words, state.detach())
        loss = F.cross_entropy(scores, words.roll(1, 0).flatten())
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
        run.rows("state", state, dim=1)
    run.state(model)


@SECTION("[B, T] words with scores as [B x T, words]")
def batch_first_view(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.decoder = nn.Embedding(10, 6), nn.Linear(6, 10)

        def forward(self, words: Tensor) -> Any:
            return self.decoder(self.embedding(words)).view(-1, 10)

    model = run.compile(Net())

    def loss() -> Tensor:
        words = run.randint(10, BATCH, 5)
        scores = model(words)
        run.rows("scores", scores)
        return F.cross_entropy(scores, words.roll(1, 1).flatten())

    train(run, model, sgd(model), loss)


@SECTION("several inputs, one without samples (a table shared by all)")
def shared_input(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, table: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x)) @ table)

    model = run.compile(Net())
    optimizer = sgd(model)
    table = torch.linspace(0, 1, 64).view(8, 8)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(run.randn(BATCH, 6), table), run.randint(4, BATCH))
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
        table = table * 0.5
    run.state(model)


@SECTION("pairs flattened into one batch in the forward, and split again")
def flattened_pairs(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(16, 4)

        def forward(self, pairs: Tensor) -> Any:
            h = torch.tanh(self.body(pairs.flatten(0, 1)))
            return self.head(h.view(pairs.shape[0], -1))

    model = run.compile(Net())
    steps(run, model, sgd(model), shape=(2, 6))


@SECTION(
    "two inputs stacked along the samples in the forward, and split again",
    refused={
        "ranks/*": "no dimension of it is known to hold the samples",
        "one/replicas": "its samples depend on each other",
        "one/mixed": "its samples depend on each other",
    },
    why="a part of the stacked samples is not known to be each rank's own; call the model twice",
)
def stacked_inputs(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

        def forward(self, a: Tensor, b: Tensor) -> Any:
            one, two = self.head(torch.tanh(self.norm(self.body(torch.cat((a, b)))))).chunk(2)
            return one - two

    model = run.compile(Net())
    train(
        run,
        model,
        sgd(model),
        lambda: F.cross_entropy(model(run.randn(BATCH, 6), run.randn(BATCH, 6)), run.randint(4, BATCH)),
    )


@SECTION("mixup in the forward: each sample mixed with another one of the batch")
def mixup(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(0.7 * x + 0.3 * x.flip(0)))
            return self.head(h)

    model = run.compile(Net())
    train(run, model, sgd(model), lambda: model(run.randn(BATCH, 6)).square().mean(), 2)


@SECTION(
    "a part of the samples chosen by a mask (`y[y > 0]`)",
    refused={"*": "the size of a result depends on the values"},
    why="the size depends on values",
)
def masked_samples(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Any:
            y = self.body(x)
            return y[y > 0].sum()

    model = run.compile(Net())
    model(run.randn(BATCH, 6)).backward()
    run.state(model)


@SECTION("sequences of another length in every batch")
def changing_lengths(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.tanh(self.body(x)).mean(1) * x.shape[1])

    model = run.compile(Net())
    optimizer = sgd(model)
    for length in (5, 3, 5):
        steps(run, model, optimizer, 1, shape=(length, 6))
