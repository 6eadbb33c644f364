"""Scatter, gather, broadcast, reduce and parallel apply: values, gradients and structures, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import RuntimeFailure
from parplan.runtime import broadcast, gather, parallel_apply, reduce, scatter

TWO, FOUR = ["cpu"] * 2, ["cpu"] * 4


@pytest.mark.parametrize(("rows", "sizes"), [(8, [2, 2, 2, 2]), (5, [2, 1, 1, 1]), (2, [1, 1, 0, 0])])
def test_scatter_cuts_nearly_evenly(rows: int, sizes: list[int]) -> None:
    assert [chunk.shape[0] for chunk in scatter(torch.zeros(rows, 3), FOUR)] == sizes


def test_scatter_keeps_the_structure_and_shares_what_is_no_tensor() -> None:
    word = object()
    values = ({"x": torch.arange(4), "n": 3}, [torch.tensor(1.5), word])
    first, second = scatter(values, TWO)
    assert first[0]["x"].tolist() == [0, 1]
    assert second[0]["x"].tolist() == [2, 3]
    assert [part[1][0].item() for part in (first, second)] == [1.5, 1.5]
    assert first[0]["n"] == 3
    assert second[1][1] is word


def test_scatter_along_another_dimension() -> None:
    assert [chunk.shape for chunk in scatter(torch.zeros(3, 6), TWO, dim=1)] == [(3, 3), (3, 3)]


def test_gather_undoes_scatter_forward_and_backward() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    y = gather(scatter({"a": x}, FOUR), "cpu")["a"]
    assert torch.equal(y, x)
    pull = torch.randn_like(y)
    y.backward(pull)
    assert x.grad is not None
    assert torch.equal(x.grad, pull)


def test_gather_makes_a_vector_of_scalars() -> None:
    losses = [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)]
    vector = gather(losses, "cpu")
    assert vector.tolist() == [1.0, 2.0]
    vector.mean().backward()
    assert [loss.grad.item() for loss in losses if loss.grad is not None] == [0.5, 0.5]


def test_broadcast_sums_the_gradients_of_the_copies() -> None:
    x = torch.randn(3, requires_grad=True)
    first, second = broadcast([x, "word"], TWO)
    assert first[1] == "word"
    (first[0] * 2 + second[0] * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0] * 3


def test_reduce_gives_every_term_the_gradient() -> None:
    terms = [torch.full((2,), float(value), requires_grad=True) for value in (1, 2, 4)]
    total = reduce(terms, "cpu")
    assert total.tolist() == [7.0, 7.0]
    (total * torch.tensor([1.0, 3.0])).sum().backward()
    assert [term.grad.tolist() for term in terms if term.grad is not None] == [[1.0, 3.0]] * 3


def test_data_parallel_by_hand() -> None:
    net = nn.Linear(4, 2)
    x = torch.randn(6, 4)
    copies = broadcast(dict(net.named_parameters()), TWO)

    def run(parameters: dict[str, Tensor], part: Tensor) -> Tensor:
        # Not functional_call: it swaps the module's parameters, and two threads would swap each other's.
        return nn.functional.linear(part, parameters["weight"], parameters["bias"])

    results = parallel_apply([run, run], list(zip(copies, scatter(x, TWO), strict=True)))
    gather(results, "cpu").square().sum().backward()
    found = [parameter.grad for parameter in net.parameters()]
    wanted = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    for gradient, tensor in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, tensor)


def test_parallel_apply_keeps_the_callers_modes() -> None:
    def modes(*, word: str) -> tuple[bool, bool, str]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), word

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = parallel_apply([modes, modes], [(), ()], [{"word": "a"}, {"word": "b"}])
    assert found == [(False, True, "a"), (False, True, "b")]


def test_parallel_apply_raises_the_first_error() -> None:
    def fail(number: int) -> None:
        raise ValueError(str(number))

    with pytest.raises(ValueError, match="3"):
        parallel_apply([fail, fail], [(3,), (4,)])


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: scatter(torch.zeros(2), []), "no devices"),
        (lambda: gather([], "cpu"), "no results"),
        (lambda: gather([torch.zeros(1), [torch.zeros(1)]], "cpu"), "replica 1"),
        (lambda: reduce([], "cpu"), "no terms"),
        (lambda: reduce([torch.zeros(1), (torch.zeros(1),)], "cpu"), "term 1"),
        (lambda: parallel_apply([len], []), "1 functions, 0 args"),
    ],
)
def test_what_makes_no_sense_is_refused(call: object, why: str) -> None:
    assert callable(call)
    with pytest.raises(RuntimeFailure, match=why):
        call()
