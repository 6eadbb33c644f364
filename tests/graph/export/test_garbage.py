"""The garbage collector while a model is planned: more patient, and afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from parplan.graph.export.garbage import SELDOM, seldom_collected


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before, on = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*before)
    gc.enable() if on else gc.disable()


def test_it_is_more_patient_for_a_while_also_where_that_ends_in_an_error() -> None:
    gc.set_threshold(700, 10, 10)
    with seldom_collected():
        with seldom_collected():
            assert gc.get_threshold() == SELDOM
        assert gc.get_threshold() == SELDOM
    assert gc.get_threshold() == (700, 10, 10)
    with pytest.raises(ZeroDivisionError), seldom_collected():
        raise ZeroDivisionError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (SELDOM[0] + 1, 5, 5)])
def test_a_collector_that_is_off_or_more_patient_is_left_alone(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with seldom_collected():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_thresholds_that_others_set_meanwhile_stay() -> None:
    gc.set_threshold(700, 10, 10)
    with seldom_collected():
        gc.set_threshold(500, 5, 5)
    assert gc.get_threshold() == (500, 5, 5)


def test_a_collector_that_is_switched_off_stays_off() -> None:
    gc.disable()
    with seldom_collected():
        assert not gc.isenabled()
    assert not gc.isenabled()
