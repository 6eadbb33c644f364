"""Devices of layers: `gpu=`, inherited from the first input, and notes on files that cuda-convnet2 would refuse.

cuda-convnet2's rules on replicas are parplan's R2, R3 and R4 read strictly; a transfer stands in for them here, so
what breaks them is told and not refused. The same goes for the sizes that its kernels ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from parplan.convnet2.ini import IniSection
from parplan.convnet2.network import Wire
from parplan.errors import RuleError
from parplan.planner.search_space.rules import r2_feeders, r3_fed, r4_divides

__all__ = ["devices_of", "replica_notes", "size_notes"]

Devices = tuple[int, ...]
MOST = 2**16
MOST_TOLD = 3


def devices_of(sections: Mapping[str, IniSection], wires: Sequence[Wire]) -> dict[str, Devices]:
    """Logical devices per layer: its own `gpu`, else those of its first input that is no data layer.

    Layers for which neither says anything are left out: the solver places them.

    Raises:
        LayerFileError: a device that is no number, or one named twice.
    """
    found: dict[str, Devices] = {}
    for wire in wires:
        section = sections[wire.layer]
        first = next((name for name in wire.inputs if sections[name].text("type") != "data"), "")
        if section.has("gpu"):
            own = found[wire.layer] = section.integers("gpu", len(section.names("gpu")), least=0)
            if max(own) > MOST:
                raise section.error("gpu", f"devices are counted from 0; {max(own)} is not plausible")
            if len(set(own)) < len(own):
                raise section.error("gpu", "replicas have to be on different devices; name each once")
        elif first in found:
            found[wire.layer] = found[first]
    return found


def replica_notes(file: str, wires: Sequence[Wire], devices: Mapping[str, Devices]) -> list[str]:
    """One sentence on layers that break cuda-convnet2's rules on replicas."""
    replicas = {name: len(own) for name, own in devices.items()}
    # R2 of every layer, R3 and R4 of those whose replicas are known, and R3 of data layers.
    checks: list[Callable[[], None]] = []
    fed: dict[str, dict[str, int]] = {}
    for wire in wires:
        if wire.layer in replicas:
            for name in wire.inputs:
                fed.setdefault(name, {})[wire.layer] = replicas[wire.layer]
        feeders = {name: replicas[name] for name in wire.inputs if name in replicas}
        checks.append(partial(r2_feeders, wire.layer, feeders))
    for name, counts in fed.items():
        checks.append(partial(r3_fed, name, counts))
        if name in replicas:
            checks.append(partial(r4_divides, name, replicas[name], counts))
    broken = []
    for check in checks:
        try:
            check()
        except RuleError as error:
            broken.append(str(error))
    more = f"; and {len(broken) - MOST_TOLD} more" if len(broken) > MOST_TOLD else ""
    told = "; ".join(broken[:MOST_TOLD]) + more
    return [f"{file}: cuda-convnet2 refuses what parplan bridges with transfers: {told}."] if broken else []


def size_notes(file: str, sections: Mapping[str, IniSection]) -> list[str]:
    """Sizes that cuda-convnet2's kernels do not take, in one sentence."""
    odd = []
    for name, section in sections.items():
        kind = section.text("type")
        if kind not in ("conv", "pool", "cmrnorm", "rnorm"):
            continue
        channels = section.integers("channels", len(section.names("channels")))
        step = 4 if kind == "rnorm" else 16
        if kind == "conv":
            if any(number % 16 for number in section.integers("filters", len(section.names("filters")))):
                odd.append(f"{name} (filters that are no multiple of 16)")
            elif any(n > 3 and n % 4 for n in channels):
                odd.append(f"{name} (channels above 3 that are no multiple of 4)")
        elif any(number % step for number in channels):
            odd.append(f"{name} (channels that are no multiple of {step})")
    more = f" and {len(odd) - MOST_TOLD} more" if len(odd) > MOST_TOLD else ""
    return [f"{file}: cuda-convnet2's kernels refuse the sizes of {', '.join(odd[:MOST_TOLD])}{more}."] if odd else []
