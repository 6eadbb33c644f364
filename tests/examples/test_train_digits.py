"""The digits example on its own: the plain model learns, and shares and shuffles lose no sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from examples import train_digits
from examples.train_digits import Digits, Place


class Always(nn.Module):
    """Reads every image as the same digit."""

    def __init__(self, digit: int) -> None:
        super().__init__()
        self.digit = digit

    def forward(self, images: Tensor) -> Tensor:
        return torch.eye(10)[self.digit].expand(len(images), -1)


@pytest.mark.full
def test_the_plain_model_reads_97_percent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_digits.main(["--history", str(tmp_path / "history.json")])
    history = json.loads((tmp_path / "history.json").read_text())
    assert history["accuracy"] >= 0.97
    assert len(history["losses"]) == 6 * 30
    assert history["losses"][-1] < history["losses"][0] / 10
    assert f"test accuracy {history['accuracy']:.2%}" in capsys.readouterr().out


@pytest.mark.full
def test_two_runs_are_the_same() -> None:
    args = train_digits.parse(["--epochs", "1", "--dtype", "float64"])
    assert train_digits.run(args, Place()) == train_digits.run(args, Place())


def test_the_split_keeps_every_digit() -> None:
    seen, unseen = train_digits.load(torch.float64, torch.device("cpu"))
    assert (len(seen.labels), len(unseen.labels)) == (1440, 357)
    rows = torch.cat((seen.images, unseen.images)).flatten(1)
    assert len(rows) == 1797
    assert (rows.min().item(), rows.max().item()) == (0.0, 1.0)
    assert torch.bincount(torch.cat((seen.labels, unseen.labels))).min() >= 174


def test_an_epoch_sees_every_sample_once() -> None:
    first, second = torch.cat(list(train_digits.batches(2, 48))).split(train_digits.TRAIN_SAMPLES)
    assert torch.equal(first.sort().values, torch.arange(1440))
    assert torch.equal(second.sort().values, torch.arange(1440))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_shares_are_equal_and_complete(processes: int) -> None:
    rows = torch.randperm(48)
    shares = [Place(rank, processes).own(rows) for rank in range(processes)]
    assert {len(share) for share in shares} == {48 // processes}
    assert torch.equal(torch.cat(shares), rows)


@pytest.mark.parametrize(("batch", "correct"), [(4, 3), (7, 3), (5, 3), (48, 3)])
def test_accuracy_counts_no_sample_twice(batch: int, correct: int) -> None:
    digits = Digits(torch.zeros(7, 1, 8, 8), torch.tensor([1, 1, 2, 3, 4, 5, 1]))
    assert train_digits.accuracy(Always(1), digits, Place(), batch) == pytest.approx(correct / 7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4", ["cpu"] * 4), ("1", ["cpu"]), ("cuda:3,cuda:2", ["cuda:3", "cuda:2"]), ("cpu,cpu", ["cpu", "cpu"])],
)
def test_devices(text: str, expected: list[str]) -> None:
    assert train_digits.devices(text) == expected


@pytest.mark.parametrize("batch", ["0", "-48", "50"])
def test_a_batch_that_leaves_a_rest_is_refused(batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_digits.parse(["--batch", batch])
    assert f"--batch {batch} does not divide the 1440 training samples" in capsys.readouterr().err
