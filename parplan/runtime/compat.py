"""The few places where the runtime leans on what torch does not document, each with a test.

When a new torch changes one of these, it is changed here and nowhere else.
"""

from __future__ import annotations

import atexit
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import checkpoint
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types

from parplan.accelerators import accelerator_type

__all__ = [
    "FOREACH_CLASSES", "Version", "WeakGroup", "as_subclass_with_dispatch", "become", "before_optimizer_state",
    "call_hooks_with_gradients_only", "default_store", "gather_slices", "gradient_hooks", "group_timeout",
    "in_backward", "keeps_graph", "loaded_metadata", "local_ops_only", "memory_in_use", "read_all", "recomputed_once",
    "release_destroyed_group", "replace_given_data", "state_by_block", "sum_to_slices", "support_foreach",
    "tensors_of_memory", "version", "without_tensor_hooks", "without_weak_references", "wrapper_tensor",
    "write_counter", "writes",
]  # fmt: skip

T = TypeVar("T", bound=Tensor)

# Collectives between slices and one tensor: torch 2.13 has renamed them, and warns of the old names.
gather_slices: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
sum_to_slices: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Version:
    """A tensor's memory, and the number of writes to it in place; every step of a fused optimizer counts."""

    pointer: int
    writes: int
    fused_steps: int


def version(tensor: Tensor) -> Version:
    """A mark that changes when `tensor` is written in place or given other memory.

    Writes through `tensor.data` are not counted by torch and not seen here.
    """
    return Version(tensor.data_ptr(), tensor._version, _fused_steps)


_fused_steps = 0


def _stepped(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Count a step of an optimizer with `fused=True`, which torch does not count as writes to its parameters."""
    global _fused_steps
    if any(group.get("fused") for group in optimizer.param_groups):
        _fused_steps += 1


register_optimizer_step_post_hook(_stepped)


def keeps_graph() -> bool:
    """Whether the backward that is running was asked to keep its graph (`retain_graph=True`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def in_backward() -> bool:
    """Whether autograd's engine has called this, from within a backward."""
    return bool(torch._C._current_graph_task_id() >= 0)


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """The user's hooks on a tensor's gradient: of `register_hook` and of `register_post_accumulate_grad_hook`."""
    registered: list[Any] = [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
    found = [hook for hooks in registered for hook in (hooks or {}).values()]
    users = [hook.hook if isinstance(hook, _WithGradient) else hook for hook in found]
    return [hook for hook in users if not type(hook).__module__.startswith("parplan.")]


@dataclass(frozen=True)
class _WithGradient:
    """A hook of `register_hook` that is not called where there is no gradient."""

    hook: Callable[[Tensor], Tensor | None]

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self.hook(gradient)


def call_hooks_with_gradients_only(tensors: Iterable[Tensor]) -> None:
    """Keep the hooks of leaves from being called with None, as autograd does where a Function gives no gradient.

    In the plain model such a leaf is no part of the backward, and its hooks are not called at all.
    """
    for tensor in tensors:
        hooks: Any = tensor._backward_hooks
        for key, hook in (hooks or {}).items():
            if not type(hook).__module__.startswith("parplan."):
                hooks[key] = _WithGradient(hook)


def writes(tensor: Tensor) -> int:
    """Number of in-place writes to the memory of `tensor`."""
    return tensor._version


def write_counter(tensor: Tensor) -> Tensor:
    """An empty tensor whose number of `writes` is that of `tensor`, without keeping its memory."""
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)
    return counter


def tensors_of_memory(tensor: Tensor) -> int:
    """Number of tensors that use the memory of `tensor` or a part of it, anywhere in this process."""
    storage = tensor.untyped_storage()  # a user itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def memory_in_use(tensor: Tensor) -> Callable[[], bool]:
    """A function that says whether tensors use the memory of `tensor`, which it does not keep."""
    memory: Any = StorageWeakRef(tensor.untyped_storage())
    return lambda: not memory.expired()


@cache
def replace_given_data(replacement: Callable[[Tensor, Any], Any]) -> None:
    """From here on, `tensor.data = value` gives a tensor `replacement(tensor, value)`, in all of the process.

    torch asks nothing but the tensor's own class before it takes over the memory of `value`, which a `wrapper_tensor`
    does not have: the process ends at the next op.
    """
    data: Any = Tensor.data
    given = property(data.__get__, lambda tensor, value: data.__set__(tensor, replacement(tensor, value)))
    Tensor.data = given  # type: ignore[assignment]


def before_optimizer_state(act: Callable[[Optimizer], object]) -> None:
    """From here on, `act(optimizer)` is called before `optimizer.state_dict()` of any optimizer in the process.

    torch has hooks for that of each optimizer by itself, which a copied one does not have.
    """
    plain = Optimizer.state_dict

    @wraps(plain)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        act(self)
        return plain(self)

    Optimizer.state_dict = state_dict  # type: ignore[method-assign]


def wrapper_tensor(cls: type[T], shape: tuple[int, ...], like: Tensor) -> T:
    """A tensor of class `cls` without memory of its own: `shape`, with the type and device of `like`.

    The class answers every op in `__torch_dispatch__`.
    """
    made: T = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
    return made


def as_subclass_with_dispatch(cls: type[T], tensor: Tensor) -> T:
    """`tensor`'s memory as a tensor of class `cls`, which answers every op in `__torch_dispatch__`."""
    made: T = torch.Tensor._make_subclass(cls, tensor)
    return made


def local_ops_only(cls: type[Tensor]) -> None:
    """Let functions of `torch` and methods of tensors pass `cls` by, down to `__torch_dispatch__`."""
    cls.__torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment,method-assign]


# The classes for which optimizers, and clipping, choose their foreach implementations.
FOREACH_CLASSES: tuple[list[Any], ...] = (_optimizer_types, _clipping_types)


def support_foreach(cls: type[Tensor]) -> None:
    """Let optimizers and clipping choose their foreach implementations for tensors of class `cls`."""
    for types in FOREACH_CLASSES:
        if cls not in types:
            types.append(cls)


def become(parameter: Tensor, other: Tensor) -> None:
    """Turn a parameter, or a buffer, into `other` in place, for everybody who refers to it, and the reverse; its hooks
    stay.

    Raises:
        RuntimeError: somebody holds a weak reference, or a graph of autograd that uses it is alive; nothing changed.
    """
    hooks, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    torch.utils.swap_tensors(parameter, other)
    # The hooks of autograd went with the memory; the dictionaries are those that the user's handles remove from.
    if hooks is not None:
        parameter._backward_hooks = hooks
    if after is not None:
        parameter._post_accumulate_grad_hooks = after


@contextmanager
def without_weak_references(module: nn.Module) -> Iterator[None]:
    """Take away the weak references that torch's recurrent layers hold to their parameters, and give them back."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    known = [[ref() if ref is not None else None for ref in layer._flat_weight_refs] for layer in layers]
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer, weights in zip(layers, known, strict=True):
            layer._flat_weight_refs = [weakref.ref(weight) if weight is not None else None for weight in weights]


class WeakGroup:
    """A process group by weak reference, so that `destroy_process_group` destroys it and joins its threads.

    A thread of gloo that frees a tensor needs the interpreter: one that is still there when the interpreter ends aborts
    the process, or waits forever.

    Args:
        group: None for the default group, or torch's number for a group that this process is not in.
    """

    def __init__(self, group: Any) -> None:
        is_group = isinstance(group, dist.ProcessGroup)
        self._group = weakref.ref(group) if is_group else None
        self._other = None if is_group else group

    def __call__(self) -> Any:
        """The group, as it was given.

        Raises:
            RuntimeError: the group is destroyed.
        """
        if self._group is None:
            return self._other
        group = self._group()
        if group is None:
            raise RuntimeError("its process group is destroyed (torch.distributed.destroy_process_group)")
        return group


def release_destroyed_group() -> None:
    """Let go of a destroyed default group that torch itself still holds, so that its threads end (see `WeakGroup`).

    `torch.distributed.nn.functional`, which torch.export imports, has the default group of that moment as the default
    argument of its functions. None stands for the default group as well.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    if module is None or dist.is_initialized():
        return
    for function in vars(module).values():
        if inspect.isfunction(function) and function.__defaults__:
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in function.__defaults__
            )


