"""Lowering, read as text: which steps a plan becomes, in which order, forward and backward."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from torch import nn

from parplan.errors import PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Range
from parplan.lowering import holdings as holdings_module
from parplan.lowering.holdings import holdings
from parplan.lowering.lower import lower
from parplan.lowering.program import Program
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Strategy
from tests.runtime.nets import Tied, Towers, conv_net, mlp

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6,)),
    "conv": (conv_net, (3, 8, 8)),
    "towers": (lambda: Towers().double(), (6,)),
    "pair": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).double(), (8,)),
    "tied": (lambda: Tied().double(), (8,)),
}


@cache
def graph_of(net: str) -> LayerGraph:
    make, shape = NETS[net]
    return capture(make(), (torch.zeros(12, *shape, dtype=torch.float64),))


def program(net: str, table: Mapping[str, Strategy], setting: StepSetting) -> Program:
    graph = graph_of(net)
    everywhere = table.get("*", Strategy())
    return lower(graph, {name: table.get(name, everywhere) for name in graph.layers}, setting)


def one_process(devices: int, samples: int = 12) -> StepSetting:
    return StepSetting(devices, (samples,), (0,) * devices)


def processes(*samples: int) -> StepSetting:
    return StepSetting(len(samples), samples, tuple(range(len(samples))))


DATA2 = Strategy(2, 1, None, (0, 1))

TEXTS: dict[str, tuple[str, Mapping[str, Strategy], StepSetting, str]] = {
    "one device is one step": (
        "mlp",
        {},
        one_process(1),
        """
        forward:
          0 + 1 + 2 + 3 + 4 on 1x1 (0): input -> linear_2
        backward:
          back through 0 + 1 + 2 + 3 + 4
        """,
    ),
    "data parallel in one process: scatter and gather": (
        "mlp",
        {"*": DATA2},
        one_process(2),
        """
        forward:
          move input 1x1 (0) -> input@1 2x1 (0,1) rows:0
          0 + 1 + 2 + 3 + 4 on 2x1 (0,1): input@1 -> linear_2
          move linear_2 2x1 (0,1) rows:0 -> linear_2@1 1x1 (0)
        backward:
          move linear_2@1 back to linear_2
          back through 0 + 1 + 2 + 3 + 4
          move input@1 back to input
        """,
    ),
    "data parallel over processes: nothing moves, one bucket": (
        "mlp",
        {"*": DATA2},
        processes(6, 6),
        """
        forward:
          0 + 1 + 2 + 3 + 4 on 2x1 (0,1): input -> linear_2
        backward:
          back through 0 + 1 + 2 + 3 + 4
          sum gradients of p_4_bias, p_4_weight, p_2_bias, p_2_weight, p_0_bias, p_0_weight
        """,
    ),
    "a sum between two layers goes to both devices at once": (
        "mlp",
        {"0": Strategy(1, 2, "in-features", (0, 1)), "1": Strategy(1, 2, "features", (0, 1))},
        one_process(2),
        """
        forward:
          move input 1x1 (0) -> input@1 1x2 (0,1) columns:1
          0 on 1x2 (0,1): input@1 -> linear
          move linear 1x2 (0,1) terms -> linear@1 1x2 (0,1) columns:1
          1 on 1x2 (0,1): linear@1 -> relu
          move relu 1x2 (0,1) columns:1 -> relu@1 1x1 (0)
          2 + 3 + 4 on 1x1 (0): relu@1 -> linear_2
        backward:
          back through 2 + 3 + 4
          move relu@1 back to relu
          back through 1
          move linear@1 back to linear
          back through 0
          move input@1 back to input
        """,
    ),
    "a sum for many readers meets in slices first": (
        "pair",
        {"0": Strategy(1, 4, "in-features", (0, 1, 2, 3)), "1": Strategy(1, 4, "out-features", (0, 1, 2, 3))},
        one_process(4),
        """
        forward:
          move input 1x1 (0) -> input@1 1x4 (0,1,2,3) columns:1
          0 on 1x4 (0,1,2,3): input@1 -> linear
          move linear 1x4 (0,1,2,3) terms -> linear@1 1x4 (0,1,2,3) columns:1
          move linear@1 1x4 (0,1,2,3) columns:1 -> linear@2 1x4 (0,1,2,3)
          1 on 1x4 (0,1,2,3): linear@2 -> linear_1
          move linear_1 1x4 (0,1,2,3) columns:1 -> linear_1@1 1x1 (0)
        backward:
          move linear_1@1 back to linear_1
          back through 1
          move linear@2 back to linear@1
          move linear@1 back to linear
          back through 0
          move input@1 back to input
        """,
    ),
    "two terms for two readers go there directly": (
        "pair",
        {"0": Strategy(1, 2, "in-features", (0, 1)), "1": Strategy(1, 2, "out-features", (0, 1))},
        one_process(2),
        """
        forward:
          move input 1x1 (0) -> input@1 1x2 (0,1) columns:1
          0 on 1x2 (0,1): input@1 -> linear
          move linear 1x2 (0,1) terms -> linear@1 1x2 (0,1)
          1 on 1x2 (0,1): linear@1 -> linear_1
          move linear_1 1x2 (0,1) columns:1 -> linear_1@1 1x1 (0)
        backward:
          move linear_1@1 back to linear_1
          back through 1
          move linear@1 back to linear
          back through 0
          move input@1 back to input
        """,
    ),
    "batch norm over replicas shares three numbers per channel": (
        "conv",
        {"*": DATA2, "fc1": Strategy(), "fc2": Strategy(), "relu_1": Strategy()},
        one_process(2),
        """
        forward:
          move images 1x1 (0) -> images@1 2x1 (0,1) rows:0
          conv on 2x1 (0,1): images@1 -> conv2d
          statistics of norm on 2x1 (0,1): conv2d -> norm.statistics
          move norm.statistics 2x1 (0,1) rows:0 -> norm.statistics@1 2x1 (0,1)
          normalise of norm on 2x1 (0,1): conv2d, norm.statistics@1 -> batch_norm
          relu + pool + flatten on 2x1 (0,1): batch_norm -> flatten
          move flatten 2x1 (0,1) rows:0 -> flatten@1 1x1 (0)
          fc1 + relu_1 + fc2 on 1x1 (0): flatten@1 -> linear_1
        backward:
          back through fc1 + relu_1 + fc2
          move flatten@1 back to flatten
          back through relu + pool + flatten
          back through norm
          move norm.statistics@1 back to norm.statistics
          back through norm
          back through conv
          move images@1 back to images
        """,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_programs_as_text(name: str) -> None:
    net, table, setting, text = TEXTS[name]
    assert program(net, table, setting).text() == textwrap.dedent(text).lstrip()


def test_a_transfer_leaves_when_the_value_is_there_and_its_gradient_after_the_first_reader() -> None:
    made = program("towers", {"b1": Strategy(devices=(1,)), "b2": Strategy(devices=(1,))}, one_process(2))
    text = made.text().splitlines()
    first = next(i for i, line in enumerate(text) if line.startswith("  b1"))
    assert "move linear_1" in text[first + 1]
    assert program("towers", {}, one_process(2)).transfers == ()


def test_a_value_is_moved_once_for_all_readers() -> None:
    made = program("towers", {"a1": Strategy(devices=(1,))}, one_process(2))
    names = [transfer.source for transfer in made.transfers]
    assert len(names) == len(set(names))


def test_uneven_ranks_keep_their_own_samples() -> None:
    made = program("mlp", {"*": DATA2}, processes(5, 1))
    assert made.slots["input"].rows == (5, 1)
    assert made.transfers == ()


def test_rows_that_do_not_follow_the_ranks_are_even() -> None:
    made = program("mlp", {"*": Strategy(2, 1, None, (0, 1))}, processes(5, 1, 1))
    assert made.slots["linear_2"].rows == (4, 3)


def test_buckets_split_segments_so_that_sums_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings_module, "FIRST_BUCKET_BYTES", 200)
    monkeypatch.setattr(holdings_module, "BUCKET_BYTES", 800)
    made = program("mlp", {"*": DATA2}, processes(6, 6))
    assert [bucket.parameters for bucket in made.buckets] == [
        ("p_4_bias", "p_4_weight"),
        ("p_2_bias", "p_2_weight"),
        ("p_0_bias", "p_0_weight"),
    ]
    backward = [line.strip() for line in made.text().split("backward:")[1].splitlines() if line]
    assert backward == [
        "back through 4", "sum gradients of p_4_bias, p_4_weight",
        "back through 2 + 3", "sum gradients of p_2_bias, p_2_weight",
        "back through 0 + 1", "sum gradients of p_0_bias, p_0_weight",
    ]  # fmt: skip


class Meeting(nn.Module):
    """Two layers that read a third one's result, and one that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        return torch.cat((self.a(h), self.b(h)), 1)


