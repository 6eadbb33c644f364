"""Numbers as they are written."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable

import pytest

from parplan.report import units
from tests.every_case import every_case

INF = math.inf


@pytest.mark.parametrize(
    ("values", "figures", "unit"),
    [
        pytest.param([0.5123e-3, 2e-6, 0.0], ["512.30", "2.00", "-"], "µs", id="microseconds"),
        pytest.param([5.1234e-3, 2e-6, 1e-7], ["5.123", "0.002", "<0.001"], "ms", id="small beside large"),
        pytest.param([0.25, 1e-3], ["250.00", "1.00"], "ms", id="hundreds"),
        pytest.param([0.999], ["999.00"], "ms", id="milliseconds up to a second"),
        pytest.param([1.5, 0.04], ["1.500", "0.040"], "s", id="seconds"),
        pytest.param([12.0, 0.004], ["12.00", "<0.01"], "s", id="many seconds"),
        pytest.param([], [], "µs", id="nothing"),
        pytest.param([0.0], ["-"], "µs", id="zero"),
        pytest.param([1e-3, -1e-18], ["1.000", "-"], "ms", id="rounding noise"),
        pytest.param([1e-3, INF], ["1.000", "unknown"], "ms", id="infinite"),
    ],
)
def test_a_column_of_times_has_one_unit(values: list[float], figures: list[str], unit: str) -> None:
    scale = units.time_column(values)
    assert [scale.figure(value) for value in values] == figures
    assert scale.unit == unit


@pytest.mark.parametrize(
    ("values", "figures", "unit"),
    [
        pytest.param([512], ["0.50"], "KiB", id="bytes"),
        pytest.param([3 << 20, 1 << 10], ["3.00", "<0.01"], "MiB", id="mebibytes"),
        pytest.param([9 << 30], ["9216.0"], "MiB", id="mebibytes up to ten gibibytes"),
        pytest.param([12 << 30, 1 << 20], ["12.0", "<0.1"], "GiB", id="gibibytes"),
    ],
)
def test_a_column_of_sizes_has_one_unit(values: list[int], figures: list[str], unit: str) -> None:
    scale = units.size_column(values)
    assert [scale.figure(value) for value in values] == figures
    assert scale.unit == unit


@every_case(
    ("scale", "value", "text"),
    [
        (units.time, 0.0812, "81.2 ms"),
        (units.time, 0.293, "293 ms"),
        (units.time, 1.3, "1.30 s"),
        (units.time, 0.0, "0 µs"),
        (units.step, 0.08123, "81.23 ms"),
        (units.step, 0.38146, "381.5 ms"),
        (units.step, 1.5, "1.50 s"),
        (units.size, 16 << 30, "16.0 GiB"),
        (units.size, 3.25 * 2**30, "3.25 GiB"),
        (units.size, 300 << 20, "300 MiB"),
    ],
)
def test_one_figure(scale: Callable[[float], units.Scale], value: float, text: str) -> None:
    assert scale(value).text(value) == text


@pytest.mark.parametrize(
    ("scale", "value", "text"),
    [
        (units.step(0.381), 1.50203, "1.50 s"),
        (units.step(0.381), 0.9996, "999.6 ms"),
        (units.step(20e-6), 3.2e-3, "3.20 ms"),
        (units.size(300 << 20), 3 << 30, "3.00 GiB"),
        (units.size(300 << 20), 1000 << 20, "1000 MiB"),
        (units.step(1.5), 0.0004, "<0.01 s"),
        (units.step(0.3), INF, "unknown"),
    ],
)
def test_what_reaches_a_larger_unit_is_written_in_it(scale: units.Scale, value: float, text: str) -> None:
    assert scale.text(value) == text


def test_a_figure_that_is_not_zero_never_reads_zero() -> None:
    scale = units.time_column([1.0])
    read = [scale.figure(10.0**-power) for power in range(12)]
    assert [text for text in read if text == "-" or set(text) <= set("0.")] == []


@every_case(
    ("share", "text"),
    [
        (0.0, "0.0 %"),
        (0.0004, "<0.1 %"),
        (0.0996, "10 %"),
        (0.5, "50 %"),
        (0.9999, ">99 %"),
        (1.0, "100 %"),
        (1.07, "107 %"),
        (INF, "unknown"),
    ],
)
def test_percent(share: float, text: str) -> None:
    assert units.percent(share) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0,), "device 0"),
        ((0, 1), "devices 0, 1"),
        ((0, 1, 2, 3), "devices 0-3"),
        ((3, 2, 1, 0), "devices 3, 2, 1, 0"),
        ((0, 2, 4, 5, 6), "devices 0, 2, 4-6"),
    ],
)
def test_devices(numbers: tuple[int, ...], text: str) -> None:
    assert units.devices(numbers) == text


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(units).failed == 0
