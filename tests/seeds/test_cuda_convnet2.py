"""The habits of cuda-convnet2's users: examples/seeds/cuda_convnet2.py as a program, and what files mean in training.

Reading, planning, verifying and running the guide's five configurations: tests/convnet2/.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import parplan
from examples.seeds import cuda_convnet2
from parplan.convnet2 import read
from parplan.plan import Scheme
from tests.convnet2.layer_files import FIXTURES, SMALL, write

PAGE = Path(__file__).parents[2] / "docs" / "seeds" / "cuda-convnet2.md"
FC = ("fca", "fcb", "fc2")
RATES = "".join(f"[{name}]\nepsW=0.1\nepsB=0.2\nmomW=0\nmomB=0\nupdatePeriod=1\n" for name in FC)
CONV_RATES = "[conv1]\nepsW=0.4\nepsB=0.8\nmomW=0\nmomB=0\n"


@pytest.mark.full
def test_the_program_learns_to_read_digits(capsys: pytest.CaptureFixture[str]) -> None:
    result = cuda_convnet2.main([])
    assert result is not None
    assert result.costs[-1] < 0.2 * result.costs[0]
    assert result.wrong < 0.06
    out = capsys.readouterr().out
    assert "fc1b=replicas:1 shards:1 gpu:1 update:1" in out
    assert re.search(r"^plan: samples by (broadcast|interleave), 2 passes per batch$", out, re.MULTILINE)


def test_the_program_tells_what_a_file_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_convnet2.main(["--epochs", "0", "--layer-def", str(FIXTURES / "layers-2gpu-data.cfg")]) is None
    out = capsys.readouterr().out
    assert "layers-2gpu-data.cfg: 61,100,840 parameters, GPUs named: 2" in out
    assert "  conv1=replicas:2 shards:1 gpu:0,1" in out


@pytest.mark.full
@pytest.mark.parametrize("scheme", [Scheme.BROADCAST, Scheme.INTERLEAVE])
def test_fully_connected_weights_are_updated_in_every_pass(tmp_path: Path, scheme: Scheme) -> None:
    """`updatePeriod=1` beside a loop by hand: fc weights after each half of the batch, conv weights after both."""
    write(tmp_path, RATES + CONV_RATES, "layer-params-some.cfg")
    torch.manual_seed(0)
    found = read(write(tmp_path, SMALL))
    network = found.network.double()
    by_hand = copy.deepcopy(network)
    images, labels = torch.randn(8, 3, 12, 12, dtype=torch.float64), torch.arange(8)

    plan = parplan.analyze(network, (images, labels), gpus=2, pins=found.pins).plan
    compiled = parplan.compile(network, devices=["cpu", "cpu"], plan=replace(plan, scheme=scheme))
    optimizer = torch.optim.SGD(found.parameter_groups())
    loss = compiled.train_step((images, labels), None, lambda costs, _: costs.mean(), optimizer)

    halves = [range(4), range(4, 8)] if scheme is Scheme.BROADCAST else [(0, 1, 4, 5), (2, 3, 6, 7)]
    expected = trained_by_hand(by_hand, images, labels, [list(half) for half in halves])
    assert loss.item() == pytest.approx(expected)
    for (name, parameter), other in zip(network.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-9, atol=1e-12, msg=name)


def trained_by_hand(network: nn.Module, images: Tensor, labels: Tensor, halves: list[list[int]]) -> float:
    """One step as cuda-convnet2 describes it; the mean cost."""
    fc = [p for name, p in network.named_parameters() if name.partition(".")[0] in FC]
    total = 0.0
    for half in halves:
        cost = network(images[half], labels[half]).mean()
        cost.backward()
        total += cost.item() / len(halves)
        stepped(fc, 0.1, 0.2)
    conv = list(network.get_submodule("conv1").parameters())
    stepped(conv, 0.4 / len(halves), 0.8 / len(halves))
    return total


def stepped(parameters: list[nn.Parameter], weights: float, biases: float) -> None:
    """Plain gradient descent; gradients are used up."""
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.sub_((weights if parameter.dim() > 1 else biases) * parameter.grad)
            parameter.grad = None


def test_the_page_names_files_that_are_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = set(re.findall(r"layer(?:s|-params)-[\w-]+\.cfg", page))
    assert {name for name in names if not (FIXTURES / name).is_file()} <= {"layers-X.cfg", "layer-params-X.cfg"}
    assert {path.name for path in FIXTURES.glob("layers-*gpu*.cfg")} <= names
