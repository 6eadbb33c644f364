"""Mixtures of experts in every form, by samples and by experts: training gives the plain numbers in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parplan.graph.axes.experts import GroupedInDouble
from parplan.graph.capture.capture import capture
from parplan.runtime.module.compiled import Compiled
from parplan.verification import verify_plan
from tests.runtime.expert_nets import EXPERTS, FORMS, Mixture
from tests.runtime.helpers import CLOSE, compiled, differences, outcome, planner, spread

INPUT = (6, 3, 6)


def mixture(form: str, biased: bool = False, lonely: int | None = None) -> Mixture:
    torch.manual_seed(2)
    return Mixture(form, biased, lonely)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("form", FORMS)
def test_experts_are_one_layer_with_samples_and_experts(form: str, biased: bool) -> None:
    net = mixture(form, biased)
    with GroupedInDouble():
        graph = capture(net, (torch.zeros(INPUT, dtype=torch.float64),))
    (layer,) = (layer for layer in graph.layers.values() if layer.axis("experts"))
    assert layer.name.startswith("experts")
    assert layer.kind == "experts"
    assert layer.batch is not None
    assert {axis.units for axis in layer.axes if axis.name == "experts"} == {EXPERTS}
    assert {graph.parameters[p] for p in layer.parameters} == {
        f"experts.{n}" for n, _ in net.experts.named_parameters()
    }
    assert not graph.fixed_batch


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lonely", [None, 1])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("form", FORMS)
def test_plans_train_as_the_plain_model(form: str, biased: bool, lonely: int | None) -> None:
    for devices, axis in ((2, "data"), (2, "experts"), (4, "experts")):
        plain = mixture(form, biased, lonely)
        with GroupedInDouble():
            model = compiled(plain, spread(devices, axis), devices)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
            for _ in range(3):
                x = torch.randn(INPUT, dtype=torch.float64)
                assert differences(outcome(model.module, model, x), outcome(plain, plain, x)) == {}
                for optimizer in optimizers:
                    optimizer.step()
        for (name, found), wanted in zip(model.module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=CLOSE, atol=CLOSE, msg=name)


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_one_capture_serves_all_numbers_of_samples(form: str) -> None:
    net = mixture(form)
    model = Compiled(copy.deepcopy(net), planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    with GroupedInDouble():
        for samples in (4, 6, 3):
            x = torch.randn(samples, 3, 6, dtype=torch.float64)
            torch.testing.assert_close(model(x), net(x), rtol=CLOSE, atol=CLOSE)
    assert model.graph is not None
    assert model.graph.batch == 4


def test_verification_in_float64_has_a_product_per_expert() -> None:
    net: nn.Module = mixture("grouped").float()
    result = verify_plan(net, (torch.randn(INPUT),), None, planner(spread(2, "experts"), 2), devices=2)
    assert result.passed
