"""Sharded state: which parameters lie in slices, and the program that gathers them and sums their gradients to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import gather_groups
from parplan.layout import shape_of
from parplan.lowering.holdings import holdings, slices
from parplan.lowering.lower import lower
from parplan.lowering.program import Compute, Regather, Step, Transfer
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.search_space.verifier import check

FOUR = (0, 1, 2, 3)
REPLICAS = Strategy(4, 1, None, FOUR, state="sharded")


class Tied(nn.Module):
    """Words in and out by one weight, a norm over the batch, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.own = nn.Embedding(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.narrow = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.words(x))
        return h @ self.words.weight.t(), self.narrow(self.own(h))


def sliced(graph: LayerGraph, strategy: Strategy) -> dict[str, tuple[int, ...]]:
    """Rows of the slices by the parameter's name."""
    found: Mapping[str, tuple[int, ...]] = {
        graph.parameters[name]: own.rows
        for layer in graph.layers.values()
        for name, own in slices(graph, layer, strategy).items()
    }
    return dict(found)


def test_matrices_of_one_layer_lie_in_slices() -> None:
    """Not vectors, what layers share, norms of the batch, and matrices with fewer indices than slices."""
    graph = capture(Tied(), (torch.randint(0, 16, (8,)),))
    assert sliced(graph, REPLICAS) == {"own.weight": (2, 1, 2, 1), "narrow.weight": (2, 1, 2, 1)}
    assert sliced(graph, Strategy(8, 1, None, tuple(range(8)), state="sharded")) == {"own.weight": (1,) * 8}
    assert sliced(graph, Strategy(4, 1, None, FOUR)) == sliced(graph, Strategy(state="sharded")) == {}


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        (REPLICAS, [(2, 8)] * 4),
        (Strategy(2, 2, "out-features", FOUR, state="sharded"), [(4, 4)] * 4),
        (Strategy(2, 2, "in-features", FOUR, state="sharded"), [(4, 4)] * 4),
        (Strategy(1, 4, "out-features", FOUR, state="sharded"), [(2, 8)] * 4),
    ],
)
def test_every_device_keeps_a_part_of_its_own(strategy: Strategy, parts: list[tuple[int, ...]]) -> None:
    graph = capture(nn.Sequential(nn.Linear(8, 8)), (torch.zeros(8, 8),))
    held = holdings(graph, {"0": strategy})["p_0_weight"]
    assert [shape_of(block) for block in held.values()] == parts
    assert len(set(held.values())) == 4


def test_weights_are_gathered_before_their_group_and_gradients_leave_behind_their_layer() -> None:
    graph = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.zeros(8, 8),))
    strategy = Strategy(2, 1, None, (0, 1), state="sharded")
    program = lower(graph, dict.fromkeys(graph.layers, strategy), StepSetting.per_process(2, 8))
    assert program.slices == ("p_0_weight", "p_2_weight")
    assert (
        program.text()
        == """\
forward:
  move p_0_weight 2x1 (0,1) rows:0 -> p_0_weight@1 2x1 (0,1)
  move p_2_weight 2x1 (0,1) rows:0 -> p_2_weight@1 2x1 (0,1)
  0 + 1 on 2x1 (0,1): input, p_0_weight@1 -> relu
  2 on 2x1 (0,1): relu, p_2_weight@1 -> linear_1
backward:
  back through 2
  move p_2_weight@1 back to p_2_weight
  back through 0 + 1
  sum gradients of p_2_bias, p_0_bias
  move p_0_weight@1 back to p_0_weight
"""
    )


def test_weights_are_gathered_one_group_ahead() -> None:
    """Forward while the group before computes, backward while the one behind goes back."""
    graph = capture(nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]), (torch.zeros(8, 8),))
    assert gather_groups(graph) == (("0", "1"), ("2", "3"), ("4", "5"))
    gathered = Strategy(2, 1, None, (0, 1), state="gathered")
    program = lower(graph, dict.fromkeys(graph.layers, gathered), StepSetting.per_process(2, 8))

    def order(steps: Sequence[Step]) -> list[str]:
        """Gathers by the number of the layer, and computed layers."""
        found = []
        for step in steps:
            own = step.transfer if isinstance(step, Regather) else step
            if isinstance(step, Compute):
                found.append("+".join(step.layers))
            elif isinstance(own, Transfer) and (isinstance(step, Regather) or steps is program.forward):
                found.append(f"gather {own.given.value.split('_')[1]}")
        return found

    assert order(program.forward) == [
        "gather 0", "gather 1", "gather 2", "gather 3", "0", "1", "gather 4", "gather 5", "2", "3", "4", "5",
    ]  # fmt: skip
    assert order(program.backward) == [
        "gather 5", "gather 4", "gather 3", "gather 2", "5", "4", "gather 1", "gather 0", "3", "2", "1", "0",
    ]  # fmt: skip


def test_gathered_weights_are_gathered_again_before_their_backward() -> None:
    graph = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.zeros(8, 8),))
    whole = Strategy(2, 1, None, (0, 1), state="sharded")
    program = lower(
        graph,
        {**dict.fromkeys(graph.layers, whole), "2": replace(whole, state="gathered")},
        StepSetting.per_process(2, 8),
    )
    assert program.freed == {"p_2_weight@1": "p_2_weight"}
    assert (
        program.text().partition("backward:")[2]
        == """
  move p_2_weight 2x1 (0,1) rows:0 -> p_2_weight@1 2x1 (0,1) again
  back through 2
  move p_2_weight@1 back to p_2_weight
  back through 0 + 1
  sum gradients of p_2_bias, p_0_bias
  move p_0_weight@1 back to p_0_weight
"""
    )


def test_no_passes() -> None:
    graph = capture(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), (torch.zeros(8, 8),))
    layers = {"0": REPLICAS, "1": Strategy(2, 2, "out-features", FOUR)}
    plan = Plan(graph.model, graph.fingerprint, 8, 4, layers)
    check(plan, graph)
    assert Plan.from_json(plan.to_json()) == plan
    check(replace(plan, micro_batches=2), graph)
    with pytest.raises(PlanError, match="0: sharded state is for steps in one pass, and the plan has 2"):
        check(replace(plan, scheme=Scheme.INTERLEAVE), graph)


class Shared(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x))
        return result


@pytest.mark.parametrize(
    ("last", "parts"),
    [
        (Strategy(1, 2, "out-features", (2, 3)), [(4, 8)] * 4),
        (Strategy(1, 2, "in-features", (2, 3)), [(8, 8)] * 4),
        (Strategy(1, 1, None, (2,)), [(8, 8)] * 3),
        (Strategy(1, 2, "in-features", (0, 1)), [(8, 8)] * 2),
    ],
)
def test_what_layers_share_is_whole_where_their_blocks_overlap(last: Strategy, parts: list[tuple[int, ...]]) -> None:
    graph = capture(Shared(), (torch.zeros(8, 8),))
    held = holdings(graph, {"first": Strategy(1, 2, "out-features", (0, 1)), "last": last})
    assert [shape_of(block) for block in held[next(iter(graph.users))].values()] == parts
