"""Parameters cut over processes: the user's own Parameter objects become sharded tensors that hold this rank's block.

The objects stay, so an optimizer made before or after refers to them. What is saved is the plain model's state: full
tensors under the original names, whatever plan trained them.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from parplan.compat import pytree
from parplan.errors import RuntimeFailure
from parplan.layout import Block, shape_of
from parplan.runtime.compat import (
    become,
    before_optimizer_state,
    replace_given_data,
    state_by_block,
    tensors_of_memory,
    without_weak_references,
    write_counter,
    writes,
)
from parplan.runtime.sharded_state.block_placement import Placement, TaggedCollectives
from parplan.runtime.sharded_state.outside_gradients import OutsideGradients
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor, data_for
from parplan.runtime.transport.base import Transport
from parplan.runtime.transport.distributed import explained
from parplan.runtime.transport.start_agreement import check_same_start

__all__ = ["Sharding", "gathered", "same_start"]

# Tensors that are shared among ranks in one message; a larger one goes in pieces of this size.
CHUNK_BYTES = 64 << 20


@torch.no_grad()
def same_start(module: nn.Module, transport: Transport, given: Mapping[str, object] | None = None) -> None:
    """Give every rank the parameters and buffers of rank 0, as DistributedDataParallel does; blocks stay.

    From here on gradients from outside the compiled model are averaged over the ranks.

    Args:
        given: options and other facts, by name, that have to be the same on all ranks.

    Raises:
        RuntimeFailure: one of these, the model or a version is not.
    """
    check_same_start(module, transport, given or {})
    everyone = range(transport.processes)
    # Those on the meta device have no values yet, and get the same in all ranks (runtime/programs/start_values.py).
    tensors = [
        t for t in (*module.parameters(), *module.buffers()) if not isinstance(t, ShardedTensor) and not t.is_meta
    ]
    for chunk in _chunks(tensors):
        flat = torch.cat([piece.reshape(-1) for piece in chunk])
        transport.broadcast("sharing rank 0's parameters and buffers", flat, 0, everyone)
        for piece, part in zip(chunk, flat.split([piece.numel() for piece in chunk]), strict=True):
            piece.copy_(part.view_as(piece))
    transport.open_rendezvous()
    _watch(module, transport)


def _watch(module: nn.Module, transport: Transport) -> None:
    if transport.processes > 1:
        for name, parameter in module.named_parameters():
            OutsideGradients.watch(name, parameter, TaggedCollectives.of(transport))


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and device, or flat pieces of them, in groups of bounded size."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype, tensor.device].append(tensor.detach())
    for group in kinds.values():
        elements, before = CHUNK_BYTES // group[0].element_size(), 0
        chunks: dict[int, list[Tensor]] = defaultdict(list)
        for tensor in group:
            for piece in tensor.view(-1).split(elements) if tensor.is_contiguous() else (tensor,):
                chunks[before // elements].append(piece)
                before += piece.numel()
        yield from chunks.values()


def gathered(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with full tensors in place of sharded ones; every rank has to call this.

    torch.distributed.checkpoint gets the sharded ones as they are.
    """
    if state_by_block():
        return dict(state)
    sharded = [value for value in state.values() if isinstance(value, ShardedTensor)]
    if sharded:
        sharded[0].placement.collectives.begin_together(f"state_dict() of the model with {sharded[0].placement.name}")
    return {
        name: value.placement.collectives.gather_blocks(f"gathering {name}", value.local, value.placement)
        if isinstance(value, ShardedTensor)
        else value
        for name, value in state.items()
    }


@dataclass(frozen=True)
class _StateCopy:
    """A gathered tensor of a state dict; where it is written, the model's blocks do not follow."""

    name: str
    tensor: weakref.ref[Tensor]
    counter: Tensor
    writes: int

    @staticmethod
    def of(name: str, tensor: Tensor) -> _StateCopy:
        counter = write_counter(tensor)
        return _StateCopy(name, weakref.ref(tensor), counter, writes(counter))


