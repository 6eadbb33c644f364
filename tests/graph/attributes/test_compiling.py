"""Forwards with code of their own for compilers: captured is what runs in Python, where that can be captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

import parplan
from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from tests.graph.by_hand import assert_same_numbers, halves
from tests.runtime.helpers import compiled, differences, outcome, spread

Scale = Callable[[nn.Module, Tensor], Tensor]


class Compiles(nn.Module):
    """A layer, and what a test makes of its results."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.scale, self.linear = scale, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to the same."""
        return self.scale(self, self.linear(x))


def of_torch_compiler(m: nn.Module, x: Tensor) -> Tensor:
    return x * (3.0 if torch.compiler.is_compiling() else 2.0)


def imported_by_name(m: nn.Module, x: Tensor) -> Tensor:
    return x * (3.0 if is_compiling() else 2.0)


def of_dynamo(m: nn.Module, x: Tensor) -> Tensor:
    return x * (3.0 if torch._dynamo.is_compiling() else 2.0)


def of_exports(m: nn.Module, x: Tensor) -> Tensor:
    return x * (3.0 if torch.compiler.is_exporting() else 2.0)


def fails_for_compilers(m: nn.Module, x: Tensor) -> Tensor:
    return x * (None if torch.compiler.is_compiling() else 2.0)  # type: ignore[operator]


@pytest.mark.parametrize("scale", [of_torch_compiler, imported_by_name, of_dynamo, of_exports, fails_for_compilers])
def test_the_code_that_runs_in_python_is_captured(scale: Scale) -> None:
    model, x = Compiles(scale).double(), torch.randn(6, 4, dtype=torch.float64)
    graph = capture(model, (x,))
    assert not graph.compiling
    assert_same_numbers(graph, model, (x,), choose=halves)
    assert not torch.compiler.is_compiling()


def test_an_assertion_that_compilers_leave_out_is_checked() -> None:
    def asserts(m: nn.Module, x: Tensor) -> Tensor:
        return x

    class Asserts(Compiles):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling() and (x > 100).any():
                raise ValueError("too large")
            return super().forward(x)

    model, x = compiled(Asserts(asserts).double(), spread(2, "data"), 2), torch.randn(6, 4, dtype=torch.float64)
    model(x)
    with pytest.raises(ValueError, match="too large"):
        model(x * 1000)


def hook(grad: Tensor) -> Tensor:
    return grad * 2


def branches_on_values(m: nn.Module, x: Tensor) -> Tensor:
    x.register_hook(hook)
    if not torch.compiler.is_compiling() and x.sum() > 1e6:
        return x * 2
    return x


def test_code_for_compilers_is_captured_where_the_other_cannot_be() -> None:
    """Also in one with hooks, which the first try has met; and the second batch size of a capture takes the same."""
    plain, x = Compiles(branches_on_values).double(), torch.randn(6, 4, dtype=torch.float64)
    model = compiled(plain, spread(2, "data"), 2)
    with pytest.warns(UserWarning, match=r"for compilers(.|\n)*test_compiling.py:\d+: if not") as told:
        graph = capture(plain, (x,))
    assert len(told) == 1
    with pytest.warns(UserWarning, match="for compilers"):
        made = outcome(model, model, x)
    assert differences(made, outcome(plain, plain, x)) == {}
    assert "data-dependent" in str(told[0].message)
    assert len(graph.compiling) == 1
    assert not graph.one_batch


def test_another_length_takes_the_code_that_the_first_took() -> None:
    plain = Compiles(lambda m, x: branches_on_values(m, x.sum(1))).double()
    model = compiled(plain, spread(2, "data"), 2)
    for length in (7, 5, 3):
        x = torch.randn(6, length, 4, dtype=torch.float64)
        with pytest.warns(UserWarning, match="for compilers") if length == 7 else nullcontext():
            result = model(x)
        assert torch.allclose(result, plain(x), atol=1e-12)


def neither(m: nn.Module, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return x if x.sum() > 0 else x * 2
    return x if x.max() > 0 else x * 2


def test_where_neither_can_be_the_error_is_that_of_python() -> None:
    with pytest.raises(CaptureError, match=r"data-dependent(.|\n)*x.max\(\)"):
        capture(Compiles(neither), (torch.randn(6, 4),))


def test_a_note_names_the_line() -> None:
    with pytest.warns(UserWarning, match="for compilers"):
        decision = parplan.analyze(Compiles(branches_on_values), torch.randn(6, 4), gpus=2, gpu="k20", time_limit_s=1)
    assert any("planned is its code for compilers" in n and "test_compiling.py:" in n for n in decision.notes)
