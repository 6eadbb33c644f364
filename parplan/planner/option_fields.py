"""Options as the fields of a dataclass: default, help text and check stand beside the field, once.

A command line's parser is built from them, and a function's keywords have their names and defaults.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError, Namespace, _ActionsContainer
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from parplan.cluster import MOST_DEVICES

__all__ = [
    "add_options", "chosen", "device_count", "gpu_count", "memory_bytes", "option", "percentage", "positive", "share",
    "whole_number",
]  # fmt: skip

# GiB: from a byte-sized slip up to more than any device has; outside it is a mistake of unit.
LEAST_MEMORY, MOST_MEMORY = 1e-6, 2.0**20


def option(default: Any, help: str | None, **settings: Any) -> Any:
    """A dataclass's field with what a command line says of it.

    Args:
        settings: as `ArgumentParser.add_argument` takes them; `flag` where the option is not called as the field,
            `action="append"` for a field that is a tuple.
    """
    switch = {"action": "store_true"} if isinstance(default, bool) else {}
    return field(default=default, metadata={"option": {"help": help, **switch, **settings}})


def add_options(parser: _ActionsContainer, options: type[Any], *only: str, **changes: Mapping[str, Any]) -> None:
    """Give a parser, or a group of one, an option for every field of the dataclass `options` made by `option`.

    Args:
        only: names of fields, if not all are wanted.
        changes: settings of single fields that this command has otherwise.
    """
    for one in fields(options):
        if "option" in one.metadata and (not only or one.name in only):
            settings = {**one.metadata["option"], **changes.get(one.name, {})}
            flag = settings.pop("flag", one.name.replace("_", "-"))
            default = [] if settings.get("action") == "append" else one.default
            parser.add_argument(f"--{flag}", dest=one.name, default=default, **settings)


def chosen(options: type[Any], given: Namespace) -> dict[str, Any]:
    """The values that a command line gives to the fields of the dataclass `options`, by name."""
    found = {one.name: getattr(given, one.name) for one in fields(options)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


# ---- checks ----------------------------------------------------------------------------------------------------------


def gpu_count(text: str) -> int | str:
    """A number, or hosts x GPUs left as text; cost_models.devices counts them, and says what is too many or too few."""
    hosts, times, each = text.partition("x")
    if text.lstrip("+-").isdecimal() and len(text) <= 12:
        return int(text)
    if times and hosts.isdecimal() and each.isdecimal():
        return text
    raise ArgumentTypeError(f"{text} is neither a number, such as 16, nor hosts x GPUs of each, such as 2x8")


def whole_number(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def device_count(text: str) -> int:
    """A number of devices that parplan plans for."""
    value = whole_number(text)
    if value > MOST_DEVICES:
        raise ArgumentTypeError(f"{text}: parplan plans for up to {MOST_DEVICES} devices")
    return value


def _number(text: str) -> float:
    """A number, or NaN, which every check refuses."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentTypeError(f"{text} is not a number above 0")
    return value


def percentage(text: str) -> float:
    """A share from 0 on, written 0.05 or 5%."""
    value = _number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text} is not a share from 0 on, such as 5% or 0.05")
    return value


def share(text: str) -> float:
    """A number from 0 up to, but not including, 1, written 0.05 or 5%."""
    value = _number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise ArgumentTypeError(f"{text} is not a share from 0 up to 1, such as 1% or 0.01")
    return value


def memory_bytes(text: str) -> int:
    """Bytes, from a plausible number of GiB."""
    value = positive(text)
    if not LEAST_MEMORY <= value <= MOST_MEMORY:
        raise ArgumentTypeError(f"{text} GiB is not plausible; give GiB (2^30 bytes) of a device, such as 16")
    return int(value * 2**30)
