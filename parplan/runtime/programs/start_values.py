"""Values of parameters and buffers on torch's meta device: made module by module, of which each process keeps its part.

Modules come in the order of `module.modules()`. Each process makes all values of one module in the host's memory, by
the module's own `reset_parameters()` (the convention of FullyShardedDataParallel) and from one seed, keeps its blocks
and frees the rest before the next module. So values do not depend on plans or processes, and starting takes the memory
of the plan and of one module.
"""

from __future__ import annotations

import os
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from math import nan
from pathlib import Path
from typing import Any
from weakref import WeakSet
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from parplan.compat import without_modes
from parplan.errors import CheckpointError, ModelError, ParplanError, RuntimeFailure
from parplan.files import checked_digest
from parplan.layout import shape_of
from parplan.runtime.compat import become, without_weak_references, writes
from parplan.runtime.preserve_state import preserved_generators
from parplan.runtime.sharded_state.block_placement import Placement
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor
from parplan.runtime.transport.base import Transport

__all__ = ["NO_VALUES", "StartValues", "Weights", "with_memory"]

Initialise = Callable[[nn.Module], object]
Weights = Mapping[str, Tensor] | str | os.PathLike[str]

NO_VALUES = (
    "the model is on the meta device and has no values yet; call prepare(inputs) first, on all processes, or compile "
    "it with example inputs; saved values are given as compile(weights=)"
)

_FAILED = "error: "  # begins what a process says in place of its values' digest
_SAMPLES = 64  # elements of a saved tensor that processes compare

# Whole numbers as long as an element: their sum has no rounding, so that processes can compare it.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Saved:
    """Tensors by the model's names, each read when it is needed; of a folder, with a prefix there, without values."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    folder: Path | None = None
    prefix: str = ""

    def names(self, module: nn.Module) -> dict[int, str]:
        """Names by the identity of the module's own tensors; a tied one may be saved under any of its names."""
        return {id(tensor): name for name, tensor in _named(module) if name in self.tensors}