def test_branches_on_other_devices_begin_when_their_value_is_there_and_do_not_wait_for_each_other() -> None:
    """Here as one segment each, `stem + a` would keep the value of `stem`, and `b + cat` would wait for `a`."""
    graph = capture(Meeting(), (torch.zeros(12, 4),))
    table = {name: Strategy(devices=(1,) if name in ("b", "cat") else (0,)) for name in graph.layers}
    lines = [line.strip() for line in lower(graph, table, one_process(2)).text().splitlines()]
    assert lines[1:7] == [
        "stem on 1x1 (0): x -> linear",
        "move linear 1x1 (0) -> linear@1 1x1 (1)",
        "a on 1x1 (0): linear -> linear_1",
        "move linear_1 1x1 (0) -> linear_1@1 1x1 (1)",
        "b on 1x1 (1): linear@1 -> linear_2",
        "cat on 1x1 (1): linear_1@1, linear_2 -> cat",
    ]


def test_devices_hold_what_they_use() -> None:
    graph = graph_of("mlp")
    table = {name: Strategy() for name in graph.layers} | {"2": Strategy(1, 2, "out-features", (1, 0))}
    held = holdings(graph, table)
    assert held["p_2_weight"] == {0: (Range(6, 12), Range(0, 12)), 1: (Range(0, 6), Range(0, 12))}
    assert held["p_0_bias"] == {0: (Range(0, 12),)}


