"""Methods of the user's module under torchrun: statistics of one process's samples are refused, all else goes on."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.errors import PlainModuleWarning, RuntimeFailure
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import compiled, planner, spread
from tests.runtime.ranks import run_case


class Net(nn.Module):
    """A model whose parts are called by methods."""

    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.images, self.kept = nn.InstanceNorm1d(6), nn.InstanceNorm1d(6, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 6) to (N, 4)."""
        result: Tensor = self.head(self.features(x))
        return result

    def features(self, x: Tensor) -> Tensor:
        """(N, 6) to (N, 8), normalised by a layer."""
        result: Tensor = self.norm(self.body(x))
        return result

    def written_out(self, x: Tensor) -> Tensor:
        """The same by a function."""
        return F.batch_norm(self.body(x), self.mean, self.var, training=True)

    def of_samples(self, x: Tensor) -> Tensor:
        """The same by torch's own op, which keeps no statistics."""
        return torch.batch_norm(self.body(x), None, None, None, None, True, 0.1, 1e-5, False)

    def image(self, x: Tensor) -> Tensor:
        """Normalised in each sample by itself."""
        result: Tensor = self.images(x[:, :, None].expand(-1, -1, 2))
        return result

    def kept_image(self, x: Tensor) -> Tensor:
        """The same, with running statistics."""
        result: Tensor = self.kept(x[:, :, None].expand(-1, -1, 2))
        return result

    def reset(self) -> None:
        """State that all processes set alike."""
        self.norm.reset_running_stats()

    def follow(self, other: nn.Module) -> None:
        """State that all processes copy alike."""
        for own, wanted in zip(self.buffers(), other.buffers(), strict=True):
            own.copy_(wanted)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        """A number of the compiled model's results."""
        found: Tensor = model(x).square().mean()
        return found


def refused(rank: int, ranks: int) -> None:
    """A norm over a process's own samples is refused by name, before it has written statistics."""
    model = Compiled(Net().double(), planner(spread(ranks, "data"), ranks))
    x = torch.randn(4, 6, dtype=torch.float64)
    before = copy.deepcopy(dict(model.named_buffers()))
    methods = {"features": "norm", "written_out": "batch_norm", "of_samples": "batch_norm", "kept_image": "kept"}
    for name, layer in methods.items():
        with pytest.raises(RuntimeFailure, match=rf"^{layer} takes statistics of samples in {name}\(\)"):
            getattr(model, name)(x)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]) or name.endswith("num_batches_tracked"), name


def allowed(rank: int, ranks: int) -> None:
    """Methods without such norms, in evaluation mode, and around the compiled model give the plain module's numbers."""
    plain = Net().double()
    model = Compiled(copy.deepcopy(plain), planner(spread(ranks, "data"), ranks))
    x = torch.randn(4 * ranks, 6, dtype=torch.float64)
    own = x[4 * rank : 4 * rank + 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first step is compared with the plain module here, too
        mean = model.loss(model, own).detach()
    torch.distributed.all_reduce(mean)
    torch.testing.assert_close(mean / ranks, plain.loss(plain, x))
    torch.testing.assert_close(model.image(own), plain.image(own))
    torch.testing.assert_close(model.eval().features(own), plain.eval().features(own))
    model.train().reset()
    assert not model.get_buffer("norm.running_mean").any()
    model.follow(plain)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert model.features.__doc__ == Net.features.__doc__


CASES = {"refused": refused, "allowed": allowed}


@pytest.mark.parametrize("case", CASES)
def test_methods_see_the_samples_of_their_process(case: str) -> None:
    run_case(CASES[case], 2)


def test_methods_see_all_samples_in_one_process() -> None:
    model: Any = compiled(Net(), spread(2, "data"), 2)
    plain: Any = copy.deepcopy(model.module)
    x = torch.randn(4, 6)
    with pytest.warns(PlainModuleWarning, match=r"features\(\) runs the plain module"):
        found = model.features(x)
    assert torch.equal(found, plain.features(x))
    assert torch.equal(model.get_buffer("norm.running_mean"), plain.norm.running_mean)
