"""The self-check: faults are found and named, nothing is left behind, and sound models pass."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.self_check import outcome
from benchmarks.sound_models import SOUND
from parplan.errors import PlanError, RuntimeFailure, SelfCheckError, UncheckedWarning
from parplan.graph.attributes.size_branches import SizeBranches
from parplan.runtime.execution.gradients import Gradients
from parplan.runtime.execution.parameter_store import Store
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.transport.local import LocalTransport
from tests.runtime.faulty_nets import FAULTY, LosesFunction, losing
from tests.runtime.helpers import compiled, planner, spread
from tests.runtime.nets import conv_net, mlp
from tests.runtime.ranks import run_case
from tests.runtime.self_check_cases import CASES

PLANS = [(1, "one"), (2, "data"), (2, "hybrid")]


def call_of(net: nn.Module) -> Tensor:
    """Six samples for a network of six inputs, with a gradient as checkpoints want it."""
    dtype = next(net.parameters()).dtype
    return torch.randn(6, 6, dtype=dtype).requires_grad_()


# --- what captures lose ----------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reason", FAULTY)
def test_what_a_capture_loses_is_found_with_its_reason(
    reason: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = FAULTY[reason]().to(dtype)
    model = Compiled(net, planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    with losing(monkeypatch), pytest.raises(SelfCheckError) as caught:
        model(call_of(net))
    text = str(caught.value)
    assert isinstance(caught.value, RuntimeFailure)
    assert reason in text
    assert 'check="off"' in text
    assert caught.value.layer in ("first", "last", "div", "add", "mul", "tanh")
    assert str(caught.value.layer) in text


def test_off_runs_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    net = LosesFunction().double()
    model = Compiled(net, planner(spread(2, "data"), 2), devices=["cpu"] * 2, check="off")
    with losing(monkeypatch):
        model(call_of(net))
    assert model.checked == ()


def test_an_error_comes_again_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    net = LosesFunction().double()
    model = compiled(net, spread(2, "data"), 2)
    for _ in range(2):
        with losing(monkeypatch), pytest.raises(SelfCheckError):
            model(call_of(net))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_always_finds_what_changes_behind_every_guard(dtype: torch.dtype) -> None:
    gain = [1.0]
    current = gain.__getitem__

    class Gains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x) * current(0)

    net = Gains().to(dtype)
    model = Compiled(net, planner(spread(1, "one"), 1), devices=["cpu"], check="always")
    for _ in range(2):
        model(call_of(net))
    gain[0] = 2.0
    with pytest.raises(SelfCheckError, match="the first layer that differs is mul"):
        model(call_of(net))


class Stepped(nn.Module):
    """Results and a whole number in a buffer that depend on the number of samples, in steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        steps = 1 + x.shape[0] // 50
        self.steps.fill_(steps)
        return self.linear(x) * steps if self.training else self.linear(x)


@pytest.mark.full
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_a_capture_has_of_another_number_of_samples_is_no_rounding(
    dtype: torch.dtype, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SizeBranches, "hold", lambda self, batch: True)
    net = Stepped().to(dtype).train(training)
    model = Compiled(net, planner(spread(1, "one"), 1), devices=["cpu"], check="always")
    model(torch.randn(8, 6, dtype=dtype))
    with pytest.raises(SelfCheckError, match=r"buffers: steps has .* other whole numbers"):
        model(torch.randn(60, 6, dtype=dtype))


def test_other_words_are_refused() -> None:
    with pytest.raises(PlanError, match='"first", "always" or "off"'):
        compiled(mlp(), spread(1, "one"), 1, check="once")


# --- what the runtime does wrong -------------------------------------------------------------


def wrong_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device gets its rows in another order."""
    start = LocalTransport.start

    def rolled(self: LocalTransport, exchange: Any, tensors: Any) -> Any:
        arrived = start(self, exchange, tensors)
        held = {d: t.roll(1, 0) if d == 1 else t for d, t in arrived.parts.items()}
        object.__setattr__(arrived, "parts", held)
        return arrived

    monkeypatch.setattr(LocalTransport, "start", rolled)


def stale_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device computes with weights of before."""
    get = Store.get

    def stale(self: Store, state: Any, device: int) -> Tensor:
        tensor = get(self, state, device)
        return tensor * 0.9 if device == 1 and "weight" in state.name else tensor

    monkeypatch.setattr(Store, "get", stale)