def test_a_tied_parameter_stays_whole_where_layers_disagree() -> None:
    graph = graph_of("tied")
    two = (0, 1)
    whole = (Range(0, 8), Range(0, 8))
    (weight,) = [p for p, name in graph.parameters.items() if name == "first.weight"]
    table = dict.fromkeys(graph.layers, Strategy())
    agree = {**table, "first": Strategy(1, 2, "out-features", two), "second": Strategy(1, 2, "out-features", two)}
    assert set(holdings(graph, agree)[weight].values()) == {(Range(0, 4), Range(0, 8)), (Range(4, 8), Range(0, 8))}
    apart = {**agree, "second": Strategy(1, 2, "in-features", two)}
    assert set(holdings(graph, apart)[weight].values()) == {whole}


def test_a_layer_that_the_plan_leaves_out_is_named() -> None:
    with pytest.raises(PlanError, match=r"^2: the plan does not say where it runs"):
        lower(graph_of("mlp"), {name: Strategy() for name in "0134"}, one_process(1))


def test_a_result_that_is_a_parameter_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.net(x), self.net.weight

    graph = capture(Bare(), (torch.zeros(4, 2),))
    with pytest.raises(PlanError, match="as it is"):
        lower(graph, dict.fromkeys(graph.layers, Strategy()), one_process(1))
