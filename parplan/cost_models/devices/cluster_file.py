"""A cluster described in a file: kinds of devices, how many, and the levels of links that join them (TOML).

    name = "two islands"

    [[devices]]             # in the order of their numbers; repeat for other kinds
    preset = "k20"          # or numbers of one's own, see DEVICE_KEYS
    count = 8

    [[links]]               # innermost first; the last joins all devices
    name = "switch"
    size = 4                # so many neighbouring devices share one
    latency_us = 5.7
    gb_per_s = 6.0

Units stand in the keys. Every mistake is told with the file, the key, the value and what would be right; numbers that
no device has are taken for mistakes of unit. docs/clusters.md explains the file.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from parplan.cluster import MOST_DEVICES, Cluster, Device, Link
from parplan.cost_models.devices.presets import device_preset, link_preset
from parplan.errors import ClusterError

__all__ = ["Entry", "Quantity"]

T = TypeVar("T")

_TYPES: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}


@dataclass(frozen=True)
class Quantity:
    """What a number means, with its unit, and the least and the most that anything real has."""

    meaning: str
    least: float
    most: float


@dataclass(frozen=True)
class Entry:
    """One table of the file.

    Args:
        where: file and table, for errors.
        data: its keys.
    """

    where: str
    data: Mapping[str, Any]

    def check_keys(self, known: Sequence[str]) -> None:
        """Refuse keys that are not `known`, with the closest that is.

        Raises:
            ClusterError: there is one.
        """
        for key, value in self.data.items():
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}? Known" if close else "known"
                raise ClusterError(f"{self.where}: unknown key {key} = {_shown(value)}; {hint} are {', '.join(known)}")

    def check_present(self, keys: Sequence[str], instead: str = "") -> None:
        """Refuse an entry without all of `keys`; `instead` says what would make up for them.

        Raises:
            ClusterError: some are missing.
        """
        missing = [key for key in keys if key not in self.data]
        if missing:
            raise ClusterError(
                f"{self.where} lacks {', '.join(missing)}; add {_them(missing)}{f' {instead}' * bool(instead)}"
            )

    def text(self, key: str) -> str | None:
        """A text that says something; None where the key is not there.

        Raises:
            ClusterError: not a text, or an empty one.
        """
        value = self._typed(key, (str,), _TYPES[str])
        if value is not None and not value.strip():
            raise ClusterError(f'{self.where}: {key} = "{value}" is empty; say something or leave it out')
        return None if value is None else str(value)

    def flag(self, key: str) -> bool | None:
        """True or false; None where the key is not there.

        Raises:
            ClusterError: neither.
        """
        value = self._typed(key, (bool,), _TYPES[bool])
        return None if value is None else bool(value)

    def whole(self, key: str, least: int, most: int | None = None) -> int:
        """A whole number of at least `least` and at most `most`.

        Raises:
            ClusterError: it is not there, no whole number, or out of range.
        """
        value = self._typed(key, (int,), _TYPES[int])
        if value is None or value < least or (most is not None and value > most):
            upper = "" if most is None else f" and at most {most}"
            raise ClusterError(f"{self.where}: {key} = {value}: it has to be at least {least}{upper}")
        return int(value)

    def number(self, key: str, quantity: Quantity) -> float | None:
        """A number within what `quantity` has; None where the key is not there.

        Raises:
            ClusterError: no number, or beyond reason; the text says the unit.
        """
        value = self._typed(key, (int, float), _TYPES[float])
        if value is None:
            return None
        if not quantity.least <= value <= quantity.most or not math.isfinite(value):
            raise ClusterError(
                f"{self.where}: {key} = {_shown(value)} is not plausible: it is {quantity.meaning}, from "
                f"{quantity.least:,.10g} to {quantity.most:,.10g}"
            )
        return float(value)

    def preset(self, find: Callable[[str], T], name: str) -> T:
        """What `find` knows under the preset's name.

        Raises:
            ClusterError: nothing; the text says where it is asked for.
        """
        try:
            return find(name)
        except ClusterError as error:
            raise ClusterError(f"{self.where}: {error}") from error

    def _typed(self, key: str, types: tuple[type, ...], words: str) -> Any:
        value = self.data.get(key)
        if value is not None and type(value) not in types:
            raise ClusterError(f"{self.where}: {key} = {_shown(value)} has to be {words}")
        return value


def _shown(value: Any) -> str:
    """A value as the file has it, cut where it is long."""
    text = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _them(keys: Sequence[str]) -> str:
    return "it" if len(keys) == 1 else "them"


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["DEVICE_KEYS", "LINK_KEYS", "load_cluster", "read_cluster"]

DEVICE_KEYS = (
    "preset", "name", "count", "memory_gib", "tflops", "gb_per_s", "launch_us", "source", "estimated",
)  # fmt: skip
LINK_KEYS = ("preset", "name", "size", "latency_us", "gb_per_s", "contention", "overlap", "source", "estimated")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp64")

MEMORY = Quantity("memory a plan may use, in GiB (2^30 bytes)", 1e-3, 2**16)
RATE = Quantity("a peak rate in TFLOP/s (1e12 per second)", 1e-5, 1e5)
BANDWIDTH = Quantity("memory bandwidth in GB/s (1e9 bytes per second)", 1e-2, 1e6)
LAUNCH = Quantity("the least time of one op in microseconds", 0, 1e5)
LATENCY = Quantity("the latency of a message in microseconds", 0, 1e7)
LINK_RATE = Quantity("what one pair of devices gets in one direction, in GB/s (1e9 bytes per second)", 1e-6, 1e5)
CONTENTION = Quantity("the share of the bandwidth that is left when all devices talk across the level at once", 1e-4, 1)
OVERLAP = Quantity("the most of a gradient reduction that can run beside the backward pass", 0, 1)


def load_cluster(path: str | Path) -> Cluster:
    """The cluster that a TOML file describes.

    Raises:
        ClusterError: the file cannot be read, or `read_cluster` refuses what it says.
    """
    if not str(path):
        raise ClusterError("--cluster: the name of the file is empty; name a TOML file")
    if Path(path).is_dir():
        raise ClusterError(f"{path} is a folder; name a TOML file that describes a cluster")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise ClusterError(f"cannot read the cluster {path}: {reason}") from error
    return read_cluster(text, str(path))


def read_cluster(text: str, where: str) -> Cluster:
    """The cluster that TOML `text` describes; `where` names it in errors.

    Raises:
        ClusterError: not TOML, an unknown or missing key, a value of the wrong type or beyond reason, levels that do
            not nest or do not join all devices.
    """
    try:
        data = tomllib.loads(text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ClusterError(f"{where} is not TOML: {error}") from error
    top = Entry(where, data)
    top.check_keys(("name", "devices", "links"))
    devices = _devices(_tables(top, "devices"), where)
    if not devices:
        raise ClusterError(f"{where} has no devices; add [[devices]] with a preset, such as v100-sxm2, and a count")
    links = tuple(_link(entry) for entry in _tables(top, "links"))
    _check_levels(links, len(devices), where)
    return Cluster(devices, links, top.text("name") or "")


def _tables(top: Entry, key: str) -> list[Entry]:
    """The tables [[key]]."""
    found: Any = top.data.get(key, [])
    if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
        raise ClusterError(f"{top.where}: {key} is no list of tables; begin each with [[{key}]]")
    return [Entry(f"{top.where}: [[{key}]] number {index}", table) for index, table in enumerate(found, start=1)]


def _devices(entries: Sequence[Entry], where: str) -> tuple[Device, ...]:
    devices: list[Device] = []
    kinds: dict[str, Device] = {}
    for entry in entries:
        device = _device(entry, where)
        count = entry.whole("count", 1, MOST_DEVICES) if "count" in entry.data else 1
        if kinds.setdefault(device.kind, device) != device:
            raise ClusterError(
                f"{entry.where}: {device.kind} has other numbers than above; give one of them a name of its own"
            )
        devices += [kinds[device.kind]] * count
    return tuple(devices)


def _device(entry: Entry, where: str) -> Device:
    """One kind: a preset with what the entry changes, or the entry's own numbers."""
    entry.check_keys(DEVICE_KEYS)
    preset = entry.text("preset")
    if preset is None:
        entry.check_present(("name", "memory_gib", "tflops", "gb_per_s", "launch_us"), "or a preset")
        base = Device("", 0, {}, 0.0, 0.0, f"given in {where}", estimated=False, like="")
    else:
        base = entry.preset(device_preset, preset)
    rates = {**base.flops_per_s, **_rates(entry)}
    if "fp32" not in rates:
        raise ClusterError(f"{entry.where}: tflops has no fp32; every device needs that one, such as {{ fp32 = 15.7 }}")
    changed = [key for key in ("memory_gib", "tflops", "gb_per_s", "launch_us") if key in entry.data]
    rated = "name" in entry.data or any(key != "memory_gib" for key in changed)
    source = f"{base.source}; {', '.join(changed)} as given in {where}" if preset and changed else base.source
    memory_gib, bandwidth = entry.number("memory_gib", MEMORY), entry.number("gb_per_s", BANDWIDTH)
    launch_us, estimated = entry.number("launch_us", LAUNCH), entry.flag("estimated")
    return Device(
        kind=entry.text("name") or base.kind,
        memory_bytes=base.memory_bytes if memory_gib is None else int(memory_gib * 2**30),
        flops_per_s=rates,
        bandwidth_bytes_per_s=base.bandwidth_bytes_per_s if bandwidth is None else bandwidth * 1e9,
        launch_s=base.launch_s if launch_us is None else launch_us * 1e-6,
        source=entry.text("source") or source,
        estimated=base.estimated if estimated is None else estimated,
        like=base.like if not preset or not rated else base.kind,
    )


