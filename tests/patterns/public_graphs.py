"""Public training programs on graphs and layers: whole graphs, neighbours, layers that train themselves."""

# mypy: disable-error-code="operator"
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training import Run
from tests.patterns.nets import BATCH
from tests.patterns.pattern import Section

SECTION = Section("Public training programs")

NODES, FEATURES, CLASSES = 8, 6, 4


def _graph(run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Features, [2, E] edges and classes of one graph, the same in every process."""
    features = torch.randn(NODES, FEATURES, generator=run.draws)
    ends = torch.randint(NODES, (2, 2 * NODES), generator=run.draws)
    return features, torch.cat([ends, ends.flip(0)], 1), torch.randint(CLASSES, (NODES,), generator=run.draws)


def _whole_graph(run: Run, model: Any, given: tuple[Tensor, ...], labels: Tensor) -> None:
    """Full-batch training on some of the nodes, tests on the others."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    idx_train, idx_test = torch.arange(4), torch.arange(4, NODES)
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        output = model(*given)
        loss = F.nll_loss(output[idx_train], labels[idx_train])
        loss.backward()
        optimizer.step()
        run.same("loss", loss)
        model.eval()
        with torch.no_grad():
            output = model(*given)
            run.same("test", F.nll_loss(output[idx_test], labels[idx_test]))
            run.same("right", (output[idx_test].argmax(1) == labels[idx_test]).sum().item())
    run.state(model)


class _GraphConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x: Tensor, adjacency: Tensor) -> Any:
        support = torch.mm(x, self.kernel)
        mixed = torch.sparse.mm(adjacency, support) if adjacency.is_sparse else adjacency @ support
        return mixed + self.bias


class _Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2, self.dropout = _GraphConv(FEATURES, 8), _GraphConv(8, CLASSES), nn.Dropout(0.0)

    def forward(self, x: Tensor, adjacency: Tensor) -> Any:
        x = self.dropout(F.relu(self.gc1(x, adjacency)))
        return F.log_softmax(self.gc2(x, adjacency), dim=1)


def _adjacency(edges: Tensor) -> Tensor:
    dense = torch.eye(NODES)
    dense[edges[0], edges[1]] = 1.0
    scale = dense.sum(1).rsqrt()
    return scale[:, None] * dense * scale[None, :]


@SECTION(
    "pytorch/examples `gcn`: a whole graph, its adjacency a sparse tensor",
    refused={"*": "make it dense (to_dense())"},
    why="devices are sent parts of dense tensors; make the adjacency dense",
)
def gcn(run: Run) -> None:
    features, edges, labels = _graph(run)
    _whole_graph(run, run.compile(_Gcn()), (features, _adjacency(edges).to_sparse()), labels)


@SECTION(
    "the same, its adjacency a dense tensor",
    refused={"ranks/*": 'compile with inputs="same"'},
    why='a graph is no batch of samples, of which each process has its own; compile with `inputs="same"`',
)
def gcn_dense(run: Run) -> None:
    features, edges, labels = _graph(run)
    _whole_graph(run, run.compile(_Gcn()), (features, _adjacency(edges)), labels)


@SECTION('the same, compiled with `inputs="same"`: every process brings the graph')
def gcn_same(run: Run) -> None:
    features, edges, labels = _graph(run)
    _whole_graph(run, run.compile(_Gcn(), inputs="same"), (features, _adjacency(edges)), labels)


class _GraphAttention(nn.Module):
    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_hidden = heads, outputs
        self.W, self.a = (
            nn.Parameter(torch.empty(inputs, heads * outputs)),
            nn.Parameter(torch.empty(heads, 2 * outputs, 1)),
        )
        nn.init.xavier_normal_(self.W)
        nn.init.xavier_normal_(self.a)

    def forward(self, h: Tensor, adjacency: Tensor) -> Any:
        n = h.shape[0]
        h = torch.mm(h, self.W).view(n, self.n_heads, self.n_hidden).permute(1, 0, 2)
        source, target = h @ self.a[:, : self.n_hidden], h @ self.a[:, self.n_hidden :]
        e = F.leaky_relu(source + target.mT, 0.2)
        attention = torch.where(adjacency > 0, e, -9e16 * torch.ones_like(e))
        mixed = torch.matmul(F.softmax(attention, dim=-1), h)
        return mixed.permute(1, 0, 2).contiguous().view(n, self.n_heads * self.n_hidden)


