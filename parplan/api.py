"""analyze, compile and verify: the three things a user calls.

Heavy imports stay inside the functions, so that `import parplan` costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parplan.errors import ClusterError, ModelError, PlanError
from parplan.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parplan.cluster import Cluster
    from parplan.cost_models.costs import CostModel
    from parplan.cost_models.roofline import RooflineCosts
    from parplan.graph.layer_graph import LayerGraph
    from parplan.planner.decide import Progress, Request
    from parplan.planner.decision import Decision
    from parplan.runtime.compiled import Compiled
    from parplan.verification import Verification

__all__ = ["analyze", "compile", "verify"]

# Planned for when no GPU is here and none is named: the most common card of current clusters.
DEFAULT_GPU = "a100-80g-sxm"
# Every layer has a strategy for each divisor of each number of devices: a minute for 64, hours far beyond.
MOST_GPUS = 1024


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
        gpus: how many devices; default: the plan's, else the GPUs that are here, else 1.
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
    given = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    gpus = given.devices if gpus is None and given is not None else gpus
    cluster, notes = _cluster(gpus, gpu, link, memory_bytes, measure)
    if progress is not None:
        progress.phase("capture")
    graph = capture(model, _arguments(example_inputs), kwargs)
    graph = replace(graph, model=name) if name else graph
    capture_s = time.perf_counter() - started
    costs, more = _costs(graph, cluster, precision, optimizer, measure, progress)
    request = Request(
        precision=precision,
        optimizer=optimizer,
        rules=rules,
        plan=given,
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
    scalars: str = "whole",
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
        scalars: what a model that returns a number (its loss) gives: "whole" (the plain model's number) or
            "per_replica" (a vector with one entry per replica, as DataParallel; under torchrun each process its own
            number, as DistributedDataParallel).
        dim: the dimension of input tensors along which samples lie.

    Raises:
        ParplanError: the model cannot be captured, the plan is not for it or breaks a rule.
    """
    from parplan.planner.decide import Request
    from parplan.runtime.compiled import Compiled

    def planner(graph: LayerGraph) -> Plan:
        count = compiled.device_count
        if plan is not None:
            return _given(plan, graph, count)
        return _searched(graph, compiled.device, count, Request(precision, optimizer, rules, None, time_limit_s))

    compiled = Compiled(
        model,
        planner,
        devices=devices,
        output_device=output_device,
        dim=dim,
        batch_norm=batch_norm,
        scalars=scalars,
    )
    if example_inputs is not None or kwargs:
        compiled.prepare(*_arguments(example_inputs), **dict(kwargs or {}))
    return compiled


def _given(plan: Plan | str | Path, graph: LayerGraph, devices: int) -> Plan:
    """A user's plan, checked against model and devices."""
    from parplan.planner.verifier import check

    found = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    if found.devices != devices:
        raise PlanError(
            f"the plan is for {found.devices} devices, here are {devices}; plan again with --gpus {devices}"
        )
    check(found, graph)
    return found


def _searched(graph: LayerGraph, device: torch.device, count: int, request: Request) -> Plan:
    """The fastest plan for `count` devices like `device`."""
    from parplan.cost_models.here import this_cluster
    from parplan.planner.decide import decide

    cluster = this_cluster(count, device)
    costs, _ = _costs(graph, cluster, request.precision, request.optimizer, False, None)
    return decide(graph, cluster, costs, request).plan


