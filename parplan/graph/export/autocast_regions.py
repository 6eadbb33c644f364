"""Results of `torch.no_grad` regions inside of regions with autocast, detached while a forward is recorded.

torch.export keeps a region of either kind, and of these inside of one with autocast it forgets that gradients were off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch import Tensor, is_grad_enabled
from torch.amp.autocast_mode import autocast
from torch.overrides import TorchFunctionMode

from parplan.compat import pytree

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RegionsDetached"]


class RegionsDetached(TorchFunctionMode):
    """While it lasts, what is computed under no_grad in an autocast of the forward's own is detached, op by op."""

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
        """Call `func`, and detach what it makes."""
        result = func(*args, **(kwargs or {}))
        if not self._depth or not self._grad or is_grad_enabled():
            return result
        given = {id(one) for one in pytree.tree_leaves((args, kwargs))}

        def detached(one: Any) -> Any:
            made = isinstance(one, Tensor) and id(one) not in given
            return one.detach() if made and (one.is_floating_point() or one.is_complex()) else one

        return pytree.tree_map(detached, result)
