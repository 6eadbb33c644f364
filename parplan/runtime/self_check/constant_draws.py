"""Replaces random draws by constants, so that two runs of a model agree however the plan cuts its samples.

No two ways of splitting a batch draw the same random numbers. A constant is the same for every part: dropout keeps
everything (and scales as it does), `randn` gives ones, `rand` halves. torch's generators are neither read nor advanced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parplan.compat import schema_of

__all__ = ["ConstantDraws"]

aten = torch.ops.aten

# Constants in place of an op's draws, by its name, where they do not depend on its arguments.
_DRAWN = {"rand": 0.5, "rand_like": 0.5, "randn": 1.0, "randn_like": 1.0, "exponential_": 1.0, "geometric_": 1.0}
_DRAWN |= {"cauchy_": 1.0, "log_normal_": 1.0, "bernoulli_": 1.0, "bernoulli": 1.0, "random_": 0.0, "random": 0.0}
_DRAWN |= {"exponential": 1.0, "_standard_gamma": 1.0, "binomial": 1.0, "poisson": 1.0}
_BY_ARGUMENTS = frozenset(
    {"native_dropout", "rrelu_with_noise", "randperm", "normal_", "normal", "randint", "randint_like"}
) | {"uniform", "uniform_"}
# Arguments that say which share is dropped, of fused ops that draw inside.
_RATES = ("dropout_p", "dropout")


class ConstantDraws(TorchDispatchMode):
    """While it lasts, ops that draw random numbers give constants.

    Attributes:
        unknown: ops that were run as they are, because no constant is known that stands for their draw.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        kwargs = dict(kwargs or {})
        schema = schema_of(func)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*_without_rates(schema, args, kwargs), **kwargs)
        name = str(schema.name).split("::")[-1]
        if name in _DRAWN or name in _BY_ARGUMENTS:
            return _constant(name, func, args, kwargs)
        found = _without_rates(schema, args, kwargs)
        if found is args:
            self.unknown.add(name)
        return func(*found, **kwargs)


def _without_rates(schema: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The arguments of a fused op, with nothing to drop; `args` themselves where it drops nothing."""
    places = [i for i, a in enumerate(schema.arguments) if a.name in _RATES and i < len(args)]
    places = [i for i in places if type(args[i]) is float and args[i]]
    for rate in _RATES:
        if kwargs.get(rate):
            kwargs[rate] = 0.0
    return [0.0 if i in places else value for i, value in enumerate(args)] if places else args


def _constant(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an op that draws random numbers, with constants in place of those."""
    schema = schema_of(func).arguments
    named = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    named |= {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
    options = {key: kwargs[key] for key in ("dtype", "device", "memory_format") if kwargs.get(key) is not None}
    own: Any = named.get("self", named.get("input"))
    value: Any = _DRAWN.get(name)
    match name:
        case "native_dropout":
            rate = named["p"] if named["train"] is not False else 0.0
            return own * (1 / (1 - rate) if rate < 1 else 0.0), torch.ones_like(own, dtype=torch.bool)
        case "rrelu_with_noise":
            if not named["training"]:
                return func(*args, **kwargs)
            mean_slope = (float(named["lower"]) + float(named["upper"])) / 2
            named["noise"].copy_(torch.where(own <= 0, mean_slope, 1.0))  # its backward multiplies by the noise
            return torch.mul(own, named["noise"])
        case "randperm":
            return torch.arange(named["n"], **options)
        case "uniform" | "uniform_":
            value = (named["from"] + named["to"]) / 2
        case "normal_" | "normal":
            if isinstance(named["mean"], Tensor) or isinstance(named["std"], Tensor):
                return torch.add(named["mean"], named["std"])
            value = named["mean"] + named["std"]
        case "randint" | "randint_like":
            value = named.get("low", 0)
            options = options if own is not None else {"dtype": torch.int64} | options
    if own is None:
        return torch.full(tuple(named["size"]), value, **options)
    return own.fill_(value) if name.endswith("_") else torch.full_like(own, value, **options)
