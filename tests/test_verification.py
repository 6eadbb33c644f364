"""What verification must not overlook, on models and results made to be overlooked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.errors import ModelError
from parplan.graph.attributes.size_branches import SizeBranches
from parplan.plan import Plan
from parplan.runtime.self_check.double_copy import double
from parplan.verification import Verification, VerificationRow, _compared, _run

NAN, INF = math.nan, math.inf


class Spectrum(nn.Module):
    """Complex weights and results."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(12, 6, dtype=torch.cfloat)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 12) to (N, 6), complex."""
        result: Tensor = self.mix(torch.complex(x, x.flip(1)))
        return result


class Masked(nn.Module):
    """Results that are minus infinity in places."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 12) to (N, 6)."""
        mask = torch.arange(6, device=x.device) % 2 == 0
        result: Tensor = self.fc(x).masked_fill(mask, -INF)
        return result


class Square(nn.Module):
    """Works for 12 samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        """(12, 12) to the same."""
        result: Tensor = self.fc(x) + x.t()
        return result


class Stubborn(nn.Module):
    """Computes in float32 whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 12) to the same."""
        result: Tensor = self.fc(x.float())
        return result


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [Masked, Spectrum, Square, nn.Identity])
@pytest.mark.parametrize("devices", [1, 3])
def test_models_out_of_the_ordinary_pass(make: type[nn.Module], devices: int) -> None:
    found = parplan.verify(make(), torch.randn(12, 12), devices=devices)
    assert found.passed, found.rows


class Casts(nn.Module):
    """A norm that casts to float32, or another type, between two linear layers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.first, self.last, self.scale = nn.Linear(12, 12), nn.Linear(12, 6), nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 12) to (N, 6)."""
        y = self.first(x).to(self.dtype)
        y = (y * y.square().mean(-1, keepdim=True).rsqrt() * (1 + self.scale.to(self.dtype))).to(x.dtype)
        result: Tensor = self.last(y)
        return result


class StochasticDepth(nn.Module):
    """Branches that are left out at random, by draws of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 12) to the same."""
        keep = torch.floor(0.9 + torch.rand(len(x), 1, dtype=x.dtype))
        x = x + self.fc(x) / 0.9 * keep
        x = x + self.fc(x) * x.new_empty(len(x), 1).bernoulli_(0.8).div_(0.8)
        result: Tensor = x + torch.randn_like(x) * nn.functional.dropout(x, 0.5)
        return result


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2])
def test_draws_are_the_same_for_every_plan(devices: int) -> None:
    found = parplan.verify(StochasticDepth(), torch.randn(12, 12), devices=devices)
    assert found.passed, found.rows
    assert {row.tolerance for row in found.rows} == {1e-9}


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_float32_parts_are_compared_as_float32_sums(devices: int) -> None:
    found = parplan.verify(Casts(), torch.randn(12, 12), devices=devices)
    assert found.passed, found.rows
    allowed = {row.group: row.tolerance for row in found.rows}
    eps = torch.finfo(torch.float32).eps
    assert allowed == dict.fromkeys(allowed, pytest.approx(eps * math.sqrt(found.batch * 12), rel=1e-3))


HALVES = [(torch.bfloat16, 0.125, "bfloat16"), (torch.float16, 0.016, "float16")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shards", ["replicas:2", "shards:2"])
@pytest.mark.parametrize(("dtype", "tolerance", "word"), HALVES)
def test_parts_in_half_precision_are_compared_as_its_sums(
    dtype: torch.dtype, tolerance: float, word: str, shards: str
) -> None:
    model, x = Casts(dtype), torch.randn(12, 12)
    plan = parplan.analyze(model, x, gpus=2, gpu="k20", pins={"first": shards, "last": shards}).plan
    found = parplan.verify(model, x, plan=plan)
    assert found.passed, found.rows
    allowed = {row.group: row.tolerance for row in found.rows}
    assert all(torch.finfo(dtype).eps < own <= tolerance for own in allowed.values()), allowed
    assert found.casts == (word,)


@pytest.mark.parametrize(("dtype", "tolerance", "word"), HALVES)
def test_a_part_in_half_precision_hides_no_missing_term(dtype: torch.dtype, tolerance: float, word: str) -> None:
    wanted = {"a": torch.tensor([1.0])}
    eps = torch.finfo(dtype).eps
    assert _compared("gradients", wanted, {"a": torch.tensor([1.0 + 4 * eps])}, tolerance).passed
    assert not _compared("gradients", wanted, {"a": torch.tensor([0.75])}, tolerance).passed, word


def test_a_float32_part_hides_no_error() -> None:
    eps = torch.finfo(torch.float32).eps
    wanted = {"a": torch.tensor([1.0]), "b": torch.tensor([1e-3])}
    for wrong in (1.0 + 1e-3, 2.0):
        row = _compared("gradients", wanted, {"a": torch.tensor([wrong]), "b": torch.tensor([1e-3])}, eps * 12)
        assert not row.passed
    assert _compared("gradients", wanted, {"a": torch.tensor([1.0 + eps]), "b": torch.tensor([1e-3])}, eps * 12).passed


@pytest.mark.parametrize("make", [Spectrum, Masked])
def test_gradients_of_unusual_results_are_there_to_be_compared(make: type[nn.Module]) -> None:
    model = make()._apply(double)
    gradients = _run(model, model, (torch.randn(4, 12, dtype=torch.float64),), {}, 0)["gradients"]
    assert all(0 < float(tensor.abs().max()) < INF for tensor in gradients.values())


def test_a_batch_asked_for_that_the_model_cannot_take_is_refused() -> None:
    with pytest.raises(ModelError, match=r"the plain model fails on 6 samples(.|\n)*test_verification\.py:\d+: result"):
        parplan.verify(Square(), torch.randn(12, 12), batch=6)


def test_a_model_that_fails_in_float64_is_refused_with_its_line() -> None:
    with pytest.raises(ModelError, match=r"in float64(.|\n)*RuntimeError(.|\n)*result: Tensor = self\.fc\(x\.float"):
        parplan.verify(Stubborn(), torch.randn(12, 12))


DIFFERENT = [
    pytest.param([[1.0, NAN], [1.0]], [[1.0, NAN], [1.0]], id="nothing can be said of NaN, though a tensor follows"),
    pytest.param([[1.0], [1.0]], [[NAN], [1.0]], id="NaN in what was a number"),
    pytest.param([[-INF, 1.0]], [[-INF, 2.0]], id="a number beside an infinity"),
    pytest.param([[-INF], [1.0]], [[-INF], [2.0]], id="a tensor beside an infinite one"),
    pytest.param([[-INF, 1.0]], [[INF, 1.0]], id="another infinity"),
    pytest.param([[-INF, 1.0]], [[1.0, -INF]], id="an infinity elsewhere"),
    pytest.param([[1.0 + 1.0j]], [[1.0 + 2.0j]], id="an imaginary part"),
    pytest.param([[1.0]], [[1.0, 1.0]], id="another shape"),
    pytest.param([[7]], [[8]], id="a count"),
    pytest.param([[10**12 + 1]], [[10**12]], id="one of a large count"),
    pytest.param([[3], [1e14]], [[2], [1e14]], id="a count beside a large number"),
    pytest.param([[2**53 + 1]], [[2**53]], id="a count that float64 does not hold"),
]


@pytest.mark.parametrize(("expected", "actual"), DIFFERENT)
def test_differences_show(expected: list[list[complex]], actual: list[list[complex]]) -> None:
    reference, found = (
        {str(index): torch.tensor(values) for index, values in enumerate(tensors)} for tensors in (expected, actual)
    )
    assert not _compared("outputs", reference, found).max_relative_difference <= 1e-9


class Stepped(nn.Module):
    """Results that depend on the number of samples, in steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 12) to (N, 4)."""
        result: Tensor = self.linear(x) * (1 + min(1, x.shape[0] // 50))
        return result


@pytest.mark.full
def test_what_a_capture_has_of_the_example_s_number_of_samples_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples run by the capture of all of them: one made of these few alone has nothing stale."""
    assert parplan.verify(Stepped(), torch.randn(60, 12), devices=2).passed
    monkeypatch.setattr(SizeBranches, "hold", lambda self, batch: True)
    assert not parplan.verify(Stepped(), torch.randn(60, 12), devices=2).passed


def test_equal_infinities_are_no_difference() -> None:
    same = {"0": torch.tensor([INF, -INF, 1.0])}
    assert _compared("outputs", same, same).max_relative_difference == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("side", "batch", "compared"), [(1, 32, 16), (2, 32, 4), (4, 32, 2), (1, 6, 6)])
def test_batch_norms_see_enough_values(side: int, batch: int, compared: int) -> None:
    """16 values per channel, of 1, 4 or 16 pixels a sample, where there are so many samples."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * side**2, 2))
    found = parplan.verify(net, torch.randn(batch, 3, side, side), devices=2, pins=["*=gpu:0"])
    assert (found.batch, found.passed) == (compared, True)


def test_a_verification_prints_as_one_line() -> None:
    rows = (VerificationRow("loss", 1, 0.0, "loss"), VerificationRow("gradients", 2, 0.5, "a.weight"))
    found = Verification(Plan("Net", "0", 8, 2, {}), 8, rows)
    assert str(found) == repr(found)
    assert (
        str(found)
        == "Net, 8 samples, 2 devices: FAILED; loss 0.0e+00 (allowed 1e-09), gradients 5.0e-01 (allowed 1e-09)"
    )
