"""The plain module in place of a plan: one rank alone, unseen sizes, methods beside forward, plain copies."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.errors import PlainModuleWarning, RuntimeFailure
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.programs import captures
from parplan.runtime.transport.rendezvous import RANK_WAIT, RankAlone
from tests.runtime.helpers import compiled, planner, spread
from tests.runtime.ranks import run_case

SAMPLES = 4
LIMIT_S = 10.0  # of a rank that is alone; the group's timeout is far above


class Net(nn.Module):
    """Batch norm, dropout, and a loss where there are targets."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.drop, self.head = (
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.0),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        """(N, 6) to (N, 4), and the loss."""
        found = self.head(self.drop(self.norm(self.body(x)).relu()))
        return found if targets is None else (found, F.cross_entropy(found, targets))

    def generate(self, x: Tensor) -> Tensor:
        """The best class of each sample."""
        found: Tensor = self(x)
        return found.argmax(1)

    def start_anew(self) -> int:
        """Parameters that are made anew."""
        nn.init.zeros_(self.head.bias)
        return sum(parameter.numel() for parameter in self.parameters())


def data(ranks: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Samples and targets of all ranks."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES * ranks, 6, dtype=torch.float64, generator=draw)
    return x, torch.randint(4, (SAMPLES * ranks,), generator=draw)


def own(tensor: Tensor, rank: int) -> Tensor:
    """A rank's samples."""
    return tensor[SAMPLES * rank : SAMPLES * rank + SAMPLES]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Tensor) -> None:
    """One training step."""
    optimizer.zero_grad()
    model.train()(*args)[1].backward()
    optimizer.step()


def both(kind: str, ranks: int) -> tuple[Any, Any, list[torch.optim.Optimizer]]:
    """A compiled model, the plain one, and their optimizers."""
    plain = Net().double()
    model = Compiled(copy.deepcopy(plain), planner(spread(ranks, kind), ranks))
    return model, plain, [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]


def evaluated(model: nn.Module, *args: Tensor) -> Any:
    """Results without gradients."""
    model.eval()
    with torch.no_grad():
        return model(*args)


def repeated(model: nn.Module, *args: Tensor) -> None:
    """Many evaluations, of which one may wait."""
    for _ in range(20):
        evaluated(model, *args)


def within(limit_s: float, call: Callable[..., Any], *args: Any) -> Any:
    """The result of `call`, which has to come before the group's timeout by far."""
    began = time.monotonic()
    try:
        return call(*args)
    finally:
        assert time.monotonic() - began < limit_s


def rank_0_evaluates(rank: int, ranks: int) -> None:
    """Before, between and behind training steps, while the other goes on: its own loss, as in DDP; then all train."""
    model, plain, optimizers = both("data", ranks)
    x, y = data(ranks)
    for number in range(3):
        if rank == 0:
            for samples in (x, x[:3]):
                for given in ((samples,), (samples, y[: len(samples)])):
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", PlainModuleWarning)
                        found = within(LIMIT_S, evaluated, model, *given)
                    torch.testing.assert_close(found, evaluated(plain, *given))
            torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
        step(model, optimizers[0], own(x, rank), own(y, rank))
        step(plain, optimizers[1], x, y)
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), msg=f"step {number}")
    together = evaluated(model, own(x, rank), own(y, rank))  # a loss of all ranks' samples, which all have to come for
    wanted = evaluated(plain, x, y)
    torch.testing.assert_close(together, (own(wanted[0], rank), wanted[1]))


def rank_0_says_so(rank: int, ranks: int) -> None:
    """A number over the samples is that of one rank, which is said once."""
    model, _, optimizers = both("data", ranks)
    x, y = data(ranks)
    step(model, optimizers[0], own(x, rank), own(y, rank))
    if rank == 0:
        with pytest.warns(PlainModuleWarning, match=r"rank 0 evaluates alone \(rank 1 is in training\)"):
            evaluated(model, x, y)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            evaluated(model, x, y)
    step(model, optimizers[0], own(x, rank), own(y, rank))


