"""Stand-ins for a model's parameters, and for devices that are missing, while it is captured.

torch.export keeps weak references to the parameters that it saw, and a parameter with weak references can no longer be
turned into a sharded one in place. So it sees others: aliases that share the memory of ordinary parameters, and empty
ones of the whole shape for parameters that are cut over processes.

A plan decides where layers run, so `x.cuda(0)` in a forward is a wish and no order. Where the device exists, capture
follows the code; where it does not, the tensor stays where it is, and so the model can be planned for GPUs, verified
and run on a machine without any. (torch itself would end the whole process on the way.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.amp.autocast_mode import autocast
from torch.overrides import TorchFunctionMode

from parplan.accelerators import accelerator_type
from parplan.compat import conversion_of, memory_of, pytree
from parplan.graph.export.hidden_writes import hidden_write

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DataDetached", "RegionsDetached", "idle_conversions", "missing_devices", "stand_ins"]


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Put other parameters into `model`, tied as its own are; its own are back afterwards."""
    made: dict[int, nn.Parameter] = {}
    places = [(module._parameters, name, p) for module in model.modules() for name, p in module._parameters.items()]
    try:
        for parameters, name, parameter in places:
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = parameter  # also of somebody else's class, which may be more than its values
                    if type(parameter) is nn.Parameter:
                        made[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    elif hasattr(parameter, "stand_in"):
                        made[id(parameter)] = parameter.stand_in()
                parameters[name] = made[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter


def missing_devices() -> AbstractContextManager[Any]:
    """A context in which accelerators that do not exist are read as the device a tensor is on, or the CPU."""
    return _Stay() if accelerator_type() is None else nullcontext()


@contextmanager
def idle_conversions() -> Iterator[None]:
    """While it lasts, a module that is converted to the type and the device that it has (`layer.to(x.dtype)`) stays.

    Module.to would swap its tensors for themselves, which an export does not let it do.
    """
    plain = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype = conversion_of(*args, **kwargs)
        tensors = [*self.parameters(), *self.buffers()]
        placed = device is None or all(tensor.device == device for tensor in tensors)
        typed = (tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())
        idle = placed and (dtype is None or all(tensor.dtype == dtype for tensor in typed))
        return self if idle else plain(self, *args, **kwargs)

    with mock.patch.object(nn.Module, "to", to):
        yield


class DataDetached(TorchFunctionMode):
    """While it lasts, `tensor.data` is `tensor.detach()`, which torch.export follows: also where it is written."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, or what stands for it."""
        data: Any = Tensor.data
        if func == data.__get__:
            return args[0].detach()
        if func == data.__set__ and memory_of(args[0]) == memory_of(args[1]):
            return None  # the end of `tensor.data *= 2`
        return func(*args, **(kwargs or {}))


class RegionsDetached(TorchFunctionMode):
    """While it lasts, what is computed under no_grad in an autocast of the forward's own is detached, op by op.

    torch.export forgets there that gradients were off.
    """

    def __init__(self) -> None:
        super().__init__()
        self._grad, self._depth = is_grad_enabled(), 0
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        """Count the regions with autocast that are entered."""
        enter: Callable[..., Any] = autocast.__enter__
        leave: Callable[..., Any] = autocast.__exit__

        def entered(region: Any) -> Any:
            self._depth += 1
            return enter(region)

        def left(region: Any, *error: Any) -> Any:
            self._depth -= 1
            return leave(region, *error)

        self._patches.enter_context(mock.patch.object(autocast, "__enter__", entered))
        self._patches.enter_context(mock.patch.object(autocast, "__exit__", left))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Count no more."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, and detach what it makes; refuse what it writes that has a gradient."""
        if not self._depth or not self._grad or is_grad_enabled():
            return func(*args, **(kwargs or {}))
        leaves = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        before = [one._version for one in leaves]
        result = func(*args, **(kwargs or {}))
        if any(one.requires_grad and one._version > own for one, own in zip(leaves, before, strict=True)):
            raise hidden_write(getattr(func, "__name__", str(func)))
        given = set(map(id, leaves))

        def detached(one: Any) -> Any:
            made = isinstance(one, Tensor) and id(one) not in given
            return one.detach() if made and (one.is_floating_point() or one.is_complex()) else one

        return pytree.tree_map(detached, result)


class _Stay(TorchFunctionMode):
    """Drops accelerators from the arguments of torch functions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` without the devices that are missing."""
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args = (args[0], *(args[0].device if _is_missing(value) else value for value in args[1:]))
        if kwargs and _is_missing(kwargs.get("device")):
            device = args[0].device if args and isinstance(args[0], Tensor) else torch.device("cpu")
            kwargs = {**kwargs, "device": device}
        return func(*args, **(kwargs or {}))


def _is_missing(value: Any) -> bool:
    """Whether a value names an accelerator; those that are asked here have none."""
    kind = value.type if isinstance(value, torch.device) else value.split(":")[0] if isinstance(value, str) else "cpu"
    return kind not in ("cpu", "meta")