@SECTION('pytorch/examples `gat`: attention over a whole graph\'s dense adjacency, `inputs="same"`')
def gat(run: Run) -> None:
    class Gat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gat1, self.gat2 = _GraphAttention(FEATURES, 4, 2), _GraphAttention(8, CLASSES, 1)

        def forward(self, x: Tensor, adjacency: Tensor) -> Any:
            return F.log_softmax(self.gat2(F.elu(self.gat1(x, adjacency)), adjacency), dim=1)

    features, edges, labels = _graph(run)
    _whole_graph(run, run.compile(Gat(), inputs="same"), (features, _adjacency(edges)), labels)


class _GcnConv(nn.Module):
    """PyG's GCNConv: edges with loops added, weights by degrees, messages gathered and added up."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin, self.bias = nn.Linear(inputs, outputs, bias=False), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        n = x.size(0)
        edge_index = torch.cat([edge_index, torch.arange(n).repeat(2, 1)], dim=1)
        row, col = edge_index[0], edge_index[1]
        deg = torch.zeros(n, dtype=x.dtype).scatter_add(0, col, torch.ones_like(col, dtype=x.dtype))
        norm = deg.pow(-0.5)[row] * deg.pow(-0.5)[col]
        x = self.lin(x)
        messages = norm.view(-1, 1) * x.index_select(0, row)
        return torch.zeros_like(x).index_add(0, col, messages) + self.bias


@SECTION(
    'PyG `gcn`: a whole graph\'s `edge_index`, messages by `index_select` and `index_add`, `inputs="same"`',
    refused={"*/replicas": "as of inputs without samples", "*/mixed": "as of inputs without samples"},
    why="inputs without samples have no replicas",
)
def pyg_gcn(run: Run) -> None:
    class Gcn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = _GcnConv(FEATURES, 8), _GcnConv(8, CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            x = F.dropout(self.conv1(x, edge_index).relu(), p=0.0, training=self.training)
            return F.log_softmax(self.conv2(x, edge_index), dim=1)

    features, edges, labels = _graph(run)
    _whole_graph(run, run.compile(Gcn(), inputs="same"), (features, edges), labels)


class _SageConv(nn.Module):
    """PyG's SAGEConv over `edge_index`, or over a fixed number of neighbours of each node, [B, k, F]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin_l, self.lin_r = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        row, col = edge_index[0], edge_index[1]
        summed = torch.zeros_like(x).index_add(0, col, x.index_select(0, row))
        count = torch.zeros(x.size(0), dtype=x.dtype).index_add(0, col, torch.ones_like(col, dtype=x.dtype))
        return self.lin_l(summed / count.clamp(min=1).unsqueeze(-1)) + self.lin_r(x)


@SECTION(
    "PyG `graph_sage` with a neighbour loader: sub-graphs of other sizes, the first nodes are the batch",
    refused={
        "one/replicas": "its samples depend on each other",
        "one/mixed": "its samples depend on each other",
        "ranks/*": 'compile with inputs="same"',
    },
    why="edges count each process's own nodes from 0; load as many neighbours for each node ([B, k, F]), or bring one "
    'sub-graph to all processes with `inputs="same"`',
)
def pyg_sage(run: Run) -> None:
    class Sage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([_SageConv(FEATURES, 8), _SageConv(8, CLASSES)])

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            x = self.convs[0](x, edge_index).relu()
            return self.convs[1](x, edge_index)

    model = run.compile(Sage())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for size in (12, 14, 12):
        parts = [torch.randint(size, (2, 2 * size), generator=run.draws) for _ in range(2)]
        xs = [torch.randn(size, FEATURES, generator=run.draws) for _ in range(2)]
        ys = torch.randint(CLASSES, (2, 4), generator=run.draws)
        mine = range(2) if run.ranks == 1 else [run.rank]  # sub-graphs, each with 4 nodes of the batch
        optimizer.zero_grad()
        x, edges = torch.cat([xs[i] for i in mine]), torch.cat([parts[i] + size * n for n, i in enumerate(mine)], 1)
        out = model(x, edges).view(len(mine), size, CLASSES)[:, :4].flatten(0, 1)
        loss = F.cross_entropy(out, ys[list(mine)].flatten())
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("GraphSAGE of as many neighbours for each node ([B, k, F] and [B, F])")
def sage_fan_out(run: Run) -> None:
    class Sage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin_l, self.lin_r, self.head = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor, neighbours: Tensor) -> Any:
            return self.head(F.normalize(self.lin_l(neighbours.mean(1)) + self.lin_r(x), dim=-1).relu())

    features, _, labels = _graph(run)
    model = run.compile(Sage())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        seeds, neighbours = run.randint(NODES, BATCH), run.randint(NODES, BATCH, 3)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features[seeds], features[neighbours]), labels[seeds])
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)
