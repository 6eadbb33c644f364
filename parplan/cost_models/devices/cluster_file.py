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

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from parplan.cluster import MOST_DEVICES, AllReduces, Cluster, Device, Link
from parplan.cost_models.devices.presets import device_preset, link_preset
from parplan.errors import ClusterError
from parplan.fields import Field, count, flag, number, parse_toml, read_fields, read_file, table, text

__all__ = ["DEVICE_KEYS", "LINK_KEYS", "load_cluster", "read_cluster"]

T = TypeVar("T")


_words = partial(text, pattern=r".*\S.*", expected="a text in quotes that is not empty")


def _tables(name: str, inside: str = "") -> Field:
    def read(value: Any) -> list[Mapping[str, Any]]:
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise TypeError
        return value

    return Field(name, f"a list of tables; begin each with [[{inside}{name}]]", read, required=False)


def _positive(name: str, meaning: str) -> Field:
    def read(value: Any) -> tuple[float, ...]:
        known = [one for one in value if isinstance(one, int | float) and not isinstance(one, bool)]
        if len(known) != len(value) or not known or min(known) <= 0:
            raise TypeError
        return tuple(known)

    return Field(name, f"a list of {meaning}, each above 0", read)


_RATES = tuple(
    number(precision, 1e-5, 1e5, "a peak rate in TFLOP/s (1e12 per second),").optional()
    for precision in ("fp32", "tf32", "fp16", "bf16", "fp64")
)
_SOURCE = (_words("source").optional(), flag("estimated").optional())
# Without a preset, these have to be there but for those that are optional.
_DEVICE = (
    _words("preset").optional(),
    _words("name"),
    count("count", 1, MOST_DEVICES).optional(),
    number("memory_gib", 1e-3, 2**16, "memory a plan may use, in GiB (2^30 bytes),"),
    table("tflops", "rates by precision, such as { fp32 = 15.7 }"),
    number("gb_per_s", 1e-2, 1e6, "memory bandwidth in GB/s (1e9 bytes per second),"),
    number("launch_us", 0, 1e5, "the least time of one op in microseconds,"),
    *_SOURCE,
)
_LINK = (
    _words("preset").optional(),
    _words("name"),
    count("size", 2),
    number("latency_us", 0, 1e7, "the latency of a message in microseconds,"),
    number("gb_per_s", 1e-6, 1e5, "bandwidth of one pair of devices in one direction, in GB/s (1e9 bytes per second),"),
    number("contention", 1e-4, 1, "share of the bandwidth left when all devices use the level at once,").optional(),
    number("overlap", 0, 1, "largest share of a gradient reduction that can run beside the backward,").optional(),
    number("pair", 1e-4, 1, "share of the bandwidth that one pair gets, less than 1 in a mesh,").optional(),
    number("slowdown", 0, 1, "share of a reduction's time that the backward beside it loses,").optional(),
    _tables("measured", "links."),
    *_SOURCE,
)
_ALL_REDUCES = (
    count("hosts", 2),
    _positive("bytes", "sizes in bytes, ascending"),
    _positive("gb_per_s", "bus bandwidths in GB/s (1e9 bytes per second)"),
)
DEVICE_KEYS, LINK_KEYS = (tuple(field.name for field in fields) for fields in (_DEVICE, _LINK))


def load_cluster(path: str | Path) -> Cluster:
    """The cluster that a TOML file describes.

    Raises:
        ClusterError: the file cannot be read, or `read_cluster` refuses what it says.
    """
    return read_cluster(read_file(path, "cluster", ClusterError, "name a TOML file that describes one"), str(path))


def read_cluster(source: str, where: str) -> Cluster:
    """The cluster that TOML text describes; `where` names it in errors.

    Raises:
        ClusterError: not TOML, an unknown or missing key, a value of the wrong type or beyond reason, levels that do
            not nest or do not join all devices.
    """
    data = parse_toml(source, where, ClusterError)
    top = read_fields(data, (_words("name").optional(), _tables("devices"), _tables("links")), where, ClusterError)
    devices: list[Device] = []
    kinds: dict[str, Device] = {}
    for index, entry in enumerate(top.get("devices", []), start=1):
        place = f"{where}: [[devices]] number {index}"
        found = _entry(entry, _DEVICE, place)
        device = _device(found, where, place)
        if kinds.setdefault(device.kind, device) != device:
            other = "has other numbers than above; give one of them a name of its own"
            raise ClusterError(f"{place}: {device.kind} {other}")
        devices += [device] * found.get("count", 1)
    if not devices:
        raise ClusterError(f"{where} has no devices; add [[devices]] with a preset, such as v100-sxm2, and a count")
    links = tuple(
        _link(entry, f"{where}: [[links]] number {index}") for index, entry in enumerate(top.get("links", []), start=1)
    )
    inner, total = 1, len(devices)  # levels nest, and the last joins all devices
    for index, link in enumerate(links, start=1):
        place = f"{where}: [[links]] number {index}, {link.name}: size = {link.size}"
        if inner >= total > 1:
            raise ClusterError(f"{place}: the level before it joins all {total} devices already; leave this one out")
        if link.size <= inner:
            raise ClusterError(f"{place}: the level before it joins {inner}; levels come innermost first and grow")
        if link.size < total and link.size % inner:
            raise ClusterError(
                f"{place} does not nest: it has to be a multiple of {inner}, the size of the level before it"
            )
        inner = link.size
    if total > 1 and inner < total:
        reach = (
            f"the outermost level joins {inner} devices of {total}" if links else f"nothing joins the {total} devices"
        )
        raise ClusterError(f"{where}: {reach}; add [[links]] with size = {total} at the end")
    return Cluster(tuple(devices), links, top.get("name", ""))


