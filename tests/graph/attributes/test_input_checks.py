"""Assertions of a forward on its inputs: captured without the branch, and checked before every step."""

from __future__ import annotations

import pytest
import torch

import parplan
from parplan.errors import CaptureError, RuntimeFailure
from parplan.graph.capture.capture import capture
from tests.graph.attributes.asserting import (
    Check,
    Checked,
    Counted,
    OnResults,
    OnWeights,
    all_of,
    asserts,
    asserts_a_number,
    asserts_a_tensor,
    asserts_in_autocast,
    asserts_later,
    asserts_later_of_results,
    asserts_results_without_gradients,
    asserts_two,
    asserts_without_gradients,
    checks,
    checks_results,
    handles,
    of_a_shifted_copy,
    of_positions,
    on_both_sides,
    raises,
    raises_unless,
    returns,
)
from tests.runtime.helpers import compiled, spread

CHECKS = [
    asserts, asserts_a_number, asserts_a_tensor, asserts_later, asserts_two, asserts_without_gradients, checks,
    of_a_shifted_copy, raises, raises_unless,
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("check", CHECKS)
def test_an_assertion_on_an_input_is_checked_at_every_step(check: Check) -> None:
    plain = Checked(check).double()
    model, x = compiled(plain, spread(2, "data"), 2), torch.randn(6, 4, dtype=torch.float64)
    assert torch.allclose(model(x), plain(x))
    more = torch.randn(10, 4, dtype=torch.float64)
    for wrong in (x.index_fill(0, torch.tensor([4]), 200.0), more.index_fill(0, torch.tensor([9]), 200.0)):
        with pytest.raises((AssertionError, ValueError, RuntimeError)) as expected:
            plain(wrong)
        with pytest.raises(expected.type) as found:
            model(wrong)
        assert str(found.value) == str(expected.value)
        assert torch.allclose(model(more), plain(more))


def test_nothing_of_a_step_has_happened_where_its_inputs_are_refused() -> None:
    model, x = compiled(Counted().double(), spread(2, "data"), 2), torch.randn(6, 4, dtype=torch.float64)
    model(x)
    drawn = torch.get_rng_state()
    with pytest.raises(AssertionError, match="too large"):
        model(x + 200)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.module.count == 1


@pytest.mark.parametrize("check", [handles, all_of])
def test_an_error_that_the_model_does_not_raise_after_all_is_said(check: Check) -> None:
    model, x = compiled(Checked(check).double(), spread(2, "data"), 2), torch.randn(6, 4, dtype=torch.float64)
    model(x)
    with pytest.raises(RuntimeFailure, match=r"as if these inputs were refused(.|\n)*asserting.py:\d+: "):
        model(x.abs() + 200)


@pytest.mark.full
def test_numbers_in_an_assertion_follow_the_batch() -> None:
    plain = Checked(of_positions).double()
    model = compiled(plain, spread(2, "data"), 2)
    for samples, largest, holds in ((8, 7, True), (4, 3, True), (4, 5, False), (10, 9, True)):
        x = torch.full((samples, 4), float(largest), dtype=torch.float64)
        if holds:
            assert torch.allclose(model(x), plain(x))
        else:
            with pytest.raises(AssertionError, match="beyond the batch"):
                model(x)


@pytest.mark.parametrize("model", [Checked(returns), OnWeights(returns)], ids=["branch", "weights"])
def test_other_branches_on_values_are_refused(model: Checked) -> None:
    with pytest.raises(CaptureError, match=r"data-dependent(.|\n)*asserting.py"):
        capture(model, (torch.randn(6, 4),))


def test_what_is_computed_before_an_error_does_not_matter() -> None:
    assert len(capture(Checked(on_both_sides), (torch.randn(6, 4),)).checks) == 1


def test_a_check_with_sizes_of_the_batch_is_captured_for_each_batch() -> None:
    assert capture(Checked(of_a_shifted_copy), (torch.randn(6, 4),)).fixed_batch
    assert not capture(Checked(asserts), (torch.randn(6, 4),)).fixed_batch


def test_a_note_says_what_is_checked() -> None:
    decision = parplan.analyze(Checked(asserts), torch.randn(6, 4), gpus=2, gpu="k20", time_limit_s=1)
    assert any("Checked before every step: 1 assertion of the forward" in note for note in decision.notes)


@pytest.mark.parametrize(
    "check", [asserts_later_of_results, checks_results, asserts_results_without_gradients, asserts_in_autocast]
)
def test_one_that_weights_or_activations_decide_is_said_to_be_left_out(check: Check) -> None:
    with pytest.warns(UserWarning, match=r"OnResults: left out .* the assertion at .*asserting.py:\d+: \S+") as told:
        graph = capture(OnResults(check), (torch.randn(6, 4),))
    assert len(told) == 1
    assert len(graph.unchecked) == 1
    assert not graph.checks


def test_a_note_says_that_it_is_not_checked() -> None:
    with pytest.warns(UserWarning, match="left out"):
        decision = parplan.analyze(OnResults(checks_results), torch.randn(6, 4), gpus=2, gpu="k20", time_limit_s=1)
    assert any(note.startswith("Not checked: 1 assertion of the forward on weights") for note in decision.notes)
