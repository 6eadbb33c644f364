"""Run a custom autograd Function on tensors without values, to know its results and how it treats samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parplan.compat import FakeTensor, memory_of, pytree, unrecorded
from parplan.errors import CaptureError
from parplan.graph.user_code.function_axes import follow
from parplan.graph.user_code.functions import FunctionSite
from parplan.graph.user_code.module_hooks import Template

__all__ = ["probe"]


def probe(site: FunctionSite, tensors: Sequence[Tensor], model: nn.Module | None) -> None:
    """Fill in what is known of a Function only once it has run; `tensors` are its arguments in a running export.

    Raises:
        CaptureError: it does what cannot be kept right: it needs values, writes to its arguments or its class, or reads
            tensors of the model that it is not given.
    """
    traced = next(tensor for tensor in tensors if isinstance(tensor, FakeTensor))
    names = {memory_of(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]} if model else {}
    with unrecorded(traced):
        made: dict[int, Tensor] = {}
        for t in tensors:
            made[id(t)] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            if t.requires_grad:  # no leaf, which autograd would keep from being written to, before this is noticed
                made[id(t)] = made[id(t)].requires_grad_().clone()
        given = [made[id(tensor)] for tensor in tensors]
        versions = [tensor._version for tensor in given]
        reads = _Reads(given)

        def call(inputs: Sequence[Tensor]) -> list[Tensor]:
            with reads:
                args, kwargs = site.inputs.filled(inputs)
                site.outputs, found = Template.of(site.function.apply(*args, **kwargs))
                return found

        with _unchanged(site):
            try:
                found = call(given)
            except Exception as error:
                reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
                what = f"cannot run without values: {type(error).__name__}: {reason}"
                raise _refused(site, what, _NEEDS_VALUES) from error
            if versions != [tensor._version for tensor in given]:
                raise _refused(site, "writes to its arguments", "let it return a new tensor instead")
            site.results = tuple(tensor.detach() for tensor in found)
            site.aliases = bool({memory_of(t) for t in found} & {memory_of(t) for t in given})
            site.followed = follow(call, given, site.name)
    own = [
        names.get(memory_of(tensor), "a tensor of the forward")
        for tensor in reads.foreign
        if isinstance(tensor, FakeTensor)
    ]
    if own:
        remedy = "pass it as an argument of apply, which is also how it gets a gradient"
        raise _refused(site, f"reads {own[0]}, which is not among its arguments", remedy)
    if reads.foreign:
        site.followed.bar(f"{site.name} reads a tensor that is not among its arguments")


_NEEDS_VALUES = "write it with ops that do not look at values, or as a torch.library.custom_op with register_fake"


def _refused(site: FunctionSite, what: str, remedy: str) -> CaptureError:
    line = f"  at {site.line}\n" if site.line else ""
    return CaptureError(f"the autograd Function {site.name} {what}\n{line}  {remedy}")


class _Reads(TorchDispatchMode):
    """Notices tensors that ops read although they were neither given nor made.

    Attributes:
        foreign: those tensors.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = list(given)  # held, so that memory is not used again
        self._memories = {memory_of(tensor) for tensor in given}
        self.foreign: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at the operands of `func`, and run it."""
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if "lift" not in str(func):  # what torch.tensor(1.0) makes first is no fake tensor
            self.foreign += [tensor for tensor in operands if memory_of(tensor) not in self._memories]
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._known.append(leaf)
                self._memories.add(memory_of(leaf))
        return result


@contextmanager
def _unchanged(site: FunctionSite) -> Iterator[None]:
    """Refuse a Function that writes to its class, after putting back what it wrote."""
    before = dict(vars(site.function))
    sizes = _sizes(before)
    yield
    after = dict(vars(site.function))
    changed = [n for n in after if n not in before or after[n] is not before[n] or _sizes(after)[n] != sizes[n]]
    for name in changed:
        if name in before:
            setattr(site.function, name, before[name])
        else:
            delattr(site.function, name)
    if changed:
        remedy = "keep such a value in a tensor that is an argument and a result, or outside of the model"
        raise _refused(site, f"writes to its class ({', '.join(changed)})", remedy)


def _sizes(attributes: Mapping[str, Any]) -> dict[str, int]:
    return {n: len(v) if isinstance(v, (list, dict, set)) else 0 for n, v in attributes.items()}
