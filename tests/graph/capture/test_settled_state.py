"""Models whose first call changes them and whose later calls do not are captured as later calls run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from parplan.graph.user_code import module_hooks
from tests.graph.by_hand import assert_same_numbers, halves
from tests.runtime.helpers import compiled, spread


class Switches(nn.Module):
    """Chooses plain attention for short sequences, at its first call and for good."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.inner = "sparse", Block()
        self.inner.kernel = "sparse"

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to the same."""
        if self.attention == "sparse" and x.shape[-1] < 16:
            self.attention = self.inner.kernel = "full"
        result: Tensor = self.inner(x)
        return result * 2 if self.attention == "full" and self.inner.kernel == "full" else result


class Block(nn.Module):
    """A layer with a setting."""

    kernel: str

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to the same."""
        return torch.tanh(self.linear(x))


class Tabled(nn.Module):
    """A table of positions, made for the length that it is first called with."""

    positions: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("positions", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, 4) to the same."""
        if self.positions.shape[0] != x.shape[1]:
            made = torch.zeros(x.shape[1], 1, dtype=x.dtype)
            made[:, 0] = torch.arange(x.shape[1], dtype=x.dtype)
            self.positions = made
            self.register_buffer("scale", torch.full((1,), 0.5, dtype=x.dtype), persistent=False)
        result: Tensor = self.linear(x) + self.positions.cos() * self.scale
        return result


class Swaps(nn.Module):
    """Puts its layer into another module at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to the same."""
        if isinstance(self.layer, nn.Sequential):
            self.layer = nn.ModuleDict({"0": self.layer[0]})
        result: Tensor = self.layer["0"](x).relu()
        return result


class OtherBlock(Block):
    """A layer of another kind."""


class Rebuilds(nn.Module):
    """Makes a layer of another kind at its first call, whose own weights it does not use."""

    layer: Block

    def __init__(self) -> None:
        super().__init__()
        self.layer = Block()

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to the same."""
        if type(self.layer) is Block:
            block = OtherBlock()
            block.linear, self.layer = self.layer.linear, block
        result: Tensor = self.layer(x[:, [2]].expand(-1, 4))
        return result


