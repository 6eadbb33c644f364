"""Buffers that a forward writes and reads: counted once, assigned once, whatever the plan; also under a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parplan.graph.capture.capture import capture
from parplan.plan import Scheme
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import compiled, differences, outcome, planner, spread

Forward = Callable[[Any, Tensor], Any]


class Written(nn.Module):
    """Two layers and buffers, with a forward that a test gives."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("share", torch.zeros(()))
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("queue", torch.zeros(4, 8))
        self._body = forward

    def forward(self, x: Tensor) -> Any:
        return self._body(self, x)


def counted(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    y: Tensor = m.b(m.a(x)) / m.steps
    return y


def counted_by_method(m: Any, x: Tensor) -> Tensor:
    m.steps.add_(1)
    y: Tensor = m.b(m.a(x)) / m.steps
    return y


def counted_by_assignment(m: Any, x: Tensor) -> Tensor:
    m.steps = m.steps + 1
    y: Tensor = m.b(m.a(x)) / m.steps
    return y


def counted_down(m: Any, x: Tensor) -> Tensor:
    m.steps -= 1
    y: Tensor = m.b(m.a(x)) / m.steps
    return y


def counted_in_floats(m: Any, x: Tensor) -> Tensor:
    m.share += 0.25
    y: Tensor = m.b(m.a(x)) * m.share.clamp(max=1.0)
    return y


def read_before_and_after(m: Any, x: Tensor) -> Tensor:
    y = m.b(m.a(x)) * (1 + m.steps)
    m.steps += 1
    z: Tensor = y / m.steps
    return z


def read_before(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.b(m.a(x)) * (1 + m.steps)
    m.steps += 1
    return y


def assigned_last(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.b(m.a(x) * m.mean)
    m.mean = m.mean * 0.5 + m.a(x).detach().mean(0)
    return y


def averaged(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        m.mean.mul_(0.9).add_(h.mean(0) * 0.1)
    y: Tensor = m.b(h - m.mean)
    return y


def averaged_as_number(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.share.mul_(0.9).add_(h.detach().mean() * 0.1)
    y: Tensor = m.b(h * m.share)
    return y


def written_by_index(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.queue[0] = h.detach()[0]
    m.queue[1, 2:4] = 1.0
    y: Tensor = m.b(h * m.queue.sum(0))
    return y


def copied(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.mean.copy_(h.detach()[0])
    y: Tensor = m.b(h * m.mean)
    return y


def queued(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    near = h @ m.queue.clone().t()
    m.queue[1:] = m.queue[:-1].clone()
    m.queue[0] = h.detach().mean(0)
    y: Tensor = near + m.b(h)
    return y


def only_in_training(m: Any, x: Tensor) -> Tensor:
    if m.training:
        m.steps += 1
    y: Tensor = m.b(m.a(x)) / (1 + m.steps)
    return y


def handed_back(m: Any, x: Tensor) -> Any:
    m.steps += 1
    return m.b(m.a(x)), m.steps.clone()


FORWARDS: tuple[Forward, ...] = (
    counted, counted_by_method, counted_by_assignment, counted_down, counted_in_floats, read_before_and_after,
    read_before, assigned_last, averaged, averaged_as_number, written_by_index, copied, queued, only_in_training,
    handed_back,
)  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("devices", "kind", "again"), [(1, "one", True), (4, "hybrid", False)], ids=["checkpoint", "hybrid"]
)
@pytest.mark.parametrize("forward", FORWARDS)
def test_steps_are_those_of_the_plain_model(forward: Forward, devices: int, kind: str, again: bool) -> None:
    torch.manual_seed(0)
    plain = Written(forward).double()
    model = compiled(plain, spread(devices, kind), devices)
    for step in range(3):
        if step == 2:
            model.eval()
            plain.eval()
        x = torch.randn(8, 6, dtype=torch.float64)
        found, wanted = (outcome(m, _again(m) if again else m, x) for m in (model, plain))
        assert differences(found, wanted) == {}, step


def _again(model: nn.Module) -> Callable[..., Any]:
    return lambda *args: checkpoint(model, *args, use_reentrant=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", [Scheme.BROADCAST, Scheme.INTERLEAVE])
@pytest.mark.parametrize("forward", [counted, read_before_and_after, averaged])
def test_layers_in_passes_see_one_step(forward: Forward, scheme: Scheme) -> None:
    plain = Written(forward).double()
    rule = spread(4, "data")
    narrow = {"b": spread(4, "out-features")}
    model = Compiled(
        Written(forward).double(),
        planner(lambda layer: narrow.get(layer.name, rule)(layer), 4, scheme),
        devices=["cpu"] * 4,
    )
    model.load_state_dict(plain.state_dict())
    for _ in range(3):
        x = torch.randn(8, 6, dtype=torch.float64)
        assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}


def test_a_backward_after_two_forwards_reads_what_each_forward_read() -> None:
    torch.manual_seed(0)
    plain = Written(assigned_last).double()
    model = compiled(plain, spread(2, "data"), 2)
    x = torch.randn(8, 6, dtype=torch.float64)
    for module in (plain, model):
        (module(x).square().sum() + module(x).square().sum()).backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.full
def test_only_counters_that_nothing_reads_are_counted_outside_the_graph() -> None:
    x = torch.randn(8, 6, dtype=torch.float64)
    graph = capture(Written(counted).double(), (x,))
    assert graph.counters == {}
    assert set(graph.buffer_updates) == {"b_steps"}
    assert graph.late == frozenset()
    graph = capture(Written(read_before).double(), (x,))
    assert graph.late == {"b_steps"}
