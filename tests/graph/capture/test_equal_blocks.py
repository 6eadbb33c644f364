"""Of equal blocks few are traced: nothing of a capture differs from one whose exports are in full."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parplan.graph.capture import equal_blocks
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph

BLOCKS, ODD, BATCH = 8, 3, 4


class Block(nn.Module):
    """Two linear layers with a residual; `body` is the detail in which one of several may differ."""

    def __init__(self, index: int, body: Callable[[Block, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.index, self.body = index, body
        self.scale, self.counts, self.settings = 2.0, False, {"shift": 1}
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.offset: Tensor
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, x: Tensor, beside: Tensor, factor: float = 4) -> tuple[Tensor, Tensor]:
        note(id(self))
        return self.body(self, self.second(self.first(x).relu()), beside) * factor + x, beside


TRACED: list[int] = []
note = TRACED.append  # a list that the forward names would be refused


def plain(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    return x - beside.mean(1, keepdim=True)


class Net(nn.Module):
    """Blocks one after another."""

    def __init__(self, body: Callable[[Block, Tensor, Tensor], Tensor] = plain) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(8, 8), nn.Linear(8, 3)
        listed = [Block(index, body) for index in range(BLOCKS)]
        self.blocks = nn.ModuleList(listed)

    def block(self, index: int) -> Block:
        found = self.blocks[index]
        assert isinstance(found, Block)
        return found

    def step(self, index: int, block: Any, x: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = block(x, beside)
        return found

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        beside = x.relu()
        for index, block in enumerate(self.blocks):
            x, beside = self.step(index, block, x, beside)
        found: Tensor = self.end(x)
        return found


def scaled(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    return x * block.scale + beside * block.settings["shift"]


def offset(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    return x + block.offset + beside


def branch(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    return x.flip(1) if block.index == ODD else x


def late_branch(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    return x / 2 if len(x) > BATCH and block.index == ODD else x / 3


def counting(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    return x * (len(x) if block.counts else BATCH)


def divided(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    return x / len(x) + torch.ones(len(x), 1)


def in_place(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    return (x + 1).relu_()


def dropped(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.1, block.training) + beside


def listed(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    return x + torch.tensor([1.0, 2.0] * 4)


def equal() -> Net:
    return Net()


def constant() -> Net:
    net = Net(scaled)
    net.block(ODD).scale = 3.0
    return net


def setting() -> Net:
    net = Net(scaled)
    net.block(ODD).settings = {"shift": 2}
    return net


def buffer_size() -> Net:
    net = Net(offset)
    net.block(ODD).register_buffer("offset", torch.zeros(8))
    return net


def number_of_samples() -> Net:
    net = Net(counting)
    net.block(ODD).counts = True
    return net


def own_forward() -> Net:
    net = Net(counting)
    own = types.MethodType(lambda self, x, beside: (x * len(x), beside), net.block(ODD))
    setattr(net.block(ODD), "forward", own)  # noqa: B010
    return net


def frozen() -> Net:
    net = Net()
    net.block(ODD).first.weight.requires_grad_(False)
    return net


def evaluated() -> Net:
    net = Net(dropped)
    setattr(net.block(ODD), "forward", net.block(ODD).forward)  # noqa: B010
    return net


def tied() -> Net:
    net = Net()
    net.block(ODD).first.weight = net.block(0).first.weight
    return net


def hooked() -> Net:
    net = Net()
    net.block(ODD).register_forward_hook(lambda block, given, made: None)
    return net


class ByArgument(Net):
    """One block is given the number of samples."""

    def step(self, index: int, block: Any, x: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = block(x, beside, len(x) if index == ODD else BATCH)
        return found


class ByWiring(Net):
    """With more samples one block is given other tensors."""

    def step(self, index: int, block: Any, x: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        given = (beside, beside) if len(x) > BATCH and index == ODD else (x, beside)
        found: tuple[Tensor, Tensor] = block(*given)
        return found


class Exchanged(Net):
    """With more samples one block is given its tensors the other way round."""

    def step(self, index: int, block: Any, x: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        x, beside = x + 1, beside + 1
        given = (beside, x) if len(x) > BATCH and index == ODD else (x, beside)
        found: tuple[Tensor, Tensor] = block(*given)
        return found


class ByAttribute(Net):
    """With more samples the model sets a number of one block and puts it back."""

    def step(self, index: int, block: Any, x: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        before = block.scale
        block.scale = float(len(x)) if index == ODD else float(BATCH)
        found: tuple[Tensor, Tensor] = block(x, beside)
        block.scale = before
        return found


class Kept(Net):
    """What a block makes is used behind all of them too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        beside = x.relu()
        kept = []
        for block in self.blocks:
            x, beside = block(x, beside)
            kept.append(x)
        found: Tensor = self.end(torch.stack(kept).sum(0))
        return found


