"""Python attributes that a forward reads or writes: the next call follows, results are put there, or it is refused."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from parplan.errors import CaptureError, RuntimeFailure
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import Outcome, compiled, differences, outcome, spread

Forward = Callable[[Any, Tensor], Any]


@dataclass
class Config:
    """What users keep their settings in."""

    scale: float = 1.0
    name: str = "plain"


class Keeper(nn.Module):
    """Two layers with attributes of all kinds, and a forward that a test gives."""

    rate = 1.0

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 4)
        self.temperature = 1.0
        self.depth = 1
        self.skip = False
        self.scales: Any = [1.0, 2.0]
        self.config: Any = Config()
        self.nested: Any = types.SimpleNamespace(inner=[0, {"scale": 2.0}])
        self.table: Any = {"scale": 1.0}
        self.choices: Any = {"double"}
        self.fixed: Any = torch.tensor(2.0, dtype=torch.float64)
        self.count = 0
        self.last: Any = None
        self.kept: Any = {}
        self.history: Any = []
        self._body = forward

    def forward(self, x: Tensor) -> Any:
        return self._body(self, x)


def model_of(forward: Forward) -> Keeper:
    torch.manual_seed(0)
    return Keeper(forward).double()


def pair(forward: Forward, devices: int = 2, kind: str = "hybrid") -> tuple[Any, Any]:
    plain = model_of(forward)
    return plain, compiled(plain, spread(devices, kind), devices)


def inputs(number: int) -> Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def captures(model: Compiled) -> int:
    """How many graphs there are."""
    return sum(map(len, model._captures._captured.values()))


def same_step(plain: Any, model: Any, number: int) -> None:
    x = inputs(number)
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}, number


def change(plain: Any, model: Any, how: Callable[[Any], object]) -> None:
    how(plain)
    how(model.module)


# --- what is read ------------------------------------------------------------------------------


def divided(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x)) / m.temperature


def skipping(m: Any, x: Tensor) -> Any:
    h = m.a(x)
    return m.b(h if m.skip else h.relu())


def listed(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x) * m.scales[0])


def configured(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x) * m.config.scale)


def nested(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x) * m.nested.inner[1]["scale"])


def tabled(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x) * m.table.get("other", 3.0))


def chosen(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x)) * (2.0 if "double" in m.choices else 1.0)


def of_the_class(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x) * m.rate)


def perhaps_there(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x) * getattr(m, "extra", 1.0))


def with_plain_tensor(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x) * m.fixed)


def with_number_of_tensor(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x) * m.fixed.item())


def of_a_layer(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x)) * m.b.out_features


STRENGTH = 1.0


def doubled(x: Tensor) -> Tensor:
    return x * 2 * STRENGTH


def of_the_file(m: Any, x: Tensor) -> Any:
    return doubled(m.b(m.a(x)))


def set_attribute(name: str, value: Any) -> Callable[[Any], object]:
    return lambda m: setattr(m, name, value)


READS: dict[str, tuple[Forward, tuple[Callable[[Any], object], ...]]] = {
    "number": (divided, (set_attribute("temperature", 2.0), set_attribute("temperature", 2))),
    "flag": (skipping, (set_attribute("skip", True), set_attribute("skip", False))),
    "list": (listed, (lambda m: m.scales.__setitem__(0, 2), set_attribute("scales", [3.0]))),
    "dataclass": (configured, (lambda m: setattr(m.config, "scale", 3.0), set_attribute("config", Config(4.0)))),
    "nested": (nested, (lambda m: m.nested.inner[1].update(scale=5.0),)),
    "dict": (tabled, (lambda m: m.table.update(other=5.0), lambda m: m.table.pop("other"))),
    "set": (chosen, (lambda m: m.choices.clear(), lambda m: m.choices.add("double"))),
    "class": (of_the_class, (lambda m: setattr(m, "rate", 2.0), lambda m: delattr(m, "rate"))),
    "absent": (perhaps_there, (set_attribute("extra", 2.0), lambda m: delattr(m, "extra"))),
    "tensor": (with_plain_tensor, (lambda m: m.fixed.fill_(3.0), lambda m: setattr(m, "fixed", m.fixed * 2))),
    "tensor's number": (with_number_of_tensor, (lambda m: m.fixed.fill_(3.0), lambda m: m.fixed.fill_(4.0))),
    "global": (of_the_file, (lambda m: globals().update(STRENGTH=3.0), lambda m: globals().update(STRENGTH=1.0))),
    "layer": (of_a_layer, (lambda m: setattr(m.b, "out_features", 7),)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", READS)
def test_a_change_counts_at_the_next_call(case: str) -> None:
    forward, changes = READS[case]
    plain, model = pair(forward)
    same_step(plain, model, 0)
    for number, how in enumerate(changes, 1):
        change(plain, model, how)
        same_step(plain, model, number)


def test_only_what_the_forward_reads_counts() -> None:
    plain, model = pair(configured)
    for number in range(3):
        change(plain, model, lambda m: setattr(m, "count", m.count + 1))
        change(plain, model, lambda m: m.table.update(scale=m.table["scale"] + 1))
        change(plain, model, lambda m: setattr(m, "config", Config()))  # equal to what it was
        same_step(plain, model, number)
    assert captures(model) == 1


def test_a_schedule_between_two_values_is_captured_twice() -> None:
    plain, model = pair(skipping)
    for number in range(6):
        change(plain, model, set_attribute("skip", number % 2 == 0))
        same_step(plain, model, number)
    assert captures(model) == 2


def test_what_is_more_often_than_capturing_is_worth_is_refused_by_name() -> None:
    def to_a_power(m: Any, x: Tensor) -> Any:
        return m.b(m.a(x)) if m.temperature < 1.0 else m.b(m.a(x) * m.temperature)

    plain, model = pair(to_a_power, 1, "one")
    for number in range(8):
        change(plain, model, set_attribute("temperature", 1.0 + number))
        model(inputs(number))
    model.temperature = 9.0
    with pytest.raises(RuntimeFailure, match=r"reads the attribute temperature, which has had 9 values in 9 calls"):
        model(inputs(9))
    model.temperature = 1.0
    model(inputs(9))


# --- numbers that become inputs ----------------------------------------------------------------


def mixed_in(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x)) * (1 - m.temperature) + m.temperature * m.config.scale


def counted(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x)) * m.depth / (1 + m.depth)


class Reversed(torch.autograd.Function):
    """Gradients times a negative weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient * ctx.weight, None