def _rates(entry: Entry) -> dict[str, float]:
    """The table of rates by precision in FLOP/s."""
    found = entry.data.get("tflops", {})
    if not isinstance(found, dict):
        raise ClusterError(f"{entry.where}: tflops = {found!r} names no precision; write {{ fp32 = {found!r} }}")
    table = Entry(f"{entry.where}: tflops", found)
    table.check_keys(PRECISIONS)
    return {precision: 1e12 * (table.number(precision, RATE) or 0.0) for precision in found}


def _link(entry: Entry) -> Link:
    entry.check_keys(LINK_KEYS)
    preset = entry.text("preset")
    entry.check_present(
        ("size",) if preset else ("name", "size", "latency_us", "gb_per_s"), "" if preset else "or a preset"
    )
    known = entry.preset(link_preset, preset) if preset else Link("", 0, 0.0, 0.0, 1.0, "as given", estimated=False)
    latency_us, rate = entry.number("latency_us", LATENCY), entry.number("gb_per_s", LINK_RATE)
    contention, estimated = entry.number("contention", CONTENTION), entry.flag("estimated")
    overlap = entry.number("overlap", OVERLAP)
    return Link(
        name=entry.text("name") or known.name,
        size=entry.whole("size", 2),
        latency_s=known.latency_s if latency_us is None else latency_us * 1e-6,
        bandwidth_bytes_per_s=known.bandwidth_bytes_per_s if rate is None else rate * 1e9,
        contention=1.0 if contention is None else contention,
        source=entry.text("source") or known.source,
        estimated=known.estimated if estimated is None else estimated,
        overlap=known.overlap if overlap is None else overlap,
    )


def _check_levels(links: Sequence[Link], count: int, where: str) -> None:
    """Levels nest, and the last joins all devices."""
    inner = 1
    for number, link in enumerate(links, start=1):
        here = f"{where}: [[links]] number {number}, {link.name}: size = {link.size}"
        if inner >= count > 1:
            raise ClusterError(f"{here}: the level before it joins all {count} devices already; leave this one out")
        if link.size <= inner:
            raise ClusterError(f"{here}: the level before it joins {inner}; levels come innermost first and grow")
        if link.size < count and link.size % inner:
            raise ClusterError(
                f"{here} does not nest: it has to be a multiple of {inner}, the size of the level before it"
            )
        inner = link.size
    if count > 1 and inner < count:
        reach = (
            f"the outermost level joins {inner} devices of {count}" if links else f"nothing joins the {count} devices"
        )
        raise ClusterError(f"{where}: {reach}; add [[links]] with size = {count} at the end")
