"""The functions a user calls: analyze, compile and verify.

Heavy imports stay inside the functions, so that `import parplan` costs nothing. Signatures spell out the keywords of
`PlanOptions`, so that editors show and check them; `PlanOptions.of(locals())` gathers them by name.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parplan.cluster import MOST_DEVICES, Cluster
from parplan.errors import ClusterError, ModelError, ParplanError, PlanError
from parplan.pins import PinsLike
from parplan.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parplan.cost_models.devices.requested import FoundCluster
    from parplan.graph.layer_graph import LayerGraph
    from parplan.planner.request import Listener, PlanOptions
    from parplan.report.analysis import Analysis
    from parplan.runtime.dispatch import ThreadsOption
    from parplan.runtime.module.compiled import Compiled
    from parplan.runtime.programs.start_values import Weights
    from parplan.verification import Verification

__all__ = ["analyze", "analyze_profile", "compile", "verify"]

SILENT_S = 3.0
"""Seconds that a first call may take without a line on the terminal; most plans of small models are made by then."""


def analyze(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    targets: Any = None,
    batch: str | None = None,
    gpus: int | str | None = None,
    gpu: str | None = None,
    link: str | None = None,
    cluster: Cluster | str | Path | None = None,
    rules: str = "default",
    scheme: str = "auto",
    micro_batches: int | None = None,
    stages: int | None = None,
    schedule: str | None = None,
    precision: str = "fp32",
    optimizer: str = "adam",
    memory_bytes: int | None = None,
    measure: bool = False,
    as_profiled: bool = False,
    time_limit_s: float = 60.0,
    tolerance: float = 0.03,
    plan: Plan | str | Path | None = None,
    pins: PinsLike | None = None,
    name: str | None = None,
    notes: Sequence[str] = (),
    progress: Listener | None = None,
) -> Analysis:
    """Plan `model` for some GPUs (none needs to be here) and say why; the decision can be written as a page or drawn.

    Args:
        example_inputs: a tensor, or a tuple of positional arguments; its batch is the whole step's.
        loss, targets: a function of the model's results and of targets such as these, planned with the model.
        batch: "auto" takes the smallest batch within 2 % of the most samples per second that fits in memory, and lists
            those tried; default: the example inputs'.
        gpus: how many devices, or hosts x devices of each, "2x8"; default: the plan's, else the GPUs here, else 1.
        gpu: preset such as "v100-sxm2"; default: the GPUs that are here, else the most common card.
        link: link preset between them; default: the GPU's own.
        cluster: the devices and links to plan for, or a file that describes them, instead of the three above.
        memory_bytes: memory a plan may use on each device, instead of the preset's.
        scheme: how samples get from many replicas to layers with fewer: "gather" (all at once), "broadcast" (one
            replica's at a time), "interleave" (a share of each at a time), or "auto", as is fastest.
        micro_batches: equal parts of the batch whose gradients add up; default: one, or as many as memory asks for.
        stages: groups of devices that work as pipeline stages; default: where memory is short, what is fastest.
        schedule: the order in which stages take micro-batches, "gpipe" or "1f1b"; default: as is fastest.
        measure: time layers on the device that is here instead of estimating.
        as_profiled: leave out how fast the device is now, so that measured costs are the same in every run.
        tolerance: share of the fastest step to give up for a simpler plan, as one written by hand; 0: the fastest.
        plan: review this plan (or file) instead of searching for one.
        pins: what is decided by hand (docs/pins.md): {"fc6": "shards:4"}, ["fc6=shards:4"], or a TOML file.
        name, notes: what to call the model in the report, and sentences beside the report's own.

    Raises:
        ParplanError: the model cannot be captured, no plan fits, an unknown preset, a cluster file with mistakes.
    """
    from parplan.graph.capture.capture import capture
    from parplan.graph.export.autocast import autocast_as
    from parplan.planner.request import PlanOptions
    from parplan.pricing import Pricing
    from parplan.report.analysis import Analysis

    started, options = time.perf_counter(), PlanOptions.of(locals())
    if batch not in (None, "auto"):
        raise ParplanError(f'batch is {batch!r}; it is "auto", or left out: then the example inputs have the batch')
    if batch and measure:
        raise ParplanError(
            "--batch auto compares many batches, and --measure would time them all; choose the batch first"
        )
    model, kwargs = _with_loss(model, kwargs, loss, targets)
    found = _cluster(options)
    if progress is not None:
        progress.phase("capture")
    with autocast_as(options.precision, model):
        graph = capture(model, _arguments(example_inputs), kwargs)
    graph, captured_s = replace(graph, model=name or graph.model), time.perf_counter() - started
    request = options.request(notes=(*notes, *found.notes), capture_s=captured_s, started=started)
    pricing = Pricing(found.cluster, request, found.device, measure, progress)
    return Analysis.of(pricing.decided(graph) if batch is None else pricing.decided_at_best_batch(graph))


def analyze_profile(
    file: str | Path,
    *,
    gpus: int | str | None = None,
    gpu: str | None = None,
    link: str | None = None,
    cluster: Cluster | str | Path | None = None,
    rules: str = "default",
    scheme: str = "auto",
    micro_batches: int | None = None,
    stages: int | None = None,
    schedule: str | None = None,
    optimizer: str = "adam",
    memory_bytes: int | None = None,
    batch: int | None = None,
    time_limit_s: float = 60.0,
    tolerance: float = 0.03,
    plan: Plan | str | Path | None = None,
    pins: PinsLike | None = None,
    progress: Listener | None = None,
) -> Analysis:
    """Plan a model that only somebody's measurements are known of (docs/profile-graph.md) and say why.

    Args:
        file: the layer profile; its times stand for any device, so `gpu` and `link` give memory and links only.
        batch: samples in one step, over all devices; default: the profile's.

    The others are those of `analyze`.

    Raises:
        ParplanError: the file is no layer profile, no plan fits, an unknown preset.
    """
    from parplan.cost_models.layer_profile.costs import ProfileCosts
    from parplan.cost_models.layer_profile.graph import profile_graph, profile_notes
    from parplan.cost_models.layer_profile.text import load_layer_profile
    from parplan.lowering.micro_batches import equal_size
    from parplan.planner.decide import decide
    from parplan.planner.decision import PricedGraph
    from parplan.planner.request import PlanOptions
    from parplan.report.analysis import Analysis

    started, options = time.perf_counter(), PlanOptions.of(locals())
    profile = load_layer_profile(file)
    options = replace(options, precision=profile.precision or "precision unknown")
    found = _cluster(options)
    graph = profile_graph(profile, batch)
    request = options.request(
        notes=(*found.notes, *profile_notes(profile, str(file), graph.batch or 1, found.cluster)),
        capture_s=time.perf_counter() - started,
        started=started,
        times_from=str(file),
    )

    def micro_batched(count: int) -> PricedGraph:
        small = graph if count == 1 else profile_graph(profile, equal_size(graph, count))
        return PricedGraph(small, ProfileCosts(profile, small, found.cluster, optimizer, count))

    requested = request.asked_micro_batches
    own = micro_batched(requested or 1)
    free = micro_batched if requested is None else None
    return Analysis.of(decide(own.graph, found.cluster, own.costs, request, progress, free))


def compile(  # the name users know from torch.compile
    model: nn.Module,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    targets: Any = None,
    devices: Sequence[torch.device | str] | None = None,
    output_device: torch.device | str | None = None,
    plan: Plan | str | Path | None = None,
    pins: PinsLike | None = None,
    batch_norm: str = "global",
    scalars: str = "whole",
    inputs: str = "own",
    same_draws: bool = False,
    dim: int = 0,
    threads: ThreadsOption = False,
    check: str = "first",
    backend: str = "eager",
    initialise: Callable[[nn.Module], object] | None = None,
    weights: Weights | None = None,
    rules: str = "default",
    scheme: str = "auto",
    micro_batches: int | None = None,
    stages: int | None = None,
    schedule: str | None = None,
    precision: str = "fp32",
    optimizer: str = "adam",
    time_limit_s: float = 60.0,
    tolerance: float = 0.03,
) -> Compiled:
    """The model, ready to be called like the model, running its plan.

    Args:
        example_inputs: a tensor or tuple of positional arguments to plan for now; default: plan at the first call.
        loss: a function of results and targets, planned with the model: calls with `targets=...` return it.
        devices: where logical device i lives, some several times; default: one per process, the GPUs here, or the CPU.
        output_device, dim: where results go (one process; default: as inputs); the dimension that samples lie along.
        batch_norm: "global" statistics (of the whole batch, the plain model's numbers) or "local" (per replica, as DDP)
        scalars: returned numbers (a loss) are "whole", the plain model's, or "per_replica", as DP and DDP give them.
        inputs: "own" samples of each process; of a "group", shards of a replica (PlanSampler); or the "same", of none.
        same_draws: True: processes seeded alike drop alike, as under DistributedDataParallel; else apart.
        plan, pins, rules and all behind it: as in `analyze`.
        threads: True: each logical device of this process has a thread; a function is called first there (its number).
        check: "first", "always", "off": compared with the plain module; backend: "eager", "inductor" (docs/backends.md)
        initialise, weights: of tensors on the meta device: a function of a module; saved ones (docs/sharded-state.md).

    Raises:
        ParplanError: it cannot be captured, the plan is not for it; (at a call) SelfCheckError: it computes otherwise.
    """
    from parplan.planner.request import PlanOptions
    from parplan.pricing import Pricing
    from parplan.report.analysis import Analysis
    from parplan.report.progress import Progress
    from parplan.runtime.module.compiled import Compiled
    from parplan.runtime.programs.start_values import StartValues

    options = PlanOptions.of(locals())
    model, kwargs, given = *_with_loss(model, kwargs, loss, targets), options.given
    request, progress = replace(options, plan=None).request(price_pins=False), Progress(after_s=SILENT_S)

    def pricing() -> Pricing:
        return Pricing.for_devices(compiled.device_count, compiled.device, request, compiled.home)

    def planner(graph: LayerGraph) -> Plan:
        if given is not None:
            return _checked(given, graph, compiled.device_count, warn=True)
        report = compiled.report = Analysis.of(replace(pricing(), progress=progress).decided(graph))
        return report.plan

    compiled = Compiled(
        model, planner, devices=devices, output_device=output_device, dim=dim, batch_norm=batch_norm, scalars=scalars,
        inputs=inputs, same_draws=same_draws, start=(start := StartValues.of(model, initialise, weights)),
        threads=threads, check=check, backend=backend, alike={**options.by_hand, "start": start and start.failure},
    )  # fmt: skip
    compiled.predict_times = lambda graph, plan: pricing().predicted(graph, plan).expected
    compiled.while_planning(progress)
    if example_inputs is not None or kwargs:
        compiled.prepare(*_arguments(example_inputs), **dict(kwargs or {}))
    return compiled


def _checked(plan: Plan, graph: LayerGraph, devices: int, warn: bool = False) -> Plan:
    """A user's plan, checked against model and devices.

    Args:
        warn: say it where a step needs more memory than its plan allows for, or has replicas with unequal shares.
    """
    from parplan.planner.search_space.verifier import check, other_batch

    size = graph.batch or 0
    matters = warn and (size > plan.batch or any(size % strategy.replicas for strategy in plan.layers.values()))
    if matters and (text := other_batch(plan, graph)):
        warnings.warn(f"{text} Plan again with this batch, or bring {plan.batch}.", stacklevel=3)
    if plan.devices != devices:
        raise PlanError(f"the plan is for {plan.devices} devices, here are {devices}; plan again with --gpus {devices}")
    check(plan, graph)
    return plan


def verify(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    targets: Any = None,
    plan: Plan | str | Path | None = None,
    pins: PinsLike | None = None,
    devices: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    name: str | None = None,
) -> Verification:
    """Run a plan on logical CPU devices in float64 and compare it with the plain model.

    Args:
        loss, targets: as for `analyze`, where the plan was made with them.
        plan: the plan to verify, or its file; default: the one parplan would choose for `devices`.
        pins: what is decided by hand where the plan is to be chosen (docs/pins.md).
        devices: how many logical devices; default: the plan's, else what the pins need, else 2.
        batch: samples to run, of those in `example_inputs`; default: two for every replica, and as many more as the
            plan's batch leaves over, as the numbers a plan gives do not depend on the batch it was made for; more where
            a batch norm would take its statistics of few values, which magnifies rounding.
        name: what to call the model in a plan that is to be chosen.

    Raises:
        ParplanError: the plan is not for this model, or breaks a rule.
    """
    import torch

    from parplan.graph.capture.capture import capture
    from parplan.planner.request import PlanOptions
    from parplan.planner.search_space.verifier import mismatches
    from parplan.pricing import Pricing
    from parplan.verification import samples_for, some_samples, verify_plan

    options = PlanOptions.of(locals())
    model, kwargs = _with_loss(model, kwargs, loss, targets)
    count = devices if devices is not None else options.plan.devices if options.plan is not None else None
    if count is None:  # as many as the pins need; where none says which devices, at least 2
        pinned = options.pins
        needed = [max(1 + max(pin.devices or (0,)), (pin.replicas or 1) * (pin.shards or 1)) for pin in pinned]
        count = max([*needed, 1 if any(pin.devices for pin in pinned) else 2])
    if count > MOST_DEVICES:
        raise ClusterError(f"{count} devices: parplan plans for up to {MOST_DEVICES}")
    args, kwargs = _arguments(example_inputs), dict(kwargs or {})
    graph = capture(model, args, kwargs)
    graph = replace(graph, model=name or graph.model)
    if options.plan is not None:
        found = _checked(options.plan, graph, count)
    else:
        found = Pricing.for_devices(count, torch.device("cpu"), options.request(price_pins=False)).decided(graph).plan
    few = samples_for(found, graph) if batch is None else batch
    try:
        few_args, few_kwargs = some_samples((args, kwargs), graph.batch, slice(few))
        ran = verify_plan(
            model, few_args, few_kwargs, lambda _: found, devices=count, seed=seed, example=(args, kwargs),
            micro_batches=found.micro_batches,
        )  # fmt: skip
    except ModelError:
        if batch is not None:
            raise
        # Some models take one number of samples only.
        ran = verify_plan(
            model, args, kwargs, lambda _: found, devices=count, seed=seed, micro_batches=found.micro_batches
        )
    return replace(ran, notes=mismatches(found, graph))


def _with_loss(
    model: object, kwargs: Mapping[str, Any] | None, loss: Callable[[Any, Any], torch.Tensor] | None, targets: Any
) -> tuple[nn.Module, Mapping[str, Any] | None]:
    """The module to capture, and the keywords to capture it with.

    Raises:
        ModelError: `model` is no module, is wrapped, its mode cannot be set, or targets are given without a loss.
    """
    from torch import nn

    from parplan.graph.user_code.with_loss import with_loss

    if not isinstance(model, nn.Module):
        raise ModelError(f"{type(model).__name__} is no model; give a torch.nn.Module, such as MyNet()")
    _check_modules(model)
    if loss is None and targets is not None:
        raise ModelError("targets are given without a loss; give loss=, a function of results and targets")
    if loss is None:
        return model, kwargs
    return with_loss(model, loss), kwargs if targets is None else {**(kwargs or {}), "targets": targets}


def _check_modules(model: nn.Module) -> None:
    """Refuse wrappers that parplan replaces, and a method of the user's own in place of `train(mode)`.

    Captures and evaluation set the mode by that.

    Raises:
        ModelError: a module is wrapped for several devices, or its `train` takes no mode.
    """
    from torch import nn

    from parplan.compat import parallel_wrapper

    for path, module in model.named_modules():
        if wrapper := parallel_wrapper(module):
            raise ModelError(
                f"{path or 'the model'} is wrapped in {wrapper}, which parplan replaces; give the plain model"
            )
        if type(module).train is nn.Module.train:
            continue
        signature = inspect.signature(module.train)
        try:
            signature.bind(True)
        except TypeError:
            raise ModelError(
                f"{path or 'the model'} has a method {type(module).__name__}.train{signature} in place of "
                "nn.Module.train(mode), which sets training and evaluation; give it another name"
            ) from None


def _arguments(example_inputs: Any) -> tuple[Any, ...]:
    if example_inputs is None:
        return ()
    return tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)


def _cluster(options: PlanOptions) -> FoundCluster:
    """The cluster to plan for; where no option says how many devices, as many as the plan has."""
    from parplan.cost_models.devices.requested import ClusterRequest, find_cluster

    gpus = options.gpus
    if gpus is None and options.plan is not None and options.cluster is None:
        gpus = options.plan.devices
    return find_cluster(
        ClusterRequest(gpus, options.gpu, options.link, options.memory_bytes, options.cluster, options.measure)
    )
