"""Replaces random draws by constants, so that two runs of a model agree however the plan cuts its samples.

No two ways of splitting a batch draw the same random numbers. A constant is the same for every part: dropout keeps
everything (and scales as it does), `randn` gives ones, `rand` halves. torch's generators are neither read nor advanced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parplan.compat import schema_of

__all__ = ["ConstantDraws"]

aten = torch.ops.aten

# What an op of this name draws, where that does not depend on its arguments.
_DRAWN = {"rand": 0.5, "rand_like": 0.5, "randn": 1.0, "randn_like": 1.0, "exponential_": 1.0, "geometric_": 1.0}
_DRAWN |= {"cauchy_": 1.0, "log_normal_": 1.0, "bernoulli_": 1.0, "bernoulli": 1.0, "random_": 0.0, "random": 0.0}
_DRAWN |= {"_standard_gamma": 1.0, "binomial": 1.0, "poisson": 1.0}
# Arguments that say which share is dropped, of fused ops that draw inside.
_RATES = ("dropout_p", "dropout")


class ConstantDraws(TorchDispatchMode):
    """While it lasts, ops that draw random numbers give constants.

    Attributes:
        unknown: ops that were run as they are, because what stands for their draw is not known.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*_without_rates(func, args, kwargs), **kwargs)
        name = str(schema_of(func).name).split("::")[-1]
        named = _named(func, args, kwargs)
        constant = _CONSTANTS.get(name)
        if constant is not None:
            return constant(func, named, args, kwargs)
        if name in _DRAWN:
            return _filled(func, name, named, _DRAWN[name], args, kwargs)
        found = _without_rates(func, args, kwargs)
        if found is args:
            self.unknown.add(name)
        return func(*found, **kwargs)


def _named(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with their defaults."""
    schema = schema_of(func).arguments
    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return found | {a.name: value for a, value in zip(schema, args, strict=False)} | kwargs


def _without_rates(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The arguments of a fused op, with nothing to drop; `args` themselves where it drops nothing."""
    schema = schema_of(func).arguments
    places = [i for i, a in enumerate(schema) if a.name in _RATES and i < len(args) and type(args[i]) is float]
    places = [i for i in places if args[i]]
    for rate in _RATES:
        if kwargs.get(rate):
            kwargs[rate] = 0.0
    return [0.0 if i in places else value for i, value in enumerate(args)] if places else args


def _filled(func: Any, name: str, named: dict[str, Any], value: float, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """What an op gives that draws everywhere the same."""
    own = named.get("self", named.get("input"))
    if own is not None and name.endswith("_"):
        filled: Tensor = own.fill_(value)
        return filled
    if own is not None:
        options = {key: kwargs[key] for key in ("dtype", "device", "memory_format") if kwargs.get(key) is not None}
        return torch.full_like(own, value, **options)
    options = {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
    return torch.full(tuple(named["size"]), value, **options)


def _uniform(func: Any, named: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
    filled: Tensor = named["self"].fill_((named["from"] + named["to"]) / 2)
    return filled


def _normal_in_place(func: Any, named: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
    filled: Tensor = named["self"].fill_(named["mean"] + named["std"])
    return filled


def _normal(func: Any, named: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
    mean, std = named["mean"], named["std"]
    if not isinstance(mean, Tensor) and not isinstance(std, Tensor):
        options = {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
        return torch.full(tuple(named["size"]), mean + std, **options)
    return torch.add(mean, std)


def _lowest(func: Any, named: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
    own, low = named.get("self"), named.get("low", 0)
    options = {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
    if own is not None:
        return torch.full_like(own, low, **options)
    return torch.full(tuple(named["size"]), low, **({"dtype": torch.int64} | options))


def _in_order(func: Any, named: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
    options = {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
    return torch.arange(named["n"], **options)


def _kept(func: Any, named: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Dropout in one kernel: everything is kept and scaled."""
    x, rate = named["input"], named["p"] if named["train"] is not False else 0.0
    return x * (1 / (1 - rate) if rate < 1 else 0.0), torch.ones_like(x, dtype=torch.bool)


def _mean_slope(func: Any, named: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
    """A randomised leaky ReLU with the mean slope; the noise is what its backward multiplies by."""
    x, noise = named["self"], named["noise"]
    if not named["training"]:
        result: Tensor = func(*args, **kwargs)
        return result
    slope = (float(named["lower"]) + float(named["upper"])) / 2
    noise.copy_(torch.where(x <= 0, slope, 1.0))
    return torch.mul(x, noise)


_CONSTANTS: dict[str, Callable[[Any, dict[str, Any], Any, dict[str, Any]], Any]] = {
    "uniform_": _uniform,
    "normal_": _normal_in_place,
    "normal": _normal,
    "randint": _lowest,
    "randint_like": _lowest,
    "randperm": _in_order,
    "native_dropout": _kept,
    "rrelu_with_noise": _mean_slope,
}