def lost_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device's gradients never arrive."""
    add = Gradients.add

    def without(self: Gradients, state: Any, device: int, gradient: Tensor, own: bool) -> None:
        if device != 1:
            add(self, state, device, gradient, own)

    monkeypatch.setattr(Gradients, "add", without)


def misplaced_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices work on each other's blocks of a weight."""
    get = Store.get

    def other(self: Store, state: Any, device: int) -> Tensor:
        return get(self, state, 1 - device if 1 - device in state.blocks else device)

    monkeypatch.setattr(Store, "get", other)


Fault = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (wrong_transfer, "hybrid"),
        (wrong_transfer, "data"),
        (stale_replica, "data"),
        (lost_gradient, "data"),
        (misplaced_shard, "out-features"),
    ],
)
def test_a_runtime_that_does_wrong_is_found(
    fault: Fault, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = conv_net().to(dtype)
    x = torch.randn(8, 3, 8, 8, dtype=dtype)
    model = compiled(net, spread(2, kind), 2)
    fault(monkeypatch)
    with pytest.raises(SelfCheckError, match=r"first layer that differs is (conv|norm|pool|fc1|fc2|relu|flatten)"):
        model(x)
    monkeypatch.undo()
    model(x)
    assert model.checked[-1].unchecked == ""


# --- what is left behind ---------------------------------------------------------------------


class Busy(nn.Module):
    """Keeps, counts, draws and normalises; every trace of a forward would show."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.4)
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Any:
        if not torch.compiler.is_exporting():
            self.history.append(len(x))
        return self.drop(self.norm(self.linear(x)))


@pytest.mark.filterwarnings("ignore:Busy. captured is the code", "ignore::parplan.errors.ReplicaHookWarning")
def test_nothing_is_left_behind() -> None:
    """A checked first step leaves what an unchecked one does, and calls hooks as often."""
    net = Busy().double()
    calls: list[str] = []
    net.linear.register_forward_hook(lambda *_: calls.append("module"))
    net.norm.register_full_backward_hook(lambda *_: calls.append("backward"))
    net.linear.weight.register_hook(lambda gradient: calls.append("tensor"))
    net.linear.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    found = []
    for check in ("first", "off"):
        model = compiled(net, spread(2, "data"), 2, check=check)
        history, attributes = model.module.history, dict(vars(model.module))
        torch.manual_seed(3)
        random.seed(3)
        calls.clear()
        result = model(torch.arange(36.0, dtype=torch.float64).view(6, 6))
        result.sum().backward()
        assert history == []
        assert vars(model.module) == attributes
        told = [record.left_out for record in model.checked]
        assert told == ([("module hooks: they are not called",)] if check == "first" else [])
        grads = [parameter.grad for parameter in model.parameters()]
        drawn = torch.tensor([*torch.rand(2), random.random()])
        found.append(([result, *grads, *model.buffers(), drawn], list(calls)))
    (tensors, told_calls), (wanted, wanted_calls) = found
    assert told_calls == wanted_calls
    for one, other in zip(tensors, wanted, strict=True):
        assert one is not None
        assert torch.equal(one, other)


@pytest.mark.full
def test_a_checkpoint_around_the_call_does_not_see_the_check() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    model = compiled(conv_net(), spread(2, "hybrid"), 2)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    counts = []
    for _ in range(2):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x).sum()
        counts.append(len(packed))
    assert counts[0] == counts[1]
    for reentrant in (False, True):
        again = compiled(conv_net(), spread(2, "hybrid"), 2)
        checkpoint(again, x, use_reentrant=reentrant).sum().backward()
        assert [record.unchecked for record in again.checked] == [""] * len(again.checked)


def test_grad_mode_and_autocast_are_as_before() -> None:
    model = compiled(mlp().float(), spread(2, "data"), 2)
    x = torch.randn(6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert model(x).dtype is torch.bfloat16
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
    with torch.inference_mode():
        model(x)
        assert torch.is_inference_mode_enabled()
    assert [(record.gradients, record.unchecked) for record in model.checked] == [(False, ""), (False, "")]


# --- when, on what ---------------------------------------------------------------------------


def test_each_capture_is_checked_once_and_gradients_when_they_are_first_wanted() -> None:
    model = compiled(conv_net(), spread(2, "data"), 2)
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        model(x)
    for _ in range(2):
        model(x)
    with torch.no_grad():
        model(x)
    model.eval()
    model(x)
    told = [(record.training, record.gradients) for record in model.checked]
    assert told == [(True, False), (True, True), (False, True)]


def test_a_few_samples_where_the_capture_serves_any() -> None:
    model = compiled(conv_net(), spread(2, "data"), 2)
    model(torch.randn(64, 3, 8, 8, dtype=torch.float64))
    assert [(record.samples, record.of) for record in model.checked] == [(4, 64)]


@pytest.mark.filterwarnings("ignore:Stubborn. captured is the code")
def test_a_plain_module_that_fails_is_told_once() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            if not torch.compiler.is_exporting():
                raise ValueError("only for export")
            return self.linear(x)

    model = compiled(Stubborn().double(), spread(2, "data"), 2)
    x = torch.randn(6, 6, dtype=torch.float64)
    with pytest.warns(UncheckedWarning, match="only for export"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    assert "only for export" in model.checked[0].unchecked


def test_measuring_checks_before_the_first_step() -> None:
    model = compiled(mlp(), spread(2, "data"), 2)
    model.measure(torch.randn(6, 6, dtype=torch.float64), steps=1, warmup=0)
    assert [record.unchecked for record in model.checked] == [""]


# --- no false alarm --------------------------------------------------------------------------

SLICE = {
    "residual, four samples": "bfloat16",
    "variational autoencoder": "float32",
    "llama": "bfloat16",
    "lstm": "autocast",
    "critic": "autocast",
    "mlp rrelu": "float32",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "precision"), SLICE.items())
def test_sound_models_raise_no_alarm(name: str, precision: str) -> None:
    """A slice of `python -m benchmarks.self_check alarms`."""
    torch.manual_seed(0)
    module, args = SOUND[name]()
    said = outcome(module, args, "shards", precision, 2)
    if "could not create a primitive" in said:
        pytest.skip(f"this processor has no such layer in bfloat16: {said}")
    assert said in ("agrees", "agrees in float64")


def test_gradients_behind_dropout_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection must not be made of the constants that stand for draws: norms would have no gradient."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4)).double()
    model = compiled(net, spread(2, "data"), 2)
    lost_gradient(monkeypatch)
    with pytest.raises(SelfCheckError, match=r"gradients: \d of 6 differ"):
        model(torch.randn(8, 6, dtype=torch.float64))


def test_intended_differences_are_left_out_by_name() -> None:
    class OwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))

        def forward(self, x: Tensor) -> Any:
            return self.net(x).square().mean()

    options = {"batch_norm": "local", "scalars": "per_replica", "dropout": False}
    model = compiled(OwnLoss().double(), spread(2, "data"), 2, **options)
    assert model(torch.randn(8, 6, dtype=torch.float64)).shape == (2,)
    (record,) = model.checked
    assert not record.unchecked
    assert [text.split(":")[0] for text in record.left_out] == [
        'batch_norm="local"',
        'scalars="per_replica"',
        "dropout=False",
    ]


def test_draws_that_cannot_be_replaced_are_named() -> None:
    """Both sides draw from the same state of the generator, which here is enough to agree."""

    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            return y * torch.multinomial(torch.ones(len(y), 9, dtype=y.dtype), 4)

    model = compiled(Picks().double(), spread(1, "one"), 1)
    model(torch.randn(64, 6, dtype=torch.float64))
    assert [(record.unchecked, record.left_out) for record in model.checked] == [
        ("", ("multinomial draws random numbers",))
    ]


# --- over processes --------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_processes_check_together(case: str) -> None:
    run_case(CASES[case], 2)
