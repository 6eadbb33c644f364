"""The quick way to a program without in-place changes is taken where it is right, and only there."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

from parplan.graph.export.functionalise import functionalise
from tests.graph.models import MODELS, rand


def exported(model: nn.Module, *args: object) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, args, strict=False)


def ops(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


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


@pytest.mark.parametrize("make", [Shared, ViewBefore, ViewAfter, IdleDropout, Squeezes])
def test_what_is_computed_stays_the_same(make: type[nn.Module]) -> None:
    model, x = make(), rand(4, 6)
    program = functionalise(exported(model, x)).program
    program.graph.lint()
    program.graph_module.recompile()
    (found,) = program.graph_module(x.clone())
    assert torch.equal(found, model(x))
