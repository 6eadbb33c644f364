"""Hooks marked `parplan.whole`: all samples of the process, once per call; others say what they see."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.errors import PlanError, ReplicaHookWarning, RuntimeFailure
from parplan.plan import Scheme, Strategy
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import Rule, compiled, planner, spread
from tests.runtime.ranks import run_case

SAMPLES = 4


class Net(nn.Module):
    """A body whose features are of interest, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 6) to (N, 4)."""
        found: Tensor = self.head(self.body(x).relu())
        return found


def watched(module: Any) -> list[Tensor]:
    """The tensors that whole hooks of all kinds see."""
    seen: list[Tensor] = []

    def keep(*values: Any) -> None:
        seen.extend(tensor.detach() for value in values for tensor in value)

    module.body.register_forward_hook(parplan.whole(lambda m, args, result: keep(args, (result,))))
    module.body.register_forward_hook(
        parplan.whole(lambda m, args, kwargs, result: keep(args, (result,))), with_kwargs=True
    )
    module.head.register_forward_pre_hook(parplan.whole(lambda m, args: keep(args)))
    module.head.register_full_backward_hook(parplan.whole(lambda m, given, pulled: keep(given, pulled)))
    return seen


def rank_0_has_the_body(ranks: int) -> Rule:
    """The layers around the hooks on the first device, all others on each."""
    data = spread(ranks, "data")
    return lambda layer: Strategy() if layer.name.startswith("body") else data(layer)


def rules(devices: int) -> list[Rule]:
    """Plans that exchange gradients alone, that cut parameters, and with layers on one device."""
    return [
        spread(devices, "data"),
        spread(devices, "hybrid"),
        spread(devices, "out-features"),
        rank_0_has_the_body(devices),
    ]


def on_ranks(rank: int, ranks: int) -> None:
    """Every process's hooks see its own samples, as with DistributedDataParallel."""
    x = torch.randn(SAMPLES * ranks, 6, dtype=torch.float64)
    own = slice(SAMPLES * rank, SAMPLES * rank + SAMPLES)
    for rule in rules(ranks):
        plain = Net().double()
        model = Compiled(copy.deepcopy(plain), planner(rule, ranks))
        wanted, found = watched(plain), watched(model)
        for _ in range(2):
            found.clear()
            wanted.clear()
            model(x[own]).square().sum().backward()
            (plain(x).square().sum() / ranks).backward()
            assert len(found) == len(wanted)
            torch.testing.assert_close(found, [tensor[own] for tensor in wanted])


def unmarked_on_ranks(rank: int, ranks: int) -> None:
    """A hook that some ranks never call says so on all of them; one that sees its process's samples does not."""
    for rule, alone in ((rank_0_has_the_body(ranks), True), (spread(ranks, "data"), False)):
        model = Compiled(Net().double(), planner(rule, ranks))
        model.body.register_forward_hook(lambda m, args, result: None)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model(torch.randn(SAMPLES, 6, dtype=torch.float64))
        texts = [str(one.message) for one in said if issubclass(one.category, ReplicaHookWarning)]
        assert bool(texts) == alone
        assert all("body: a hook of this module is called on rank 0 alone" in text for text in texts)


def in_groups(rank: int, ranks: int) -> None:
    """Processes that bring the same samples work on some rows of them each, which no hook is told to be all."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    net[1].register_forward_hook(parplan.whole(lambda m, args, result: None))
    model = parplan.compile(net, pins=["0=shards:2", "2=shards:2"], inputs="group")
    told = r"1\.hooks: parplan\.whole\(hook\) .* with inputs=.group. .* compile with inputs=.own."
    with pytest.raises(PlanError, match=told):
        model(torch.randn(4, 8))


CASES = {case.__name__: case for case in (on_ranks, unmarked_on_ranks, in_groups)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_ranks(case: str) -> None:
    run_case(CASES[case], 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(4))
def test_a_whole_hook_sees_what_that_of_the_plain_module_sees(number: int) -> None:
    plain = Net().double()
    model = compiled(plain, rules(2)[number], 2)
    wanted, found = watched(plain), watched(model)
    for samples in (6, 5, 1):
        x = torch.randn(samples, 6, dtype=torch.float64)
        found.clear()
        wanted.clear()
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        assert len(found) == len(wanted)
        torch.testing.assert_close(found, wanted)


def test_an_unmarked_hook_that_reads_says_what_it_sees_once() -> None:
    model: Any = compiled(Net(), spread(2, "data"), 2)
    seen: list[int] = []
    handle = model.body.register_forward_hook(lambda m, args, result: seen.append(len(result)))
    with pytest.warns(ReplicaHookWarning, match=r"body: .* called 2 times per call, .*parplan\.whole\(hook\)"):
        model(torch.randn(6, 6))
    model(torch.randn(6, 6))
    assert seen == [3] * 4
    handle.remove()
    model.body.register_forward_hook(lambda m, args, result: 2 * result)  # changes each sample alone
    model(torch.randn(6, 6))
    model.body.register_forward_hook(parplan.whole(lambda m, args, result: seen.append(len(result))))
    model(torch.randn(6, 6))
    assert seen[4:] == [6]


def test_a_whole_hook_only_reads() -> None:
    for model in (Net(), compiled(Net(), spread(2, "data"), 2)):
        model.body.register_forward_hook(parplan.whole(lambda m, args, result: 2 * result))
        with pytest.raises(RuntimeFailure, match=r"marked parplan\.whole.* returned a value; let it return None"):
            model(torch.randn(6, 6))


def test_a_whole_hook_in_a_plan_of_passes_is_refused() -> None:
    net: Any = Net()
    net.head.register_forward_hook(parplan.whole(lambda m, args, result: None))
    model = Compiled(net, planner(spread(2, "data"), 2, Scheme.INTERLEAVE), devices=["cpu"] * 2)
    with pytest.raises(PlanError, match=r"head\.hooks: parplan\.whole\(hook\) needs a plan without passes"):
        model(torch.randn(6, 6))
