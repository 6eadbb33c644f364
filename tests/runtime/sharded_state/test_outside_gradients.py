"""Terms of the loss that use parameters directly, over processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parplan.runtime.sharded_state.outside_gradients import OutsideGradients, ParameterAliases
from tests.runtime.outside_gradient_cases import CASES
from tests.runtime.ranks import on_two_and_four, run_case


@pytest.mark.full
@pytest.mark.parametrize(("case", "ranks"), on_two_and_four(CASES, few_on_four=()))
def test_terms_beside_the_model_are_averaged_or_refused(case: str, ranks: int) -> None:
    run_case(CASES[case], ranks)


class _Counting:
    """Stands in for the collectives of one process."""

    def __init__(self) -> None:
        self.count = 0

    def mean(self, tag: str, own: Tensor) -> Tensor:
        self.count += 1
        return own


@pytest.mark.parametrize("uses", ["a", "aa", "p", "ap", "pa", "apa", "pap", "aap", "paa"])
def test_the_sum_of_programs_gradients_is_told_from_one_with_other_terms(uses: str) -> None:
    parameter, collectives = nn.Parameter(torch.ones(3)), _Counting()
    OutsideGradients.watch("p", parameter, collectives)  # type: ignore[arg-type]
    (alias,) = ParameterAliases([parameter]).tensors
    terms = [({"a": alias, "p": parameter}[use] * (index + 2)).sum() for index, use in enumerate(uses)]
    torch.stack(terms).sum().backward()
    assert collectives.count == ("p" in uses)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [sum(range(2, len(uses) + 2))] * 3
