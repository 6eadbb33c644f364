"""Replicas whose parts of the batch differ by one sample compute the plain model's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parplan
from parplan.errors import RuleError
from parplan.graph.capture.capture import capture
from parplan.layout import split_evenly
from parplan.lowering.program import Compute
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.search_space.verifier import check
from tests.runtime.helpers import differences, outcome
from tests.runtime.ranks import run_case
from tests.runtime.uneven_cases import CASES, NETS, batch, build, plan_for

SMALL = [(net, samples, devices) for net in NETS for samples, devices in ((7, 2), (7, 3), (7, 4), (5, 4))]
LARGE = [(net, 256, devices) for net in ("mlp", "conv", "block") for devices in (3, 5, 6, 7)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("net", "samples", "devices"), [*SMALL, *LARGE])
def test_a_step_gives_the_plain_models_numbers(net: str, samples: int, devices: int) -> None:
    x, plain = batch(net, samples), build(net)
    plan = plan_for(net, samples, devices)
    model = parplan.compile(copy.deepcopy(plain), plan=plan, devices=["cpu"] * devices, check="always")
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}
    assert model.program is not None
    parts = {step.batches for step in model.program.forward if isinstance(step, Compute)}
    assert split_evenly(samples, devices) in parts


@pytest.mark.parametrize(
    ("net", "ranks"),
    [pytest.param(net, n, marks=() if (net, n) == ("conv", 2) else pytest.mark.full) for net in CASES for n in (2, 3)],
)
def test_ranks_agree_with_the_plain_model(net: str, ranks: int) -> None:
    run_case(CASES[net], ranks)


def test_a_loss_outside_of_the_model_is_a_mean_over_samples() -> None:
    x, plain, y = batch("conv", 7), build("conv"), torch.randint(12, (7,))
    model = parplan.compile(copy.deepcopy(plain), plan=plan_for("conv", 7, 3), devices=["cpu"] * 3)
    for one in (model, plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(one(x), y).backward()
            optimizer.step()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], wanted, rtol=1e-9, atol=1e-9)


def test_a_train_step_updates_as_the_plain_loop() -> None:
    x, y, plain = batch("mlp", 7), torch.randn(7, 4, dtype=torch.float64), build("mlp")
    model = parplan.compile(copy.deepcopy(plain), plan=plan_for("mlp", 7, 4), devices=["cpu"] * 4)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    loss = model.train_step(x, y, F.mse_loss, optimizers[0])
    wanted = F.mse_loss(plain(x), y)
    wanted.backward()
    optimizers[1].step()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=1e-9)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)


def test_a_loss_per_replica_is_of_its_own_samples() -> None:
    x, plain = batch("loss", 7), build("loss")
    model = parplan.compile(
        copy.deepcopy(plain).eval(), plan=plan_for("loss", 7, 3), devices=["cpu"] * 3, scalars="per_replica"
    )
    losses, _ = model(x)
    wanted = [plain.eval()(part)[0] for part in x.split(split_evenly(7, 3))]
    torch.testing.assert_close(losses, torch.stack(wanted), rtol=1e-9, atol=1e-9)


def test_dropout_draws_for_every_sample() -> None:
    net = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5)).double()
    x = torch.randn(7, 6, dtype=torch.float64)
    graph = capture(net, (x,))
    layers = {name: Strategy(3, 1, None, (0, 1, 2)) for name in graph.layers}
    plan = Plan(graph.model, graph.fingerprint, 7, 3, layers)
    torch.manual_seed(0)
    model = parplan.compile(copy.deepcopy(net), plan=plan, devices=["cpu"] * 3)
    y = model(x)
    kept = y != 0
    assert len({tuple(row.tolist()) for row in kept}) == 7  # no two samples drop the same
    torch.testing.assert_close(y[kept], 2 * net[0](x)[kept], rtol=1e-9, atol=1e-9)


@pytest.mark.full
def test_verify_runs_the_parts_of_the_plan() -> None:
    plan = plan_for("conv", 256, 5)
    found = parplan.verify(build("conv"), batch("conv", 256), plan=plan)
    assert found.passed
    assert found.batch % 5 == 256 % 5


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_strict_rules_keep_equal_parts() -> None:
    graph = capture(build("mlp"), (batch("mlp", 7),))
    with pytest.raises(RuleError, match=r"a batch of 7 cannot be split over 3 replicas; use 1 .*R1"):
        check(plan_for("mlp", 7, 3, rules="strict"), graph)


def test_no_part_is_empty() -> None:
    graph = capture(build("mlp"), (batch("mlp", 3),))
    with pytest.raises(RuleError, match=r"a batch of 3 cannot be split over 4 replicas; use 1 or 3"):
        check(plan_for("mlp", 3, 4), graph)


@pytest.mark.parametrize("scheme", [Scheme.BROADCAST, Scheme.INTERLEAVE])
def test_passes_keep_equal_parts(scheme: Scheme) -> None:
    graph = capture(build("mlp"), (batch("mlp", 7),))
    plan = plan_for("mlp", 7, 2)
    last = {"4": Strategy(1, 2, "out-features", (0, 1))}
    check(plan.with_layers(last), graph)
    with pytest.raises(RuleError, match=r"7 cannot be split over 2 replicas in equal parts, which 2 passes need"):
        check(Plan(plan.model, plan.fingerprint, 7, 2, {**plan.layers, **last}, scheme=scheme), graph)
