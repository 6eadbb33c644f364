"""Repeated blocks: where they begin, how many there are, what keeps layers from being alike; and units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import Blocks, fold, repeated_blocks, unit_of, units, why_kept
from parplan.layout import Sections


class Block(nn.Module):
    """A residual block of a linear layer on a normalised input."""

    def __init__(self, width: int, hidden: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """x plus what the layers make of it."""
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


class Deep(nn.Module):
    """A linear layer, blocks, and another linear layer: (N, 8) to (N, 4)."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(8, 8), nn.ModuleList(blocks), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's result."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def graph_of(blocks: list[nn.Module]) -> LayerGraph:
    return capture(Deep(blocks), (torch.zeros(4, 8),))


@pytest.mark.full
def test_equal_blocks_are_found_with_their_first_layer() -> None:
    graph = graph_of([Block(8) for _ in range(6)])
    (found,) = repeated_blocks(graph)
    names = tuple(graph.layers)
    assert (found.copies, found.period) == (6, len([name for name in names if name.startswith("blocks.3.")]))
    assert names[found.begin].startswith("blocks.0.")
    assert names[found.end - 1].startswith("blocks.5.")


@pytest.mark.full
def test_the_layers_of_one_block_stand_for_those_between_first_and_last() -> None:
    graph = graph_of([Block(8) for _ in range(6)])
    found = fold(graph, 1)
    assert found is not None
    assert found.kept["blocks.4.up"] == found.kept["blocks.1.up"] == "blocks.1.up"
    assert (found.kept["blocks.0.up"], found.kept["blocks.5.up"]) == ("blocks.0.up", "blocks.5.up")
    assert set(found.times.values()) == {4}
    assert ("blocks.0.up", "blocks.1.up", "blocks.5.up") in found.alike
    assert found.describe(graph).startswith("6 equal blocks of ")


@pytest.mark.full
def test_blocks_of_two_widths_are_two_runs() -> None:
    graph = graph_of([*(Block(8, 8) for _ in range(4)), *(Block(8, 16) for _ in range(5))])
    assert [own.copies for own in repeated_blocks(graph)] == [4, 5]


def test_blocks_that_alternate_are_alike_in_pairs() -> None:
    graph = graph_of([Block(8, 8 * (1 + number % 2)) for number in range(8)])
    (found,) = repeated_blocks(graph)
    assert found.copies == 4
    assert found.period * 4 == len(graph.layers) - 2


def shared() -> list[nn.Module]:
    one = Block(8)
    return [one] * 6


def skipping() -> list[nn.Module]:
    results: list[Tensor] = []
    keep, kept, count = results.append, results.__getitem__, results.__len__

    class Skip(nn.Module):
        """A layer on its input and on the result of the third block before."""

        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            """(N, 8) to the same."""
            keep(x)
            result: Tensor = self.own(x) + kept(-3 if count() > 2 else -1)
            return result

    return [Skip() for _ in range(6)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("blocks", [shared, skipping])
def test_shared_weights_and_inputs_from_far_behind_keep_blocks_apart(blocks: Callable[[], list[nn.Module]]) -> None:
    assert fold(graph_of(blocks()), 1) is None


@pytest.mark.full
def test_few_layers_are_planned_one_by_one() -> None:
    assert fold(graph_of([Block(8) for _ in range(6)])) is None
    assert fold(graph_of([Block(8) for _ in range(20)])) is not None


def test_places_of_blocks() -> None:
    assert Blocks(3, 16, 5).end == 83


def test_blocks_that_are_cut_in_other_sections_are_not_alike() -> None:
    graph = graph_of([Block(8) for _ in range(6)])
    up = graph.layers["blocks.3.up"]
    packed = [replace(axis, sections=dict.fromkeys(up.outputs, Sections((1, 1), (0, 0)))) for axis in up.axes]
    other = replace(graph, layers={**graph.layers, up.name: replace(up, axes=tuple(packed))})
    assert [found.copies for found in repeated_blocks(graph)] == [6]
    assert all(found.copies < 6 for found in repeated_blocks(other))


# ---- units of recomputation ------------------------------------------------------------------------------------------


class Residuals(nn.Module):
    """Two residual branches of two linear layers each, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in "ab")
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Samples to two classes each."""
        x = x + self.first(x)
        made: Tensor = self.head(x + self.second(x))
        return made


def test_a_unit_ends_behind_the_sum_of_a_branch() -> None:
    graph = capture(Residuals(), (torch.zeros(4, 8),))
    assert units(graph) == (("first.0", "first.1", "first.2", "add"), ("second.0", "second.1", "second.2", "add_1"))
    assert unit_of(graph)["second.1"] == 1
    assert why_kept(graph, "first.0") == ""
    assert why_kept(graph, "head") == "it is in no unit of layers with at least two matrices"


def test_units_of_a_chain_have_two_matrices() -> None:
    net = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.Tanh())))
    assert units(capture(net, (torch.zeros(4, 8),))) == (("0", "1", "2", "3"), ("4", "5", "6", "7"))


def test_what_runs_once_is_in_no_unit() -> None:
    convs = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)]
    graph = capture(
        nn.Sequential(*convs, nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), (torch.zeros(2, 3, 16, 16),)
    )
    assert why_kept(graph, "1") == "it writes running statistics"
    assert units(graph) == (("3", "4", "5"),)
    assert units(capture(nn.Sequential(*convs), (torch.zeros(2, 3, 16, 16),), training=False)) != ()
