"""Random draws replaced by constants: the same whatever the shape, without a trace in the generators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.runtime.self_check.constant_draws import ConstantDraws

X = torch.linspace(-1.0, 1.0, 24).view(2, 3, 4)
LSTM = nn.LSTM(4, 4, num_layers=2, dropout=0.5)

DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(X, 0.3),
    "channel dropout": lambda: F.dropout1d(X, 0.3),
    "alpha dropout": lambda: F.alpha_dropout(X, 0.3, True),
    "attention": lambda: F.scaled_dot_product_attention(X[None], X[None], X[None], None, 0.4),
    "rrelu": lambda: F.rrelu(X, training=True),
    "gumbel softmax": lambda: F.gumbel_softmax(X),
    "rand": lambda: torch.rand(2, 3),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(3, 9, (4,)),
    "randperm": lambda: torch.randperm(5),
    "bernoulli": lambda: torch.bernoulli(torch.full((4,), 0.3)),
    "uniform_": lambda: torch.empty(3).uniform_(2.0, 4.0),
    "uniform": lambda: torch.ops.aten.uniform(torch.empty(3), 2.0, 4.0),
    "exponential": lambda: torch.ops.aten.exponential(torch.empty(3)),
    "normal_": lambda: torch.empty(3).normal_(2.0, 0.5),
    "normal": lambda: torch.normal(X, 1.0),
    "distribution": lambda: torch.distributions.Normal(X, torch.ones_like(X)).rsample(),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "lstm": lambda: LSTM(X)[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_two_runs_draw_alike_and_leave_the_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    results = []
    for _ in range(2):
        with ConstantDraws() as draws:
            results.append(DRAWS[name]())
        assert draws.unknown == set()
    assert torch.equal(*results)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_part_draws_what_the_whole_draws() -> None:
    with ConstantDraws():
        whole = F.dropout(X, 0.25) * torch.randn_like(X)
        part = F.dropout(X[1:], 0.25) * torch.randn_like(X[1:])
    assert torch.equal(whole[1:], part)
    torch.testing.assert_close(whole, X / 0.75)


def test_gradients_go_through() -> None:
    x = X.clone().requires_grad_()
    with ConstantDraws():
        F.dropout(F.rrelu(x, 0.1, 0.3, training=True), 0.5).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.where(x.detach() > 0, 2.0, 0.4))


def test_what_cannot_be_replaced_is_named() -> None:
    with ConstantDraws() as draws:
        torch.multinomial(torch.ones(4), 2)
    assert draws.unknown == {"multinomial"}