def counted(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    return x * numbered()


numbered = count(1).__next__  # an iterator that the forward names would be refused


def borrowing(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    return x @ elsewhere(block.index)


BORROWED: list[nn.Linear] = []


def elsewhere(index: int) -> Tensor:
    return BORROWED[index % 2].weight


def borrower() -> Net:
    """Blocks that use weights of layers beside them, which they have no name for."""
    net = Net(borrowing)
    BORROWED[:] = [net.start, net.start]
    return net


def noting(block: Block, x: Tensor, beside: Tensor) -> Tensor:
    block.settings["seen"] = 4
    return x * block.settings["shift"]


class Shifted(Net):
    """What a block makes is written in place behind it."""

    def step(self, index: int, block: Any, x: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        made, _ = block(x, beside)
        return made.add_(1), beside


class Unwatched(Net):
    """Ops without gradients before, between and behind the blocks."""

    def step(self, index: int, block: Any, x: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        made: Tensor
        made, _ = block(x, beside)
        with torch.no_grad():
            largest = made.detach().abs().amax() * 2 + 1
        return made / largest, beside


class Groups(Net):
    """Every second block is given a number of its own, and the model calls them from the last to the first."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        beside = x.relu()
        for index in range(len(self.blocks) - 1, -1, -1):
            x, beside = self.blocks[index](x, beside, 4 + index % 2)
        found: Tensor = self.end(x)
        return found


class Twice(Net):
    """The first block is also the last."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).repeat(1, 3)[:, :8]
        found: Tensor = self.block(0)(x, x)[0]
        return found


class NamedLikePythons(Net):
    """Its argument has a name that fx gives to no node."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


ALL = list(range(BLOCKS))
COMPARED, ODD_TOO = [0, 1, BLOCKS - 1], [0, 1, ODD, BLOCKS - 1]
# By name the model, and the blocks that are traced at the first and at the second number of samples.
NETS: dict[str, tuple[Callable[[], Net], list[int], list[int]]] = {
    "equal": (equal, COMPARED, [0]),
    "constant": (constant, ODD_TOO, [0, ODD]),
    "setting": (setting, ODD_TOO, [0, ODD]),
    "branch": (lambda: Net(branch), ALL, ALL),
    "branch at one number of samples": (lambda: Net(late_branch), COMPARED, ALL),
    "size of a buffer": (buffer_size, ODD_TOO, [0, ODD]),
    "number of samples": (number_of_samples, ODD_TOO, [0, ODD]),
    "number of samples in all": (lambda: Net(divided), COMPARED, [0]),
    "forward of its own": (own_forward, COMPARED, [0]),
    "frozen": (frozen, ODD_TOO, [0, ODD]),
    "dropout": (lambda: Net(dropped), COMPARED, [0]),
    "bound forward": (evaluated, ODD_TOO, [0, ODD]),
    "in place": (lambda: Net(in_place), ALL, ALL),
    "constant tensor": (lambda: Net(listed), ALL, ALL),
    "argument": (ByArgument, COMPARED, [0, ODD]),
    "an input called input": (NamedLikePythons, COMPARED, [0]),
    "wiring": (ByWiring, COMPARED, [0, ODD]),
    "exchanged": (Exchanged, COMPARED, [0]),
    "attribute set meanwhile": (lambda: ByAttribute(scaled), ALL, ALL),
    "kept results": (Kept, COMPARED, [0]),
    "tied": (tied, COMPARED, [0]),
    "hooks": (hooked, [*ODD_TOO, *ALL], ALL),
    "a counter that nobody sees": (lambda: Net(counted), [*COMPARED, *ALL], ALL),
    "weights from elsewhere": (borrower, ALL, ALL),
    "notes of each block": (lambda: Net(noting), [*COMPARED, *ALL], [*ALL, *ALL]),  # once more settled
    "written behind": (Shifted, [*COMPARED, *ALL], ALL),
    "without gradients": (Unwatched, COMPARED, [0]),
    "two groups": (Groups, [7, 6, 5, 4, 0], [7, 6]),
    "called twice": (Twice, [*COMPARED, *ALL, 0], [*ALL, 0]),
}


READERS = (
    "branch at one number of samples", "number of samples", "number of samples in all", "forward of its own",
    "argument", "wiring", "exchanged", "attribute set meanwhile",
)  # fmt: skip


def facts(graph: LayerGraph) -> list[Any]:
    """All that a capture says of a model, ops as text."""
    numbers = {node: number for number, node in enumerate(next(iter(graph.layers.values())).nodes[0].graph.nodes)}
    ops = [
        (node.name, str(node.target), repr(node.args), repr(node.kwargs), str(node.meta.get("val")))
        for layer in graph.layers.values()
        for node in layer.nodes
    ]
    layers = [
        (layer.name, layer.inputs, layer.outputs, layer.parameters, layer.batch, layer.axes, layer.constant)
        for layer in graph.layers.values()
    ]
    rest = (graph.grown, graph.batch_dims, graph.fixed_batch, graph.one_batch, graph.values, graph.user_outputs)
    return [len(numbers), ops, layers, *rest, graph.sample_indices, graph.unplaced, graph.flattened]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_blocks, "LEAST_PARTS", 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NETS)
def test_the_capture_is_that_of_full_exports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, first, second = NETS[name]
    torch.manual_seed(0)
    net, given = make(), (torch.randn(BATCH, 8),)
    TRACED.clear()
    found = capture(net, given)
    index = {id(block): number for number, block in enumerate(net.blocks)}
    traced = [index[block] for block in TRACED]
    known = len(first + second)
    assert traced[:known] == first + second
    assert bool(traced[known:]) == (name in READERS)  # which are traced once more, with a symbol for the samples
    if name == "a counter that nobody sees":  # which a capture cannot be asked for twice
        return
    monkeypatch.setattr(equal_blocks, "LEAST_ALIKE", BLOCKS + 1)
    TRACED.clear()
    full = capture(net, given)
    assert set(first + second).issubset(index[block] for block in TRACED[: 2 * BLOCKS])
    assert facts(found) == facts(full)
    assert {(e.path, str(e.key)) for e in found.reads.entries} == {(e.path, str(e.key)) for e in full.reads.entries}
    assert [(one.path, one.template.leaves) for one in found.stored] == [
        (one.path, one.template.leaves) for one in full.stored
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "change", [lambda block: block.settings.update(shift=5), lambda block: setattr(block, "scale", 5.0)]
)
def test_an_attribute_of_a_copied_block_is_watched(change: Callable[[Block], None]) -> None:
    net = Net(scaled)
    TRACED.clear()
    graph = capture(net, (torch.randn(BATCH, 8),))
    assert id(net.block(ODD)) not in TRACED
    assert graph.reads.hold
    change(net.block(ODD))
    assert not graph.reads.hold
