"""Masks, positions and ranges made from the number of samples bind nothing to it: one capture serves every batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.resized import at_batch
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.programs import captures
from tests.plans import plan_by
from tests.runtime.helpers import CLOSE

LENGTH = 5

Idiom = Callable[["Net", Tensor], Tensor]


def expanded_mask(m: Net, x: Tensor) -> Tensor:
    """A causal mask laid out once per sample."""
    at = torch.arange(x.shape[1])
    mask = (at[:, None] >= at[None])[None, None].expand(x.shape[0], -1, -1, -1)
    return m.attend(x, mask)


def padding(m: Net, x: Tensor) -> Tensor:
    """A mask of ones, summed up to positions, looked up per sample and key."""
    ones = torch.ones(x.shape[0], x.shape[1])
    positions = ones.cumsum(1).long() - 1
    samples, keys = torch.arange(x.shape[0]), torch.arange(x.shape[1])
    allowed = ones.bool()[samples[:, None, None, None], keys[None, None, None, :]]
    return m.attend(x + m.positions(positions), allowed)


def packed(m: Net, x: Tensor) -> Tensor:
    """Documents that follow from positions, as a mask of queries by keys."""
    positions = torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1)
    document = (torch.diff(positions, prepend=positions[:, :1], dim=1) != 1).cumsum(-1)
    b, q, k = torch.arange(x.shape[0]), torch.arange(x.shape[1]), torch.arange(x.shape[1])
    same = document[b[:, None, None, None], q[None, None, :, None]] == document[b[:, None, None, None], k]
    return m.attend(x, same)


def class_token(m: Net, x: Tensor) -> Tensor:
    """A token in front of every sample."""
    return m.attend(torch.cat([m.token.repeat(x.shape[0], 1, 1), x], 1))[:, 0]


def last_step(m: Net, x: Tensor) -> Tensor:
    """The last token of every sample that is no padding."""
    last = (x[..., 0] > 0).long().argmax(-1)
    return m.attend(x)[torch.arange(x.shape[0]), last]


def contrastive(m: Net, x: Tensor) -> Tensor:
    """Every sample is its own class."""
    y = F.normalize(m.attend(x).mean(1), dim=-1)
    return F.cross_entropy(y @ y.t(), torch.arange(x.shape[0]))


def numbered(m: Net, x: Tensor) -> Tensor:
    """The number of a sample as a value."""
    return m.attend(x) * (1 + torch.arange(x.shape[0]))[:, None, None]


def state(m: Net, x: Tensor) -> Tensor:
    """A state of zeros that the first step fills."""
    return m.attend(x) + torch.zeros(x.shape[0], 1, 8, dtype=x.dtype).tanh() * m.token


IDIOMS: dict[str, Idiom] = {
    idiom.__name__: idiom
    for idiom in (expanded_mask, padding, packed, class_token, last_step, contrastive, numbered, state)
}


class Net(nn.Module):
    """Attention of two heads, with one idiom around it."""

    def __init__(self, idiom: Idiom) -> None:
        super().__init__()
        self.idiom = idiom
        self.qkv, self.out, self.positions = nn.Linear(8, 24), nn.Linear(8, 8), nn.Embedding(LENGTH, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention over all tokens that `mask` allows."""
        q, k, v = self.qkv(x).view(*x.shape[:2], 6, 4).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        found: Tensor = self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.idiom(self, x)


def samples(count: int) -> Tensor:
    return torch.randn(count, LENGTH, 8, dtype=torch.float64)


