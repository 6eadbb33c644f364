"""Accelerate's treatment of a model that is compiled: its autocast, and no wrapper around it.

    model = adopt(accelerator, parplan.compile(model))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Without mixed precision `accelerator.prepare` leaves a compiled model as it is by itself (runtime/module/wrapper.py).
"""

from __future__ import annotations

from typing import Any

from parplan.errors import RuntimeFailure
from parplan.integrations import library
from parplan.runtime.module.compiled import Compiled

library("accelerate", "accelerate")

__all__ = ["adopt"]


def adopt(accelerator: Any, model: Compiled) -> Compiled:
    """The model, under the accelerator's autocast; `accelerator.prepare` leaves it as it is from then on.

    Raises:
        RuntimeFailure: the accelerator has a plugin that splits models itself, fp8, or torch.compile; or the model was
            compiled before the accelerator joined several processes.
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
    return model
