"""What a recording says: everything adds up to the step, layers come in the plan's order, and numbers stay the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from parplan.graph.capture.capture import capture
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.program_function import run_program
from parplan.runtime.execution.timeline import (
    REST,
    ActivityKind,
    StepActivity,
    StepTimeline,
    StepTimes,
)
from tests.runtime.helpers import Rule, executor, spread
from tests.runtime.nets import Towers, conv_net, mlp

NETS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "mlp": (mlp(), (6,)),
    "conv net": (conv_net(), (3, 8, 8)),
    "towers": (Towers().double(), (6,)),
}
RULES = {"one": spread(2, "one"), "data": spread(2, "data"), "hybrid": spread(2, "hybrid")}
CASES = [(net, rule) for net in NETS for rule in RULES]


def plain_executor(module: nn.Module, shape: Sequence[int], rule: Rule, devices: int = 2) -> Executor:
    graph = capture(module, (torch.randn(4, *shape, dtype=torch.float64),))
    return executor(module, graph, {name: rule(layer) for name, layer in graph.layers.items()}, devices, 4)


def recorded_step(plain: Executor, x: Tensor) -> StepTimes:
    """One training step of one executor, recorded."""
    timeline = StepTimeline(plain.transport)
    own = plain.recorded(timeline)
    (name,) = (value for value in plain.graph.user_inputs if value is not None)
    timeline.begin()
    (result,) = run_program(own, {name: x})
    timeline.enter(StepActivity(ActivityKind.LOSS))
    result.sum().backward()
    timeline.end()
    (times,) = timeline.steps()
    return times


def layers(times: StepTimes, device: int, backward: bool) -> list[str]:
    """Names in the order they were first entered."""
    return [
        a.name for a in times.spent_ns if a.kind is ActivityKind.LAYER and a.device == device and a.backward is backward
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("net", "rule"), CASES)
def test_everything_adds_up_to_the_step(net: str, rule: str) -> None:
    module, shape = NETS[net]
    times = recorded_step(plain_executor(module, shape, RULES[rule]), torch.randn(4, *shape, dtype=torch.float64))
    assert sum(times.spent_ns.values()) == times.step_ns
    assert times.spent_ns[REST] > 0
    assert min(times.spent_ns.values()) >= 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("net", "rule"), CASES)
def test_layers_come_in_forward_order_and_go_back_in_reverse(net: str, rule: str) -> None:
    module, shape = NETS[net]
    plain = plain_executor(module, shape, RULES[rule])
    times = recorded_step(plain, torch.randn(4, *shape, dtype=torch.float64))
    for device in (0,) if rule == "one" else (0, 1):
        assert layers(times, device, backward=False) == list(plain.graph.layers)
        assert layers(times, device, backward=True) == list(plain.graph.layers)[::-1]


def test_layers_that_share_a_compute_step_are_told_apart() -> None:
    plain = plain_executor(*NETS["mlp"], RULES["one"], devices=1)
    assert len(plain.program.forward) == 1
    times = recorded_step(plain, torch.randn(4, 6, dtype=torch.float64))
    assert layers(times, 0, backward=False) == ["0", "1", "2", "3", "4"]


def test_transfers_are_known_by_the_slot_they_fill_in_both_directions() -> None:
    plain = plain_executor(*NETS["conv net"], RULES["hybrid"])
    times = recorded_step(plain, torch.randn(4, 3, 8, 8, dtype=torch.float64))
    moved = [a.name for a in times.spent_ns if a.kind is ActivityKind.TRANSFER and a.name and not a.backward]
    assert moved == [transfer.target for transfer in plain.program.transfers]
    back = {a.name for a in times.spent_ns if a.kind is ActivityKind.TRANSFER and a.backward}
    assert back == set(moved) - {"images@1"}  # nobody asks for the gradient of the images


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("net", "rule"), CASES)
def test_recording_changes_no_number(net: str, rule: str) -> None:
    module, shape = NETS[net]
    plain = plain_executor(module, shape, RULES[rule])
    x = torch.randn(4, *shape, dtype=torch.float64)
    (name,) = (value for value in plain.graph.user_inputs if value is not None)
    found: list[list[Tensor]] = []
    for each in (plain, plain.recorded(StepTimeline(plain.transport))):
        (result,) = run_program(each, {name: x})
        found.append([result, *torch.autograd.grad(result.square().sum(), list(module.parameters()))])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_recorded_unless_asked() -> None:
    plain = plain_executor(*NETS["mlp"], RULES["data"])
    assert not isinstance(plain.recorder, StepTimeline)
    assert isinstance(plain.recorded(StepTimeline(plain.transport)).recorder, StepTimeline)
    step = plain.program.forward[1]
    assert not any("layer" in name for name in _globals(plain, step))
    assert any("layer" in name for name in _globals(plain.recorded(StepTimeline(plain.transport)), step))


def _globals(of: Executor, step: object) -> list[str]:
    """What the generated code of a compute step calls."""
    code = of.code.get(step, 0)  # type: ignore[arg-type]
    return [node.name for node in code.__self__.graph.nodes]  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_events_on_a_gpu_add_up_on_every_stream() -> None:
    from parplan.runtime.module.compiled import Compiled
    from tests.runtime.helpers import planner

    net = conv_net().cuda()
    model = Compiled(net, planner(RULES["hybrid"], 2), devices=["cuda:0"] * 2)
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64, device="cuda")
    model(x)
    found = model.measure(x, steps=4, optimizer=torch.optim.Adam(net.parameters()), memory=True)
    assert [layer.name for layer in found.layers] == list(model.graph.layers if model.graph is not None else ())
    assert all(layer.forward.seconds > 0 and layer.backward.seconds > 0 for layer in found.layers)
    assert found.step.seconds > max(layer.forward.seconds for layer in found.layers)
    assert found.peak is not None
    assert found.peak.rise_bytes > 0