def net(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(IDIOMS[name]).double()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[LayerGraph]:
    """The graphs that compiled models capture."""
    found: list[LayerGraph] = []

    def recorded(*args: Any, **kwargs: Any) -> LayerGraph:
        found.append(capture(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(captures, "capture", recorded)
    return found


def check_results(plain: nn.Module, model: Compiled, x: Tensor) -> None:
    """Results are equal; both models have the gradients of this call alone afterwards."""
    plain.zero_grad()
    model.zero_grad()
    wanted, found = plain(x), model(x)
    torch.testing.assert_close(found, wanted, rtol=CLOSE, atol=CLOSE)
    for result in (wanted, found):
        result.square().sum().backward()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", IDIOMS)
def test_one_capture_serves_every_batch(name: str, traced: list[LayerGraph]) -> None:
    plain = net(name)
    for plan in ("data parallel", "model parallel", "mixed"):
        model = Compiled(copy.deepcopy(plain), partial(plan_by, plan, 2), devices=["cpu"] * 2, check="off")
        for count in (4, 6, 2, 3):
            check_results(plain, model, samples(count))
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(q.grad, p.grad, rtol=CLOSE, atol=CLOSE)
    assert len(traced) == 3


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "last": lambda h: h[-1:],
    "last two": lambda h: h[-2:].mean(0),
    "second": lambda h: h[1:2],
    "one before the last": lambda h: h[-2:-1],
    "narrow": lambda h: h.narrow(0, 1, 1),
    "middle": lambda h: h[h.shape[0] // 2 : h.shape[0] // 2 + 1],  # grows with the samples
    "second half": lambda h: h.chunk(2)[1].sum(0),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", ["data parallel", "model parallel", "mixed"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_at_a_place_are_those_of_every_batch(name: str, plan: str) -> None:
    torch.manual_seed(0)
    plain = Net(lambda m, x: m.out(x + ROWS[name](torch.tanh(m.out(x))))).double()
    model = Compiled(copy.deepcopy(plain), partial(plan_by, plan, 2), devices=["cpu"] * 2)
    for count in (8, 4, 6, 2):
        check_results(plain, model, samples(count))
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=CLOSE, atol=CLOSE)


@pytest.mark.full
def test_a_length_that_python_takes_is_captured_once_for_each_number_of_samples(traced: list[LayerGraph]) -> None:
    """`len(x)` is a plain number, of which no export knows where it goes: each capture turns out to be the first."""
    torch.manual_seed(0)
    plain = Net(lambda m, x: m.attend(x) * (1 + torch.arange(len(x)))[:, None, None]).double()
    model = Compiled(copy.deepcopy(plain), partial(plan_by, "data parallel", 2), devices=["cpu"] * 2, check="off")
    for count in (4, 6, 2, 6, 4, 2):
        check_results(plain, model, samples(count))
    assert [graph.batch for graph in traced] == [4, 6, 2]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(IDIOMS.keys() - {"contrastive"}))
def test_every_layer_that_samples_reach_has_replicas(name: str) -> None:
    graph = capture(net(name), (samples(4),))
    whole = [layer for layer in graph.layers.values() if layer.batch is None and not layer.constant]
    assert [layer.nodes[0].target for layer in whole] == ([torch.ops.aten.arange.default] if name == "numbered" else [])


@pytest.mark.full
@pytest.mark.parametrize("name", IDIOMS)
def test_it_is_priced_at_any_batch(name: str) -> None:
    few, many = capture(net(name), (samples(4),)), capture(net(name), (samples(12),))
    made = at_batch(few, 12)
    assert made.values == many.values
    assert {n: (layer.batch, layer.axes) for n, layer in made.layers.items()} == {
        n: (layer.batch, layer.axes) for n, layer in many.layers.items()
    }


@pytest.mark.full
def test_masks_are_held_once_and_not_per_sample() -> None:
    graph = capture(net("packed"), (samples(4),))
    inner = [node for layer in graph.layers.values() if layer.constant for node in layer.nodes]
    assert {"cumsum"} <= {str(node.target).split(".")[1] for node in inner}
    assert all(graph.values[node.name].shape[:1] != (4,) for node in inner)


def test_a_number_that_follows_the_batch_binds_no_other_op() -> None:
    def share(m: Net, x: Tensor) -> Tensor:
        y = m.attend(x).relu() * 2
        return (y / len(x)).relu() + y

    graph = capture(Net(share).double(), (samples(4),))
    whole = [[str(node.target) for node in layer.nodes] for layer in graph.layers.values() if layer.batch is None]
    assert whole == [["aten.div.Tensor"]]
    assert graph.fixed_batch


def filled(m: Net, x: Tensor) -> Tensor:
    """A fill value that follows the batch."""
    return m.attend(x * torch.full((len(x), 1, 1), 1.0 / len(x), dtype=x.dtype))


def divided(m: Net, x: Tensor) -> Tensor:
    """Rows laid out once per sample, divided by their number."""
    return m.attend(x * (torch.ones(len(x), 1, 1, dtype=x.dtype) / len(x)))


def expanded_share(m: Net, x: Tensor) -> Tensor:
    """Positions laid out once per sample, times a number that follows the batch."""
    return m.attend(x + torch.arange(8.0, dtype=x.dtype)[None, None].expand(len(x), 1, -1) * (1.0 / len(x)))


def hard_negatives(m: Net, x: Tensor) -> Tensor:
    """Every sample against two documents of every sample."""
    y = m.attend(x).mean(1)
    documents = torch.cat([m.out(m.out(y)), y.flip(1)])
    return F.cross_entropy(y @ documents.T, torch.arange(len(x)))


@pytest.mark.full
@pytest.mark.parametrize("plan", ["data parallel", "model parallel", "mixed"])
@pytest.mark.parametrize(
    ("idiom", "batches"),
    [
        (filled, (4, 6, 2, 3)),
        (divided, (4, 6, 2, 3)),
        (expanded_share, (4, 6, 2, 3)),
        (hard_negatives, (24, 6, 10, 16)),
    ],
)
def test_numbers_that_follow_the_batch_are_those_of_the_batch(
    idiom: Idiom, batches: tuple[int, ...], plan: str
) -> None:
    torch.manual_seed(0)
    plain = Net(idiom).double()
    model = Compiled(copy.deepcopy(plain), partial(plan_by, plan, 2), devices=["cpu"] * 2, check="off")
    for count in batches:
        check_results(plain, model, samples(count))
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            grads = [torch.zeros_like(p) if one.grad is None else one.grad for one in (p, q)]
            torch.testing.assert_close(grads[1], grads[0], rtol=CLOSE, atol=CLOSE)
