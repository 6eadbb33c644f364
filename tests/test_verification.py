"""What verification must not overlook, on models and results made to be overlooked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.errors import ModelError
from parplan.runtime.self_check.double_copy import double
from parplan.verification import _compared, _run

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


@pytest.mark.parametrize("make", [Masked, Spectrum, Square, nn.Identity])
@pytest.mark.parametrize("devices", [1, 3])
def test_models_out_of_the_ordinary_pass(make: type[nn.Module], devices: int) -> None:
    found = parplan.verify(make(), torch.randn(12, 12), devices=devices)
    assert found.passed, found.rows


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
]


@pytest.mark.parametrize(("expected", "actual"), DIFFERENT)
def test_differences_show(expected: list[list[complex]], actual: list[list[complex]]) -> None:
    reference, found = (
        {str(index): torch.tensor(values) for index, values in enumerate(tensors)} for tensors in (expected, actual)
    )
    assert not _compared("outputs", reference, found).max_relative_difference <= 1e-9


def test_equal_infinities_are_no_difference() -> None:
    same = {"0": torch.tensor([INF, -INF, 1.0])}
    assert _compared("outputs", same, same).max_relative_difference == 0
