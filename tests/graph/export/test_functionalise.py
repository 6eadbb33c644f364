"""The quick way to a program without in-place changes is taken where it is right, and only there."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

from parplan.graph.capture.canonical import canonicalise
from parplan.graph.capture.capture import capture
from parplan.graph.export.functionalise import functionalise, inline_grad_regions
from tests.graph.models import MODELS, rand


def exported(model: nn.Module, *args: object) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, args, strict=False)
    inline_grad_regions(program)
    return program


def ops(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_sections_are_written_the_quick_way() -> None:
    program = exported(Sections(), rand(4, 6))
    assert functionalise(program).program is program


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "quick"),
    [
        ("residual", True),  # relu_, add_, batch norm's counters
        ("no_grad", True),
        ("attention", True),
        ("in_place_views", False),
        ("buffers", False),
        ("recurrent", True),
    ],
)
def test_which_way_is_taken(name: str, quick: bool) -> None:
    case = MODELS[name]()
    program = exported(case.model, *case.args)
    functional = functionalise(program)
    assert (functional.program is program) is quick
    assert not any("_." in op and op != "aten.detach_.default" for op in ops(functional.program))


def test_counters_are_taken_out() -> None:
    case = MODELS["residual"]()
    counters = functionalise(exported(case.model, *case.args)).counters
    assert counters == {"b_bn1_num_batches_tracked": 1, "b_bn2_num_batches_tracked": 1}


class Watched(nn.Module):
    """Takes a statistic of a value without gradients, of what some function makes of the value."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        with torch.no_grad():
            mean = self.function(hidden).mean(0)
        result: Tensor = hidden - mean
        return result


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "function",
    [
        Tensor.float,
        Tensor.cpu,
        lambda h: h.to(h.dtype),
        lambda h: h.type_as(h).float(),
        torch.real,
        lambda h: torch.broadcast_tensors(h, h)[0],
        torch.atleast_2d,
        torch.positive,
        lambda h: h.flatten(1),
        lambda h: h.detach().float(),
        torch.abs,
    ],
)
def test_what_no_grad_only_calls_by_another_name_keeps_its_gradient(function: Callable[[Tensor], Tensor]) -> None:
    """Functions that return their very argument where there is nothing to do; the last two are none."""
    graph = capture(Watched(function), (rand(4, 6),))
    (result,) = graph.results
    assert graph.values[result].requires_grad
    (hidden,) = graph.layers["linear"].outputs
    last = graph.layers[list(graph.layers)[-1]]
    assert hidden in last.inputs
    assert not any(graph.values[name].requires_grad for name in last.inputs if name != hidden)


class Shared(nn.Module):
    """Changes a value in place that is read before, after, and through what the change returns."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        before = y + 1
        z = y.relu_()
        z += before
        return torch.cat([y, z, before, F.relu(z.add_(1))])


class ViewBefore(nn.Module):
    """A view from before the change sees it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        view = y.view(-1)
        y.relu_()
        return view + 1


class ViewAfter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = (x * 2).relu_()
        return y.view(-1) + 1


class IdleDropout(nn.Module):
    """In evaluation dropout hands its input back, so the change is seen there too."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        F.dropout(y, 0.5, training=False).relu_()
        return y + 1


class Squeezes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        a, b = torch.broadcast_tensors(x.unsqueeze(1).squeeze(), x[:1])
        return a * b


class Sections(nn.Module):
    """Sections written one after the other, and a view between."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_zeros(x.shape)
        y[:, 1:] = x[:, :-1].clone()
        y[:, 0] = 3
        between = y[1:] * 2
        y[1:3, 2:4] = x[:2, :2]
        return torch.cat([y.masked_fill_(y < 0, 1), between])


class Drawn(nn.Module):
    """Changes of sections, of the whole, and reads, in a random order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        draw = random.Random(self.seed)
        y, read = draw.choice((lambda: x * 2, lambda: x.new_zeros(x.shape), lambda: x.new_ones(4, 6)))(), [x.sum()]
        view = y[1:]
        for _ in range(draw.randint(1, 5)):
            at, dim = draw.randint(0, 3), draw.randint(0, 1)
            kind = draw.choice(("slice", "corner", "select", "number", "add", "relu", "read", "part", "old", "turned"))
            if kind == "slice":
                y.narrow(0, 0, at + 1)[:] = x[: at + 1] * 3
            elif kind == "corner":
                y[:at, 2:] = x[:at, :4] + y[:at, :4]
            elif kind == "select":
                y.select(dim, at).copy_(y.select(dim, 0) * x.select(dim, 1))
            elif kind == "number":
                y[:, at] = at
            elif kind == "add":
                y[at:] += 1
            elif kind == "relu":
                y.relu_()
            elif kind == "turned":
                y.t()[at] = x[:, 1]
            else:
                part = {"read": y, "part": y[:, at], "old": view}[kind]
                read.append((part * part).sum())
        return torch.stack(read).sum() + y


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(120))
def test_drawn_changes_of_sections_give_the_plain_numbers(seed: int) -> None:
    model, x = Drawn(seed), rand(4, 6).double().requires_grad_()
    functional = functionalise(exported(model, x))
    assert not any("_." in op and op != "aten.detach_.default" for op in ops(functional.program))
    canonicalise(functional, model)  # which has a derivative for copies
    found, plain = functional.program.module()(x), model(x)
    assert torch.equal(found, plain)
    weights = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    try:
        (expected,) = torch.autograd.grad((plain * weights).sum(), x)
    except RuntimeError:  # a value that its backward needs was changed
        return
    assert torch.allclose(torch.autograd.grad((found * weights).sum(), x)[0], expected, rtol=1e-12)


class BehindDropout(nn.Module):
    """A view of what dropout hands back, written while the value before it is still read."""

    def forward(self, x: Tensor) -> Tensor:
        h = x + 1
        kept, same = F.dropout(h, 0.0), h.type_as(x)
        first, _ = kept.chunk(2, 1)
        first.mul_(0.5)
        torch.atleast_2d(same).add_(1)
        return h + kept.type_as(x).mul_(2)


@pytest.mark.parametrize("make", [Shared, ViewBefore, ViewAfter, IdleDropout, Squeezes, Sections, BehindDropout])
def test_what_is_computed_stays_the_same(make: type[nn.Module]) -> None:
    model, x = make(), rand(4, 6)
    program = functionalise(exported(model, x)).program
    program.graph.lint()
    program.graph_module.recompile()
    assert torch.equal(program.module()(x.clone()), model(x))
