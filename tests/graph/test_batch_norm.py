"""Batch norm over replicas against torch's own, in float64: values, gradients, running statistics."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from parplan.graph.batch_norm import normalise, statistics


@dataclass(frozen=True)
class Case:
    """Samples per replica, the rest of the shape, and whether there are weights and running statistics."""

    rows: tuple[int, ...]
    rest: tuple[int, ...]
    affine: bool = True
    running: bool = True
    offset: float = 0.0


CASES = {
    "images": Case((2, 3), (4, 5, 6)),
    "features": Case((4, 1, 2), (7,)),
    "one without samples": Case((3, 0, 2), (4, 3)),
    "no weights": Case((2, 2), (4, 3, 3), affine=False),
    "no running statistics": Case((2, 2), (4, 3, 3), running=False),
    "far from zero": Case((3, 4), (5, 2), offset=1e4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_torchs_batch_norm_of_the_whole_batch(case: Case) -> None:
    channels = case.rest[0]
    x = torch.randn(sum(case.rows), *case.rest, dtype=torch.float64) + case.offset
    weight, bias = (torch.randn(channels, dtype=torch.float64, requires_grad=True) for _ in range(2))
    affine: tuple[Tensor | None, Tensor | None] = (weight, bias) if case.affine else (None, None)
    kept = [torch.zeros(channels, dtype=torch.float64), torch.ones(channels, dtype=torch.float64)]
    own, spare = ([t.clone() for t in kept] if case.running else [None, None] for _ in range(2))
    here, there = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted = functional.batch_norm(there, own[0], own[1], *affine, training=True, momentum=0.3, eps=1e-5)
    chunks = here.split(list(case.rows))
    parts = torch.cat([statistics(chunk, torch.float64) for chunk in chunks])
    results = []
    for index, chunk in enumerate(chunks):
        mean, variance = spare if index == 0 else (None, None)
        results.append(normalise(chunk, parts, *affine, mean, variance, 0.3, 1e-5))
    found = torch.cat(results)
    pull = torch.randn_like(wanted)
    inputs = [weight, bias] if case.affine else []
    given = torch.autograd.grad(found, [here, *inputs], pull)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(given, torch.autograd.grad(wanted, [there, *inputs], pull), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    if case.running:
        torch.testing.assert_close(spare, own, rtol=1e-9, atol=1e-9)


def test_half_precision_keeps_its_statistics_in_single() -> None:
    x = torch.randn(64, 4, dtype=torch.float32).to(torch.bfloat16)
    parts = statistics(x, torch.float32)
    assert parts.dtype == torch.float32
    result = normalise(x, parts, None, None, None, None, 0.1, 1e-5)
    assert result.dtype == torch.bfloat16
    assert abs(float(result.float().mean())) < 1e-2


def test_gradients_far_from_zero_are_as_precise_as_torchs() -> None:
    """In single precision, of samples whose mean is a thousand times their deviation."""
    x, weight = torch.randn(64, 5, 7) + 1000, torch.rand(5) + 0.5
    pull, found = torch.randn_like(x), dict[str, list[Tensor]]()
    for name, dtype in (("true", torch.float64), ("torch's", torch.float32), ("own", torch.float32)):
        given = [tensor.to(dtype).requires_grad_() for tensor in (x, weight, torch.zeros(5))]
        if name == "own":
            result = normalise(given[0], statistics(given[0], dtype), given[1], given[2], None, None, 0.1, 1e-5)
        else:
            result = functional.batch_norm(given[0], None, None, given[1], given[2], training=True)
        found[name] = list(torch.autograd.grad(result, given, pull.to(dtype)))
    for true, theirs, own in zip(*found.values(), strict=True):
        assert (own - true).abs().max() <= 1.5 * (theirs - true).abs().max() + 1e-6 * true.abs().max()
