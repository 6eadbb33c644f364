"""Split of a dataset over processes, so that an epoch sees every sample once: `shard_dataset` and `PlanSampler`.

Under torchrun a compiled model takes every process's own samples, whatever the plan: the step's batch is all of them in
rank order, and where a layer has fewer replicas than there are processes the runtime gathers what its devices need. So
the shards of one layer do compute on the same samples, but nobody has to read a sample twice, and by default no two
processes do.

    train = parplan.shard_dataset(train, model.plan)                 # once: this process's part
    sampler = parplan.PlanSampler(train, model.plan, seed=7)         # or every epoch another part
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)

Without a process group there is one process, which has all devices and reads everything.

`scaled_lr` scales a learning rate to a larger batch; it is applied only where it is called.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, get_worker_info

from parplan.errors import ParplanError, PlanError, RuntimeFailure
from parplan.plan import Plan

__all__ = ["PlanSampler", "Share", "scaled_lr", "shard_dataset", "share_of"]


def scaled_lr(lr: float, batch: int, base_batch: int = 128) -> float:
    """The learning rate for a batch k times as large: k times `lr`, momentum and weight decay unchanged.

    Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (arXiv 1404.5997), which found
    k to work better than the square root of k, up to batches of 1024.

    >>> scaled_lr(0.01, batch=512)
    0.04

    Raises:
        ParplanError: a batch below 1.
    """
    if batch < 1 or base_batch < 1:
        raise ParplanError(f"a batch of {batch} against one of {base_batch} gives no rate; both are at least 1")
    return lr * batch / base_batch


@dataclass(frozen=True)
class Share:
    """Part `index` of the `count` equal ones that a dataset is split into."""

    index: int = 0
    count: int = 1


def share_of(
    plan: Plan | str | Path | None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    same_within_group: bool = False,
) -> Share:
    """The part of a dataset that a process reads under a plan.

    Args:
        plan: the plan that the model runs, or its file; `model.plan` of a compiled model.
        rank, world_size: default: of the process group, else one process.
        same_within_group: parts go to the replicas of the plan's first layer, not to processes: the processes that
            hold the shards of one replica read the same part. See `shard_dataset`.

    Raises:
        PlanError: there is no plan yet, it is for another number of processes, or its first layer leaves some out.
        RuntimeFailure: torchrun started several processes which have not joined, or the rank does not exist.
    """
    made = Plan.load(plan) if isinstance(plan, (str, Path)) else getattr(plan, "plan", plan)  # a compiled model has one
    if made is None:
        raise PlanError("there is no plan yet; give parplan.compile example inputs, or call the model once")
    if not isinstance(made, Plan):
        raise PlanError(f"{type(plan).__name__} is no plan; give model.plan of a compiled model, or a plan's file")
    own = _process(rank, world_size)
    if own.count == 1:
        return Share()
    if made.devices != own.count:
        raise PlanError(
            f"the plan is for {made.devices} devices, here are {own.count} processes, one device each; start as "
            f"many, or plan with --gpus {own.count}"
        )
    if not same_within_group:
        return own
    name, first = next(iter(made.layers.items()))
    if len(first.devices) != made.devices:
        raise PlanError(
            f"{name}, the first layer, is on {len(first.devices)} of {made.devices} devices, so the others have no "
            "replica whose samples they could read; leave out same_within_group"
        )
    return Share(first.devices.index(own.index) // first.shards, first.replicas)


def _process(rank: int | None, world: int | None) -> Share:
    """This process among all: as said, else as the process group says."""
    joined = dist.is_available() and dist.is_initialized()
    if not joined and (rank is None) != (world is None):
        raise RuntimeFailure("rank and world_size belong together; give both, or neither")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if not joined and world is None and started > 1:
        raise RuntimeFailure(
            f"torchrun started {started} processes, which have not joined: every one would read all samples; call "
            "torch.distributed.init_process_group first"
        )
    own = rank if rank is not None else (dist.get_rank() if joined else 0)
    count = world if world is not None else (dist.get_world_size() if joined else 1)
    if not 0 <= own < count:
        raise RuntimeFailure(f"rank {own} of {count} processes; ranks go from 0 to {count - 1}")
    return Share(own, count)


class PlanSampler(DistributedSampler[Any]):
    """The samples of one process in every epoch, for `DataLoader(dataset, batch_size, sampler=...)`.

    All processes together visit every sample once per epoch, in an order drawn from `seed` and the epoch; each gets
    equally many, as processes have to take as many steps. Where samples do not divide evenly the first ones of the
    epoch are visited again, or with `drop_last` the last ones are left out. It is torch's DistributedSampler, told by
    the plan who shares what: call `set_epoch` before every epoch. `batch_size` is per process. In one process all
    samples come, in the order drawn; batches of `batch_size` x processes there are the same sets of samples.

    Args:
        dataset: anything with a length.
        plan, rank, world_size, same_within_group: as for `shard_dataset`.
        shuffle: draw another order every epoch; else the dataset's own.
        seed: of those orders; the same in every process.
        drop_last: leave out what does not divide evenly instead of visiting some samples twice.

    Raises:
        PlanError: as for `shard_dataset`.
        RuntimeFailure: as for `shard_dataset`, or the dataset has no length.
    """

    def __init__(
        self,
        dataset: Any,
        plan: Plan | str | Path | None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        same_within_group: bool = False,
    ) -> None:
        share = share_of(plan, rank=rank, world_size=world_size, same_within_group=same_within_group)
        if not hasattr(dataset, "__len__"):
            raise RuntimeFailure(f"{type(dataset).__name__} has no length to draw from; use parplan.shard_dataset")
        super().__init__(dataset, share.count, share.index, shuffle, seed, drop_last)
        self.share = share


def shard_dataset(
    dataset: Any,
    plan: Plan | str | Path | None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    drop_last: bool = False,
    same_within_group: bool = False,
) -> Any:
    """This process's part of a dataset: every k-th item; in one process the dataset itself.

    All parts together are the dataset, and they are equally long: where items do not divide evenly the first ones are
    in two parts, or with `drop_last` the last ones in none. A part stays the same over epochs; `PlanSampler` draws
    another one every epoch.

    With `same_within_group` the processes that hold the shards of one replica of the plan's first layer get the same
    part, and the parts of all replicas make up the dataset; compile with `inputs="group"` then, so that the model takes
    them as the same samples and gathers nothing. By default no sample is read twice, and the shards of a layer see the
    same samples because the runtime brings them there.

    Args:
        dataset: with a length and items by index (a tensor too), or iterable. An iterable one is to give the same items
            in every process, and in every worker of a DataLoader: each takes its own of them.
        plan: the plan that the model runs, or its file; `model.plan` of a compiled model.
        rank, world_size: default: of the process group, else one process.

    Raises:
        PlanError: there is no plan yet, it is for another number of processes, or (`same_within_group`) its first layer
            is not on all devices.
        RuntimeFailure: torchrun started several processes which have not joined, or the dataset has neither items by
            index and a length, nor can be iterated.
    """
    share = share_of(plan, rank=rank, world_size=world_size, same_within_group=same_within_group)
    by_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not by_index and not hasattr(dataset, "__iter__"):
        raise RuntimeFailure(
            f"{type(dataset).__name__} cannot be split: it has neither __getitem__ and __len__, nor __iter__"
        )
    if share.count == 1:
        return dataset
    if by_index and not isinstance(dataset, IterableDataset):
        return _Items(dataset, share, drop_last)
    return _Stream(dataset, share, drop_last)


class _Part:
    """Every k-th item of a dataset; as many for every part."""

    def __init__(self, dataset: Any, share: Share, drop_last: bool) -> None:
        self.dataset, self.share, self._drop_last = dataset, share, drop_last

    def __len__(self) -> int:
        """Number of items, for all workers of a DataLoader together.

        Raises:
            TypeError: the dataset does not know its length.
        """
        items = len(self.dataset)
        return items // self.share.count if self._drop_last else -(-items // self.share.count)


class _Items(_Part, Dataset[Any]):
    """Every k-th item of a dataset that has them by index."""

    def __getitem__(self, index: int) -> Any:
        size = len(self)
        at = index + size if index < 0 else index
        if not 0 <= at < size:
            raise IndexError(f"item {index} of {size}")
        return self.dataset[(at * self.share.count + self.share.index) % len(self.dataset)]


class _Stream(_Part, IterableDataset[Any]):
    """Every k-th item of a dataset that is iterated over.

    Items come in rounds, one for each part; workers of a DataLoader take turns at rounds, so that the parts are equally
    long for each worker too.
    """

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        own, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        count, items = self.share.count, iter(self.dataset)
        first: list[Any] = []
        for number in itertools.count():
            items_of_round = list(islice(items, count))
            first = first or items_of_round
            missing = count - len(items_of_round)
            if not items_of_round or (missing and self._drop_last):
                return
            if number % workers == own:
                yield [*items_of_round, *islice(cycle(first), missing)][self.share.index]
