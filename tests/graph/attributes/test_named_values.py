"""Values that a forward reads past its modules' attributes: a change of one counts at the next call."""

from __future__ import annotations

import functools
import itertools
import random
import types
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from parplan.runtime.module.compiled import Compiled
from tests.graph.attributes import asserting
from tests.graph.by_hand import close
from tests.runtime.helpers import planner, spread

Forward = Callable[[Any, Tensor], Any]


@dataclass
class Settings:
    """An object of a global variable."""

    scale: float = 1.0
    unit = 2.0

    @property
    def twice(self) -> float:
        return 2 * self.scale

    def value(self) -> float:
        return self.scale * self.unit

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale


class Part(nn.Module):
    """A module that is no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0


GIVEN: dict[str, Any] = {"scale": 1.0, "function": torch.relu}
NAMESPACE, SETTINGS, PART = types.SimpleNamespace(scale=1.0), Settings(), Part()
FACTOR: Any = torch.tensor(2.0, dtype=torch.float64)
VALUE, VIEW, NUMBERS = SETTINGS.value, types.MappingProxyType(GIVEN), array("d", [1.0])
STRENGTH = 1.0
SEEN: list[Any] = []
DRAWS, PYTHON_DRAWS = np.random.default_rng(0), random.Random(0)
TABLES: dict[int, Tensor] = {}


def scaled(x: Tensor) -> Tensor:
    return x * 1.0


def settings() -> Settings:
    return SETTINGS


def strengthened(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    @functools.wraps(function)
    def wrapped(m: Any, x: Tensor) -> Tensor:
        return function(m, x) * STRENGTH

    return wrapped


@strengthened
def decorated(m: Any, x: Tensor) -> Tensor:
    return x


class Spells:
    """Gives any attribute of lower case letters, and fails for others in its own way."""

    def __init__(self) -> None:
        self.given = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.given[name] if name.islower() and not name.startswith("_") else object.__getattribute__(self, name)


SPELLS = Spells()


class Net(nn.Module):
    """A layer, and a forward that a test gives."""

    rate = 1.0

    def __init__(self, body: Forward) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = 1.0
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.parts = [Part()]
        self.teachers = [nn.Linear(4, 4).double().requires_grad_(False)]
        self.method = Settings().value
        self.numbers: Iterator[float] = itertools.cycle([1.0, 2.0])
        self._body = body

    @classmethod
    def of_class(cls) -> float:
        return cls.rate

    def of_type(self) -> float:
        return type(self).rate

    def past_getattr(self) -> float:
        found: float = object.__getattribute__(self, "scale")
        return found

    def forward(self, x: Tensor) -> Any:
        """(N, 4) to the same."""
        return self._body(self, self.fc(x))


class Deep(Net):
    """Reads the model's own attributes in its own way."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


def through_layers(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x)
    return x


def imported_inside(m: Any, x: Tensor) -> Tensor:
    import tests.graph.attributes.asserting as other

    result: Tensor = x * other.SCALE  # type: ignore[attr-defined]
    return result


def to(holder: Any, name: str, value: Any) -> Callable[[Any], object]:
    return lambda m: setattr(holder, name, value)


def of_model(name: str, value: Any) -> Callable[[Any], object]:
    return lambda m: setattr(m, name, value)


def replaces(name: str, value: Any) -> Callable[[Any], object]:
    return lambda m: globals().update({name: value})


