"""Training on the accelerators of this machine, of any type, gives the numbers of CPUs; skipped where there are none.

In float32, without convolutions, and each op by itself: what every type of accelerator computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from parplan.accelerators import accelerator_count, place_of
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import STATES, Plan, Scheme
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import planner, spread
from tests.runtime.pipeline_cases import Staging, Tower, tokens

pytestmark = pytest.mark.skipif(not accelerator_count(), reason="needs an accelerator")

STEPS, SAMPLES = 200, 12

PLANS: dict[str, tuple[int, Callable[[LayerGraph], Plan]]] = {
    "one device": (1, planner({}, 1)),
    "data parallel": (4, planner(spread(4, "data"), 4)),
    "sharded": (4, planner(spread(4, "out-features"), 4)),
    "hybrid": (2, planner(spread(2, "hybrid"), 2)),
    "passes": (2, planner(spread(2, "hybrid"), 2, Scheme.BROADCAST)),
    "micro-batches": (2, planner(spread(2, "data"), 2, micro_batches=3)),
    **{f"{state} state": (4, Staging(1, 4, 1, state=state).plan) for state in STATES[1:]},
    "stages": (2, Staging(2, 2, 4).plan),
    "interleaved stages": (4, Staging(2, 4, 4, rounds=2).plan),
    "gpipe": (4, Staging(4, 4, 4, "gpipe").plan),
    "everything": (4, Staging(2, 4, 4, state="gathered", saved="replay").plan),
}


def left_by(
    plan: Callable[[LayerGraph], Plan], places: Sequence[torch.device], home: torch.device, threads: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of training a small residual network, and the weights it ends with."""
    torch.manual_seed(0)
    net: nn.Module = Tower(counted=False).float().to(home)
    # On the simulated accelerator, float64 gradients of a plain module are now and then wrong once other threads of the
    # process have used it, and the self-check compares with those.
    model = Compiled(net, plan, devices=list(places), threads=threads, check="off" if threads else "first")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    losses = []
    for _ in range(STEPS):
        loss, _ = model(*(tensor.to(home) for tensor in tokens(SAMPLES)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def frees_storages() -> bool:
    """Whether the memory of a tensor can be given back and taken again, as gathered weights do."""
    try:
        torch.empty(1, device=place_of(0)).untyped_storage().resize_(0)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("home", ["accelerator", "host"])
@pytest.mark.parametrize("name", PLANS)
def test_training_is_that_on_cpus(name: str, home: str, threads: bool) -> None:
    if name in ("gathered state", "everything") and not frees_storages():
        pytest.skip("storages of this type of accelerator cannot be resized")
    count, plan = PLANS[name]
    cpu = torch.device("cpu")
    wanted, weights = left_by(plan, [cpu] * count, cpu)
    places = [place_of(number) for number in range(count)]
    found, own = left_by(plan, places, places[0] if home == "accelerator" else cpu, threads)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own, weights, rtol=1e-3, atol=1e-4)
