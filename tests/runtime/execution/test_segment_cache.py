"""Compute steps compiled by inductor: the numbers of the ops one by one, and no silence where they are not."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from parplan.errors import BackendWarning, PlanError, RuntimeFailure
from parplan.graph.layer_graph import Layer
from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import Rule, compiled, planner, spread
from tests.runtime.nets import mlp
from tests.runtime.ranks import run_case

WIDTH = 6  # of the perceptron's inputs

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


class Normed(nn.Module):
    """Statistics that the forward writes, random numbers, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.first(x)).relu())
        result: Tensor = self.head(h + torch.nn.functional.gelu(self.second(h)))
        return result


def trained(model: Compiled, steps: int = 3) -> list[Tensor]:
    """Losses of steps, of an evaluation behind them, and the parameters and buffers then."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets, found = torch.randn(8, 6), torch.arange(8) % 3, []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    model.eval()
    with torch.no_grad():
        found.append(model(inputs).sum())
    return [*found, *(tensor.detach() for tensor in model.state_dict().values())]


@needs_compiler
@pytest.mark.sampled(1)  # each compiles for half a minute
@pytest.mark.parametrize(
    ("rule", "devices", "options"),
    [
        (spread(1, "one"), 1, {}),
        (spread(2, "data"), 2, {"batch_norm": "local"}),
        (spread(2, "data"), 2, {}),  # statistics are exchanged between halves of a layer, which run as they are
        (spread(2, "data"), 2, {"threads": True}),
    ],
    ids=["one", "local", "global", "threads"],
)
def test_compiled_steps_train_as_the_ops_one_by_one(rule: Rule, devices: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = Normed()
    with warnings.catch_warnings():
        warnings.simplefilter("error", BackendWarning)
        found = trained(compiled(module, rule, devices, backend="inductor", **options))
    expected = trained(compiled(module, rule, devices, **options))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.full
def test_shards_and_their_transfers_go_between_compiled_steps() -> None:
    module, x = mlp().float(), torch.randn(4, WIDTH)
    outcomes = []
    for backend in ("eager", "inductor"):
        model = compiled(module, spread(2, "hybrid"), 2, backend=backend)
        model(x).square().sum().backward()
        outcomes.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-4, atol=1e-5)


def _gathered(layer: Layer) -> Strategy:
    own = spread(2, "data")(layer)
    return replace(own, state="gathered") if layer.parameters else own


def _on_ranks(rank: int, ranks: int) -> None:
    warnings.simplefilter("error", BackendWarning)
    torch.manual_seed(0)
    module = mlp(8).float()
    torch.manual_seed(rank)
    for rule in (_gathered, spread(ranks, "hybrid")):
        outcomes = []
        x = torch.randn(4, WIDTH)
        for backend in ("eager", "inductor"):
            model = Compiled(copy.deepcopy(module), planner(rule, ranks), backend=backend)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            outcomes.append([*model.state_dict().values()])
        torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.full
def test_ranks_compile_their_own_steps() -> None:
    run_case(_on_ranks, 2)


def pretended(monkeypatch: pytest.MonkeyPatch, compiler: Callable[[Any], Any]) -> None:
    """Have a function in the place of torch.compile."""
    monkeypatch.setattr(torch, "compile", lambda code, **options: compiler(code))


def fails(code: Any) -> Any:
    def run(*tensors: Tensor) -> Any:
        raise NotImplementedError("no kernel\nfor this")

    return run


def scaled(code: Any) -> Any:
    return lambda *tensors: tuple(1.01 * result for result in code(*tensors))


def other_gradients(code: Any) -> Any:
    def run(*tensors: Tensor) -> Any:
        results = code(*tensors)
        for result in (one for one in results if one.requires_grad):
            result.register_hook(lambda gradient: 1.01 * gradient)
        return results

    return run


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (fails, "NotImplementedError: no kernel"),
        (scaled, r"a result or gradient of shape \(8, 3\) is off by"),
        (other_gradients, r"a result or gradient of shape .* is off by"),
    ],
)
def test_what_is_not_compiled_or_wrong_runs_as_it_is_and_a_warning_says_so(
    compiler: Callable[[Any], Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = Normed()
    expected = trained(compiled(module, spread(1, "one"), 1))
    pretended(monkeypatch, compiler)
    with pytest.warns(
        BackendWarning, match=f"first to head .* is not compiled by inductor and runs as it is: {reason}"
    ):
        found = trained(compiled(module, spread(1, "one"), 1, backend="inductor"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_comparison_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Normed()
    expected = trained(compiled(module, spread(1, "one"), 1))
    pretended(monkeypatch, lambda code: code)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BackendWarning)
        found = trained(compiled(module, spread(1, "one"), 1, backend="inductor"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_hooks_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended(monkeypatch, lambda code: code)
    module, called = Normed(), list[str]()
    module.second.register_forward_hook(lambda *_: called.append("hook"))
    model = Compiled(
        copy.copy(module), compiled(module, spread(1, "one"), 1)._planner, devices=["cpu"], backend="inductor"
    )
    with pytest.warns(BackendWarning, match="hooks or seeded ops"):
        model(torch.randn(8, 6))
    assert called == ["hook"]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(PlanError, match=r"backend is 'nvfuser'; it is \"eager\" or \"inductor\""):
        compiled(mlp(), spread(1, "one"), 1, backend="nvfuser")


def test_layers_that_are_compiled_together_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended(monkeypatch, lambda code: code)
    model = compiled(mlp(), spread(1, "one"), 1, backend="inductor")
    with pytest.raises(
        RuntimeFailure, match=r"inductor compiles them together; measure the plan with backend=\"eager\""
    ):
        model.measure(torch.randn(4, WIDTH).double())