def reversed_gradients(m: Any, x: Tensor) -> Any:
    return m.b(Reversed.apply(m.a(x), m.temperature))  # type: ignore[no-untyped-call]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("forward", [mixed_in, nested, counted, reversed_gradients])
def test_a_number_that_changes_again_is_an_input(forward: Forward) -> None:
    plain, model = pair(forward, 4)
    for number in range(6):

        def anneal(m: Any, number: int = number) -> None:
            m.temperature = m.scales[0] = m.nested.inner[1]["scale"] = 1.0 + number / 3
            m.config.scale, m.depth = 0.5 * number, 1 + number

        change(plain, model, anneal)
        same_step(plain, model, number)
    assert captures(model) == 3


def test_a_backward_after_another_forward_has_its_own_number() -> None:
    plain, model = pair(divided)
    for number in range(3):
        change(plain, model, set_attribute("temperature", 1.0 + number))
        same_step(plain, model, number)
    for module in (plain, model):
        module.zero_grad()
        losses = []
        for value in (3.5, 4.5):
            (module if module is plain else model.module).temperature = value
            losses.append(module(inputs(9)).square().sum())
        sum(losses).backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-9)


def leaky(m: Any, x: Tensor) -> Any:
    return m.b(nn.functional.leaky_relu(m.a(x), m.temperature))


def typed(m: Any, x: Tensor) -> Any:
    h = m.b(m.a(x))
    return h * m.temperature if isinstance(m.temperature, float) else h - m.temperature


def promoted(m: Any, x: Tensor) -> Any:
    h = m.b(m.a(x)).float()
    return (h[0, 0] * m.temperature).to(torch.float64) + h.double()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("forward", [leaky, typed, promoted])
def test_a_number_that_is_no_plain_operand_is_captured_per_value(forward: Forward) -> None:
    plain, model = pair(forward, 1, "one")
    for number in range(4):
        change(plain, model, set_attribute("temperature", 0.1 + number / 5))
        x = inputs(number)
        found, wanted = outcome(model, model, x), outcome(plain, plain, x)
        for name, tensor in wanted.tensors.items():
            torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-9, atol=1e-9)
    assert captures(model) == 4


# --- what is written ---------------------------------------------------------------------------


def keeping(m: Any, x: Tensor) -> Any:
    h = m.a(x)
    m.last = h
    m.kept["penalty"] = h.square().mean()
    m.kept["attention"] = [h.detach().softmax(1), 3]
    m.a.seen = (x, h.shape[1], "a layer's own")
    return m.b(h)


@pytest.mark.parametrize(("devices", "kind"), [(2, "data"), (4, "hybrid")])
def test_tensors_that_the_forward_stores_are_there_with_gradients(devices: int, kind: str) -> None:
    plain, model = pair(keeping, devices, kind)
    for number in range(3):
        found, wanted = (outcome(m, lambda x, m=m: _stored(m, x), inputs(number)) for m in (model, plain))
        assert differences(found, wanted) == {}
        assert plain.a.seen[1:] == model.a.seen[1:] == (8, "a layer's own")
        assert not model.kept["attention"][0].requires_grad
        assert model.kept["attention"][1] == 3
    assert captures(model) == 1


