"""Evaluation by the plain module, where a process holds the whole model and the plan is not needed or not possible.

A capture costs seconds, which a loop that decodes with a cache would pay for every length, and a plan over processes
needs all of them, where programs let rank 0 evaluate alone. What is planned stays so: sizes that were seen, calls in
training mode, models whose parameters are cut over processes.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from parplan.compat import pytree
from parplan.errors import PlainModuleWarning
from parplan.runtime.calls import ModelCall
from parplan.runtime.programs.captures import Captures
from parplan.runtime.programs.program_cache import Options
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor
from parplan.runtime.transport.base import Transport
from parplan.runtime.transport.rendezvous import RankAlone

__all__ = ["PlainEvaluation"]

# Captures of calls that differ in sizes alone before further sizes run the plain module. Where several memories share
# the work a few sizes (those of a validation set) are worth it; where all devices are one, the first says what the
# forward does with samples.
_CAPTURES, _CAPTURES_IN_SEVERAL_MEMORIES = 1, 4


class PlainEvaluation:
    """Calls without gradients, in evaluation mode, that run the plain module.

    Args:
        module: the user's module.
        captures: its captured graphs.
        transport: which devices there are.
        options: how the model runs.
        comparing: every call is to be compared with the plain module.
    """

    def __init__(
        self, module: nn.Module, captures: Captures, transport: Transport, options: Options, comparing: bool
    ) -> None:
        self._module, self._captures, self._transport = module, captures, transport
        self._options, self._comparing = options, comparing
        self._told = False
        self._noted = False
        several = captures.programs.home is not None or bool(options.threads)
        self._enough = _CAPTURES_IN_SEVERAL_MEMORIES if several else _CAPTURES

    def takes(self, call: ModelCall) -> bool:
        """Whether a call of sizes that were not captured runs the plain module: nothing of it depends on processes."""
        if torch.is_grad_enabled() or self._module.training or self._comparing or not self._options.dropout:
            return False
        known = self._captures.of_other_sizes(call, False)
        # What draws, draws from the process's own stream (runtime/execution/random_state.py), which is the plan's.
        bound = any(one.graph.fixed_batch or one.seeded.apart for one in known)
        if len(known) < self._enough or bound or not self._may_run(call):
            return False
        if self._transport.processes == 1:
            return not self._options.per_replica
        sync = self._captures.programs.sync
        return not any(one.exchanges for one in known) and not (sync is not None and sync.stale)

    def run(self, call: ModelCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain module's result."""
        place = self._place
        if any(tensor.device != place for tensor in call.tensors):  # else containers stay the caller's objects
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), (args, kwargs))
        found = self._module(*args, **kwargs)
        output = self._transport.physical(self._options.output) if self._transport.processes == 1 else place
        return found if output == place else pytree.tree_map_only(torch.Tensor, lambda t: t.to(output), found)

    def run_alone(self, call: ModelCall, args: tuple[Any, ...], kwargs: dict[str, Any], alone: RankAlone) -> Any:
        """The plain module's result for the samples of this process, to whose call no other one comes.

        Raises:
            RankAlone: this process does not hold the whole model, or the call changes it.
        """
        if self._module.training or not self._may_run(call):
            raise alone
        if not self._told:
            self._told = True
            warnings.warn(
                f"rank {self._transport.rank} evaluates alone ({alone.absent}) and runs the plain module on its own "
                "samples, as it holds all weights: a number over the samples, such as a loss, is that of this rank's",
                PlainModuleWarning,
                stacklevel=4,
            )
        return self.run(call, args, kwargs)

    def unplanned(self) -> bool:
        """Whether it is still to be said that nothing is planned; the answer is yes once."""
        first = self._captures.plan is None and not self._noted
        self._noted |= first
        return first

    def copy(self) -> nn.Module:
        """A plain copy of the module with whole weights; every process has to ask for it if they are cut."""
        sharding = self._captures.programs.sharding
        apart = sharding is not None and (sharding.cuts or sharding.fresh)
        if apart:
            remedy = "parameters are cut over processes: move it out of `if rank == 0:`, and use there what it returned"
            self._transport.begin_call()
            self._transport.come_together("in plain()", remedy)
        with sharding.whole_values() if sharding is not None and apart else nullcontext():
            return deepcopy(self._module)

    def _may_run(self, call: ModelCall) -> bool:
        """Whether this process can run the module on these inputs: it has all of it, in one place, up to date."""
        sharding, place = self._captures.programs.sharding, self._place
        if call.batch == 0 or any(part.training for part in self._module.modules()):
            return False
        if sharding is not None and any(self._transport.rank not in held for held in sharding.fresh.values()):
            return False  # statistics of a batch norm that other ranks write
        if call.containers and any(tensor.device != place for tensor in call.tensors):
            return False
        return all(p.device == place and not isinstance(p, ShardedTensor) for p in self._module.parameters())

    @property
    def _place(self) -> torch.device:
        return self._transport.physical(self._transport.owned[0])
