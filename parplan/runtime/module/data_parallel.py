"""`nn.parallel.data_parallel` in one call: replicate, scatter, apply and gather, on any devices.

The compiled model is kept beside the module and dies with it, so that calling this in a loop costs what calling a
compiled model costs. There is nothing to decide, so nothing is solved: every layer that keeps samples apart gets a
replica per device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parplan.accelerators import accelerator_count, accelerator_type
from parplan.errors import RuntimeFailure
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.transport.devices import named

__all__ = ["data_parallel", "replicate_all"]

Device = torch.device | str | int

_KEPT = "_parplan_data_parallel"


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """The result of `module(*inputs)`, each device having worked on its part of the samples.

    As with `nn.DataParallel`, batch norm takes the statistics of each replica's own samples (the first one's are
    recorded), and a result that is one number becomes a vector with one entry per replica. Gradients are summed on the
    module's own parameters.

    Args:
        inputs: a tensor, a tuple of positional arguments, or None; tensors are cut along `dim`, all else is shared.
        device_ids: numbers of accelerators, or any devices by name, also the same one several times; None: all
            accelerators. Empty: the module is simply called.
        output_device: where results are gathered; default: the first of `device_ids`.
        dim: the dimension that samples lie along.
        module_kwargs: keyword arguments, treated as `inputs` are.

    Raises:
        ParplanError: a device that is not here, or a module that cannot be captured.
    """
    if not isinstance(module, nn.Module):
        raise RuntimeFailure(f"{module!r} is no torch.nn.Module, which is what can be run on several devices")
    whole = inputs if isinstance(inputs, tuple) else (inputs,)
    args, kwargs = () if inputs is None else whole, dict(module_kwargs or {})
    places = _places(range(accelerator_count()) if device_ids is None else device_ids)
    if not places:
        return module(*args, **kwargs)
    output = _places([output_device])[0] if output_device is not None else places[0]
    known: _CompiledForms = module.__dict__.setdefault(_KEPT, _CompiledForms())
    form = places, output, dim
    if form not in known.by_devices:
        known.by_devices[form] = Compiled(
            module,
            lambda graph: replicate_all(graph, len(places)),
            devices=places,
            output_device=output,
            dim=dim,
            batch_norm="local",
            scalars="per_replica",
        )
    compiled = known.by_devices[form]
    # The module's own mode counts: it may have been set since.
    compiled.training = module.training
    return compiled(*args, **kwargs)


def replicate_all(graph: LayerGraph, devices: int) -> Plan:
    """The data-parallel plan: a replica per device of every layer that can have one, the others on the first device."""
    everyone = Strategy(devices, 1, None, tuple(range(devices)))
    chosen = {name: everyone if layer.batch is not None else Strategy() for name, layer in graph.layers.items()}
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, devices, chosen)


class _CompiledForms:
    """A module's compiled forms; a copy of the module, or a saved one, begins without any.

    Attributes:
        by_devices: by the devices that the module runs on, that of the output, and the dimension that it is cut along.
    """

    def __init__(self) -> None:
        self.by_devices: dict[tuple[tuple[torch.device, ...], torch.device, int], Compiled] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _CompiledForms:
        return _CompiledForms()

    def __reduce__(self) -> tuple[type[_CompiledForms], tuple[()]]:
        return _CompiledForms, ()


def _places(devices: Sequence[Device]) -> tuple[torch.device, ...]:
    found = []
    for device in devices:
        if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
            raise RuntimeFailure(f"{device!r} is no device; give the number of an accelerator, or a name such as 'cpu'")
        found.append(torch.device(accelerator_type() or "cuda", device) if isinstance(device, int) else named(device))
    return tuple(found)
