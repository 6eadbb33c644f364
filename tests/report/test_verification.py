"""The table of a verification."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from parplan.report.verification import render_verification
from parplan.verification import Verification
from parplan.verification import VerificationRow as Row
from tests.report.decisions import alexnet


def printed(*rows: Row) -> str:
    """The table of these rows."""
    stream = io.StringIO()
    render_verification(Verification(alexnet().plan, 8, rows), Console(file=stream, width=80))
    return stream.getvalue()


def test_notes_come_before_the_table() -> None:
    stream = io.StringIO()
    render_verification(
        Verification(alexnet().plan, 8, (), notes=("Made for 4 samples.",)), Console(file=stream, width=80)
    )
    assert "in float64\nMade for 4 samples.\n\n" in stream.getvalue()


def test_passed() -> None:
    rows = (Row("outputs", 1, 2.5e-16, "output 0"), Row("gradients", 16, 0.0, "fc6.weight"))
    assert printed(*rows) == (
        "AlexNet: 8 samples, on 4 logical CPU devices against the plain model, in float64\n"
        "\n"
        "             tensors  relative difference  largest in\n"
        "  outputs          1              2.5e-16  output 0\n"
        "  gradients       16                    0  fc6.weight\n"
        "\n"
        "PASSED: every tensor agrees to 1e-09, which is rounding.\n"
    )


def test_types_the_model_casts_to_are_said_with_what_they_allow() -> None:
    stream, row = io.StringIO(), Row("outputs", 1, 3e-2, "output 0", 0.125)
    found = Verification(alexnet().plan, 8, (row,), casts=("bfloat16", "float32"))
    render_verification(found, Console(file=stream, width=120))
    assert "The model casts to bfloat16 and float32 inside; what that reaches may differ by 1e-01" in stream.getvalue()


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ((1e-3, 0.0), "FAILED: outputs differs by more than 1e-09."),
        ((math.nan, 0.0), "FAILED: outputs differs by more than 1e-09."),
        ((1.0, math.inf), "FAILED: outputs, loss differ by more than 1e-09."),
    ],
)
def test_failed(differences: tuple[float, float], words: str) -> None:
    text = printed(*(Row(group, 1, value, "x") for group, value in zip(("outputs", "loss"), differences, strict=True)))
    assert words in text
    assert "PASSED" not in text
