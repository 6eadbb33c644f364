"""A module that stands for another one: its names, parameters, state and mode are those of the module it holds.

Under torchrun a process may hold slices only; the state that is saved and loaded is the plain model's all the same.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from parplan.compat import parallel_wrapper
from parplan.errors import RuntimeFailure
from parplan.runtime.compat import loaded_metadata
from parplan.runtime.sharded_state.cutting import Sharding, gathered
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from typing_extensions import Self

    from parplan.runtime.transport.base import Transport

__all__ = ["Wrapped"]

_REPLACED = (
    "a compiled model is wrapped in {wrapper}, which parplan replaces: use the compiled model itself; for accelerate, "
    "adopt it first (parplan.integrations.accelerate.adopt)"
)


class Wrapped(nn.Module):
    """The interface that a compiled model has in common with the module that it runs.

    Args:
        module: the model; its parameters and buffers stay its own.
    """

    _transport: Transport
    # Accelerate's autocast keeps a model's forward there; declared, as what is not goes to the module.
    _original_forward: Any = None

    def __new__(cls, module: nn.Module, *args: Any, **kwargs: Any) -> Self:
        """An instance of a class of its own, which has the module's name and the signature of its forward.

        Trainers ask a model's class which arguments its forward takes, and by its name what kind of model it is.
        """
        try:
            signature = inspect.signature(module.forward)
        except (AttributeError, TypeError, ValueError):  # no module, or one whose forward is not Python
            return super().__new__(cls)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return cls.forward(self, *args, **kwargs)

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        given = [p for p in signature.parameters.values() if p.name != "self"]
        forward.__signature__ = signature.replace(parameters=[own, *given])  # type: ignore[attr-defined]
        members = {"forward": forward, "__signature__": signature, "__module__": cls.__module__, "__doc__": cls.__doc__}
        return super().__new__(type(type(module).__name__, (cls,), members))

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # Not a submodule: names would get a prefix.
        object.__setattr__(self, "module", module)
        self.module: nn.Module

    @property
    def _slices(self) -> Sharding | None:
        """The blocks of the state that this process holds; None when it holds all of it."""
        return None

    @property
    def training(self) -> bool:
        """The mode of the module, also where that was switched without this one."""
        return self.module.training if "module" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__ and mode is not self.module.training:
            self.module.train(mode)

    def train(self, mode: bool = True) -> Self:
        """Set the module's mode."""
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The plain model's state, with its names; under torchrun full tensors, gathered by all ranks together."""
        slices = self._slices
        if slices is None and not any(isinstance(p, ShardedTensor) for p in self.module.parameters()):
            return self.module.state_dict(*args, **kwargs)
        # As a part of a larger model it adds to that model's state, under a prefix.
        prefix = kwargs.get("prefix", "")
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        whole = slices.gather(own) if slices is not None else gathered(own)
        state.update({prefix + name: value for name, value in whole.items()})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a plain model's state, of full tensors; each rank keeps its blocks."""
        state = self._slices.cut(state_dict) if self._slices else state_dict
        return self.module.load_state_dict(state, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load as a part of a larger model, which has its state under `prefix`."""
        own = OrderedDict((n.removeprefix(prefix), value) for n, value in state_dict.items() if n.startswith(prefix))
        told = {f"{name}.": of for name, of in loaded_metadata().items()}
        vars(own)["_metadata"] = {n.removeprefix(prefix)[:-1]: of for n, of in told.items() if n.startswith(prefix)}
        try:
            assign = bool(local_metadata.get("assign_to_params_buffers", False))
            found = self.load_state_dict(own, strict=False, assign=assign)
        except RuntimeError as error:
            error_msgs.append(str(error))
            return
        missing_keys += [prefix + name for name in found.missing_keys]
        unexpected_keys += [prefix + name for name in found.unexpected_keys if strict]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The module's modules, by their own names."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The module's children."""
        return self.module.named_children()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters; without `recurse` those that are not in one of its children."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The module's buffers; without `recurse` those that are not in one of its children."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """One of the module's modules; `get_parameter` and `get_buffer` look there too."""
        return self.module.get_submodule(target)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Give the module a buffer; the next call is captured anew."""
        self.module.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Give the module a parameter; the next call is captured anew."""
        self.module.register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Give the module a submodule; the next call is captured anew."""
        self.module.add_module(name, module)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call `fn` with every one of the module's modules."""
        self.module.apply(fn)
        return self

    def __getitem__(self, key: Any) -> Any:
        """The module's part, where it is a list or a dictionary of modules."""
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        """Number of the module's parts, where it is a list or a dictionary of modules."""
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """The module's parts, where it is a list, or their names, where it is a dictionary."""
        return iter(self.module)  # type: ignore[call-overload,no-any-return]

    def __bool__(self) -> bool:
        """True, as of any module, also of one that has no length."""
        return True

    def __getattr__(self, name: str) -> Any:
        """The module's attribute, for what this one does not have itself."""
        if "module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is this one's own here, and anything else on the module, where `__getattr__` reads it."""
        if name == "__class__":  # what fully_shard ends with
            raise RuntimeFailure(_REPLACED.format(wrapper=value.__name__))
        own = "_built" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name)
        if own:
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of processes that run the model together; None for the default group, or for one process."""
        return self._transport.process_group

    @property
    def device(self) -> torch.device:
        """The physical device of the first logical device of this process."""
        return self._transport.physical(self._transport.owned[0])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a compiled model is saved as its state and its plan."""
        raise RuntimeFailure(
            "a compiled model is not pickled; save model.state_dict() and model.plan.to_json(), and compile with "
            "plan=... when it is loaded"
        )

    def __repr__(self) -> str:
        """The module's text, as that of a compiled one."""
        return f"Compiled({self.module!r})"

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """DistributedDataParallel's accumulation of gradients over several backwards, by code that is written for it.

        Each backward within exchanges its gradients too: their mean over processes is linear, so that the sum is, once
        the last backward is done, what one exchange of the accumulated gradients gives. All processes have to make
        equally many backwards.
        """
        yield

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate's question whether it leaves a model as it is, rather than wrap it for several processes.

        Raises:
            RuntimeFailure: accelerate runs several processes, which the model was compiled too early to know of.
        """
        accelerate: Any = sys.modules.get("accelerate.state")
        if accelerate is None or self.__dict__.get("_left_alone", False):
            return True
        state = accelerate.AcceleratorState()
        if state.num_processes > 1 and self._transport.processes == 1:
            raise RuntimeFailure(
                f"the model was compiled for one process before accelerate joined {state.num_processes}; make the "
                "Accelerator (TrainingArguments) first, then compile"
            )
        return bool(state.num_processes > 1 and state.mixed_precision == "no")

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        self.__dict__["_left_alone"] = prepared

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the module."""
        self.module._apply(fn, recurse)
        return self


def _refuse_wrapper(parent: nn.Module, name: str, part: nn.Module | None) -> None:
    """Refuse a wrapper of torch's around a compiled model, before it has done anything."""
    if isinstance(part, Wrapped) and (wrapper := parallel_wrapper(parent)):
        raise RuntimeFailure(_REPLACED.format(wrapper=wrapper))


register_module_module_registration_hook(_refuse_wrapper)
