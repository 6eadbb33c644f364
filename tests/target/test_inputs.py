"""Shapes on the command line, and another batch in the same memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parplan.errors import TargetError
from parplan.target.inputs import Inputs, from_options, with_batch


@pytest.mark.parametrize(
    ("option", "shape", "dtype"),
    [
        ("8x3x4", (8, 3, 4), torch.float32),
        ("8", (8,), torch.float32),
        ("8x16:int64", (8, 16), torch.int64),
        ("8x2:bfloat16", (8, 2), torch.bfloat16),
        ("8x2:bool", (8, 2), torch.bool),
    ],
)
def test_positional(option: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = from_options([option])
    assert found is not None
    (tensor,) = found.args
    assert (tuple(tensor.shape), tensor.dtype, found.kwargs) == (shape, dtype, {})
    assert dtype.is_floating_point or not tensor.any()


def test_several_and_named() -> None:
    found = from_options(["8x3", "ids=8x5:int64", "8x4"])
    assert found is not None
    assert [tuple(value.shape) for value in found.args] == [(8, 3), (8, 4)]
    assert list(found.kwargs) == ["ids"]


def test_none() -> None:
    assert from_options([]) is None


def test_a_large_batch_takes_the_memory_of_one_sample() -> None:
    found = from_options(["4096x3x224x224"])
    assert found is not None
    assert found.args[0].untyped_storage().nbytes() == 3 * 224 * 224 * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["8,3"], r"--input 8,3: write sizes with x between them"),
        (["8x"], r"--input 8x: write sizes"),
        (["-1x3"], r"--input -1x3: write sizes"),
        (["8x0"], r"--input 8x0: a size of 0 leaves nothing to compute"),
        (["8x3:half"], r"--input 8x3:half: there is no type half; use float32, float16"),
        (["a=8x3", "a=8x4"], r"--input a=8x4: a is given twice"),
        (["0a=8x3"], r"--input 0a=8x3: write sizes"),
        (["8x99999999999"], r"799,999,999,992 elements, 99,999,999,999 in one sample, are more than"),
        (["9999999999999999999x3"], r"29,999,999,999,999,999,997 elements, 3 in one sample, are more than"),
    ],
)
def test_refused(options: list[str], words: str) -> None:
    with pytest.raises(TargetError, match=words):
        from_options(options)


def nested() -> Inputs:
    """Samples in several places, and things that are none."""
    return Inputs((torch.arange(12.0).reshape(4, 3), [torch.zeros(4), 5, None]), {"w": torch.ones(3, 4), "n": "text"})


@pytest.mark.parametrize("batch", [1, 2, 4, 64])
def test_another_batch(batch: int) -> None:
    found = with_batch(nested(), batch)
    first, (second, five, none) = found.args
    assert (first.shape, second.shape, five, none) == ((batch, 3), (batch,), 5, None)
    assert (found.kwargs["w"].shape, found.kwargs["n"]) == ((3, 4), "text")
    assert first.untyped_storage().nbytes() == 12 * 4


def test_fewer_samples_are_the_first_ones() -> None:
    first = with_batch(nested(), 2).args[0]
    assert isinstance(first, Tensor)
    assert torch.equal(first, torch.arange(6.0).reshape(2, 3))


def test_a_batch_that_nothing_could_hold() -> None:
    with pytest.raises(TargetError, match=r"--batch 10+: 3[0,]+ elements, 3 in one sample, are more than devices hold"):
        with_batch(nested(), 10**22)


@pytest.mark.parametrize("inputs", [Inputs((), {}), Inputs((3,), {}), Inputs((torch.tensor(1.0),), {})])
def test_no_batch_to_change(inputs: Inputs) -> None:
    with pytest.raises(TargetError, match="--batch 8: the example inputs hold no tensor with a batch dimension"):
        with_batch(inputs, 8)