def _stored(model: Any, x: Tensor) -> list[Tensor]:
    result = model(x)
    return [result, model.last, model.kept["penalty"], model.kept["attention"][0], model.a.seen[0]]


def cached(m: Any, x: Tensor) -> Any:
    if m.last is None:
        m.last = torch.arange(4, dtype=x.dtype)
    return m.b(m.a(x)) + m.last


def test_a_tensor_that_is_made_at_the_first_call_is_there_at_the_next() -> None:
    plain, model = pair(cached)
    for number in range(3):
        same_step(plain, model, number)
    assert captures(model) == 2


def counting(m: Any, x: Tensor) -> Any:
    m.count += 1
    return m.a(x)


def collecting(m: Any, x: Tensor) -> Any:
    m.history.append(m.a(x))
    return m.b(m.history[-1])


def scaling(m: Any, x: Tensor) -> Any:
    m.scales[0] *= 2
    return m.a(x)


def writing_in_place(m: Any, x: Tensor) -> Any:
    m.fixed.add_(1)
    return m.a(x) * m.fixed


def carrying(m: Any, x: Tensor) -> Any:
    m.fixed = m.fixed * 0.5 + x.mean()
    return m.a(x) * m.fixed


def leaving_an_object(m: Any, x: Tensor) -> Any:
    m.last = lambda: x
    return m.a(x)


def drawing(m: Any, x: Tensor) -> Any:
    return m.a(x) * random.random()


def drawing_with_numpy(m: Any, x: Tensor) -> Any:
    return m.a(x) * float(np.random.rand())


def of_open_size(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    return y[y > 0].sum()


def counting_outside(m: Any, x: Tensor) -> Any:
    global STRENGTH
    STRENGTH += 1.0
    return m.a(x)


def untrained(m: Any, x: Tensor) -> Any:
    return m.a(x) * m.history[0]


REFUSED: dict[Forward, str] = {
    counting: r"writes count: it changes it from 0 to 1, .*register_buffer",
    collecting: r"writes history: it changes how much it holds, from 0 to 1 entries",
    scaling: r"writes scales\[0\]: it changes it from 1.0 to 2.0",
    writing_in_place: r"writes fixed, a tensor that is neither parameter nor buffer, in place.*register_buffer",
    carrying: r"reads fixed and writes it for the next call.*register_buffer",
    leaving_an_object: r"writes last: it leaves an object of function there",
    drawing: r"(?s)random numbers from random.*test_attributes.py:\d+: return m.a\(x\) \* random.*torch.rand",
    drawing_with_numpy: r"(?s)random numbers from numpy.random.*test_attributes.py.*np.random.rand",
    of_open_size: r"(?s)size of a result depends on the values of a tensor.*torch.where.*test_attributes.py",
    counting_outside: r"writes .*STRENGTH: it changes it from 1.0 to 2.0",
    untrained: r"uses history\[0\], of shape \(8,\), which needs a gradient.*nn.Parameter",
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_what_cannot_be_kept_up_is_refused_and_leaves_no_trace(forward: Forward) -> None:
    plain, model = pair(forward)
    change(plain, model, lambda m: m.history.append(torch.ones(8, dtype=torch.float64, requires_grad=True)))
    if forward is collecting:
        change(plain, model, lambda m: m.history.clear())
    states = random.getstate(), str(np.random.get_state())
    before = {name: repr(value) for name, value in model.module.__dict__.items()}
    with pytest.raises(CaptureError, match=REFUSED[forward]):
        model(inputs(0))
    assert {name: repr(value) for name, value in model.module.__dict__.items()} == before
    assert (random.getstate(), str(np.random.get_state())) == states
    assert STRENGTH == 1.0
    assert "__getattribute__" not in vars(nn.Module)


def test_nothing_of_a_capture_stays_on_the_modules() -> None:
    _, model = pair(keeping)
    model.prepare(inputs(0))
    held = [value for part in model.modules() for value in part.__dict__.values()]
    assert model.module.last is None
    assert model.module.kept == {}
    assert not hasattr(model.module.a, "seen")
    assert not any(isinstance(value, FakeTensor) for value in held)


# --- modes ---------------------------------------------------------------------------------------


def by_gradients(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x)) * (2.0 if torch.is_grad_enabled() else 3.0)


def by_inference(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x)) * (2.0 if torch.is_inference_mode_enabled() else 3.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("forward", [by_gradients, by_inference])
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_a_mode_that_the_forward_asks_for_is_the_callers(
    forward: Forward, first: Callable[[], AbstractContextManager[Any]]
) -> None:
    plain, model = pair(forward)
    for mode in (first, torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            x = inputs(0)
            found, wanted = (Outcome({"result": m(x).detach()}) for m in (model, plain))
        assert differences(found, wanted) == {}
    assert captures(model) <= 3
