"""Small networks of unusual ops compute under a plan what they compute without one, at every number of samples."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from parplan.plan import Scheme, Strategy
from parplan.runtime.execution.program_function import run_program
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import compiled, differences, executor, outcome, planner, spread

Op = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """An op between two linear layers, (N, 12) to (N, 12)."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 12)
        self.op = op
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """First, the op, last."""
        result: Tensor = self.last(self.op(self.first(x)))
        return result


def written_over(x: Tensor) -> Tensor:
    """Parts replaced by others, in place."""
    y = x.clone()
    y[:, 1] = y[:, 0] * 2
    y[:, 2:4] = x[:, 4:5].float()
    return y


def distances(x: Tensor) -> Tensor:
    """An op that no axis is known of, and a change of shape that names the number of samples."""
    rows = x.view(-1, 3, 2, 2).flatten(2)
    return torch.cdist(rows, rows).mean((1, 2)).unsqueeze(1)


def spaced(x: Tensor) -> Tensor:
    """Samples meet what an unknown op made of them."""
    return x + distances(x)


def low_modes(x: Tensor) -> Tensor:
    """Some modes of a spectrum, written into zeros, as Fourier neural operators do."""
    found = torch.fft.rfft(x.view(-1, 3, 4))
    made = torch.zeros_like(found)
    made[:, :, :2] = found[:, :, :2] * (1 + 2j)
    made[:, -1] = found[:, 0]
    result: Tensor = torch.fft.irfft(made, n=4).reshape(-1, 12)
    return result


def windows(x: Tensor) -> Tensor:
    """Positions shifted around, as between windows of attention."""
    return x.view(-1, 3, 4).roll((1, -2), (1, 2)).tril().repeat(1, 2, 1)[:, :3].reshape(-1, 12)


def pairs(x: Tensor) -> Tensor:
    """The lower half of all products of a sample's rows, as between embeddings."""
    rows = torch.stack(x.view(-1, 3, 4).unbind(1), 1)
    products = rows @ rows.transpose(1, 2)
    i, j = torch.tril_indices(3, 3)
    return torch.cat([products[:, i, j], x.index_select(1, i)], 1)


def shifted(x: Tensor) -> Tensor:
    """What a decoder reads: everything one place later, in a tensor made here."""
    y = x.new_zeros(x.shape)
    y[..., 1:] = x[..., :-1].clone()
    y[..., 0] = 0.5
    return torch.min(y, x)


def best_row(x: Tensor) -> Tensor:
    """One row of each sample, looked up by sample and place, as the last token of a text."""
    rows = x.view(-1, 3, 4)
    best = rows.sum(2).argmax(1)
    found = rows[torch.arange(len(x)), best]
    taken = rows.gather(1, best.view(-1, 1, 1).expand(-1, 1, 4)).squeeze(1)
    return torch.cat([found, taken, found * torch.cosine_similarity(found, rows[:, 0]).unsqueeze(1)], 1)


def neighbours(x: Tensor) -> Tensor:
    """Every sample is compared with the next one: samples that are looked up depend on each other."""
    other = x[torch.arange(len(x)).roll(1)]
    return x * torch.cosine_similarity(x, other).unsqueeze(1) + x.roll(1, 0)


OPS: dict[str, Op] = {
    op.__name__: op for op in (written_over, spaced, low_modes, windows, pairs, shifted, best_row, neighbours)
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPS)
def test_ops_keep_the_numbers(name: str) -> None:
    net = Between(OPS[name])
    for kind in ("data", "out-features"):
        model, plain = compiled(net, spread(2, kind), 2), copy.deepcopy(net)
        for samples in (4, 3):
            x = torch.randn(samples, 12, dtype=torch.float64)
            assert differences(outcome(model.module, model, x), outcome(plain, plain, x)) == {}, (kind, samples)


def test_sparse_gradients_are_refused() -> None:
    net = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Flatten())
    with pytest.raises(CaptureError, match=r"sparse gradient[^;]*devices sum dense ones; make it with sparse=False"):
        capture(net, (torch.zeros(4, 3, dtype=torch.long),))


