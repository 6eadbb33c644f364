"""The logical devices: where each lives, and the transport that moves tensors between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from parplan.errors import RuntimeFailure
from parplan.runtime.transport.base import Transport
from parplan.runtime.transport.distributed import DistributedTransport
from parplan.runtime.transport.local import LocalTransport

__all__ = ["Device", "existing", "logical", "memories", "named", "transport_for"]

Device = torch.device | str


def transport_for(devices: Sequence[Device] | None, group: dist.ProcessGroup | None) -> Transport:
    """The transport for these devices; without any, for the process group's ranks, else for what this machine has."""
    if devices is None and dist.is_available() and dist.is_initialized():
        # The process's device: its current CUDA device where the group talks between those, else the CPU.
        cuda = torch.cuda.is_available() and dist.get_backend(group) == "nccl"
        own = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        return DistributedTransport(own, group)
    if devices is None:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise RuntimeFailure(f"devices is {devices!r}; give a list with a place for each, such as ['cuda:0', 'cuda:1']")
    if not devices:
        raise RuntimeFailure("devices is empty; name at least one, such as devices=['cpu']")
    return LocalTransport([existing(device) for device in devices])


def existing(name: Device) -> torch.device:
    """A device by name.

    Raises:
        RuntimeFailure: no name of a device, or a CUDA device that this machine does not have.
    """
    device = named(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            raise RuntimeFailure(f"{name}: this machine has {count} CUDA devices; name others, or 'cpu'")
        return torch.device("cuda", index)
    return device


def named(name: Device) -> torch.device:
    """The device that `name` names, whether it is here or not.

    Raises:
        RuntimeFailure: it names none.
    """
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise RuntimeFailure(f"{name!r} names no device; write 'cuda:0' or 'cpu'") from error


def logical(place: torch.device | None, transport: Transport) -> int:
    """The logical device that results are gathered on: one that lives where they are wanted, else the first."""
    return next((device for device in transport.owned if transport.physical(device) == place), transport.owned[0])


def memories(transport: Transport) -> tuple[int, ...]:
    """For each logical device the memory it works in: its process, or its physical device."""
    if transport.processes > 1:
        return tuple(range(transport.processes))
    places = [transport.physical(device) for device in transport.owned]
    return tuple(places.index(place) for place in places)
