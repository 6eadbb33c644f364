"""How a row of the axis table is read, and how users add their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.graph.axes.row_syntax import Cut, OpAxis, read_row
from parplan.graph.axes.table import TABLE, register_row
from parplan.graph.capture.capture import capture
from tests.graph.single_op import OneOp, part_results, whole_results

RANKS = {"x": 3, "w": 2, "b": 1, "y": 3}


def test_a_row_gives_one_axis_per_letter() -> None:
    axes = read_row("b.. i+, o i+, o^ -> b.. o", ["x", "w", "b"], ["y"], RANKS, names={"o": "out"}, units={"o": 2})
    assert axes == (
        OpAxis({"x": 0, "y": 0}),
        OpAxis({"x": 1, "y": 1}),
        OpAxis({"x": 2, "w": 1}, Cut.SUM, first_only=frozenset({"b"})),
        OpAxis({"w": 0, "b": 0, "y": 2}, name="out", units=2),
    )


def test_a_missing_operand_is_skipped() -> None:
    axes = read_row("i+, i+ o, o^ -> o", ["x", "w", None], ["y"], {"x": 1, "w": 2, "y": 1})
    assert axes[0] == OpAxis({"x": 0, "w": 0}, Cut.SUM)


@pytest.mark.parametrize(
    ("row", "cuts"),
    [("n c! -> n c!", [Cut.MAP, Cut.BLOCKED]), ("n* c -> n* c", [Cut.MIXED, Cut.MAP])],
)
def test_marks(row: str, cuts: list[Cut]) -> None:
    assert [axis.cut for axis in read_row(row, ["x"], ["y"], {"x": 2, "y": 2})] == cuts


@pytest.mark.parametrize(
    ("row", "operands", "ranks"),
    [
        ("a b -> a b", ["x"], {"x": 3, "y": 3}),
        ("a b c.. -> a b c..", ["x"], {"x": 1, "y": 1}),
        ("m k+, k+ n -> m n", ["x", "x"], {"x": 2, "y": 2}),
    ],
    ids=["rank too high", "rank too low", "one tensor in two roles"],
)
def test_a_call_that_does_not_fit_its_row_has_no_axes(row: str, operands: list[str], ranks: dict[str, int]) -> None:
    assert read_row(row, operands, ["y"], ranks) == ()


@pytest.fixture
def scale() -> Iterator[object]:
    """An op of a user's own: x times gain, plus shift, summed over features."""

    @torch.library.custom_op("parplan_test::weigh", mutates_args=())
    def weigh(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        return x @ gain + shift

    op = torch.ops.parplan_test.weigh.default
    register_row(op, "b i+, i+ o, o^ -> b o", "x", "gain", "shift", i="in_features")
    yield op
    del TABLE[op]


def test_users_add_rows_of_their_own(scale: object) -> None:
    call = OneOp.of(scale, (torch.randn(4, 6), torch.randn(6, 2), torch.randn(2)), {})
    whole = whole_results(call)
    assert len(call.open_axes()) == 3
    for axis in call.open_axes():
        found = part_results(call, axis, [axis.units // 2] * 2)
        torch.testing.assert_close(found.outputs, whole.outputs)


@pytest.fixture(scope="module")
def centre() -> Iterator[object]:
    """An op of a user's own that mixes samples, and says so as batch norm does."""

    @torch.library.custom_op("parplan_test::centre_mse_loss", mutates_args=())
    def centre(x: Tensor) -> Tensor:
        return x - x.mean(0)

    @centre.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    op = torch.ops.parplan_test.centre_mse_loss.default
    register_row(op, "b* f -> b f", "x", f="features")
    yield op
    del TABLE[op]


class Centred(nn.Module):
    """A linear layer, and the user's op behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.parplan_test.centre_mse_loss(self.fc(x))
        return found


def test_mixed_samples_of_a_users_op_get_one_replica(centre: object) -> None:
    decision = parplan.analyze(Centred(), torch.randn(8, 4), gpus=2)
    graph = capture(Centred(), (torch.randn(8, 4),))
    (layer,) = (layer for layer in graph.layers.values() if not layer.parameters)
    assert layer.batch is None
    assert not layer.mixes_batch
    assert decision.plan.layers[layer.name].replicas == 1


def test_an_op_is_a_loss_by_its_whole_name(centre: object) -> None:
    graph = capture(Centred(), (torch.randn(8, 4),))
    (layer,) = (layer for layer in graph.layers.values() if not layer.parameters)
    assert not layer.is_loss
    assert [axis.name for axis in layer.axes] == ["features"]