if dist.is_available():
    atexit.register(release_destroyed_group)


def group_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """The timeout of a process group's collectives; None where it does not tell."""
    known: Any = group if group is not None else dist.group.WORLD
    try:
        for device in ("cpu", accelerator_type()):
            if device is not None and device in str(dist.get_backend_config(known)):
                found: timedelta | None = known._get_backend(torch.device(device)).options._timeout
                return found
    except (AttributeError, RuntimeError):
        pass
    return None


def default_store() -> Any:
    """The store that the processes of the default group found each other through.

    Raises:
        ValueError: there is no group, or no longer.
    """
    return dist.distributed_c10d._get_default_store()


def read_all(store: Any, keys: Sequence[str]) -> list[bytes]:
    """The values of keys of a store, in one message where it knows how; waits for those that are not there."""
    found: list[bytes] = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    return found


def recomputed_once() -> AbstractContextManager[object]:
    """A context in which a checkpoint (`use_reentrant=False`) computes its forward again once, not per backward call.

    A torch without such groups computes it again for every one.
    """
    group = getattr(checkpoint, "GraphExecGroup", None)
    return nullcontext() if group is None or group._get_current_group() is not None else group()


def state_by_block() -> bool:
    """Whether the caller's caller is one of torch.distributed.checkpoint's functions for states (`get_state_dict` and
    the like) and wants tensors as they lie over processes, not whole ones (`full_state_dict=True`).

    They call the usual `state_dict()` without a word about this. Where this is not noticed, states are whole: as
    right, and larger.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            options = frame.f_locals.get("info")
            if options is not None:
                return not getattr(options, "full_state_dict", True)
        frame = frame.f_back
    return False


def loaded_metadata() -> Mapping[str, Any]:
    """Metadata of the state that torch is loading, by the names of modules: above all the versions that saved it.

    A module's `_load_from_state_dict` gets that of itself, and none of what its submodules would get.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "load" and frame.f_globals.get("__name__") == nn.Module.__module__:
            return frame.f_locals.get("metadata") or {}
        frame = frame.f_back
    return {}


@contextmanager
def without_tensor_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """While it lasts, hooks of `register_hook` and `register_post_accumulate_grad_hook` on these are not called."""
    fields = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooks = [found for leaf in leaves for field in fields if (found := getattr(leaf, field))]
    # autograd reads these dictionaries when it comes to the leaf, and handles remove their hooks from them.
    saved = [(found, dict(found)) for found in hooks]
    for found, _ in saved:
        found.clear()
    try:
        yield
    finally:
        for found, before in saved:
            found.update(before)
