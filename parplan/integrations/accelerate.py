"""Accelerate's `prepare` for objects with compiled models among them, which run under its autocast and stay unwrapped.

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

Without mixed precision `accelerator.prepare` leaves a compiled model as it is by itself (runtime/module/wrapper.py).
"""

from __future__ import annotations

from typing import Any

from parplan.errors import RuntimeFailure
from parplan.integrations import library
from parplan.runtime.module.compiled import Compiled

library("accelerate", "accelerate")

__all__ = ["adopt", "prepare"]


def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
    """`accelerator.prepare(*objects, **options)`, with compiled models among the objects.

    Raises:
        RuntimeFailure: the accelerator has a plugin that splits models itself, fp8, or torch.compile.
    """
    for one in objects:
        if isinstance(one, Compiled):
            adopt(accelerator, one)
    return accelerator.prepare(*objects, **options)


def adopt(accelerator: Any, model: Compiled) -> None:
    """Give a compiled model the accelerator's autocast, and have it left as it is from then on.

    Raises:
        RuntimeFailure: the accelerator has a plugin that splits models itself, fp8, or torch.compile.
    """
    state = accelerator.state
    kind, backend = state.distributed_type.name, state.dynamo_plugin.backend.name
    sizes = getattr(accelerator, "parallelism_config", None)
    refused = {
        f"the plugin {kind}": kind != "NO" and not kind.startswith("MULTI_"),
        "its parallelism_config": sizes is not None and sizes.total_size > 1,
        'mixed_precision="fp8"': state.mixed_precision == "fp8",
        f"dynamo_backend={backend}": backend != "NO",
    }
    for setting, given in refused.items():
        if given:
            raise RuntimeFailure(
                f"accelerate is asked for {setting}, which does not go with a compiled model: the plan says how the "
                "model is split, and generates its code; take it out of the Accelerator and of `accelerate config`"
            )
    # What accelerate calls evaluation is all that it does to a training model but wrap it.
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    model._is_accelerate_prepared = True
