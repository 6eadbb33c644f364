"""analyze, compile and verify: the three things a user calls.

Heavy imports stay inside the functions, so that `import parplan` costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parplan.errors import ClusterError, ParplanError, PlanError
from parplan.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parplan.cluster import Cluster
    from parplan.cost_models.costs import CostModel
    from parplan.graph.layer_graph import LayerGraph
    from parplan.planner.decide import Progress
    from parplan.planner.decision import Decision
    from parplan.runtime.compiled import Compiled
    from parplan.verification import Verification

__all__ = ["analyze", "compile", "verify"]

# Planned for when no GPU is here and none is named: the most common card of current clusters.
DEFAULT_GPU = "a100-80g-sxm"


def analyze(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    gpus: int | None = None,
    gpu: str | None = None,
    link: str | None = None,
    rules: str = "default",
    precision: str = "fp32",
    optimizer: str = "adam",
    memory_bytes: int | None = None,
    measure: bool = False,
    time_limit_s: float = 60.0,
    plan: Plan | str | Path | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Decision:
    """Plan `model` for some GPUs (none needs to be here) and say why.

    Args:
        example_inputs: a tensor, or a tuple of positional arguments; its batch is the whole step's.
        gpus: how many devices; default: the GPUs that are here, else 1.
        gpu: preset such as "v100-sxm2"; default: the GPUs that are here, else DEFAULT_GPU.
        link: link preset between them; default: the GPU's own.
        memory_bytes: memory a plan may use on each device, instead of the preset's.
        measure: time layers on the device that is here instead of estimating.
        plan: review this plan (or file) instead of searching for one.
        name: what to call the model in the report.

    Raises:
        ParplanError: the model cannot be captured, no plan fits, an unknown preset.
    """
    from parplan.graph.capture import capture
    from parplan.planner.decide import Request, decide

    started = time.perf_counter()
    cluster, notes = _cluster(gpus, gpu, link, memory_bytes)
    if progress is not None:
        progress.phase("capture")
    graph = capture(model, _arguments(example_inputs), kwargs)
    capture_s = time.perf_counter() - started
    costs, more = _costs(graph, cluster, precision, optimizer, measure, progress)
    request = Request(
        precision=precision,
        optimizer=optimizer,
        rules=rules,
        plan=Plan.load(plan) if isinstance(plan, (str, Path)) else plan,
        time_limit_s=time_limit_s,
        notes=(*notes, *more),
        capture_s=capture_s,
        started=started,
    )
    return decide(graph, cluster, costs, request, progress)


def compile(  # the name users know from torch.compile
    model: nn.Module,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    devices: Sequence[torch.device | str] | None = None,
    output_device: torch.device | str | None = None,
    plan: Plan | str | Path | None = None,
    batch_norm: str = "global",
    dim: int = 0,
    rules: str = "default",
    precision: str = "fp32",
    optimizer: str = "adam",
    time_limit_s: float = 60.0,
) -> Compiled:
    """The model, ready to be called like the model, running its plan.

    Args:
        example_inputs: a tensor or tuple of positional arguments to plan for now; without them the
            plan is made at the first call.
        devices: where logical device i lives; one physical device may appear several times. Default:
            under torchrun one device per process, else the GPUs that are here, else the CPU.
        output_device: where results are gathered (one process); default: where the inputs were.
        plan: run this plan (or file) instead of searching for one; it is verified first.
        batch_norm: "global" (statistics over the whole batch: the plain model's numbers) or "local"
            (per replica, as DataParallel and DistributedDataParallel do).
        dim: the dimension of input tensors along which samples lie.

    Raises:
        ParplanError: the model cannot be captured, the plan is not for it or breaks a rule.
    """
    from parplan.runtime.compiled import Compiled

    def planner(graph: LayerGraph) -> Plan:
        count = compiled.device_count
        if plan is not None:
            return _given(plan, graph, count)
        return _agreed(lambda: _searched(graph, compiled.devices[0], count, rules, precision, optimizer, time_limit_s))

    compiled = Compiled(
        model, planner, devices=devices, output_device=output_device, dim=dim, batch_norm=batch_norm
    )
    if example_inputs is not None or kwargs:
        compiled.prepare(*_arguments(example_inputs), **dict(kwargs or {}))
    return compiled


def _given(plan: Plan | str | Path, graph: LayerGraph, devices: int) -> Plan:
    """A user's plan, checked against model and devices."""
    from parplan.planner.verifier import check

    found = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    if found.devices != devices:
        raise PlanError(f"the plan is for {found.devices} devices, here are {devices}; plan again with --gpus {devices}")
    check(found, graph)
    return found


def _searched(
    graph: LayerGraph, device: torch.device, count: int, rules: str, precision: str, optimizer: str, time_limit_s: float
) -> Plan:
    from parplan.cost_models.here import this_cluster
    from parplan.planner.decide import Request, decide

    cluster = this_cluster(count, device)
    costs, _ = _costs(graph, cluster, precision, optimizer, False, None)
    return decide(graph, cluster, costs, Request(precision, optimizer, rules, None, time_limit_s)).plan


def _agreed(search: Any) -> Plan:
    """One plan for all processes: the first one searches, the others take its answer (or its error)."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return search()  # type: ignore[no-any-return]
    answer: list[str] = ["", ""]
    failure: ParplanError | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = search().to_json()
        except ParplanError as error:
            failure, answer[1] = error, str(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1]:
        raise failure or ParplanError(answer[1])
    return Plan.from_json(answer[0], "the first process's plan")


def verify(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    plan: Plan | str | Path | None = None,
    devices: int | None = None,
    seed: int = 0,
) -> Verification:
    """Run a plan on logical CPU devices in float64 and compare it with the plain model.

    Args:
        plan: the plan to verify, or its file; default: the one parplan would choose for `devices`.
        devices: how many logical devices; default: the plan's, else 2.

    Raises:
        ParplanError: the plan is not for this model, or breaks a rule.
    """
    from parplan.verification import verify_plan

    given = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    count = devices if devices is not None else (given.devices if given is not None else 2)

    def planner(graph: LayerGraph) -> Plan:
        import torch

        if given is not None:
            return _given(given, graph, count)
        return _searched(graph, torch.device("cpu"), count, "default", "fp32", "adam", 60.0)

    return verify_plan(model, _arguments(example_inputs), kwargs, planner, devices=count, seed=seed)


def _arguments(example_inputs: Any) -> tuple[Any, ...]:
    if example_inputs is None:
        return ()
    return tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)


def _cluster(gpus: int | None, gpu: str | None, link: str | None, memory_bytes: int | None) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster asked for, and what the reader must know about it."""
    from dataclasses import replace

    import torch

    from parplan.cost_models.presets import cluster_preset
    from parplan.cost_models.here import this_cluster

    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = gpus if gpus is not None else max(here, 1)
    if count < 1:
        raise ClusterError(f"--gpus {count}: a plan needs at least 1 device")
    notes: tuple[str, ...] = ()
    if gpu is None and here:
        cluster = this_cluster(count)
    else:
        cluster = cluster_preset(gpu or DEFAULT_GPU, count, link)
        if gpu is None:
            notes = (f"No GPU here and no --gpu: planned for {count} x {DEFAULT_GPU}, a preset.",)
    if memory_bytes is not None:
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))
    return cluster, notes


def _costs(
    graph: LayerGraph, cluster: Cluster, precision: str, optimizer: str, measure: bool, progress: Progress | None
) -> tuple[CostModel, tuple[str, ...]]:
    from parplan.cost_models.roofline import RooflineCosts

    return RooflineCosts(graph, cluster, precision=precision, optimizer=optimizer), ()
