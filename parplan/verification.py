"""Runs a plan on logical CPU devices in float64 and compares it with the plain model, tensor by tensor.

The plain model is the oracle: same weights, same inputs, no graph, no plan. Dropout is off on both
sides and other random draws are constants, because no two ways of splitting a batch draw the same random numbers.
Where the model itself casts to a shorter type, sums of another order differ by its rounding, and no plan can help it.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parplan.compat import pytree
from parplan.errors import ModelError, PlannedMemoryWarning
from parplan.graph.axes.experts import GroupedInDouble
from parplan.graph.capture.capture import batch_of
from parplan.graph.kinds import op_name
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.user_line import failing_module, user_line
from parplan.plan import Plan
from parplan.runtime.calls import ModelCall
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.self_check.comparison import compare_group, largest_of, projected, projection_weights
from parplan.runtime.self_check.constant_draws import ConstantDraws
from parplan.runtime.self_check.double_copy import double

__all__ = ["TOLERANCE", "Verification", "VerificationRow", "samples_for", "some_samples", "verify_plan"]

TOLERANCE = 1e-9
STATISTICS = 16
"""Values per channel that the statistics of a batch norm are taken of at least, where there are so many samples."""

# A tensor far smaller than its group's largest one is rounding noise (the gradient of a bias in front
# of a batch norm is zero but for rounding), so it is measured against this share of the largest.
_FLOOR = 1e-4
# The same where parts in shorter types are compared, and the most that is ever allowed there: a missing term of a sum,
# or one that counts twice, is more of it.
_SHORT_FLOOR = 1e-2
_MOST_ALLOWED = {torch.float32: 1e-3, torch.float16: 0.016, torch.bfloat16: 0.125}

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class VerificationRow:
    """Largest relative difference in one group of tensors, the tensor that has it, and what is allowed there."""

    group: str
    count: int
    max_relative_difference: float
    worst: str
    tolerance: float = TOLERANCE

    @property
    def passed(self) -> bool:
        """Whether it is within the tolerance (a NaN is not)."""
        return self.max_relative_difference <= self.tolerance


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of `verify` with `batch` samples: passed when no relative difference exceeds its group's tolerance.

    `notes` tell of a plan that was made for another model's name or batch, and of draws that were not fixed;
    `casts` are the types shorter than float64 that the model computes in all the same, the shortest first.
    """

    plan: Plan
    batch: int
    rows: tuple[VerificationRow, ...]
    notes: tuple[str, ...] = ()
    casts: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every group is within its tolerance."""
        return all(row.passed for row in self.rows)

    def __str__(self) -> str:
        """One line: the verdict, and the largest relative difference of each group of tensors."""
        found = (f"{row.group} {row.max_relative_difference:.1e} (allowed {row.tolerance:.0e})" for row in self.rows)
        verdict = "PASSED" if self.passed else "FAILED"
        return f"{self.plan.model}, {self.batch} samples, {self.plan.devices} devices: {verdict}; {', '.join(found)}"

    __repr__ = __str__


def verify_plan(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    planner: Callable[[LayerGraph], Plan],
    *,
    devices: int,
    seed: int = 0,
    example: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    micro_batches: int = 1,
) -> Verification:
    """Run `model` plainly and under the plan of `planner`, on `devices` logical CPU devices in float64.

    Inputs that hold one repeated sample (zeros, say) are replaced by random ones of the same shape,
    so that a wrong order of samples shows. The user's model is copied, not changed.

    Args:
        example: the call to capture with, if another: what a capture has of its number of samples shows with fewer.
        micro_batches: of the plan: of several, the model's own loss is compared, or one of all its results that each
            takes by itself, and no gradients of inputs are.
    """
    own = tuple(pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs)) if micro_batches > 1 else (args, kwargs))
    args, kwargs = own
    captured_with = _doubled(example or (args, dict(kwargs or {})), seed)
    args, kwargs = _doubled(args, seed), _doubled(dict(kwargs or {}), seed + 1)
    # Copies in double precision (complex numbers too), in training mode, that drop nothing in their modules.
    plain, compiled_model = (copy.deepcopy(model).cpu()._apply(double).train() for _ in range(2))
    for module in (*plain.modules(), *compiled_model.modules()):
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):  # those that drop inside of one function
            module.dropout = 0.0
    samples = batch_of(pytree.tree_leaves((args, kwargs))) or 0
    seeded = ConstantDraws()
    try:
        with _NoDropout(), seeded, GroupedInDouble():
            reference = _run(plain, plain, args, kwargs, seed, micro_batches)
    except Exception as error:
        line, layer = user_line(error), failing_module(error, plain)
        raise ModelError(
            f"the plain model fails on {samples} samples in float64, so there is nothing to compare with\n"
            f"  {f'{layer}: ' if layer else ''}{type(error).__name__}: {error}" + (f"\n  at {line}" if line else "")
        ) from error
    compiled = Compiled(compiled_model, planner, devices=["cpu"] * devices, dropout=False, check="off")
    with GroupedInDouble():
        compiled.prepare(*captured_with[0], **captured_with[1])  # no draw is replaced in what is captured
        compiled.prepare(*args, **kwargs)  # where the other capture does not serve
    with seeded, GroupedInDouble():
        found = _run(compiled, compiled_model, args, kwargs, seed, micro_batches)
    assert compiled.plan is not None
    assert compiled.graph is not None
    allowed, casts = _tolerances(compiled.graph, samples)
    rows = tuple(
        _compared(group, expected, found[group], allowed.get(group, TOLERANCE))
        for group, expected in reference.items()
        if expected
    )
    notes = tuple(
        f"{name} draws random numbers that cannot be fixed, so results may differ." for name in sorted(seeded.unknown)
    )
    return Verification(compiled.plan, samples, rows, notes, casts)


def _tolerances(graph: LayerGraph, samples: int) -> tuple[dict[str, float], tuple[str, ...]]:
    """Tolerances of the groups that parts in shorter types of a model in float64 reach, and the names of these types.

    Every rounding is off by up to the type's epsilon, and n of them in another order add up like a random walk, to the
    square root of n: as many as there are elements in the largest value of that type in each layer with one, at so many
    samples.
    """
    largest: dict[torch.dtype, dict[str, int]] = defaultdict(dict)
    for name, layer in graph.layers.items():
        for spec in (graph.values[node.name] for node in layer.nodes if node.name in graph.values):
            if spec.dtype in _MOST_ALLOWED and (spec.requires_grad or layer.reached):
                elements = spec.elements * samples // graph.batch if graph.batch else spec.elements
                largest[spec.dtype][name] = max(elements, largest[spec.dtype].get(name, 0))
    allowed: dict[str, float] = {}
    for dtype, sizes in largest.items():
        tolerance = min(_MOST_ALLOWED[dtype], torch.finfo(dtype).eps * math.sqrt(sum(sizes.values())))
        reached = set(sizes).union(*(nx.descendants(graph.digraph, name) for name in sizes))
        groups = {"gradients", "input gradients"}
        if any(graph.producer.get(str(value)) in reached for value in graph.user_outputs):
            groups |= {"outputs", "loss"}
        if any(graph.producer.get(value) in reached for value in graph.buffer_updates.values()):
            groups.add("buffers")
        allowed |= {group: max(tolerance, allowed.get(group, 0.0)) for group in groups}
    ordered = sorted(largest, key=lambda dtype: -torch.finfo(dtype).eps)
    return allowed, tuple(str(dtype).removeprefix("torch.") for dtype in ordered)


def samples_for(plan: Plan, graph: LayerGraph) -> int:
    """Samples to compare: two for every replica, as many as the plan's batch leaves over, and more where a batch norm
    would take its statistics of fewer than STATISTICS values, which magnifies rounding."""
    most = max((strategy.replicas for strategy in plan.layers.values()), default=1)
    norms = [node for layer in graph.layers.values() if layer.mixes_batch for node in layer.nodes]
    normed = [graph.values[node.all_input_nodes[0].name] for node in norms if op_name(node) == "batch_norm"]
    fewest = min((spec.elements // (spec.shape[1] * (graph.batch or 1)) for spec in normed), default=STATISTICS)
    each = max(2, -(-STATISTICS // (most * max(1, fewest)))) * most + plan.micro_batch % most
    return plan.micro_batches * each


def some_samples(call: Any, batch: int | None, wanted: slice) -> Any:
    """(args, kwargs) with the `wanted` ones of `batch` samples of every tensor that has so many."""

    def cut(leaf: Any) -> Any:
        sampled = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[wanted].detach().requires_grad_(leaf.requires_grad) if sampled else leaf

    return pytree.tree_map(cut, call)


class _NoDropout(TorchFunctionMode):
    """Dropout called as a function returns its input; attention drops nothing."""

    _NAMES = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") in self._NAMES:
            return args[0] if args else kwargs["input"]
        if kwargs.get("dropout_p"):
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _doubled(tree: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def doubled(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        wanted = double(leaf.detach().cpu())
        if not (wanted.is_floating_point() or wanted.is_complex()):
            return wanted
        flat = leaf.numel() > 1 and bool((leaf == leaf.flatten()[0]).all())
        values = torch.randn(leaf.shape, generator=generator, dtype=wanted.dtype) if flat else wanted
        return values.clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(doubled, tree)


def _run(
    call: nn.Module, owner: nn.Module, args: Any, kwargs: Any, seed: int, micro_batches: int = 1
) -> dict[str, dict[str, Tensor]]:
    """Tensors of one forward and backward, by group and name."""
    # Tensors of their own: a forward may put hooks on them.
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, kwargs)
    )
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlannedMemoryWarning)
        leaves = [leaf for leaf in pytree.tree_leaves(call(*args, **kwargs)) if isinstance(leaf, Tensor)]
    weights, losses = projection_weights(leaves, seed), [leaf for leaf in leaves if leaf.dim() == 0]
    if micro_batches > 1 and any(leaf.requires_grad for leaf in losses):
        loss = projected(losses, projection_weights(losses, seed))
    else:
        loss = projected(leaves, weights)
    if micro_batches > 1 and loss.requires_grad and isinstance(call, Compiled) and not losses:
        loss = _in_micro_batches(call, args, kwargs, weights)
    elif loss.requires_grad:
        loss.backward()
    return {
        "outputs": {f"output {index}": leaf.detach() for index, leaf in enumerate(leaves)},
        "loss": {"loss": loss.detach()},
        "gradients": {name: _gradient(parameter) for name, parameter in owner.named_parameters()},
        "input gradients": {f"input {index}": _gradient(leaf) for index, leaf in enumerate(inputs)},
        "buffers": {name: buffer.detach().clone() for name, buffer in owner.named_buffers()},
    }


def _in_micro_batches(compiled: Compiled, args: Any, kwargs: Any, weights: Sequence[Tensor]) -> Tensor:
    """The weighed sum of all results of a step in micro-batches, each of which goes back by its own part of it."""
    samples = batch_of(pytree.tree_leaves((args, kwargs))) or 1

    def loss(results: Any, part: Sequence[Tensor]) -> Tensor:
        """Its mean over the samples of a micro-batch, which is what a step adds up, times all samples."""
        leaves = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
        *own, one_each = part
        return projected(leaves, own) * (samples / len(one_each))

    optimizer = torch.optim.SGD(compiled.module.parameters(), lr=0.0)
    found = compiled._train_in_parts(ModelCall.of(args, kwargs, 0), [*weights, torch.ones(samples)], loss, optimizer)
    assert found is not None  # the plan has several
    return found


def _gradient(tensor: Tensor) -> Tensor:
    return tensor.grad.detach().clone() if tensor.grad is not None else torch.zeros_like(tensor)


def _compared(
    group: str, expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: float = TOLERANCE
) -> VerificationRow:
    """The largest difference in a group; NaN where the plain model gives one, as there is nothing to compare with."""
    floor = _FLOOR if tolerance == TOLERANCE else _SHORT_FLOOR
    compared = compare_group(group, expected, found, floor * largest_of(expected))
    nothing = next((name for name, tensor in expected.items() if bool(tensor.isnan().any())), None)
    difference, worst = (compared.difference, compared.worst) if nothing is None else (math.nan, nothing)
    return VerificationRow(group, len(expected), difference, worst, tolerance)
