"""Replayed layers: the steps of their units, the order in which these go forward again, and what is refused."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import units
from parplan.lowering.lower import lower
from parplan.lowering.program import Program
from parplan.lowering.step_setting import StepSetting
from parplan.lowering.strategies import strategies_for
from parplan.plan import Plan, Scheme, Strategy

TWO = Strategy(2, 1, None, (0, 1))


def five() -> nn.Sequential:
    """Five matrices: two units of two, and one that is in none."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(8, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, 4))


def lowered(graph: LayerGraph, replayed: Collection[str], strategy: Strategy = TWO) -> Program:
    """The graph's program, with these layers replayed."""
    chosen = {name: replace(strategy, saved="replay" if name in replayed else "keep") for name in graph.layers}
    return lower(graph, chosen, StepSetting.per_process(2, 8))


def test_what_is_replayed_is_steps_of_its_own() -> None:
    graph = capture(five(), (torch.zeros(8, 8),))
    assert units(graph) == (("0", "1", "2", "3"), ("4", "5", "6", "7"))
    program = lowered(graph, ("0", "1", "2", "3", "6", "7"))
    assert [step.unit for step in program.computes] == [0, None, 1, None]
    assert (
        program.text().replace("gradients of p_8_bias, p_8_weight, p_6_bias, p_6_weight, ", "")
        == """\
forward:
  0 + 1 + 2 + 3 on 2x1 (0,1): input -> relu_1
  4 + 5 on 2x1 (0,1): relu_1 -> relu_2
  6 + 7 on 2x1 (0,1): relu_2 -> relu_3
  8 on 2x1 (0,1): relu_3 -> linear_4
backward:
  back through 8
  back through 6 + 7
  back through 4 + 5
  back through 0 + 1 + 2 + 3
  sum p_4_bias, p_4_weight, p_2_bias, p_2_weight, p_0_bias, p_0_weight
"""
    )


def test_units_next_to_each_other_are_steps_of_their_own() -> None:
    graph = capture(five(), (torch.zeros(8, 8),))
    program = lowered(graph, [name for unit in units(graph) for name in unit])
    assert [(step.layers, step.unit) for step in program.computes] == [
        (("0", "1", "2", "3"), 0), (("4", "5", "6", "7"), 1), (("8",), None),
    ]  # fmt: skip


def test_weights_of_a_unit_are_gathered_before_all_of_it() -> None:
    graph = capture(five(), (torch.zeros(8, 8),))
    program = lowered(graph, ("4", "5", "6", "7"), replace(TWO, state="gathered"))
    assert [line.strip() for line in program.text().partition("backward:")[2].splitlines()[2:13]] == [
        "move p_6_weight 2x1 (0,1) rows:0 -> p_6_weight@1 2x1 (0,1) again",
        "move p_4_weight 2x1 (0,1) rows:0 -> p_4_weight@1 2x1 (0,1) again",
        "back through 8",
        "move p_8_weight@1 back to p_8_weight",
        "move p_2_weight 2x1 (0,1) rows:0 -> p_2_weight@1 2x1 (0,1) again",
        "move p_0_weight 2x1 (0,1) rows:0 -> p_0_weight@1 2x1 (0,1) again",
        "back through 4 + 5 + 6 + 7",
        "move p_6_weight@1 back to p_6_weight",
        "move p_4_weight@1 back to p_4_weight",
        "back through 2 + 3",
        "move p_2_weight@1 back to p_2_weight",
    ]


def test_a_graph_without_a_backward_replays_nothing() -> None:
    graph = capture(five(), (torch.zeros(8, 8),), training=False)
    program = lowered(graph, list(graph.layers))
    assert [step.unit for step in program.computes] == [None]


def test_a_unit_without_gradients_is_not_replayed() -> None:
    net = five()
    for parameter in net[:3].parameters():
        parameter.requires_grad_(False)
    graph = capture(net, (torch.zeros(8, 8),))
    assert units(graph)[0] == ("0", "1", "2", "3")
    program = lowered(graph, [name for unit in units(graph) for name in unit])
    assert [step.unit for step in program.computes] == [None, 1, None]


# ---- what is refused -------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A norm of the batch between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(x)))
        return result


def test_layers_in_no_unit_are_refused() -> None:
    graph = capture(five(), (torch.zeros(8, 8),))
    with pytest.raises(
        PlanError, match=r'^8: cannot replay its forward, as it is in no unit .*; give it saved "keep"$'
    ):
        lowered(graph, ("8",))
    graph = capture(Normed(), (torch.zeros(8, 8),))
    with pytest.raises(PlanError, match=r"^norm: cannot replay its forward, as it writes running statistics; give it"):
        lowered(graph, ("norm",))


class Recurrent(nn.Module):
    """Two recurrent layers between two others."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.cells = nn.LSTM(8, 8, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.cells(self.first(x))[0])
        return result


@pytest.mark.full
def test_dropout_within_recurrent_layers_is_refused() -> None:
    """cuDNN has a generator of its own for it."""
    (unit,) = units(capture(Recurrent(0.0), (torch.zeros(8, 3, 8),)))
    assert "cells" in unit
    graph = capture(Recurrent(0.5), (torch.zeros(8, 3, 8),))
    with pytest.raises(PlanError, match="cells: cannot replay its forward, as it drops values between recurrent"):
        lowered(graph, ("cells",))


def test_passes_are_refused() -> None:
    graph = capture(five(), (torch.zeros(8, 8),))
    chosen = {name: replace(TWO, replicas=1, devices=(0,)) if name == "8" else TWO for name in graph.layers}
    chosen["0"] = replace(TWO, saved="replay")
    setting = StepSetting.per_process(2, 8, Scheme.INTERLEAVE)
    with pytest.raises(
        PlanError, match=r'^0: replays its forward, .* and the plan has 2; give its layers saved "keep"'
    ):
        lower(graph, chosen, setting)


def test_another_capture_keeps_what_it_cannot_replay() -> None:
    """As where weights were frozen in between; the first capture refuses it."""
    graph = capture(five(), (torch.zeros(8, 8),))
    layers = {name: replace(TWO, saved="replay") for name in graph.layers}
    plan = Plan(graph.model, graph.fingerprint, 8, 2, layers)
    assert strategies_for(graph, plan)["8"].saved == "replay"
    held = {"p_0_weight": TWO}
    assert {name: own.saved for name, own in strategies_for(graph, plan, held).items() if own.saved == "keep"} == {
        "8": "keep"
    }