class Meets(nn.Module):
    """A branch whose op lets no sample be told apart meets one that has them: (N, 12) to (N, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = (nn.Linear(12, 12) for _ in range(3))
        self.after = nn.Linear(1, 12)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """The branches' sum."""
        left, right = self.after(distances(self.left(x))), self.right(x)
        result: Tensor = self.last(torch.relu(right) + left)
        return result


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", [Scheme.BROADCAST, Scheme.INTERLEAVE], ids=lambda scheme: scheme.value)
def test_a_value_of_the_whole_batch_is_read_in_passes(scheme: Scheme) -> None:
    net, x = Meets(), torch.randn(4, 12, dtype=torch.float64)
    graph = capture(net, (x.clone().requires_grad_(),))
    wide = {"left", "right"}
    table = {n: Strategy(2, devices=(0, 1)) if n in wide else Strategy(devices=(1,)) for n in graph.layers}
    other, plain = copy.deepcopy(net), copy.deepcopy(net)
    run = executor(other, graph, table, 2, 4, scheme)
    assert differences(outcome(other, lambda t: run_program(run, {"x": t}), x), outcome(plain, plain, x)) == {}


class NormedTwice(nn.Module):
    """Batch norm that is called twice, and instance norm with running statistics: (N, 6) to (N, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.turn = nn.Linear(6, 6)
        self.single = nn.InstanceNorm1d(3, track_running_stats=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Normalised, turned, normalised, and by channel."""
        y = self.norm(self.turn(self.norm(x)))
        result: Tensor = y + self.single(y.view(-1, 3, 2)).flatten(1)
        return result


def norms_apart(ranks: int) -> list[dict[str, Strategy]]:
    """The calls of `NormedTwice`'s norms on different devices."""
    last, everyone = Strategy(devices=(ranks - 1,)), tuple(range(ranks))
    both, cut = Strategy(ranks, 1, None, everyone), Strategy(1, 2, "channels", (0, ranks - 1))
    calls = [(Strategy(), last), (both, last), (cut, both)]
    return [{"norm": first, "norm@1": second, "single": last} for first, second in calls]


HALVES: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "halves of the samples": (lambda x: x.chunk(2), "features"),
    "pairs of samples": (lambda x: x.split(2), "features"),
    "every sample": (lambda x: x.unbind(0), "one"),
    "the product of halves": (lambda x: torch.mul(*x.chunk(2)), "features"),
    "the first of three parts": (lambda x: x.tensor_split(3)[0], "features"),
    "every third sample": (lambda x: (x[::3], x[1::3], x[2::3]), "features"),
    "every second of the second half": (lambda x: x[x.shape[0] // 2 :: 2], "features"),
    "parts of the input": (lambda x: (x, torch.cat(x.split(2)[::-1])), "features"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", HALVES)
def test_results_along_the_samples_are_what_they_are_at_every_number_of_samples(name: str) -> None:
    """Where it is odd, halves are not in proportion to it, and it has a capture of its own."""
    part, axis = HALVES[name]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> object:
            """(N, 4) to parts of (N, 4)."""
            return part(self.fc(x))

    net = Net().double()
    model = compiled(net, spread(2, "out-features") if axis == "features" else {}, 2)
    for samples in (8, 6, 7, 12, 8):
        if name.startswith("the product") and samples % 2:
            continue  # the plain model multiplies halves of equal size only
        x = torch.randn(samples, 4, dtype=torch.float64)
        torch.testing.assert_close(model(x), net(x))


@pytest.mark.full
def test_statistics_of_norms_that_run_in_several_places() -> None:
    for table in norms_apart(2):
        net = NormedTwice()
        plain = copy.deepcopy(net)
        model = Compiled(net, planner(table, 2), devices=["cpu"] * 2)
        for _ in range(3):
            x = torch.randn(4, 6, dtype=torch.float64)
            found, wanted = outcome(model.module, model, x), outcome(plain, plain, x)
            assert differences(found, wanted) == {}
        model.eval()
        assert differences(outcome(model.module, model, x), outcome(plain.eval(), plain, x)) == {}


def test_copies_see_the_statistics_of_the_first_replica() -> None:
    """Plain batch norm, which torch does not count as a change of its buffers, then evaluation on all devices.

    `cpu:0` is the same memory to torch, and another device to parplan, which keeps copies there.
    """
    net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    model = Compiled(net, planner(spread(2, "data"), 2), devices=["cpu", "cpu:0"], batch_norm="local")
    x = torch.randn(4, 6, dtype=torch.float64)
    for _ in range(2):
        model.train()(x)
        torch.testing.assert_close(model.eval()(x), copy.deepcopy(net).eval()(x), rtol=1e-9, atol=1e-9)
