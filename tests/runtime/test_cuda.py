"""The CUDA paths, on logical devices that share the GPUs there are; skipped without one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parplan.plan import STATES
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import differences, outcome, planner, spread
from tests.runtime.nets import conv_net
from tests.runtime.pipeline_cases import Staging, Tower, trained

PLACES = {
    "one GPU four times": ["cuda:0"] * 4,
    "a GPU and the CPU": ["cuda:0", "cpu", "cuda:0", "cpu"],
    "all GPUs": [f"cuda:{i % max(1, torch.cuda.device_count())}" for i in range(4)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["data", "hybrid", "channels", "out-features"])
@pytest.mark.parametrize("places", PLACES)
def test_a_gpu_gives_the_plain_models_numbers(places: str, kind: str) -> None:
    plain = conv_net().cuda()
    model = Compiled(copy.deepcopy(plain), planner(spread(4, kind), 4), devices=PLACES[places])
    for samples in (12, 5):
        x = torch.randn(samples, 3, 8, 8, dtype=torch.float64, device="cuda")
        found, wanted = outcome(model, model, x), outcome(plain, plain, x)
        assert differences(found, wanted) == {}


@pytest.mark.gpu
def test_copies_follow_the_optimizer() -> None:
    plain = conv_net()  # on the CPU, so that every device works on copies
    model = Compiled(copy.deepcopy(plain), planner(spread(2, "data"), 2), devices=["cuda:0"] * 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    for _ in range(3):
        x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
        for module, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-8, atol=1e-8)


STAGINGS = {
    "micro-batches": Staging(1, 4, 3),
    "stages": Staging(2, 2, 4),
    "gpipe": Staging(4, 4, 4, "gpipe"),
    "interleaved": Staging(2, 4, 4, rounds=2),
    "replays": Staging(2, 4, 4, saved="replay"),
    **{f"{state} state": Staging(1, 4, 1, state=state) for state in STATES[1:]},
    "everything": Staging(2, 4, 4, state="gathered", saved="replay"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("kind", STAGINGS)
def test_training_on_a_gpu_is_the_plain_models(kind: str, threads: bool) -> None:
    trained(STAGINGS[kind], 12, lambda: Tower(tied=kind == "stages"), place="cuda:0", threads=threads)


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("kind", ["data", "hybrid", "out-features"])
def test_work_that_takes_longer_than_its_launch(kind: str, threads: bool) -> None:
    """Streams that do not wait for each other show in products of milliseconds, and in none of microseconds."""
    torch.manual_seed(0)
    width = 2048
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6))).double().cuda()
    model = Compiled(
        copy.deepcopy(plain), planner(spread(4, kind), 4), devices=["cuda:0"] * 4, threads=threads, check="off"
    )
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01, momentum=0.9) for one in (model, plain)]
    for _ in range(5):
        x = torch.randn(width, width, dtype=torch.float64, device="cuda")
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            one(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
