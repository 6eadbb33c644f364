"""Dropout under a plan: alike where devices compute the same thing, apart where they hold different parts of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import compiled, planner, spread, spread_all
from tests.runtime.nets import Adds, DropLinear

FOUR = (0, 1, 2, 3)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def test_redundant_copies_drop_alike() -> None:
    model = compiled(nn.Sequential(nn.Identity(), Adds()), spread_all(4), 4)
    results = [model(torch.zeros(8, 32, dtype=torch.float64)) for _ in range(3)]
    for result in results:
        assert (result == result[0]).all()
        assert 0 < int((result[0] == 0).sum()) < 32
    assert not torch.equal(results[0], results[1])
    results[2].sum().backward()
    table = dict(model.named_parameters())["1.table"]
    assert table.grad is not None
    # As one layer would: the gradient of a copy passes where its mask let the value pass.
    assert torch.equal(table.grad, 8 * results[2][0])


def test_replicas_drop_apart() -> None:
    model = compiled(nn.Sequential(nn.Dropout(), nn.Identity()), spread(2, "data"), 2)
    first, second = model(ones(2, 64)).chunk(2)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("replicas", [1, 2])
def test_shards_drop_apart_and_so_do_their_replicas(replicas: int) -> None:
    strategy = Strategy(replicas, 4 // replicas, "features", FOUR)
    model = compiled(nn.Sequential(nn.Dropout(), nn.Identity()), {"0": strategy}, 4)
    result = model(ones(replicas, 128))
    blocks = [block for row in result for block in row.chunk(4 // replicas)]
    assert not any(torch.equal(a, b) for i, a in enumerate(blocks) for b in blocks[:i])


def test_shards_that_read_one_whole_input_drop_it_alike() -> None:
    linear = DropLinear(16, 8, bias=False).double()
    linear.weight.data[:] = linear.weight.data[0].clone()
    strategy = Strategy(2, 2, "out-features", FOUR)
    model = compiled(nn.Sequential(linear, nn.Identity()), {"0": strategy}, 4)
    result = model(ones(2, 16)).detach()
    torch.testing.assert_close(result, result[:, :1].expand_as(result))
    assert not torch.allclose(result[0], result[1])


def test_a_seed_repeats_a_step_and_the_callers_generator_moves_on_by_one_draw() -> None:
    model = compiled(nn.Sequential(nn.Linear(6, 64), nn.Dropout()).double(), {"1": cut()}, 2)
    x = ones(3, 6)
    model(x)
    found, states = [], []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(model(x))
        states.append(torch.get_rng_state())
    assert torch.equal(found[0], found[1])
    torch.manual_seed(5)
    torch.randint(1 << 62, ())
    assert all(torch.equal(state, torch.get_rng_state()) for state in states)
    assert not torch.equal(model(x), found[0])


def cut() -> Strategy:
    return Strategy(1, 2, "features", (0, 1))


def test_nothing_is_drawn_without_dropout() -> None:
    net = nn.Sequential(nn.Linear(6, 64), nn.Dropout()).double()
    model = Compiled(net, planner({"1": cut()}, 2), devices=["cpu"] * 2)
    model(ones(3, 6))
    state = torch.get_rng_state()
    torch.testing.assert_close(model.eval()(ones(3, 6)), net(ones(3, 6)))
    assert torch.equal(torch.get_rng_state(), state)
