"""Dropout under a plan: alike where devices compute the same thing, apart where they hold different parts of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parplan.plan import Strategy
from parplan.runtime.execution.random_state import OwnDraws
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import compiled, planner, spread, spread_all
from tests.runtime.nets import Adds, DropLinear
from tests.runtime.ranks import Case, run_case

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


def test_a_stream_goes_on_where_it_was_left_beside_the_callers_numbers() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(4)
    torch.manual_seed(7)
    stream, found = OwnDraws(11, ()), [torch.rand(1)]
    parts = []
    for _ in range(3):
        with stream.entered():
            parts.append(torch.rand(2))
        found.append(torch.rand(1))
    assert torch.equal(torch.cat(found), wanted)
    torch.manual_seed(11)
    assert torch.equal(torch.cat(parts), torch.rand(6))


# --- processes that were seeded alike --------------------------------------------------------


def masks(tensor: Tensor, ranks: int) -> list[Tensor]:
    """What each rank has."""
    found = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(found, tensor.detach())
    return found


def apart(rank: int, ranks: int) -> None:
    """Their masks differ, are those of the seed whatever the self-check does, and leave the script's numbers alike."""
    seen = []
    for check in ("first", "off", "first"):
        model = Compiled(nn.Sequential(nn.Dropout(), nn.Dropout()), planner(spread(ranks, "data"), ranks), check=check)
        torch.manual_seed(5)
        of_ranks = masks(model(ones(2, 64)), ranks)
        state = torch.get_rng_state()
        assert not any(torch.equal(one, other) for i, one in enumerate(of_ranks) for other in of_ranks[:i])
        assert 0 < int((of_ranks[rank] == 0).sum()) < 128
        torch.manual_seed(5)
        torch.randint(1 << 62, ())  # one draw, the same on all ranks
        assert torch.equal(state, torch.get_rng_state())
        assert [one.unchecked for one in model.checked] == ([""] if check == "first" else [])
        seen.append(of_ranks[rank])
        assert not torch.equal(model(ones(2, 64)), seen[0])
        model.eval()
        state = torch.get_rng_state()
        model(ones(2, 64))
        assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def replayed(rank: int, ranks: int) -> None:
    """The forward that a checkpoint runs again draws what it drew before."""
    net = nn.Sequential(nn.Dropout(), nn.Linear(64, 3).double(), nn.Dropout())
    model = Compiled(net, planner(spread(ranks, "data"), ranks))
    torch.manual_seed(5)
    x = ones(2, 64).requires_grad_()
    found = checkpoint(model, x, use_reentrant=False)
    torch.rand(3)
    found.sum().backward()
    assert x.grad is not None
    weight = next(parameter for name, parameter in model.named_parameters() if name == "1.weight")
    torch.manual_seed(5)
    again = ones(2, 64).requires_grad_()
    results = model(again)
    assert torch.equal(found, results)
    (wanted,) = torch.autograd.grad(results.sum(), again)
    assert torch.equal(x.grad, wanted)
    assert weight.grad is not None


def in_unseen_sizes(rank: int, ranks: int) -> None:
    """Evaluation with dropout (Monte Carlo) draws apart also where a size was not met before, and none is captured."""
    model = Compiled(Sampled(), planner(spread(ranks, "data"), ranks))
    model.eval()
    for length in (3, 5, 7):
        torch.manual_seed(1)
        with torch.no_grad():
            of_ranks = masks(model(ones(2, length, 64)), ranks)
        assert not torch.equal(of_ranks[0], of_ranks[1])


class Sampled(nn.Module):
    """Dropout in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


def as_ddp(rank: int, ranks: int) -> None:
    """On demand the masks are DistributedDataParallel's, bit for bit, and so is what the script draws afterwards."""
    net = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 4), nn.Dropout(0.2)).double()
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    model = Compiled(net, planner(spread(ranks, "data"), ranks), same_draws=True)
    drawn = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 6, generator=drawn, dtype=torch.float64)
    found = []
    for one in (model, ddp):
        torch.manual_seed(5)
        results = one(x)
        results.square().sum().backward()
        found.append([results, *(parameter.grad for parameter in one.parameters()), torch.rand(2)])
    for own, others in zip(*found, strict=True):
        torch.testing.assert_close(own, others, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[0][0] == 0, found[1][0] == 0)
    kept = [one != 0 for one in masks(Compiled(nn.Sequential(nn.Dropout(), nn.Identity()),
            planner(spread(ranks, "data"), ranks), same_draws=True)(ones(2, 64)), ranks)]  # fmt: skip
    assert all(torch.equal(kept[0], other) for other in kept[1:])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [apart, in_unseen_sizes, replayed, as_ddp])
def test_processes_that_were_seeded_alike(case: Case) -> None:
    run_case(case, 2)