class Sharding:
    """The blocks of parameters and buffers that each rank holds, by dotted name.

    Args:
        module: the user's module, whose parameters become blocks.

    Attributes:
        fresh: block per device, by dotted name, of buffers that are only up to date on some ranks.
        placements: of the parameters that are cut, or about to be, by dotted name.
    """

    def __init__(self, module: nn.Module, transport: Transport) -> None:
        self._module = module
        self._transport = transport
        self.fresh: dict[str, dict[int, Block]] = {}
        # The first name of every parameter name, for tied parameters.
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        self._aliases = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
        self.placements: dict[str, Placement] = {}
        self._planned: set[str] = set()
        self._state_copies: list[_StateCopy] = []
        cut = [p.placement.collectives for p in module.parameters() if isinstance(p, ShardedTensor)]
        with explained("making a group for what is cut over processes", transport.rank):
            self._collectives = cut[0] if cut else TaggedCollectives.of(transport)

    def knows(self, name: str) -> bool:
        """Whether this was the first name of a parameter when the first graph was run."""
        return self._aliases.get(name) == name

    def plan(self, parameters: Mapping[str, Mapping[int, Block]]) -> None:
        """Plan blocks of parameters that no graph has read before, to be cut by `hold`.

        Args:
            parameters: block per device, by dotted name; a parameter that is not named stays whole everywhere.

        Raises:
            RuntimeFailure: a parameter is cut already, into other blocks.
        """
        self._planned |= parameters.keys()
        for name, held in parameters.items():
            parameter = self._module.get_parameter(name)
            whole = tuple(parameter.shape)
            if len(held) == self._transport.processes and all(shape_of(block) == whole for block in held.values()):
                continue
            if not isinstance(parameter, ShardedTensor):
                self.placements[name] = Placement(name, whole, dict(held), self._collectives)
            elif parameter.placement.blocks == held:
                self.placements[name] = parameter.placement  # cut already, as in a copied model
            else:
                raise RuntimeFailure(
                    f"{name} is cut over processes as {parameter.placement.blocks}, and this plan needs {dict(held)}; "
                    "build the model anew, compile it, and load state_dict()"
                )

    @property
    def cuts(self) -> bool:
        """Whether some rank's module holds less than the whole model; the same on all ranks."""
        return bool(self.placements)

    @torch.inference_mode(False)
    @torch.no_grad()
    def hold(self) -> None:
        """Cut those parameters that are whole: all at first, later those that the user replaced, on all ranks alike.

        Raises:
            RuntimeFailure: a parameter cannot be cut, or stands under the name of another one.
        """
        self._check_names()
        try:
            named = {name: self._module.get_parameter(name) for name in self.placements}
        except AttributeError as error:
            raise RuntimeFailure(
                f"a parameter that is cut over processes is not in the model any more ({error}); replace parameters, "
                "and add or remove their parametrizations, before the first call, or build the model anew, compile it, "
                "and load state_dict()"
            ) from error
        whole = {name: p for name, p in named.items() if not isinstance(p, ShardedTensor)}
        if whole:
            self._cut_all(whole)
        if self.placements:
            _watch_optimizers()
            replace_given_data(data_for)
        _watch(self._module, self._transport)

    def _check_names(self) -> None:
        """Refuse blocks under names that this plan has other blocks for, as after an exchange of two layers."""
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if not isinstance(parameter, ShardedTensor):
                continue
            own, wanted = parameter.placement, self.placements.get(self._aliases.get(name, name))
            if own is not wanted and (name in self._planned if wanted is None else own.blocks != wanted.blocks):
                raise RuntimeFailure(
                    f"{name} is now the parameter that was {own.name} when it was cut over processes, and this plan "
                    "cuts the two otherwise; exchange layers before the first call, or build the model anew, compile "
                    "it, and load state_dict()"
                )

    def check_state_copies(self) -> None:
        """Refuse to go on where a gathered tensor of a state dict was written, which changes a plain model.

        Raises:
            RuntimeFailure: one was, and not loaded since.
        """
        written = [copy.name for copy in self._state_copies if writes(copy.counter) != copy.writes]
        self._state_copies = [copy for copy in self._state_copies if copy.tensor() is not None]
        if written:
            raise RuntimeFailure(
                f"{written[0]} was written through a tensor of state_dict(), which is a copy where parameters are cut "
                "over processes: the model did not change. Write the parameters themselves, under torch.no_grad(), or "
                "give the state to load_state_dict()"
            )

    def _cut_all(self, whole: Mapping[str, nn.Parameter]) -> None:
        """Cut parameters, or none of them if one of them cannot be."""
        _check_memory(self._module, whole)
        cut: list[tuple[nn.Parameter, nn.Parameter]] = []
        problem = ""
        with without_weak_references(self._module):
            for name, parameter in whole.items():
                placement = self.placements[name]
                other = nn.Parameter(ShardedTensor.cut(parameter, placement), requires_grad=parameter.requires_grad)
                vars(other).update(vars(parameter))
                if parameter.grad is not None:
                    other.grad = ShardedTensor.cut(parameter.grad, placement)
                try:
                    become(parameter, other)
                except RuntimeError as error:
                    problem = f"rank {self._transport.rank}: {name} cannot be cut over processes: {error}"
                    break
                cut.append((parameter, other))
        failed = self._collectives.exchange("cutting the parameters", [float(bool(problem))])[:, 0]
        if failed.any():
            with without_weak_references(self._module):
                for parameter, other in cut:
                    become(parameter, other)
            raise RuntimeFailure(
                (problem or f"rank {int(failed.argmax())} could not cut a parameter over processes, see its error")
                + "; before the first call drop results and losses of the plain model (del loss), or compute them "
                "under torch.no_grad(), and drop weak references to its parameters"
            )

    @contextmanager
    def whole_values(self) -> Iterator[None]:
        """Put ordinary parameters with the values of all ranks into the module; every rank has to call this."""
        places = [(part, name, p) for part in self._module.modules() for name, p in part._parameters.items()]
        whole: dict[int, nn.Parameter] = {}
        for _, _, parameter in places:
            own: Tensor | None = parameter
            if isinstance(own, ShardedTensor) and id(own) not in whole:
                whole[id(own)] = nn.Parameter(own.whole(), requires_grad=own.requires_grad)
        buffers = {name: self._module.get_buffer(name) for name in self.fresh}
        stale = {name: buffer.data for name, buffer in buffers.items()}
        try:
            for part, name, parameter in places:
                part._parameters[name] = whole.get(id(parameter), parameter)
            for name, buffer in buffers.items():
                buffer.data = self._gathered(name, buffer.data, self.fresh[name])
            yield
        finally:
            for part, name, parameter in places:
                part._parameters[name] = parameter
            for name, buffer in buffers.items():
                buffer.data = stale[name]

    def gather(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Full tensors for a module's state dict; every rank has to call this.

        Raises:
            RuntimeFailure: a tensor of an earlier one was written.
        """
        self.check_state_copies()
        fresh = {name: self._gathered(name, state[name], held) for name, held in self.fresh.items() if name in state}
        whole = {**gathered(state), **fresh}
        made = [(name, value) for name, value in whole.items() if value is not state[name]]
        self._state_copies += [_StateCopy.of(name, value) for name, value in made if not value.is_inference()]
        return whole

    def _gathered(self, name: str, own: Tensor, held: Mapping[int, Block]) -> Tensor:
        """A buffer, of which every rank has the whole shape and some have values of now."""
        if len(held) == self._transport.processes and all(shape_of(b) == tuple(own.shape) for b in held.values()):
            return own
        placement = Placement(name, tuple(own.shape), dict(held), self._collectives)
        return self._collectives.gather_blocks(f"gathering {name}", placement.cut(own), placement)

    def cut(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of full tensors with this rank's blocks in place of those that are cut.

        Raises:
            RuntimeFailure: a tensor does not have the model's shape.
        """
        cut = OrderedDict(state)
        if (versions := getattr(state, "_metadata", None)) is not None:
            vars(cut)["_metadata"] = versions  # of the modules that saved it, as torch's own states have them
        loaded = set(map(id, state.values()))
        self._state_copies = [copy for copy in self._state_copies if id(copy.tensor()) not in loaded]
        for name, value in state.items():
            placement = self.placements.get(self._aliases.get(name, name))
            if placement is not None and not isinstance(value, ShardedTensor):
                if tuple(value.shape) != placement.shape:
                    raise RuntimeFailure(
                        f"{name} has shape {tuple(value.shape)} in the state to load and {placement.shape} in the "
                        "model; load the state of this model, with full tensors"
                    )
                cut[name] = ShardedTensor.cut(value, placement)
        return cut


# -- optimizers: their state is cut with the parameters, and saved and loaded whole --

_WATCHED = "_parplan_gathers_state"


def _check_memory(module: nn.Module, cut: Mapping[str, nn.Parameter]) -> None:
    """Refuse to cut parameters that share memory with each other, or that are, or have gradients that are, pieces.

    A block has memory of its own, so that a write to the one would no longer be seen in the other. A module's own
    tensors may share a larger one that nothing else holds, as the weights of LSTMs do on GPUs.
    """
    # What torch.nn.utils.spectral_norm computes anew before each forward is the weight's own memory at first.
    computed = [value for part in module.modules() if part._forward_pre_hooks for value in vars(part).values()]
    tensors = [t for t in (*module.parameters(), *module.buffers(), *computed) if isinstance(t, Tensor)]
    whole = [t for t in tensors if not isinstance(t, ShardedTensor) and not t.is_meta]
    own = Counter(tensor.untyped_storage().data_ptr() for tensor in whole)
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, ShardedTensor) or parameter.is_meta or not parameter.numel():
            continue
        if name in cut and tensors_of_memory(parameter) > own[parameter.untyped_storage().data_ptr()]:
            if parameter.untyped_storage().nbytes() > parameter.nbytes:
                raise RuntimeFailure(
                    f"{name} is a piece of a larger tensor (p.data = flat[a:b]) that is in use, and is cut over "
                    "processes, which gives it memory of its own; drop the larger tensor before the first call, or "
                    "use a plan with replicas alone"
                )
            warnings.warn(
                f"{name} shares its memory with another tensor (its detach(), its .data, or a state_dict() made "
                "before the first call), and is cut over processes: that tensor keeps the present values",
                stacklevel=2,
            )
        other = names.setdefault(parameter.data_ptr(), name)
        if other != name and not cut.keys().isdisjoint((name, other)):
            raise RuntimeFailure(
                f"{name} and {other} are two parameters of one memory (weight.data = ...), which cannot be cut over "
                f"processes; tie them as one parameter ({name} = {other}), or use a plan with replicas alone"
            )
        gradient = parameter.grad
        if name in cut and gradient is not None and gradient.untyped_storage().nbytes() > gradient.nbytes:
            raise RuntimeFailure(
                f"the gradient of {name} is a piece of a larger tensor (p.grad = flat[a:b]), and {name} is cut over "
                "processes, which gives it a gradient of its own; let backward() make the gradients, or use a plan "
                "with replicas alone"
            )


