"""Models with their losses inside, plans that cut the losses, and training beside the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.graph.layer_graph import Layer
from parplan.graph.user_code.with_loss import with_loss
from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import Rule, planner

__all__ = [
    "ELEMENT_LOSSES", "LANGUAGE", "Elements", "Language", "cut_losses", "language_batch", "losses_by_ranks",
    "trained_beside",
]  # fmt: skip

VOCABULARY, WIDTH, LENGTH = 48, 8, 5


class Language(nn.Module):
    """A language model that shifts its labels as transformers' do: padded, cut and flattened with the positions."""

    def __init__(self, padded: bool = True, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.padded, self.options = padded, options
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("weight", torch.rand(VOCABULARY) + 0.5 if weighted else None)
        self.double()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.mix(self.embed(tokens))))
        if self.padded:
            labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        else:
            scores, labels = scores[:, :-1], labels[:, 1:]
        weight = dict(self.named_buffers()).get("weight")
        return F.cross_entropy(scores.reshape(-1, VOCABULARY), labels.reshape(-1), weight, **self.options)


class Elements(nn.Module):
    """A loss over elements of [samples, 3, 8], behind two layers."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.loss = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), loss
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.b(torch.relu(self.a(x))), y)


LANGUAGE: Mapping[str, Mapping[str, Any]] = {
    "padded labels": {},
    "shifted scores": {"padded": False},
    "weights": {"weighted": True},
    "smoothing": {"weighted": True, "label_smoothing": 0.1},
    "sum": {"reduction": "sum", "weighted": True},
    "every row": {"reduction": "none", "label_smoothing": 0.2},
}

ELEMENT_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": F.mse_loss,
    "sum of squares": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "smooth_l1_loss": nn.SmoothL1Loss(),
    "with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "kl_div": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "mean": lambda x, y: (x * y).mean(),
    "sum": lambda x, y: (x - y).abs().sum() + 0.5 * x.square().mean(),
    "mean of dimensions": lambda x, y: (x * y).mean((0, 1, 2)),
    "nll_loss": lambda x, y: F.nll_loss(x.log_softmax(1), y.argmax(1)),
    "positions": lambda x, y: F.cross_entropy(x, y.argmax(1), label_smoothing=0.1),
    "probabilities": lambda x, y: F.cross_entropy(x.flatten(1), y.flatten(1).softmax(1)),
    "cosine": lambda x, y: F.cosine_embedding_loss(x[:, 0], y[:, 0], y[:, 1, 0].sign()),
    "triplet": lambda x, y: F.triplet_margin_loss(x[:, 0], x[:, 1], y[:, 2]),
    "margins": lambda x, y: F.multi_margin_loss(x[:, 0], y[:, 0].argmax(1)),
    "poisson": lambda x, y: F.poisson_nll_loss(x, y.abs(), reduction="sum"),
}


def language_batch(samples: int, ignored: Iterable[int] = (1,)) -> tuple[Tensor, Tensor]:
    """Tokens and labels; all labels of the `ignored` samples are ignored."""
    tokens = torch.randint(0, VOCABULARY, (samples, LENGTH))
    labels = tokens.clone()
    labels[:, 0] = -100
    labels[[sample for sample in ignored if sample < samples]] = -100
    return tokens, labels


def cut_losses(replicas: int, shards: int) -> Rule:
    """Every layer in `replicas`, losses and what makes their scores in `shards` along the vocabulary as well."""
    everyone = tuple(range(replicas * shards))
    along = ("vocabulary", "out-features", "features")

    def rule(layer: Layer) -> Strategy:
        if layer.batch is None and not layer.constant:
            return Strategy()
        axis = next((a.name for a in layer.axes if a.name in along and a.units % shards == 0), None)
        if axis is None or shards == 1:
            return Strategy(replicas, 1, None, everyone[::shards])
        return Strategy(replicas, shards, axis, everyone)

    return rule


@dataclass(frozen=True)
class Share:
    """A rank's samples; in one process all of them."""

    rank: int = 0
    ranks: int = 1

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.tensor_split(self.ranks)[self.rank]


def trained_beside(
    net: nn.Module, rule: Rule, devices: int, batches: Iterable[tuple[Tensor, Tensor]], micro_batches: int = 1
) -> Compiled:
    """Three kinds of numbers after every step: the loss, gradients, and the weights that Adam makes of them.

    Under torchrun every rank brings its share of the batch, and the loss is the whole batch's on each of them.
    """
    plain = copy.deepcopy(net)
    share = Share(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Share()
    places = None if dist.is_initialized() else ["cpu"] * devices
    model = Compiled(net, planner(rule, devices, micro_batches=micro_batches), devices=places)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain)]
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        found, wanted = model(*(share.of(tensor) for tensor in batch)), plain(*batch)
        expected = wanted if wanted.dim() == 0 else share.of(wanted.detach())
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        (found.sum() * (share.ranks if found.dim() else 1)).backward()
        wanted.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        state = model.state_dict()
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9)
    return model


def losses_by_ranks(rank: int, ranks: int) -> None:
    """Replicated and vocabulary-cut losses over processes; one rank's targets are all ignored."""
    for name in ("padded labels", "smoothing", "sum"):
        for rule in (cut_losses(ranks, 1), cut_losses(1, ranks)):
            torch.manual_seed(3)
            batches = [language_batch(2 * ranks, (0, 1)) for _ in range(3)]
            model = trained_beside(Language(**LANGUAGE[name]), rule, ranks, batches)
            assert model.program is not None
            assert model.program.strategies["loss"].devices == tuple(range(ranks))
    torch.manual_seed(4)
    plain = nn.Linear(WIDTH, VOCABULARY).double()
    model = Compiled(with_loss(copy.deepcopy(plain), F.cross_entropy), planner(cut_losses(1, ranks), ranks))
    x, y = torch.randn(3 * ranks, WIDTH).double(), torch.randint(0, VOCABULARY, (3 * ranks,))
    share = Share(rank, ranks)
    found, wanted = model(share.of(x), targets=share.of(y)), F.cross_entropy(plain(x), y)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    found.backward()
    wanted.backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-9)
