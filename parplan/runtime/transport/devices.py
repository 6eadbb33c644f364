"""The logical devices: where each lives, and the transport that moves tensors between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from parplan.accelerators import accelerator_count, accelerator_type, place_of
from parplan.errors import RuntimeFailure
from parplan.runtime.transport.base import Transport
from parplan.runtime.transport.distributed import DistributedTransport
from parplan.runtime.transport.local import LocalTransport

__all__ = ["Device", "existing", "logical", "memories", "named", "transport_for"]

Device = torch.device | str


def transport_for(devices: Sequence[Device] | None, group: dist.ProcessGroup | None) -> Transport:
    """The transport for these devices; without any, for the process group's ranks, else for what this machine has."""
    if devices is None and dist.is_available() and dist.is_initialized():
        return DistributedTransport(_own_device(group), group)
    if devices is None:
        devices = [place_of(number) for number in range(max(1, accelerator_count()))]
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise RuntimeFailure(f"devices is {devices!r}; give a list with a place for each, such as ['cuda:0', 'cuda:1']")
    if not devices:
        raise RuntimeFailure("devices is empty; name at least one, such as devices=['cpu']")
    return LocalTransport([existing(device) for device in devices])


def _own_device(group: dist.ProcessGroup | None) -> torch.device:
    """This process's device: its current accelerator where the group talks between those, else the CPU."""
    kind = accelerator_type()
    if kind is None:
        return torch.device("cpu")
    backend = dist.get_default_backend_for_device(kind)
    # gloo is asked to carry every type of tensor, by way of the host: with it, the processes' devices are CPUs.
    if backend == "gloo" or f"{kind}:{backend}" not in dist.get_backend_config(group).split(","):
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def existing(name: Device) -> torch.device:
    """A device by name.

    Raises:
        RuntimeFailure: no name of a device, or an accelerator that this machine does not have.
    """
    device = named(name)
    if device.type == "cpu":
        return device
    count = accelerator_count() if device.type == accelerator_type() else 0
    if (device.index or 0) >= count:
        here = f"{count} {device.type} device{'s' * (count != 1)}" if count else f"no {device.type} device"
        raise RuntimeFailure(f"{name}: this machine has {here}; name others, or 'cpu'")
    return torch.device(device.type, device.index or 0)


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
