"""The accelerators of this machine, as `torch.accelerator` has them: CUDA, XPU and any other that torch is built with.

A process has one type of them beside the CPU. Streams, events, memory and devices' indices go by torch's own classes
for all types; what torch has per type, or what a type lacks, is asked for here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import torch
from torch import Tensor

__all__ = [
    "DeviceGenerator", "StreamContext", "accelerator_count", "accelerator_name", "accelerator_type", "as_current",
    "autocast_types", "default_generator", "generators_in_use", "is_accelerator", "is_started", "place_of",
    "reach_each_other",
]  # fmt: skip


_NOTHING = nullcontext()


def accelerator_type() -> str | None:
    """The type of the accelerators that are here, such as "cuda" or "xpu"; None if there are none.

    An Apple GPU ("mps") counts as none: a machine has one of it, with one queue, and torch makes no streams for it.
    """
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return here.type if here is not None and here.type != "mps" else None


def accelerator_count() -> int:
    """How many accelerators are here."""
    return torch.accelerator.device_count() if accelerator_type() is not None else 0


def place_of(number: int) -> torch.device:
    """The accelerator of that number, counted around; the CPU where there is none."""
    kind = accelerator_type()
    return torch.device(kind, number % accelerator_count()) if kind is not None else torch.device("cpu")


def is_accelerator(device: torch.device) -> bool:
    """Whether ops on a device are queued on streams: on all but the CPU, and "meta", which has no memory."""
    return device.type not in ("cpu", "meta")


def accelerator_name(device: torch.device) -> str:
    """The name that its driver gives an accelerator, or its type where the driver gives none."""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device.index or 0)) if named is not None else device.type


def is_started() -> bool:
    """Whether this process has used an accelerator: asking for its state would start the driver otherwise."""
    kind = accelerator_type()
    if kind is None:
        return False
    started = getattr(torch.get_device_module(kind), "is_initialized", None)
    return bool(started()) if started is not None else True


@dataclass(frozen=True)
class DeviceGenerator:
    """The default generator of an accelerator whose module in torch gives and takes its state only."""

    device: torch.device

    def get_state(self) -> Tensor:
        """A copy of the state."""
        return cast("Tensor", torch.get_device_module(self.device).get_rng_state(self.device))

    def set_state(self, state: Tensor) -> None:
        """Go on from a state."""
        torch.get_device_module(self.device).set_rng_state(state, self.device)

    def manual_seed(self, seed: int) -> None:
        """Begin with a seed."""
        self.set_state(torch.Generator(self.device).manual_seed(seed).get_state())


def default_generator(device: torch.device) -> torch.Generator | DeviceGenerator:
    """The generator that ops on a device draw from where they are given none."""
    if device.type == "cpu":
        return torch.default_generator
    known: Sequence[torch.Generator] | None = getattr(torch.get_device_module(device), "default_generators", None)
    return known[device.index or 0] if known is not None else DeviceGenerator(device)


def generators_in_use() -> list[torch.Generator | DeviceGenerator]:
    """The default generators of the CPU and of the accelerators, if this process has used any."""
    places = [place_of(number) for number in range(accelerator_count())] if is_started() else []
    return [torch.default_generator, *map(default_generator, places)]


def autocast_types() -> tuple[str, ...]:
    """The types of devices that autocast may be set for."""
    # "cuda" also where there is none: programs written for GPUs set it, and torch keeps it.
    return tuple(dict.fromkeys(("cpu", "cuda", accelerator_type() or "cpu")))


def reach_each_other(one: torch.device, other: torch.device) -> bool:
    """Whether a copy between two accelerators is sure to go directly, or torch finds the way for its type."""
    if one.type != "cuda":
        return True
    return bool(torch.cuda.can_device_access_peer(one.index or 0, other.index or 0))


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """An accelerator as the current device: ops of some types are queued on a stream of that, wherever tensors are."""
    return torch.accelerator.device_index(device.index) if is_accelerator(device) else _NOTHING


class StreamContext:
    """A stream, and its device, as the current ones.

    `with stream:` of torch may not be entered twice at once, by threads or one in another.
    """

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        accelerator = torch.accelerator
        self._device = accelerator.current_device_index()
        self._before = accelerator.current_stream(self._stream.device)
        accelerator.set_stream(self._stream)  # and its device

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.accelerator.set_stream(self._before)
        torch.accelerator.set_device_index(self._device)