READS: dict[str, tuple[Forward, Callable[[Any], object]]] = {
    "__dict__": (lambda m, x: x * m.__dict__["scale"], of_model("scale", 2.0)),
    "vars": (lambda m, x: x * vars(m)["scale"], of_model("scale", 2.0)),
    "new in vars": (lambda m, x: x * vars(m).get("extra", 1.0), of_model("extra", 2.0)),
    "past getattr": (lambda m, x: x * m.past_getattr(), of_model("scale", 2.0)),
    "type": (lambda m, x: x * m.of_type(), to(Net, "rate", 2.0)),
    "class method": (lambda m, x: x * m.of_class(), to(Net, "rate", 2.0)),
    "class by name": (lambda m, x: x * Net.rate, to(Net, "rate", 2.0)),
    "method": (lambda m, x: x * m.of_type(), to(Net, "of_type", lambda m: 2.0)),
    "forward": (lambda m, x: x, of_model("forward", lambda x: x * 2)),
    "dict": (lambda m, x: x * GIVEN["scale"], lambda m: GIVEN.update(scale=2.0)),
    "function in a dict": (lambda m, x: GIVEN["function"](x), lambda m: GIVEN.update(function=torch.tanh)),
    "namespace": (lambda m, x: x * NAMESPACE.scale, to(NAMESPACE, "scale", 2.0)),
    "object": (lambda m, x: x * SETTINGS.twice, to(SETTINGS, "scale", 2.0)),
    "object by name": (lambda m, x: x * getattr(SETTINGS, "sc" + "ale"), to(SETTINGS, "scale", 2.0)),
    "object that is called": (lambda m, x: SETTINGS(x), to(SETTINGS, "scale", 2.0)),
    "object of a function": (lambda m, x: x * settings().scale, to(SETTINGS, "scale", 2.0)),
    "object with attributes of its own": (lambda m, x: x * SPELLS.scale, lambda m: SPELLS.given.update(scale=2.0)),
    "its class": (lambda m, x: x * SETTINGS.value(), to(Settings, "unit", 3.0)),
    "its property": (lambda m, x: x * SETTINGS.twice, to(Settings, "twice", property(lambda s: 5.0))),
    "bound method": (lambda m, x: x * VALUE(), to(SETTINGS, "scale", 3.0)),
    "bound method in an attribute": (lambda m, x: x * m.method(), lambda m: setattr(m.method.__self__, "scale", 3.0)),
    "file": (lambda m, x: x * asserting.SCALE, to(asserting, "SCALE", 2.0)),  # type: ignore[attr-defined]
    "file imported inside": (imported_inside, to(asserting, "SCALE", 2.0)),
    "view of a dict": (lambda m, x: x * VIEW["scale"], lambda m: GIVEN.update(scale=2.0)),
    "array": (lambda m, x: x * NUMBERS[0], lambda m: NUMBERS.__setitem__(0, 2.0)),
    "tensor": (lambda m, x: x * FACTOR, replaces("FACTOR", torch.tensor(3.0, dtype=torch.float64))),
    "function": (lambda m, x: scaled(x), replaces("scaled", lambda x: x * 2)),
    "decorator": (decorated, replaces("STRENGTH", 2.0)),
    "weight in a list": (lambda m, x: m.teachers[0](x), lambda m: m.teachers[0].weight.mul_(2.0)),
    "weight in a list, replaced": (
        lambda m, x: m.teachers[0](x),
        lambda m: setattr(m.teachers[0], "weight", nn.Parameter(m.teachers[0].weight * 2, requires_grad=False)),
    ),
    "memory of a weight in a list": (
        lambda m, x: m.teachers[0](x),
        lambda m: setattr(m.teachers[0].weight, "data", m.teachers[0].weight * 2),
    ),
    "module in a list": (lambda m, x: x * m.parts[0].scale, lambda m: setattr(m.parts[0], "scale", 2.0)),
    "mode of a module in a list": (lambda m, x: x * (1 + m.parts[0].training), lambda m: m.parts[0].eval()),
    "global module": (lambda m, x: x * PART.scale, to(PART, "scale", 2.0)),
    "new layer": (through_layers, lambda m: m.layers.append(nn.Linear(4, 4).double())),
}


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cases change is put back."""
    monkeypatch.setattr(asserting, "SCALE", 1.0, raising=False)
    for holder, name in ((Net, "rate"), (Net, "of_type"), (NAMESPACE, "scale"), (Settings, "unit"), (PART, "scale")):
        monkeypatch.setattr(holder, name, vars(holder)[name])
    monkeypatch.setattr(Settings, "twice", vars(Settings)["twice"])
    monkeypatch.setattr(SETTINGS, "scale", 1.0)
    monkeypatch.setitem(SPELLS.given, "scale", 1.0)
    for name in ("FACTOR", "STRENGTH", "scaled"):
        monkeypatch.setitem(globals(), name, globals()[name])
    for name, value in list(GIVEN.items()):
        monkeypatch.setitem(GIVEN, name, value)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", READS)
def test_a_change_counts_at_the_next_call(case: str) -> None:
    forward, change = READS[case]
    check(Net(forward), change)


def check(plain: nn.Module, change: Callable[[Any], object]) -> None:
    plain.double()
    model = Compiled(plain, planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    x = torch.randn(6, 4, dtype=torch.float64)
    before = plain(x)
    close(model(x), before)
    change(plain)
    close(model(x), plain(x))
    assert not torch.equal(plain(x), before)
    model(x)
    assert sum(map(len, model._captures._captured.values())) <= 2


def test_a_getattribute_of_its_own_hides_nothing() -> None:
    check(Deep(lambda m, x: x * m.scale), of_model("scale", 2.0))


def test_the_mode_is_the_modules() -> None:
    check(Net(lambda m, x: x * (1 + m.training)), lambda m: m.eval())


def test_closures_hold_containers_too() -> None:
    given = {"scale": 1.0}
    check(Net(lambda m, x: x * given["scale"]), lambda m: given.update(scale=2.0))


def appends(m: Any, x: Tensor) -> Any:
    SEEN.append(x)
    return x


def counts(m: Any, x: Tensor) -> Any:
    GIVEN["scale"] += 1
    return x


def keeps(m: Any, x: Tensor) -> Any:
    GIVEN["kept"] = x.mean()
    return x


def draws(m: Any, x: Tensor) -> Any:
    return x * DRAWS.uniform()


def draws_in_python(m: Any, x: Tensor) -> Any:
    return x * PYTHON_DRAWS.random()


def takes_the_next(m: Any, x: Tensor) -> Any:
    return x * next(m.numbers)


WRITES: dict[Forward, str] = {
    appends: r"writes .*SEEN: it changes the values in it",
    counts: r"writes .*GIVEN: it changes the values in it",
    keeps: r"writes .*GIVEN: it changes the values in it",
    draws: r"writes .*\.DRAWS: it changes the values in it",
    draws_in_python: r"writes .*PYTHON_DRAWS: it changes the values in it",
    takes_the_next: "reads numbers, an iterator",
}


@pytest.mark.parametrize("forward", WRITES, ids=lambda forward: forward.__name__)
def test_what_no_graph_can_do_at_every_call_is_refused(forward: Forward) -> None:
    before = dict(GIVEN)
    model = Compiled(Net(forward).double(), planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    with pytest.raises(CaptureError, match=WRITES[forward]):
        model(torch.randn(6, 4, dtype=torch.float64))
    assert not SEEN
    assert before == GIVEN


@functools.lru_cache
def table_of(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float64)


def memoised(m: Any, x: Tensor) -> Any:
    if x.shape[1] not in TABLES:
        TABLES[x.shape[1]] = torch.arange(x.shape[1], dtype=torch.float64)
    return x * TABLES[x.shape[1]]


@pytest.mark.parametrize("forward", [lambda m, x: x * table_of(x.shape[1]), memoised], ids=["lru_cache", "dict"])
def test_tables_that_are_made_once_hold_no_tensors_of_a_capture(forward: Forward) -> None:
    TABLES.clear()
    table_of.cache_clear()
    plain, x = Net(forward).double(), torch.randn(6, 4, dtype=torch.float64)
    model = Compiled(plain, planner(spread(2, "data"), 2), devices=["cpu"] * 2, check="off")
    result = model(x)
    assert not TABLES
    assert table_of.cache_info().currsize == 0
    close(result, plain(x))
    close(model(x), plain(x))


NOTED: list[float] = []


def note(gradient: Tensor) -> None:
    """A hook of a user's own, which keeps what it sees."""
    NOTED.append(float(gradient.square().sum()))


