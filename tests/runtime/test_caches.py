"""Caches of keys and values: results of a compiled model, arguments that it updates, and settings filled in once."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import CaptureError
from parplan.graph.attributes.containers import containers_in, register_caches
from parplan.graph.capture.capture import capture
from tests.runtime.helpers import CLOSE, compiled, spread
from tests.torch_versions import fails_before


class CacheLayer:
    """Keys of one layer, which grow with every call."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.seen = 0
        self.device: torch.device | None = None

    def update(self, keys: Tensor) -> Tensor:
        """All keys so far."""
        if self.keys is None:
            self.keys, self.device = torch.tensor([], dtype=keys.dtype), keys.device
        self.keys, self.seen = torch.cat([self.keys, keys], dim=-2), self.seen + keys.shape[-2]
        return self.keys


class Cache:
    """A list of layers, lengthened by the first forward."""

    def __init__(self) -> None:
        self.layers: list[CacheLayer] = []
        self.filled: dict[int, bool] = {}


class Attention(nn.Module):
    """Attends to keys of this call and of those before."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        if len(cache.layers) <= self.number:
            cache.layers.append(CacheLayer())
        keys = cache.layers[self.number].update(self.k(x))
        cache.filled[self.number] = True
        attended: Tensor = (self.q(x) @ keys.transpose(-1, -2)).softmax(-1) @ keys
        return x + attended


class Config:
    """Settings, one of which the first forward fills in."""

    kind: str | None = None

    def __init__(self) -> None:
        self.kind = None


class Decoder(nn.Module):
    """Two layers of attention and a cache, returned or (`hidden`) only changed."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.hidden, self.config = Attention(0), Attention(1), hidden, Config()

    def forward(self, x: Tensor, cache: Cache | None = None) -> Any:
        cache = Cache() if cache is None else cache
        if self.config.kind is None:
            self.config.kind = "double"
        y = self.second(self.first(x, cache), cache)
        y = 2 * y if self.config.kind == "double" else y
        return y if self.hidden else {"y": y, "cache": cache}


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the library's name with classes of our own, as if the user had imported it."""
    module = ModuleType("transformers.cache_utils")
    for kind in (Cache, CacheLayer):
        setattr(module, kind.__name__, kind)
        monkeypatch.setattr(kind, "__module__", module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def rows(length: int = 3) -> Tensor:
    return torch.randn(4, length, 8, dtype=torch.float64)


def test_nothing_is_imported_for_models_without_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers.cache_utils")
    register_caches()
    assert "transformers" not in sys.modules


def test_training_returns_a_cache_as_the_model_does() -> None:
    plain = Decoder().double()
    model, x = compiled(plain, spread(2, "data"), 2, check="first"), rows()
    wanted, found = plain(x), model(x)
    for made in (wanted, found):
        (made["y"].sum() + sum(layer.keys.square().sum() for layer in made["cache"].layers)).backward()
    assert type(found["cache"]) is Cache
    assert [layer.seen for layer in found["cache"].layers] == [3, 3]
    for layer, other in zip(wanted["cache"].layers, found["cache"].layers, strict=True):
        torch.testing.assert_close(other.keys, layer.keys, rtol=CLOSE, atol=CLOSE)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=CLOSE, atol=CLOSE)


@pytest.mark.full
@pytest.mark.parametrize("hidden", [False, True], ids=["returned", "changed alone"])
def test_a_cache_that_is_passed_in_is_updated(hidden: bool) -> None:
    plain = Decoder(hidden).double().eval()
    model = compiled(plain, spread(2, "data"), 2).eval()
    own, other = Cache(), Cache()
    layers = other.layers
    with torch.no_grad():
        for length in (3, 1, 1):
            x = rows(length)
            wanted, found = plain(x, own), model(x, other)
            y, z = (wanted, found) if hidden else (wanted["y"], found["y"])
            torch.testing.assert_close(z, y, rtol=CLOSE, atol=CLOSE)
            if not hidden:
                assert found["cache"] is other
            assert [layer.seen for layer in other.layers] == [layer.seen for layer in own.layers]
            assert other.filled == own.filled
            for mine, theirs in zip(own.layers, other.layers, strict=True):
                torch.testing.assert_close(theirs.keys, mine.keys, rtol=CLOSE, atol=CLOSE)
    assert other.layers is layers


def test_an_empty_cache_takes_no_replicas_away() -> None:
    graph = capture(Decoder().double(), (rows(),))
    assert [name for name, layer in graph.layers.items() if layer.batch is None] == []
    assert containers_in((Cache(), [Cache()], 3))


def test_a_setting_that_the_first_forward_fills_in_is_filled_in() -> None:
    plain = Decoder().double()
    model = compiled(copy.deepcopy(plain), spread(2, "data"), 2)
    x = rows()
    for _ in range(2):
        torch.testing.assert_close(model(x)["y"], plain(x)["y"], rtol=CLOSE, atol=CLOSE)
    config: Any = model.module.config
    assert config.kind == "double"


@dataclass
class Unknown:
    y: Tensor


class ReturnsUnknown(nn.Module):
    def forward(self, x: Tensor | Unknown) -> Any:
        return Unknown(x * 2) if isinstance(x, Tensor) else x.y


# `torch.export.export` of this model says "unhashable type: 'Unknown'" on 2.11.
_UNHASHABLE = fails_before((2, 12), "torch.export looks a result's class up by the result's hash, which it has not")


@pytest.mark.parametrize(
    "given", [pytest.param(rows(), id="result", marks=_UNHASHABLE), pytest.param(Unknown(rows()), id="argument")]
)
def test_a_class_that_nobody_registered_is_named_with_the_remedy(given: Any) -> None:
    with pytest.raises(CaptureError, match=r"test_caches.*Unknown is a class .*register_dataclass"):
        capture(ReturnsUnknown(), (given,))