@dataclass(frozen=True)
class StartValues:
    """The source of the values that a module's meta tensors start with.

    Args:
        seed: of the values; the first process's counts.
        initialise: called with a module after its `reset_parameters()`, or in its place where it has none.
        saved: values that come before both.
        failure: the reason for which this process has none, until all processes meet.
    """

    seed: int
    initialise: Initialise | None = None
    saved: _Saved = field(default_factory=_Saved)
    failure: ParplanError | None = None

    @staticmethod
    def of(
        module: nn.Module,
        initialise: Initialise | None = None,
        weights: Weights | None = None,
        seed: int | None = None,
    ) -> StartValues | None:
        """The start values of a module; None where it has no meta tensors.

        Args:
            weights: a state of the model by name, a file of it, or a folder of torch.distributed.checkpoint.
            seed: default: drawn from torch's generator.

        Raises:
            ModelError: a module cannot give its tensors values, or there is nothing to give values to.
            CheckpointError: the weights are not those of this model. Where several processes run, both are a `failure`.
        """
        try:
            return StartValues._of(module, initialise, weights, seed)
        except ParplanError as error:
            if not (dist.is_available() and dist.is_initialized()):
                raise
            return StartValues(0, failure=error)  # the others would wait for this process

    @staticmethod
    def _of(
        module: nn.Module, initialise: Initialise | None, weights: Weights | None, seed: int | None
    ) -> StartValues | None:
        if not any(tensor.is_meta for _, tensor in _named(module)):
            given = {"initialise": initialise, "weights": weights}
            if named := ", ".join(name for name, value in given.items() if value is not None):
                raise ModelError(
                    f"{named} is for tensors on the meta device, and {type(module).__name__} has none; make it under "
                    'torch.device("meta"), or give it values before it is compiled (load_state_dict)'
                )
            return None
        saved = _opened(weights, module) if weights is not None else _Saved()
        known = saved.names(module)
        for path, part in module.named_modules():
            names = [_joined(path, name) for name, t in _own(part) if t.is_meta and id(t) not in known]
            if names and initialise is None and not callable(getattr(part, "reset_parameters", None)):
                raise ModelError(
                    f"{', '.join(names)}: on the meta device, and {type(part).__name__} has no reset_parameters() that "
                    "gives values; write one, or give compile(initialise=) a function that is called with each module "
                    "and writes its tensors" + ("" if known else ", or compile(weights=) a state of the model")
                )
        return StartValues(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed, initialise, saved)

    @torch.inference_mode(False)
    @torch.no_grad()
    def give(self, module: nn.Module, transport: Transport, placements: Mapping[str, Placement]) -> None:
        """Give the module's meta tensors their values; all processes call this.

        The objects stay, so an optimizer that was made before refers to them.

        Args:
            placements: by dotted name, of the parameters that become sharded tensors.

        Raises:
            RuntimeFailure: a module does not write a tensor of its own, or processes made different values.
        """
        if self.failure is not None:
            raise self.failure
        ((seed,), *_), problem = transport.gather(self.seed), None
        maker = _Maker(self, module, transport.physical(transport.owned[0]), placements)
        try:
            with preserved_generators(), without_modes(), torch.device("cpu"), without_weak_references(module):
                torch.default_generator.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed % 2**32)
                for path, part in module.named_modules():
                    maker.give(path, part)
        except Exception as error:
            problem = error
        told = transport.gather_texts(f"{_FAILED}{problem}" if problem else str(maker.digest))
        if problem is not None:
            raise problem
        if failed := [rank for rank, text in enumerate(told) if text.startswith(_FAILED)]:
            reason = told[failed[0]].removeprefix(_FAILED)
            raise RuntimeFailure(f"process {failed[0]} has no values for {type(module).__name__}: {reason}")
        if differs := [rank for rank, text in enumerate(told) if text != told[0]]:
            raise RuntimeFailure(
                f"processes 0 and {differs[0]} made different values for the meta tensors of {type(module).__name__} "
                f"({told[0]}; {told[differs[0]]}); let reset_parameters() and initialise draw from torch's, Python's "
                "or NumPy's global generators, which are seeded alike, and not depend on the process; give all "
                "processes the same weights"
            )
        if maker.waiting:
            # Not at the top: it imports all of torch's parallel modules.
            from torch.distributed.checkpoint import state_dict_loader
            from torch.distributed.checkpoint.api import CheckpointException

            how: dict[str, Any] = {"process_group": transport.process_group, "no_dist": transport.processes == 1}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # which is meant
                try:
                    state_dict_loader.load(maker.waiting, checkpoint_id=self.saved.folder, **how)
                except CheckpointException as error:  # a BaseException: `except Exception` would miss it
                    rank, (cause, _) = next(iter(error.failures.items()))
                    raise CheckpointError(
                        f"cannot read the weights in {self.saved.folder}: rank {rank}: {type(cause).__name__}: "
                        f"{cause}; the folder is damaged or incomplete: give another one, or copy it again"
                    ) from error
        _watch_optimizers()


