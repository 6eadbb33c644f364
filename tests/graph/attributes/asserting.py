"""Forwards that assert something of their inputs; in a file that pytest does not rewrite assertions in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

Check = Callable[[Tensor], None]


class Checked(nn.Module):
    """A layer behind an assertion that a test gives."""

    def __init__(self, check: Check) -> None:
        super().__init__()
        self.check, self.fc = check, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to the same."""
        self.check(x)
        result: Tensor = self.fc(x)
        return result


def asserts(x: Tensor) -> None:
    assert torch.all(x < 100).item(), "too large"


def asserts_a_tensor(x: Tensor) -> None:
    assert x.max() < 100


def asserts_two(x: Tensor) -> None:
    assert x.min() > -100 and x.max() < 100, f"from {x.min()} to {x.max()}"  # noqa: PT018


def raises(x: Tensor) -> None:
    if (x >= 100).any():
        raise ValueError(f"too large: {x.max()}")


def raises_unless(x: Tensor) -> None:
    if not torch.all(x < 100).item():
        raise ValueError("too large")


def of_a_shifted_copy(x: Tensor) -> None:
    shifted = x.new_zeros(x.shape)
    shifted[:, 1:] = x[:, :-1]
    shifted.masked_fill_(shifted == -7, 0.0)
    assert (shifted < 100).all()


def asserts_a_number(x: Tensor) -> None:
    assert x.max().item() < 100


def asserts_later(x: Tensor) -> None:
    torch._assert_async((x < 100).all(), "too large")


def checks(x: Tensor) -> None:
    torch._check((x < 100).all().item(), lambda: "too large")


def asserts_without_gradients(x: Tensor) -> None:
    with torch.no_grad():
        torch._assert_async((x.detach() + 0 < 100).all(), "too large")


def handles(x: Tensor) -> None:
    with suppress(ValueError):
        raises(x)


def all_of(x: Tensor) -> None:
    assert any([(x < 100).all(), (x > -100).all()])


def of_positions(x: Tensor) -> None:
    assert (x[:, 0] < torch.tensor(x.shape[0])).all(), "beyond the batch"


def returns(x: Tensor) -> None:
    if (x > 100).any():
        return
    assert x is not None


def on_both_sides(x: Tensor) -> None:
    if (x > 100).any():
        x = x + 1
        raise ValueError(x)


class OnWeights(Checked):
    """Asserts what weights decide."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x)
        assert not result.isnan().any()
        return result


def asserts_later_of_results(y: Tensor) -> None:
    torch._assert_async((y < 100).all(), "too large")


def checks_results(y: Tensor) -> None:
    torch._check((y < 100).all().item(), lambda: "too large")


def asserts_results_without_gradients(y: Tensor) -> None:
    with torch.no_grad():
        torch._assert_async((y < 100).all(), "too large")


def asserts_in_autocast(y: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch._assert_async((y < 100).all(), "too large")


class OnResults(Checked):
    """Asserts of its results what a test gives."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x)
        self.check(result)
        return result


class Counted(Checked):
    """Counts its calls and draws a number before it looks at its input."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(asserts)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to the same."""
        self.count += 1
        drawn = torch.rand(())
        return super().forward(x) + 0 * drawn