def rank_0_alone_on_cut_parameters(rank: int, ranks: int) -> None:
    """An error at once, on that rank alone; then all go on."""
    model, plain, optimizers = both("hybrid", ranks)
    x, y = data(ranks)
    for number in range(3):
        if rank == 0 and number:
            for call in (lambda: evaluated(model, x), model.state_dict, optimizers[0].state_dict, model.plain):
                with pytest.raises(RankAlone, match=r"rank 0 is in .*rank 1 is in training; .*if rank == 0"):
                    within(LIMIT_S, call)
        for optimizer in optimizers:
            optimizer.param_groups[0]["momentum"] = 0.9
        step(model, optimizers[0], own(x, rank), own(y, rank))
        step(plain, optimizers[1], x, y)
    state = model.state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name], tensor, msg=name)
    torch.testing.assert_close(evaluated(model, own(x, rank)), own(evaluated(plain, x), rank))


def others_give_no_sign(rank: int, ranks: int) -> None:
    """Ranks in a barrier: rank 0 ends after the time that is set, or runs where it has all weights."""
    x, y = data(ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RANK_WAIT, "1")
        for kind in ("hybrid", "data"):
            model, plain, optimizers = both(kind, ranks)
            step(model, optimizers[0], own(x, rank), own(y, rank))
            step(plain, optimizers[1], x, y)
            if rank == 0 and kind == "hybrid":
                with pytest.raises(RankAlone, match=r"rank 1 is in training, and has given no sign for 1 s"):
                    within(LIMIT_S, evaluated, model, x)
            elif rank == 0:
                with pytest.warns(PlainModuleWarning, match="rank 0 evaluates alone"):
                    within(
                        LIMIT_S, lambda model=model: [evaluated(model, x, y) for _ in range(20)]
                    )  # one of them waits
                found = evaluated(model, x, y)
                torch.testing.assert_close(found, evaluated(plain, x, y))
            dist.barrier()
            state = model.state_dict()
            torch.testing.assert_close(dict(state), dict(plain.state_dict()))


def late_ranks_are_waited_for(rank: int, ranks: int) -> None:
    """A rank that captures for longer than others wait, and rank 0 that comes later than that."""
    x, y = data(ranks)

    def slow(*args: Any, **kwargs: Any) -> LayerGraph:
        time.sleep(2)
        return capture(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RANK_WAIT, "1")
        if rank == 1:
            patch.setattr(captures, "capture", slow)
        model, plain, optimizers = both("hybrid", ranks)
        torch.testing.assert_close(evaluated(model, own(x, rank)), own(evaluated(plain, x), rank))
        step(model, optimizers[0], own(x, rank), own(y, rank))
        step(plain, optimizers[1], x, y)
        if rank == 0:
            time.sleep(2)
        torch.testing.assert_close(
            evaluated(model, own(x, rank), own(y, rank))[0], own(evaluated(plain, x, y)[0], rank)
        )


def modes_that_differ(rank: int, ranks: int) -> None:
    """A rank in evaluation that records gradients meets one in training: the message names what differs."""
    model, _, optimizers = both("hybrid", ranks)
    x, y = data(ranks)
    step(model, optimizers[0], own(x, rank), own(y, rank))
    model.train(rank == 1)
    with pytest.raises(RuntimeFailure, match=r"set them alike: rank 0 is in evaluation, rank 1 is in training$"):
        model(own(x, rank), own(y, rank))
    model.train()
    model.norm.train(rank == 1)
    with pytest.raises(RuntimeFailure, match=r"alike: norm\..* is not read on rank 0, \w+ on rank 1 \(is a module in"):
        model(own(x, rank), own(y, rank))


def plain_copies(rank: int, ranks: int) -> None:
    """Whole weights and statistics, in a module that knows nothing of ranks; rank 0 generates with it alone."""
    x, y = data(ranks)
    for kind in ("data", "hybrid"):
        model, plain, optimizers = both(kind, ranks)
        for _ in range(2):
            step(model, optimizers[0], own(x, rank), own(y, rank))
            step(plain, optimizers[1], x, y)
        found: Any = model.plain()
        assert type(found) is Net
        assert found.training
        torch.testing.assert_close(dict(found.state_dict()), dict(plain.state_dict()))
        if rank == 0:
            assert torch.equal(found.eval().generate(x), plain.eval().generate(x))
            found.head.weight.data.zero_()
        step(model, optimizers[0], own(x, rank), own(y, rank))
        step(plain.train(), optimizers[1], x, y)
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def unseen_sizes(rank: int, ranks: int) -> None:
    """Sizes that one rank meets alone: its own samples' results, without a capture, where no value is exchanged."""
    plain = Decoder().double()
    model = Compiled(copy.deepcopy(plain), planner(spread(ranks, "data"), ranks))
    model(torch.randint(9, (2, 5)))["scores"].sum().backward()
    x = torch.randint(9, (2 * ranks, 12), generator=torch.Generator().manual_seed(1))
    lengths = (5, 4, 7) if rank == 0 else (5,)
    captured = _captured(lambda: [evaluated(model, x[2 * rank : 2 * rank + 2, :length]) for length in lengths])
    wanted = [evaluated(plain, x[2 * rank : 2 * rank + 2, :length]) for length in lengths]
    torch.testing.assert_close([one["scores"] for one in captured[0]], [one["scores"] for one in wanted])
    assert captured[1] == 1


