"""The CUDA paths, on logical devices that share the GPUs there are; skipped without one."""

from __future__ import annotations

import copy

import pytest
import torch

from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import differences, outcome, planner, spread
from tests.runtime.nets import conv_net

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