class _Maker:
    """The values of one module after the other.

    Attributes:
        digest: of all values that were made, and of some of each tensor that was saved.
        waiting: tensors to be read from a folder, by their names there.
    """

    def __init__(
        self, start: StartValues, module: nn.Module, place: torch.device, placements: Mapping[str, Placement]
    ) -> None:
        self._initialise, self._place, self._placements = start.initialise, place, placements
        self._saved, self._names = start.saved, start.saved.names(module)
        self.digest = 0
        self.waiting: dict[str, Any] = {}
        # For all modules: memory of their own would leave gaps in the heap, as blocks that are kept lie in between.
        self._scratch = defaultdict[int, torch.UntypedStorage](partial(torch.UntypedStorage, 0))

    def give(self, path: str, part: nn.Module) -> None:
        """Give a part's own tensors their values, but for those of its children."""
        own = {name: tensor for name, tensor in _own(part) if tensor.is_meta or id(tensor) in self._names}
        saved = {name: self._names.pop(id(tensor)) for name, tensor in own.items() if id(tensor) in self._names}
        wanted = {name: tensor for name, tensor in own.items() if name not in saved}
        made = self._made(path, part, wanted) if wanted else {}
        for name, tensor in own.items():
            values = made[name] if name in made else self._saved.tensors[saved[name]]
            self.digest += 0 if name in made else _sampled(saved[name], values)
            if values.shape != tensor.shape or (values.is_meta and self._saved.folder is None):
                raise CheckpointError(
                    f"{saved[name]} has shape {tuple(values.shape)} in the weights, on {values.device}, and "
                    f"{tuple(tensor.shape)} in the model; give compile(weights=) a state of this model, with values"
                )
            if values.is_meta:
                self.waiting[self._saved.prefix + saved[name]] = tensor
            if tensor.is_meta:
                block = self._block(values, tensor.dtype, self._placements.get(_joined(path, name)))
                try:
                    become(tensor, _like(tensor, block))
                except RuntimeError as error:
                    what = "drop weak references to it before the first call"
                    raise RuntimeFailure(f"{_joined(path, name)} cannot get its values: {error}; {what}") from error
            elif not values.is_meta:
                tensor.copy_(values)

    def _block(self, values: Tensor, dtype: torch.dtype, placement: Placement | None) -> Tensor:
        """This process's block of a tensor's values, in memory of its own; without values where those come later.

        Args:
            values: in the host's memory, or on the meta device.
        """
        if values.is_meta:
            shape = values.shape if placement is None else shape_of(placement.own)
            own = torch.empty(shape, dtype=dtype, device=self._place)
        else:
            own = (values if placement is None else placement.cut(values)).to(self._place, dtype, copy=True)
        return own if placement is None else ShardedTensor(own, placement)

    def _made(self, path: str, part: nn.Module, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values that a module's initialisation gives its own tensors.

        It writes to others, so that a tensor which is tied, saved or not on the meta device keeps what it has.
        """
        reset, initialise = getattr(part, "reset_parameters", None), self._initialise
        made, numbers = dict[str, Tensor](), count()

        def blank(tensor: Tensor) -> Tensor:
            """Scratch memory, full of NaN: which no initialisation means."""
            memory = torch.empty(0, dtype=tensor.dtype)
            memory.set_(self._scratch[next(numbers)], 0, tensor.size(), tensor.stride())
            return _like(tensor, memory.fill_(nan) if memory.is_floating_point() or memory.is_complex() else memory)

        with _replaced(part, blank, lambda inner, t: inner is part or not t.is_meta) as blanks:
            before = {name: writes(blanks[id(tensor)]) for name, tensor in wanted.items()}
            if callable(reset):
                reset()
            if initialise is not None:
                initialise(part)
            now = {name: {**part._parameters, **part._buffers}.get(name) for name in wanted}
        for name, tensor in wanted.items():
            found: Any = now[name]
            kind = tensor.shape, tensor.dtype, False
            written = found is not None and (found.shape, found.dtype, found.is_meta) == kind
            bits = torch.view_as_real(found) if found is not None and found.is_complex() else found
            if written and bits.is_floating_point() and bits.numel():
                written = not bool(bits.amin().isnan())  # the least is NaN where any is; `isnan()` takes memory
            elif found is blanks[id(tensor)] and bits.numel():
                written = writes(found) > before[name]
            if not written:
                by = ["reset_parameters()"] * callable(reset) + ["initialise"] * (initialise is not None)
                raise RuntimeFailure(
                    f"{_joined(path, name)} is on the meta device, and {' and '.join(by)} of {type(part).__name__} "
                    "left it, or a part of it, without values of its type and shape; write them there (what __init__ "
                    "computes of a buffer is lost on that device), or give compile(initialise=) a function of a module "
                    "that does"
                )
            made[name] = found.detach()
            self.digest += int(bits.detach().contiguous().view(_BITS[bits.element_size()]).sum())
        return made


def _sampled(name: str, values: Tensor) -> int:
    """A digest of a tensor's name, type and shape, and of some elements from its first to its last.

    Not of all: a file is read by each process where it keeps a block of a tensor.
    """
    digest = crc32(f"{name} {values.dtype} {tuple(values.shape)}".encode())
    if values.is_meta or not values.numel():
        return digest
    places = torch.linspace(0, values.numel() - 1, _SAMPLES, dtype=torch.float64).long()
    some = values.detach()[torch.unravel_index(places, values.shape)] if values.dim() else values.detach()
    bits = torch.view_as_real(some) if some.is_complex() else some
    return digest + int(bits.contiguous().view(_BITS[bits.element_size()]).sum())


@cache
def _watch_optimizers() -> None:
    """Refuse steps of optimizers with state on the meta device, of parameters that have values since it was made.

    Some would go on without a word: what an op adds from there to a tensor elsewhere is nothing.
    """
    seen = WeakSet[Optimizer]()

    def check(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in seen:
            return
        for parameter, state in optimizer.state.items():
            names = [name for name, value in state.items() if isinstance(value, Tensor) and value.is_meta]
            if names and not parameter.is_meta:
                raise RuntimeFailure(
                    f"the state of {type(optimizer).__name__} for a parameter of shape {tuple(parameter.shape)} "
                    f"({', '.join(names)}) was made, or loaded, while it was on the meta device, and has no values; do "
                    "that after prepare(inputs) of the compiled model"
                )
        if not any(parameter.is_meta for parameter in optimizer.state):
            seen.add(optimizer)

    register_optimizer_step_pre_hook(check)


@contextmanager
def with_memory(module: nn.Module, place: torch.device) -> Iterator[None]:
    """While it lasts, tensors without values stand for the module's meta tensors, where its inputs are.

    In the host's memory they take none, as nothing is written there.
    """

    def empty(tensor: Tensor) -> Tensor:
        return _like(tensor, torch.empty_like(tensor, device=place, requires_grad=False))

    with _replaced(module, empty, lambda _, tensor: tensor.is_meta):
        yield


@contextmanager
def _replaced(
    module: nn.Module, make: Callable[[Tensor], Tensor], chosen: Callable[[nn.Module, Tensor], bool]
) -> Iterator[dict[int, Tensor]]:
    """Put others in place of chosen tensors of a module's parts, tied as they are; its own are back afterwards.

    Gives the others, by the identity of the module's own.
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (held, name, tensor)
        for part in module.modules()
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
        if tensor is not None and chosen(part, tensor)
    ]
    made = {id(tensor): make(tensor) for tensor in {id(tensor): tensor for _, _, tensor in places}.values()}
    try:
        for held, name, tensor in places:
            held[name] = made[id(tensor)]
        yield made
    finally:
        for held, name, tensor in places:
            held[name] = tensor


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """Other values as a parameter with the attributes of `tensor`, or as a buffer."""
    made = nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    vars(made).update({key: value for key, value in vars(tensor).items() if key not in vars(made)})
    return made