CASES = {
    case.__name__: case
    for case in (
        rank_0_evaluates, rank_0_says_so, rank_0_alone_on_cut_parameters, others_give_no_sign,
        late_ranks_are_waited_for, modes_that_differ, plain_copies, unseen_sizes,
    )
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_ranks(case: str) -> None:
    run_case(CASES[case], 2)


class Decoder(nn.Module):
    """One block of attention with a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 9)

    def forward(self, ids: Tensor, past: tuple[Tensor, Tensor] | None = None) -> dict[str, Any]:
        """(N, L) and keys and values of what came before, to the scores of the last place and the new ones."""
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        found = F.scaled_dot_product_attention(q, k, v)
        return {"scores": self.head(found[:, -1]), "past": (k, v)}


def _captured(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of `call`, and how many graphs were captured for it."""
    seen: list[object] = []

    def counted(*args: Any, **kwargs: Any) -> LayerGraph:
        seen.append(args)
        return capture(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captures, "capture", counted)
        return call(), len(seen)


def _decoded(model: nn.Module, ids: Tensor, tokens: int) -> list[Tensor]:
    found, past, token = [], None, ids
    for _ in range(tokens):
        result = evaluated(model, token, *([past] if past is not None else []))
        past, token = result["past"], result["scores"].argmax(-1, keepdim=True)
        found.append(result["scores"])
    return found


@pytest.mark.full
def test_decoding_is_captured_once_per_kind_of_call_and_not_per_length() -> None:
    plain = Decoder().double()
    model = compiled(plain, spread(2, "data"), 2)
    ids = torch.randint(9, (4, 3))
    model(ids)["scores"].sum().backward()
    found, count = _captured(lambda: _decoded(model, ids, 8))
    torch.testing.assert_close(found, _decoded(plain, ids, 8))
    assert count == 2  # of the first call, and of a step with a cache


@pytest.mark.full
def test_an_unseen_size_in_training_or_with_other_attributes_is_captured() -> None:
    plain = Decoder().double()
    model = compiled(plain, spread(2, "data"), 2)
    evaluated(model, torch.randint(9, (4, 10)))  # planned for the longest
    model.train()
    assert _captured(lambda: model(torch.randint(9, (4, 4))))[1] == 1
    with torch.no_grad():
        assert _captured(lambda: model(torch.randint(9, (4, 5))))[1] == 1
    model.eval()
    assert _captured(lambda: model(torch.randint(9, (4, 6))))[1] == 1
    model.head = nn.Linear(8, 9).double()
    assert _captured(lambda: evaluated(model, torch.randint(9, (4, 7))))[1] == 1
    assert _captured(lambda: evaluated(model, torch.randint(9, (4, 8))))[1] == 0


def test_results_per_replica_are_those_of_the_plan_at_any_size() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.fc(x[:, :, None]).mean()
            return found

    model = compiled(Mean(), spread(2, "data"), 2, scalars="per_replica")
    for length in (3, 4):
        assert evaluated(model, torch.randn(4, length)).shape == (2,)


def test_a_method_that_computes_before_anything_is_planned_says_so_once() -> None:
    plain = Net().double().eval()
    model: Any = compiled(plain, spread(2, "data"), 2)
    x = data(1)[0]
    assert model.start_anew() == plain.start_anew()
    with pytest.warns(PlainModuleWarning, match=r"^generate\(\) runs the plain module.* nothing is planned"):
        found = model.generate(x)
    for result in (found, model.generate(x)):
        assert torch.equal(result, plain.generate(x))
    model = compiled(plain, spread(2, "data"), 2)
    model(x)
    assert torch.equal(model.generate(x), plain.generate(x))


def test_a_plain_copy_in_one_process() -> None:
    plain = Net().double()
    model = compiled(plain, spread(2, "hybrid"), 2)
    found = model.plain()
    assert type(found) is Net
    assert found is not model.module
    torch.testing.assert_close(dict(found.state_dict()), dict(plain.state_dict()))
