"""Scatter, gather, broadcast, reduce and parallel apply, as functions that work with autograd anywhere.

These are what one builds a small parallel program from by hand, on CUDA devices or on the CPU, where
`torch.nn.parallel` only takes CUDA devices. They are made of differentiable copies, so autograd gives their transposes:
the backward of scatter gathers, that of broadcast reduces. A compiled model does not use them: it runs a program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parplan.accelerators import as_current
from parplan.compat import pytree
from parplan.errors import RuntimeFailure
from parplan.runtime.dispatch import CallersModes
from parplan.runtime.transport.streams import sent

__all__ = ["broadcast", "gather", "parallel_apply", "reduce", "scatter"]

Devices = Sequence[torch.device | str]


def scatter(values: Any, devices: Devices, dim: int = 0) -> list[Any]:
    """One copy of a nested structure per device, with tensors cut along `dim` and all else shared.

    A tensor (N, ...) becomes chunks of nearly N / len(devices) rows, larger ones first; with fewer rows than devices
    the last chunks are empty. A tensor that has no dimension `dim` (a scalar) goes whole to every device.

    Raises:
        RuntimeFailure: no devices.
    """
    places = _places(devices)
    leaves, spec = pytree.tree_flatten(values)
    columns: list[Sequence[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            columns.append([leaf] * len(places))
        elif not -leaf.dim() <= dim < leaf.dim():
            columns.append([leaf.to(place) for place in places])
        else:
            chunks = leaf.tensor_split(len(places), dim)
            columns.append([sent(chunk, place) for chunk, place in zip(chunks, places, strict=True)])
    return (
        [pytree.tree_unflatten(row, spec) for row in zip(*columns, strict=True)] if columns else [values] * len(places)
    )


def gather(results: Sequence[Any], device: torch.device | str, dim: int = 0) -> Any:
    """One nested structure on `device` from one per replica: tensors are joined along `dim`.

    Chunks (n_i, ...) become (sum n_i, ...); scalars become a vector with one entry per replica, as with
    `nn.DataParallel`; what is no tensor is taken from the first replica.

    Raises:
        RuntimeFailure: nothing to gather, or the replicas' results are not built alike.
    """
    if not results:
        raise RuntimeFailure("gather: no results to join; pass one per replica")
    place = torch.device(device)

    def join(*column: Any) -> Any:
        if not isinstance(column[0], Tensor):
            return column[0]
        moved = [sent(tensor, place) for tensor in column]
        return torch.stack(moved) if moved[0].dim() == 0 else torch.cat(moved, dim)

    return _joined(join, results, "gather: replica {} returned {}, replica 0 {}; return the same structure")


def broadcast(values: Any, devices: Devices) -> list[Any]:
    """One whole copy of a nested structure per device; the gradients of the copies are summed.

    A device that already holds a tensor gets an alias of it, not a copy.

    Raises:
        RuntimeFailure: no devices.
    """

    def copy(place: torch.device, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor) if tensor.device == place else sent(tensor, place)

    return [pytree.tree_map_only(Tensor, partial(copy, place), values) for place in _places(devices)]


def reduce(values: Sequence[Any], device: torch.device | str) -> Any:
    """The elementwise sum on `device` of equally built nested structures; each term gets the sum's gradient.

    Terms are added in the order given, so that the result does not depend on timing.

    Raises:
        RuntimeFailure: nothing to sum, or the structures differ.
    """
    if not values:
        raise RuntimeFailure("reduce: no terms to sum; pass one per device")

    def add(*terms: Tensor) -> Tensor:
        with as_current(torch.device(device)):
            first, *others = (term.to(device) for term in terms)
            return sum(others, start=first)

    return _joined(add, values, "reduce: term {} is {}, term 0 {}; sum equal structures")


def _joined(join: Callable[..., Any], values: Sequence[Any], error: str) -> Any:
    """One nested structure of joined leaves; `error` takes an index and two structures that differ."""
    flat = [pytree.tree_flatten(value) for value in values]
    first = flat[0][1]
    for index, (_, spec) in enumerate(flat):
        if spec != first:
            raise RuntimeFailure(error.format(index, spec, first))
    return pytree.tree_unflatten([join(*column) for column in zip(*(own for own, _ in flat), strict=True)], first)


def parallel_apply(
    functions: Sequence[Callable[..., Any]],
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
) -> list[Any]:
    """Results of `functions[i](*args[i], **kwargs[i])`, called side by side, one thread each.

    Gradient mode and autocast are the caller's in every thread. The first error, by index, is raised as it is.

    Raises:
        RuntimeFailure: the three sequences are not equally long.
    """
    named = kwargs if kwargs is not None else [{}] * len(functions)
    if not len(functions) == len(args) == len(named):
        raise RuntimeFailure(
            f"parallel_apply: {len(functions)} functions, {len(args)} args, {len(named)} kwargs; pass one of each"
        )
    if len(functions) == 1:
        return [functions[0](*args[0], **named[0])]
    modes = CallersModes.current()

    def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = (leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        with modes.set(), as_current(next(given, torch.device("cpu"))):
            return function(*args, **kwargs)

    with ThreadPoolExecutor(max_workers=max(1, len(functions))) as pool:
        jobs = [pool.submit(call, f, a, k) for f, a, k in zip(functions, args, named, strict=True)]
        return [job.result() for job in jobs]


def _places(devices: Devices) -> list[torch.device]:
    if not devices:
        raise RuntimeFailure("no devices given; name at least one, for instance ['cpu']")
    return [torch.device(device) for device in devices]