def _own(part: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module itself, without its children's, each once."""
    return [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers, under each of their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _opened(weights: Weights, module: nn.Module) -> _Saved:
    """The tensors of a state, a file or a folder, by the names of a module that has all of them, and no more.

    Raises:
        CheckpointError: they cannot be read, or are not those of the module.
    """
    own, folder, prefix, where = dict(_named(module)), None, "", "the weights"
    state: Any = weights
    if not isinstance(weights, Mapping):
        try:
            path, where = Path(weights), os.fspath(weights)
            if path.is_dir():
                from torch.distributed.checkpoint.filesystem import FileSystemReader

                found: Mapping[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
                folder, prefix = path, "" if own.keys() & found.keys() else "model."
                state = {
                    name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                    for name, entry in found.items()
                    if name.startswith(prefix) and hasattr(entry, "size")
                }
            else:
                with open(path, "rb") as file:
                    checked_digest(file, path)  # of save_checkpoint's files; others have none
                state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
                state = state["model"] if isinstance(state.get("model"), Mapping) else state
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"cannot read the weights in {where}: {error}") from error
    if wrong := next((name for name, value in state.items() if not isinstance(value, Tensor) and name in own), None):
        raise CheckpointError(f"{wrong} is {type(state[wrong]).__name__} in {where}; give tensors")
    saved = _Saved(state, folder, prefix)
    given, kept = saved.names(module), module.state_dict(keep_vars=True)
    missing = [name for name, tensor in own.items() if tensor.is_meta and name in kept and id(tensor) not in given]
    unknown = [name for name in state if name not in own and isinstance(state[name], Tensor)]
    if missing or unknown:
        told = {"lacks": missing, "has what the model lacks:": unknown}
        words = (f"{verb} {', '.join(names[:3])} ({len(names)} in all)" for verb, names in told.items() if names)
        raise CheckpointError(
            f"{where} is no state of {type(module).__name__}: it {'; it '.join(words)}; give a mapping with the "
            "model's names, and tensors of your own for what was not saved"
        )
    return saved