def _entry(entry: Mapping[str, Any], fields: Sequence[Field], place: str) -> dict[str, Any]:
    """The fields of a device or link; with a preset only those that no preset has are needed."""
    if "preset" not in entry:
        return read_fields(entry, fields, place, ClusterError, "or a preset")
    fields = [field if field.name == "size" else field.optional() for field in fields]
    return read_fields(entry, fields, place, ClusterError)


def _preset(find: Callable[[str], T], name: str, place: str) -> T:
    try:
        return find(name)
    except ClusterError as error:
        raise ClusterError(f"{place}: {error}") from error


def _device(found: Mapping[str, Any], where: str, place: str) -> Device:
    """One kind: a preset with the values that the entry changes, or the entry's own."""
    base = Device("", 0, {}, 0.0, 0.0, f"given in {where}", estimated=False, like="")
    source, changed = base.source, [key for key in ("memory_gib", "tflops", "gb_per_s", "launch_us") if key in found]
    if "preset" in found:
        base = _preset(device_preset, found["preset"], place)
        source = f"{base.source}; {', '.join(changed)} as given in {where}" if changed else base.source
    given = read_fields(found.get("tflops", {}), _RATES, f"{place}: tflops", ClusterError)
    rates = {**base.flops_per_s, **{precision: 1e12 * rate for precision, rate in given.items()}}
    if "fp32" not in rates:
        raise ClusterError(f"{place}: tflops has no fp32; every device needs that one, such as {{ fp32 = 15.7 }}")
    rated = "name" in found or any(key != "memory_gib" for key in changed)
    return Device(
        kind=found.get("name", base.kind),
        memory_bytes=int(found["memory_gib"] * 2**30) if "memory_gib" in found else base.memory_bytes,
        flops_per_s=rates,
        bandwidth_bytes_per_s=found["gb_per_s"] * 1e9 if "gb_per_s" in found else base.bandwidth_bytes_per_s,
        launch_s=found["launch_us"] * 1e-6 if "launch_us" in found else base.launch_s,
        source=found.get("source", source),
        estimated=found.get("estimated", base.estimated),
        like=base.kind if "preset" in found and rated else base.like,
    )


def _link(entry: Mapping[str, Any], place: str) -> Link:
    found = _entry(entry, _LINK, place)
    known = Link("", 0, 0.0, 0.0, 1.0, "as given", estimated=False)
    if "preset" in found:
        known = _preset(link_preset, found["preset"], place)
    return Link(
        name=found.get("name", known.name),
        size=found["size"],
        latency_s=found["latency_us"] * 1e-6 if "latency_us" in found else known.latency_s,
        bandwidth_bytes_per_s=found["gb_per_s"] * 1e9 if "gb_per_s" in found else known.bandwidth_bytes_per_s,
        contention=found.get("contention", 1.0),
        source=found.get("source", known.source),
        estimated=found.get("estimated", known.estimated),
        overlap=found.get("overlap", known.overlap),
        pair=found.get("pair", known.pair),
        slowdown=found.get("slowdown", known.slowdown),
        measured=tuple(
            _all_reduces(entry, f"{place}, [[links.measured]] number {index}")
            for index, entry in enumerate(found.get("measured", []), start=1)
        ),
    )


def _all_reduces(entry: Mapping[str, Any], place: str) -> AllReduces:
    found = read_fields(entry, _ALL_REDUCES, place, ClusterError)
    sizes, rates = found["bytes"], found["gb_per_s"]
    if len(sizes) != len(rates) or list(sizes) != sorted(set(sizes)):
        raise ClusterError(
            f"{place}: {len(sizes)} bytes and {len(rates)} gb_per_s; give a bandwidth for each size, sizes ascending"
        )
    return AllReduces(found["hosts"], tuple(int(size) for size in sizes), tuple(1e9 * rate for rate in rates))
