"""`loss=`: a model planned with its loss has the model's own names and results, and the loss of the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parplan
from parplan.errors import ModelError
from parplan.graph.capture.capture import capture
from parplan.graph.user_code.with_loss import with_loss
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import planner
from tests.runtime.loss_cases import cut_losses

CLASSES = 48


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.0), nn.Linear(12, CLASSES)).double()


def batch(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 6, dtype=torch.float64), torch.randint(0, CLASSES, (samples,))


LOSSES: dict[str, Any] = {
    "function": F.cross_entropy,
    "module": nn.CrossEntropyLoss(torch.linspace(1, 2, CLASSES).double(), ignore_index=3),
    "lambda": lambda scores, target: F.nll_loss(scores.log_softmax(1), target) + 0.1 * scores.square().mean(),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", [(2, 1), (2, 2)])
@pytest.mark.parametrize("loss", LOSSES)
def test_three_steps_and_an_evaluation_are_the_plain_models(loss: str, cut: tuple[int, int]) -> None:
    plain, criterion = net(), LOSSES[loss]
    devices = cut[0] * cut[1]
    own = copy.deepcopy(plain)
    model = Compiled(with_loss(own, criterion), planner(cut_losses(*cut), devices), devices=["cpu"] * devices)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain)]
    for _ in range(3):
        x, y = batch(6)
        for optimizer in optimizers:
            optimizer.zero_grad()
        found, wanted = model(x, targets=y), criterion(plain(x), y)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        found.backward()
        wanted.backward()
        for optimizer in optimizers:
            optimizer.step()
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)
    model.eval()
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-10, atol=1e-10)


def test_names_are_the_models_own() -> None:
    plain = net()
    x, y = batch(8)
    inside = with_loss(plain, nn.CrossEntropyLoss())
    assert list(inside.state_dict()) == list(plain.state_dict())
    assert [id(p) for p in inside.parameters()] == [id(p) for p in plain.parameters()]
    assert type(inside).__name__ == type(plain).__name__
    with_it, without = capture(inside, (x,), {"targets": y}), capture(plain, (x,))
    assert with_it.fingerprint == without.fingerprint
    assert list(with_it.layers)[: len(without.layers)] == list(without.layers)
    assert "loss" in with_it.layers
    torch.testing.assert_close(plain(x), inside(x))


@pytest.mark.full
def test_a_plan_made_with_a_loss_runs_with_it() -> None:
    x, y = batch(8)
    plain = net()
    decision = parplan.analyze(plain, x, loss=F.cross_entropy, targets=y, gpus=2, gpu="k20")
    assert decision.loss_outside is None
    assert "loss" in decision.plan.layers
    model = parplan.compile(net(), x, loss=F.cross_entropy, targets=y, plan=decision.plan, devices=["cpu"] * 2)
    assert model(x, targets=y).shape == ()
    assert model(x).shape == (8, CLASSES)
    assert parplan.verify(net(), x, loss=F.cross_entropy, targets=y, plan=decision.plan).passed


def test_a_report_says_what_a_loss_outside_takes() -> None:
    """Scores of a cut vocabulary are handed out sample by sample: all to all, there and back."""
    model = nn.Linear(64, 48 * 512)
    x, y = torch.randn(64, 64), torch.zeros(64, dtype=torch.long)
    outside = parplan.analyze(model, x, gpus=4, gpu="k20", pins={"linear": "shards:4 axis:out-features"})
    found = outside.loss_outside
    assert found is not None
    assert found.nbytes == 64 * 48 * 512 * 4
    assert 0.01 < found.share < 1
    assert found.moved_s == pytest.approx(found.share * outside.prediction.step_s)
    assert str(found) in outside.notes
    pins = {"linear": "shards:4 axis:out-features"}
    inside = parplan.analyze(model, x, loss=F.cross_entropy, targets=y, gpus=4, gpu="k20", pins=pins)
    assert inside.loss_outside is None


def test_what_has_no_meaning_is_refused() -> None:
    x = torch.randn(4, 2)
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda module, args, result: result)
    with pytest.raises(ModelError, match="is no loss"):
        parplan.analyze(nn.Linear(2, 2), x, loss=3.0)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="targets are given without a loss"):
        parplan.analyze(nn.Linear(2, 2), x, targets=x)
    with pytest.raises(ModelError, match="Linear has hooks of its own"):
        parplan.compile(hooked, x, loss=F.mse_loss, targets=x)
    with pytest.raises(ModelError, match="Bilinear has parameters"):
        parplan.compile(nn.Linear(2, 2), x, loss=nn.Bilinear(2, 2, 1), targets=x)