MODELS: dict[Callable[[], nn.Module], tuple[int, ...]] = {
    Switches: (6, 4), Tabled: (6, 3, 4), Swaps: (6, 4), Rebuilds: (6, 4)
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", MODELS)
def test_it_is_captured_as_later_calls_run(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, plain = make().double(), make().double()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(*MODELS[make], dtype=torch.float64)
    graph = capture(model, (x,))
    assert graph.settled
    plain(x)
    assert_same_numbers(graph, model, (x,), choose=halves)
    assert_same_numbers(graph, plain, (x,), choose=halves)
    assert [(name, b.shape) for name, b in model.named_buffers()] == [(n, b.shape) for n, b in plain.named_buffers()]
    assert [type(part) for part in model.modules()] == [type(part) for part in plain.modules()]
    assert {key: value for key, value in vars(model).items() if isinstance(value, str)} == {
        key: value for key, value in vars(plain).items() if isinstance(value, str)
    }
    assert capture(model, (x,)).settled == ()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", MODELS)
def test_compiled_steps_equal_plain_ones(make: Callable[[], nn.Module]) -> None:
    plain = make().double()
    model = compiled(plain, spread(2, "data"), 2)
    for _ in range(3):
        x = torch.randn(*MODELS[make], dtype=torch.float64)
        assert torch.allclose(model(x), plain(x), atol=1e-12)


class Alternates(Switches):
    """Changes its setting at every call."""

    def forward(self, x: Tensor) -> Tensor:
        self.attention = "full" if self.attention == "sparse" else "sparse"
        result: Tensor = self.inner(x)
        return result


class Initialises(nn.Module):
    """Takes its scale from the samples of its first call."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.ready = nn.Linear(4, 4), False
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to the same."""
        if not self.ready:
            self.scale.copy_(x.std(0))
            self.ready = True
        result: Tensor = self.linear(x / self.scale)
        return result


class WritesLater(Tabled):
    """Reads a table before its first call fills it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.positions.shape[0] != 4:
            made = torch.zeros(4, dtype=x.dtype)
            early = x * made
            made += 1
            self.positions = made
        else:
            early = x * self.positions
        result: Tensor = self.linear(early + self.positions)
        return result


class Grows(Tabled):
    """A buffer of the shape of what it is given, with its values."""

    def forward(self, x: Tensor) -> Tensor:
        self.positions = x[0, :, :1] * 2
        result: Tensor = self.linear(x) + self.positions
        return result


class NewLayer(Swaps):
    """A layer that its first call makes."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Sequential):
            self.layer = nn.Linear(4, 4)
        result: Tensor = self.layer(x)
        return result


@pytest.mark.parametrize(
    ("make", "shape", "words"),
    [
        (Alternates, (6, 4), "writes attention: it changes it from 'sparse' to 'full'"),
        (
            Initialises,
            (6, 4),
            "first call .* something else than later ones: of ready it .* call the model once before",
        ),
        (WritesLater, (6, 4), "first call .* something else than later ones: of positions"),
        (Grows, (6, 3, 4), r"replaces the buffer positions by one of another shape, \[3, 1\], with values that depend"),
        (NewLayer, (6, 4), "first call of the model gives it new tensors: it replaces Sequential by Linear"),
    ],
)
def test_state_that_does_not_settle_is_refused_and_put_back(
    make: Callable[[], nn.Module], shape: tuple[int, ...], words: str
) -> None:
    model = make()
    before = {name: value for part in model.modules() for name, value in vars(part).items() if name != "training"}
    parts, buffers = list(model.modules()), [(name, tensor.clone()) for name, tensor in model.named_buffers()]
    with pytest.raises(CaptureError, match=words):
        capture(model, (torch.randn(*shape),))
    assert {n: v for part in model.modules() for n, v in vars(part).items() if n != "training"} == before
    assert list(model.modules()) == parts
    assert all(torch.equal(tensor, dict(model.named_buffers())[name]) for name, tensor in buffers)


class CountsOnce(Switches):
    """Writes a buffer at its first call that no result of it depends on."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.attention == "sparse":
            self.attention = "full"
            with torch.no_grad():
                self.count.add_(1)
        result: Tensor = self.inner(x)
        return result


class Loses(Switches):
    """Drops something of its own at its first call."""

    table: Tensor | None

    def __init__(self, lose: Callable[[Any], Any]) -> None:
        super().__init__()
        self.lose, self.spare = lose, nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "spare") and self.table is not None and self.spare.weight.requires_grad:
            self.lose(self)
        result: Tensor = self.inner(x)
        return result


def freeze(model: Any) -> None:
    model.spare.requires_grad_(False)


def make_a_parameter(model: Any) -> None:
    model.inner.scale = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (CountsOnce, "first call of the model computes something else than later ones: of attention"),
        (lambda: Loses(lambda model: delattr(model, "spare")), "writes spare: it takes a module or a hook away"),
        (lambda: Loses(lambda model: setattr(model, "table", None)), "takes the buffer table away"),
        (lambda: Loses(freeze), "adds, replaces or freezes the parameter spare.weight"),
        (lambda: Loses(make_a_parameter), "adds, replaces or freezes the parameter inner.scale"),
        (lambda: Loses(lambda model: setattr(model, "table", model.table.double())), "buffer table .*another type"),
    ],
)
def test_a_first_call_that_drops_or_counts_is_refused_and_put_back(make: Callable[[], nn.Module], words: str) -> None:
    model = make()
    before, parts = {key: value.clone() for key, value in model.state_dict().items()}, list(model.modules())
    with pytest.raises(CaptureError, match=words):
        capture(model, (torch.randn(6, 4),))
    assert list(model.modules()) == parts
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


class Resized(Tabled):
    """Makes a table of its first length, and is refused for another reason."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if self.scale.shape[0] == 1:
            self.linear.bias = nn.Parameter(torch.zeros(4))
        return result


def test_a_refused_capture_leaves_real_buffers() -> None:
    model = Resized()
    with pytest.raises(CaptureError, match=r"parameter linear\.bias"):
        capture(model, (torch.randn(6, 3, 4),))
    assert torch.equal(model.positions, torch.zeros(1))
    assert [name for name, _ in model.named_buffers()] == ["positions"]


class Trained(Tabled):
    """Changes at its first training step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.warm = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            super().forward(x)
            self.warm = True
        result: Tensor = self.linear(x) * (2 if self.warm else 1) + self.positions
        return result


@pytest.mark.full
def test_a_plan_that_is_made_for_training_does_not_settle_a_model_in_evaluation() -> None:
    plain = Trained().double()
    model, x = compiled(plain, spread(2, "data"), 2), torch.randn(6, 3, 4, dtype=torch.float64)
    for training in (False, True, False):
        plain.train(training)
        model.train(training)
        assert torch.allclose(model(x), plain(x), atol=1e-12)
        assert vars(model.module)["warm"] is plain.warm
        assert torch.equal(model.module.get_buffer("positions"), plain.positions)


class Collects(nn.Module):
    """Registers hooks that collect the results of its blocks at its first call, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.installed = False

    def forward(self, x: Tensor) -> list[Tensor]:
        """(N, 4) to the results of all blocks."""
        if not getattr(self, "installed", False):
            for block in self.blocks:
                block.register_forward_hook(_collect)
            self.installed = True
        _COLLECTED.append([])
        self.blocks(x)
        return _COLLECTED.pop()


_COLLECTED: list[list[Tensor]] = []


def _collect(module: nn.Module, args: Any, output: Tensor) -> None:
    if _COLLECTED:
        _COLLECTED[-1].append(output)


def test_hooks_that_a_library_registers_at_the_first_call_are_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_hooks, "is_users", lambda filename: False)
    model, x = Collects().double(), torch.randn(4, 4, dtype=torch.float64)
    for settled in (True, False):
        graph = capture(model, (x,))
        assert bool(graph.settled) is settled
        assert len(graph.user_outputs) == 2
        assert [len(block._forward_hooks) for block in model.blocks] == [1, 1]
        assert_same_numbers(graph, model, (x,), choose=halves)


class Refused(Collects):
    """Registers hooks, and is refused for another reason."""

    def forward(self, x: Tensor) -> list[Tensor]:
        results = super().forward(x)
        return results if x.sum() > 0 else []


def test_a_refused_capture_leaves_no_hooks() -> None:
    model = Refused()
    with pytest.raises(CaptureError, match="data-dependent"):
        capture(model, (torch.randn(4, 4),))
    assert not model.installed
    assert [len(block._forward_hooks) for block in model.blocks] == [0, 0]


def test_a_note_says_what_was_settled() -> None:
    decision = parplan.analyze(Switches(), torch.randn(6, 4), gpus=2, gpu="k20", time_limit_s=1)
    assert any("first call changes it (attention: it changes it from 'sparse' to 'full'" in n for n in decision.notes)