def verify(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    plan: Plan | str | Path | None = None,
    devices: int | None = None,
    batch: int | None = None,
    seed: int = 0,
) -> Verification:
    """Run a plan on logical CPU devices in float64 and compare it with the plain model.

    Args:
        plan: the plan to verify, or its file; default: the one parplan would choose for `devices`.
        devices: how many logical devices; default: the plan's, else 2.
        batch: samples to run, of those in `example_inputs`; default: two for every replica, as the
            numbers a plan gives do not depend on the batch it was made for.

    Raises:
        ParplanError: the plan is not for this model, or breaks a rule.
    """
    from parplan.graph.capture import capture
    from parplan.verification import first_samples, verify_plan

    given = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    count = devices if devices is not None else (given.devices if given is not None else 2)
    args, kwargs = _arguments(example_inputs), dict(kwargs or {})
    graph = capture(model, args, kwargs)
    found = _given(given, graph, count) if given is not None else _for_cpu(graph, count)
    few = 2 * max((strategy.replicas for strategy in found.layers.values()), default=1) if batch is None else batch
    try:
        few_args, few_kwargs = first_samples((args, kwargs), graph.batch, few)
        return verify_plan(model, few_args, few_kwargs, lambda _: found, devices=count, seed=seed)
    except ModelError:
        if batch is not None:
            raise
        # Some models take one number of samples only.
        return verify_plan(model, args, kwargs, lambda _: found, devices=count, seed=seed)


def _for_cpu(graph: LayerGraph, count: int) -> Plan:
    import torch

    from parplan.planner.decide import Request

    return _searched(graph, torch.device("cpu"), count, Request())


def _arguments(example_inputs: Any) -> tuple[Any, ...]:
    if example_inputs is None:
        return ()
    return tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)


def _cluster(
    gpus: int | None, gpu: str | None, link: str | None, memory_bytes: int | None, measure: bool
) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster asked for, and what the reader must know about it."""
    import torch

    from parplan.cost_models.here import this_cluster
    from parplan.cost_models.presets import cluster_preset

    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = gpus if gpus is not None else max(here, 1)
    if count < 1:
        raise ClusterError(f"--gpus {count}: a plan needs at least 1 device")
    if count > MOST_GPUS:
        raise ClusterError(f"--gpus {count}: parplan plans for up to {MOST_GPUS} devices")
    if measure and gpu is not None:
        raise ClusterError(
            f"--measure times the devices of this machine, which cannot stand for a {gpu}; leave out --gpu"
        )
    notes: tuple[str, ...] = ()
    if measure or (gpu is None and here):
        cluster = this_cluster(count, calibrate=measure)
        if measure and not here:
            notes = (f"No GPU here: planned for {count} CPU processes of one thread each, measured on this machine.",)
    else:
        cluster = cluster_preset(gpu or DEFAULT_GPU, count, link)
        if gpu is None:
            notes = (f"No GPU here and no --gpu: planned for {count} x {DEFAULT_GPU}, a preset.",)
    if memory_bytes is not None:
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))
    return cluster, notes


# Longest that --measure takes; what is left is interpolated, and the report says so.
MEASURE_S = 120.0


def _costs(
    graph: LayerGraph, cluster: Cluster, precision: str, optimizer: str, measure: bool, progress: Progress | None
) -> tuple[CostModel, tuple[str, ...]]:
    """The cost model asked for, and what the reader must know about its figures."""
    from parplan.cost_models.roofline import RooflineCosts

    roofline = RooflineCosts(graph, cluster, precision=precision, optimizer=optimizer)
    return _measured(graph, cluster, roofline, progress) if measure else (roofline, ())


def _measured(
    graph: LayerGraph, cluster: Cluster, roofline: RooflineCosts, progress: Progress | None
) -> tuple[CostModel, tuple[str, ...]]:
    """Costs of every part a plan could use, timed on the device that is here."""
    import torch

    from parplan.cost_models.measure import MeasuredCosts, Request
    from parplan.planner.strategies import strategies

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    costs = MeasuredCosts(roofline, device)
    if progress is not None:
        progress.phase("measure")
    requests = [
        Request(layer, strategy)
        for layer in graph.layers.values()
        for strategy in strategies(layer, graph.batch or 1, cluster.count)
    ]
    outcome = costs.measure(requests, MEASURE_S, progress.advance if progress is not None else None)
    step = costs.measure_step()
    factor = costs.correct(step.forward_s + step.backward_s)
    notes = [f"Layer times are scaled by {factor:.2f}, so that on one device they add up to a measured step."]
    if outcome.left:
        notes.append(f"{outcome.left} parts were left after {MEASURE_S:.0f} s of measuring and are interpolated.")
    notes += [f"Not measured: {why}" for why in outcome.failed[:3]]
    return costs, tuple(notes)