@cache
def _watch_optimizers() -> None:
    """From here on, look at every optimizer with sharded parameters before its step.

    State that an optimizer makes of a sharded parameter is sharded by itself (`zeros_like`). What was made before the
    parameters were cut, or loaded from a file of whole tensors, is cut before the next step. `optimizer.state_dict()`
    gathers, so that a saved state fits a plain model and any number of processes; also that of an optimizer that has
    made no step, as Adagrad has a state from the start, and a copied optimizer the state of another one.
    """
    register_optimizer_step_pre_hook(_before_step)
    before_optimizer_state(_watch_state)


def _watch_state(optimizer: Optimizer) -> None:
    if _WATCHED not in vars(optimizer):
        vars(optimizer)[_WATCHED] = optimizer.register_state_dict_post_hook(_gathered_state)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedTensor)]
    if not found:
        return
    _watch_state(optimizer)
    for parameter in found:
        state, placement = optimizer.state.get(parameter) if parameter.dim() else None, parameter.placement
        # Those on the meta device are refused (runtime/programs/start_values.py).
        known = {k: v for k, v in (state or {}).items() if isinstance(v, Tensor) and v.dim() and not v.is_meta}
        plain = {key: value for key, value in known.items() if not isinstance(value, ShardedTensor)}
        if state is None or not plain:
            continue
        whole, shapes = tuple(parameter.shape), {tuple(value.shape) for value in plain.values()}
        if shapes <= {shape_of(block) for block in placement.blocks.values()} - {whole}:
            raise RuntimeFailure(
                f"the state of {type(optimizer).__name__} for {placement.name} has shape {sorted(shapes)[0]}, which "
                f"one process holds of the parameter, whose shape is {whole}: it was saved in blocks. Load a state of "
                "whole tensors, as optimizer.state_dict() gives it (on all processes: it gathers)"
            )
        with torch.no_grad():
            state.update({k: ShardedTensor.cut(v, placement) for k, v in plain.items() if tuple(v.shape) == whole})


def _gathered_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state with whole tensors; every rank has to ask for it. torch.distributed.checkpoint gets them sharded."""
    if state_by_block():
        return state_dict
    sharded = (v for v in pytree.tree_leaves(state_dict["state"]) if isinstance(v, ShardedTensor))
    if (first := next(sharded, None)) is not None:
        first.placement.collectives.begin_together(f"state_dict() of the optimizer with {first.placement.name}")

    def whole(tensor: Tensor) -> Tensor:
        return tensor.whole() if isinstance(tensor, ShardedTensor) else tensor

    state: dict[str, Any] = pytree.tree_map_only(Tensor, whole, state_dict["state"])
    return {**state_dict, "state": state}
