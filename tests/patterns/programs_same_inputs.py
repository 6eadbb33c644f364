"""Whole programs whose inputs are no samples, or not all of them: one graph, one state, masks beside sentences."""

# mypy: disable-error-code="operator"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

from benchmarks.training import Run
from tests.patterns.pattern import Section

SECTION = Section("Programs: inputs that are not samples")

WORDS = 12


def _graph(run: Run) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One graph of 12 nodes: features, a normalised adjacency, its edges and the nodes' classes, alike on all ranks."""
    edges = torch.randint(12, (2, 30), generator=run.draws)
    adjacency = torch.eye(12).index_put((edges[0], edges[1]), torch.ones(()))
    features = torch.randn(12, 6, generator=run.draws)
    return features, adjacency / adjacency.sum(1, keepdim=True), edges, torch.randint(4, (12,), generator=run.draws)


def _train_on_graph(run: Run, model: Any, given: tuple[Tensor, ...], classes: Tensor) -> None:
    """Some nodes are trained on; the rest is looked at in evaluation."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(*given)[:8], classes[:8])
        loss.backward()
        optimizer.step()
        run.same("loss", loss)
    model.eval()
    with torch.no_grad():
        run.same("scores", model(*given))
    run.state(model)


class _Convolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(nn.init.xavier_normal_(torch.empty(inputs, outputs)))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.spmm(adjacency, torch.mm(x, self.kernel))


class _Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = _Convolution(6, 16), _Convolution(16, 4), nn.Dropout(0.0)

    def forward(self, x: Tensor, adjacency: Tensor) -> Any:
        x = self.drop(F.relu(self.first(x, adjacency)))
        return F.log_softmax(self.second(x, adjacency), dim=1)


@SECTION('GCN on one graph, every rank brings the same: `compile(inputs="same")`, a dense adjacency')
def gcn(run: Run) -> None:
    features, adjacency, _, classes = _graph(run)
    _train_on_graph(run, run.compile(_Gcn(), inputs="same"), (features, adjacency), classes)


@SECTION(
    "the same, every rank's graph taken as samples of its own (no `inputs=`)",
    refused={"ranks/*": 'compile with inputs="same"'},
    why='a graph is no batch of samples: `inputs="same"`',
)
def gcn_of_own_samples(run: Run) -> None:
    features, adjacency, _, classes = _graph(run)
    _train_on_graph(run, run.compile(_Gcn()), (features, adjacency), classes)


@SECTION(
    "the same with a sparse adjacency (`to_sparse()`)",
    refused={"*": "make it dense (to_dense())"},
    why="devices are sent parts of dense tensors: bring it dense, or its edges",
)
def gcn_of_sparse(run: Run) -> None:
    features, adjacency, _, classes = _graph(run)
    _train_on_graph(run, run.compile(_Gcn(), inputs="same"), (features, adjacency.to_sparse()), classes)


@SECTION('GAT on one graph, `inputs="same"`: scores of all pairs of nodes, masked by a dense adjacency')
def gat(run: Run) -> None:
    class Attention(nn.Module):
        def __init__(self, inputs: int, hidden: int, heads: int) -> None:
            super().__init__()
            self.heads, self.hidden = heads, hidden
            self.w = nn.Parameter(nn.init.xavier_normal_(torch.empty(inputs, hidden * heads)))
            self.a = nn.Parameter(nn.init.xavier_normal_(torch.empty(heads, 2 * hidden, 1)))

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            n = x.shape[0]
            h = torch.mm(x, self.w).view(n, self.heads, self.hidden).permute(1, 0, 2)
            scores = h @ self.a[:, : self.hidden] + (h @ self.a[:, self.hidden :]).mT
            scores = F.leaky_relu(scores, 0.2)
            scores = torch.where(adjacency > 0, scores, -9e16 * torch.ones_like(scores))
            seen = F.softmax(scores, dim=-1) @ h
            return seen.permute(1, 0, 2).contiguous().view(n, self.heads * self.hidden)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Attention(6, 8, 2), Attention(16, 4, 1)

        def forward(self, x: Tensor, adjacency: Tensor) -> Any:
            return F.log_softmax(self.second(F.elu(self.first(x, adjacency)), adjacency), dim=1)

    features, adjacency, _, classes = _graph(run)
    _train_on_graph(run, run.compile(Net(), inputs="same"), (features, adjacency), classes)


class _Sage(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.near, self.own = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        source, target = edges
        total = x.new_zeros(x.shape).scatter_add_(0, target.unsqueeze(-1).expand(-1, x.size(1)), x[source])
        count = x.new_zeros(x.size(0)).index_add_(0, target, x.new_ones(target.size(0)))
        return self.near(total / count.clamp(min=1).unsqueeze(-1)) + self.own(x)


class _ByEdges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Sage(6, 16), _Sage(16, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        return F.log_softmax(self.second(self.first(x, edges).relu(), edges), dim=1)


@SECTION(
    'SAGE on one graph, `inputs="same"`: neighbours summed along edges (`scatter_add_`, `index_add_`)',
    refused={"*/replicas": "as of inputs without samples", "*/mixed": "as of inputs without samples"},
    why="inputs without samples have no replicas",
)
def sage(run: Run) -> None:
    features, _, edges, classes = _graph(run)
    _train_on_graph(run, run.compile(_ByEdges(), inputs="same"), (features, edges), classes)


@SECTION(
    "the same, every rank's graph taken as samples of its own (no `inputs=`)",
    refused={
        "ranks/*": 'compile with inputs="same"',
        "one/replicas": "its samples depend on each other",
        "one/mixed": "its samples depend on each other",
    },
    why='edges point at nodes of one graph: `inputs="same"`',
)
def sage_of_own_samples(run: Run) -> None:
    features, _, edges, classes = _graph(run)
    _train_on_graph(run, run.compile(_ByEdges()), (features, edges), classes)


def _act(run: Run, **options: Any) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine, self.action, self.value = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Any:
            x = F.relu(self.affine(x))
            return F.softmax(self.action(x), dim=-1), self.value(x)

    model = run.compile(Policy(), **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(2):
        terms = []
        for reward in range(3):
            chances, value = model(torch.randn(4, generator=run.draws))
            chosen = Categorical(chances).log_prob(chances.argmax())
            terms.append(F.smooth_l1_loss(value, torch.full((1,), float(reward))) - chosen * (reward - value.item()))
        optimizer.zero_grad()
        loss = torch.stack(terms).sum()
        loss.backward()
        optimizer.step()
        run.same("loss", loss)
    run.state(model)


@SECTION(
    'actor-critic: one state of shape `[4]` at a time, `inputs="same"`',
    refused={"*/replicas": "as of inputs without samples", "*/mixed": "as of inputs without samples"},
    why="inputs without samples have no replicas",
)
def actor_critic(run: Run) -> None:
    _act(run, inputs="same")


@SECTION(
    "the same, the state taken as 4 samples (no `inputs=`)",
    refused={
        "ranks/*": 'compile with inputs="same"',
        "one/replicas": "its samples depend on each other",
        "one/mixed": "its samples depend on each other",
    },
    why='one state is no batch: `inputs="same"`, or `state.unsqueeze(0)`',
)
def actor_critic_of_samples(run: Run) -> None:
    _act(run)


class _Translator(nn.Module):
    """Words lie along dimension 0, sentences along dimension 1; of padding masks too where `turn` is set."""

    def __init__(self, turn: bool, known: dict[str, bool]) -> None:
        super().__init__()
        self.turn, self.known = turn, known
        self.source, self.target, self.out = nn.Embedding(WORDS, 8), nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)

    def forward(self, source: Tensor, target: Tensor, masks: tuple[Tensor, Tensor], padded: tuple[Tensor, ...]) -> Any:
        source_padding, target_padding = (mask.T for mask in padded) if self.turn else padded
        given = (self.source(source), self.target(target), *masks, None, source_padding, target_padding, source_padding)
        return self.out(self.transformer(*given, **self.known))


def _translate(run: Run, turn: bool, **known: bool) -> None:
    model = run.compile(_Translator(turn, known), dim=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    minus = float("-inf")
    masks = torch.zeros(5, 5), torch.triu(torch.full((6, 6), minus), 1)
    for _ in range(3):
        source, target = run.randint(WORDS - 1, 5, 4, dim=1) + 1, run.randint(WORDS - 1, 7, 4, dim=1) + 1
        source = torch.where((source == 2) & (torch.arange(5).unsqueeze(1) > 1), 0, source)
        padded = [torch.zeros(words.shape).masked_fill(words == 0, minus) for words in (source, target[:-1])]
        scores = model(source, target[:-1], masks, tuple(mask if turn else mask.T for mask in padded))
        loss = F.cross_entropy(scores.reshape(-1, WORDS), target[1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


_CAUSAL = {"src_is_causal": False, "tgt_is_causal": True}
_PARTS = tuple(f"transformer.{one}.out_proj" for one in (
    "encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"
))  # fmt: skip


@SECTION(
    "translation: `nn.Transformer(..., src_is_causal=False, tgt_is_causal=True)`, sentences along dimension 1 of all",
    free=_PARTS,
)
def masked_translation(run: Run) -> None:
    _translate(run, turn=True, **_CAUSAL)


@SECTION(
    "the same with padding masks `[sentences, words]` beside words `[words, sentences]`",
    refused={
        "ranks/*": "bring all inputs with samples there",
        "one/replicas": "its samples depend on each other",
        "one/mixed": "its samples depend on each other",
    },
    why="samples lie along one dimension of all inputs: turn the masks inside the model",
    free=_PARTS,
)
def masks_by_sentence(run: Run) -> None:
    _translate(run, turn=False, **_CAUSAL)


@SECTION(
    "the same, and nn.Transformer sees for itself whether masks are causal",
    refused={"*": "src_is_causal=False, tgt_is_causal=True"},
    why="it would branch on a mask's values: say it in the call",
    free=_PARTS,
)
def masked_translation_that_looks(run: Run) -> None:
    _translate(run, turn=True)
