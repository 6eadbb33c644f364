"""Calls of a model: hashes of what they bring."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from parplan.runtime.calls import digest


def test_the_digest_of_a_tensor_is_that_of_its_shape_and_values() -> None:
    tensor = torch.arange(6.0)
    before = digest(tensor)
    assert digest(torch.arange(6.0)) == before
    assert digest(tensor.view(2, 3)) != before
    tensor[2:].zero_()  # through a view
    assert digest(tensor) != before
    with torch.inference_mode():
        unversioned = torch.arange(6.0)
        assert digest(unversioned) == before
        unversioned.zero_()
        assert digest(unversioned) != before


def test_a_tensor_that_was_not_written_is_read_once_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, reads = torch.arange(6.0), []

    def read(self: Tensor) -> Tensor:
        reads.append(self.shape)
        return self.clone()

    monkeypatch.setattr(Tensor, "cpu", read)
    assert digest(tensor) == digest(tensor)
    assert len(reads) == 1
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is None