class Hooked(nn.Module):
    """Its hooks append to a list of the function around it, and to a global one."""

    def __init__(self, seen: list[float], at_once: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

        def forward(x: Tensor) -> Tensor:
            h: Tensor = self.fc(x)
            if at_once:
                note(torch.ones(3))
            if h.requires_grad:
                h.register_hook(lambda g: seen.append(float(g.square().sum())))
                h.register_hook(note)
            return h

        self.forward = forward


class HookedMethod(Hooked):
    """The same, by a method."""

    def __init__(self, seen: list[float]) -> None:
        super().__init__(seen)
        del self.forward

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x)
        if h.requires_grad:
            h.register_hook(note)
        return h


@pytest.mark.parametrize("kind", [Hooked, HookedMethod])
def test_lists_that_hooks_fill_make_no_new_captures(kind: type[Hooked]) -> None:
    seen: list[float] = []
    plain = kind(seen)
    model = Compiled(plain, planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    for _ in range(12):
        model(torch.randn(6, 4)).sum().backward()
    assert len(NOTED) >= 12
    assert sum(map(len, model._captures._captured.values())) == 1


def test_a_list_that_a_function_fills_in_the_forward_is_refused_and_as_it_was() -> None:
    before = list(NOTED)
    with pytest.raises(CaptureError, match=r"NOTED: it changes the values in it"):
        capture(Hooked([], at_once=True), (torch.randn(6, 4),))
    assert before == NOTED
