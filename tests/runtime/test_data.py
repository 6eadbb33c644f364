"""Every sample once an epoch, over all processes, whatever the plan; and training with it gives the plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import parplan
from examples import train_digits
from parplan.errors import ParplanError
from parplan.plan import Plan, Strategy
from parplan.runtime.data import PlanSampler, Share, shard_dataset, share_of
from parplan.runtime.module.compiled import Compiled
from tests.runtime.ranks import run_case


def plan(replicas: int, shards: int = 1, devices: tuple[int, ...] | None = None) -> Plan:
    """Of a model that begins with one layer of so many replicas and shards, its devices in order if not said."""
    count = replicas * shards
    first = Strategy(replicas, shards, "out-features" if shards > 1 else None, devices or tuple(range(count)))
    total = max(count, 1 + max(first.devices))
    return Plan("Net", "0" * 16, 8, total, {"fc1": first, "fc2": Strategy(devices=(0,))})


class Stream(IterableDataset[int]):
    """The numbers below `items`, one after another."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        yield from range(self.items)


class Sized(Stream):
    """The same, and it says how many they are."""

    def __len__(self) -> int:
        return self.items


def listed(items: int) -> list[int]:
    return list(range(items))


DATASETS: dict[str, Callable[[int], Any]] = {"items": listed, "stream": Stream, "sized": Sized}

sizes = {"items": st.integers(1, 40), "world": st.integers(1, 6), "drop_last": st.booleans()}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(kind=st.sampled_from(sorted(DATASETS)), **sizes)
def test_parts_are_equally_long_and_make_up_the_dataset(kind: str, items: int, world: int, drop_last: bool) -> None:
    whole = DATASETS[kind](items)
    parts = [shard_dataset(whole, plan(world), rank=r, world_size=world, drop_last=drop_last) for r in range(world)]
    read = [list(part) for part in parts]
    each = items // world if drop_last else -(-items // world)
    assert [len(part) for part in read] == [each] * world
    if kind != "stream":
        assert [len(part) for part in parts] == [each] * world
    taken = sorted(item for part in read for item in part)
    first = [number % items for number in range(items, each * world)]
    assert taken == sorted(listed(each * world)[:items] + first)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 99), epoch=st.integers(0, 9), shuffle=st.booleans(), **sizes)
def test_an_epoch_visits_every_sample_once(
    seed: int, epoch: int, shuffle: bool, items: int, world: int, drop_last: bool
) -> None:
    def visited(rank: int) -> list[int]:
        sampler = PlanSampler(
            listed(items), plan(world), rank=rank, world_size=world, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        sampler.set_epoch(epoch)
        assert len(sampler) == len(list(sampler))
        assert list(sampler) == list(sampler)
        return list(sampler)

    each = items // world if drop_last else -(-items // world)
    read = [visited(rank) for rank in range(world)]
    assert [len(part) for part in read] == [each] * world
    taken = [item for part in read for item in part]
    if drop_last:
        assert len(set(taken)) == each * world
    else:
        assert set(taken) == set(listed(items))


def epochs(seed: int) -> list[list[int]]:
    sampler = PlanSampler(listed(50), plan(2), rank=1, world_size=2, seed=seed)
    found = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def test_orders_depend_on_seed_and_epoch_alone() -> None:
    assert epochs(3) == epochs(3)
    assert len({tuple(order) for seed in (3, 4) for order in epochs(seed)}) > 3


def loader(dataset: Any, batch: int, sampler: PlanSampler) -> DataLoader[Any]:
    return DataLoader(dataset, batch, sampler=sampler)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_global_batches_are_those_of_one_process(world: int) -> None:
    """In order, also of a last batch that is not full."""
    items, batch = listed(12 * world + 2 * world), 5
    samplers = [PlanSampler(items, plan(world), rank=rank, world_size=world, seed=9) for rank in range(world)]
    alone = loader(items, batch * world, PlanSampler(items, plan(world), seed=9))
    parts = [loader(items, batch, sampler) for sampler in samplers]
    together = [sorted(torch.cat(batches).tolist()) for batches in zip(*parts, strict=True)]
    assert together == [sorted(batch_alone.tolist()) for batch_alone in alone]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", sorted(DATASETS))
def test_workers_share_a_part(kind: str, workers: int) -> None:
    parts = [shard_dataset(DATASETS[kind](23), plan(2), rank=rank, world_size=2) for rank in range(2)]
    read = [torch.cat(list(DataLoader(part, 4, num_workers=workers))).tolist() for part in parts]
    assert sorted(read[0] + read[1]) == sorted([*range(23), 0])
    assert len(read[0]) == len(read[1]) == 12


@pytest.mark.parametrize("by_plan", [plan(1), plan(4), plan(1, 2)])
@pytest.mark.parametrize("dataset", [listed(5), Stream(5), torch.zeros(3, 2)], ids=["items", "stream", "tensor"])
def test_one_process_has_all_devices_and_the_whole_dataset(dataset: Any, by_plan: Plan) -> None:
    assert shard_dataset(dataset, by_plan) is dataset


# (replicas, shards, devices of the first layer, the part of every rank)
GROUPS = [
    (1, 2, None, [0, 0]),
    (2, 1, None, [0, 1]),
    (2, 2, None, [0, 0, 1, 1]),
    (2, 2, (0, 2, 1, 3), [0, 1, 0, 1]),
    (1, 4, None, [0, 0, 0, 0]),
]


@pytest.mark.parametrize(("replicas", "shards", "devices", "parts"), GROUPS)
def test_a_shard_group_may_read_the_same_samples(
    replicas: int, shards: int, devices: tuple[int, ...] | None, parts: list[int]
) -> None:
    by_plan, world = plan(replicas, shards, devices), len(parts)
    shares = [share_of(by_plan, rank=rank, world_size=world, same_within_group=True) for rank in range(world)]
    assert shares == [Share(part, replicas) for part in parts]
    read = [
        list(PlanSampler(listed(9), by_plan, rank=rank, world_size=world, same_within_group=True, drop_last=True))
        for rank in range(world)
    ]
    for rank, part in enumerate(parts):
        assert read[rank] == read[parts.index(part)]
    once = [sample for part in range(replicas) for sample in read[parts.index(part)]]
    assert len(once) == len(set(once)) == 9 // replicas * replicas


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_by_default_no_two_processes_read_the_same(replicas: int) -> None:
    by_plan = plan(replicas, 4 // replicas)
    read = [list(PlanSampler(listed(20), by_plan, rank=rank, world_size=4)) for rank in range(4)]
    assert sorted(sample for part in read for sample in part) == listed(20)


def test_a_plan_file_will_do(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan(2).to_json())
    assert list(shard_dataset(listed(4), tmp_path / "plan.json", rank=1, world_size=2)) == [1, 3]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"plan": None}, "there is no plan yet"),
    ({"plan": "missing.json"}, "cannot read the plan missing.json"),
    ({"plan": [1, 2]}, "list is no plan; give model.plan of a compiled model"),
    ({"plan": plan(4)}, "the plan is for 4 devices, here are 2 processes"),
    ({"rank": 2}, "rank 2 of 2 processes; ranks go from 0 to 1"),
    ({"world_size": None}, "rank and world_size belong together"),
    ({"dataset": object()}, "object cannot be split"),
    ({"dataset": plan(2), "world_size": 1}, "Plan cannot be split"),
    ({"plan": plan(1, 1, (1,)), "same_within_group": True}, "fc1, the first layer, is on 1 of 2 devices"),
]


@pytest.mark.parametrize(("wrong", "text"), REFUSED)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ParplanError, match=text):
        shard_dataset(**{"dataset": listed(4), "plan": plan(2), "rank": 0, "world_size": 2, **wrong})


def test_a_sampler_needs_a_length() -> None:
    with pytest.raises(ParplanError, match=r"Stream has no length to draw from; use parplan\.shard_dataset"):
        PlanSampler(Stream(4), plan(2), rank=0, world_size=2)


def test_processes_that_have_not_joined_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ParplanError, match="torchrun started 2 processes, which have not joined"):
        shard_dataset(listed(4), plan(2))


# -- training --

SAMPLES, BATCH, SEED = 60, 12, 5


def digits() -> TensorDataset:
    train, _ = train_digits.load(torch.float64, torch.device("cpu"))
    return TensorDataset(train.images[:SAMPLES], train.labels[:SAMPLES])


def network() -> nn.Module:
    torch.manual_seed(0)
    return train_digits.build().double()


def trained(model: nn.Module, batches: DataLoader[Any], sampler: PlanSampler) -> dict[str, Tensor]:
    """The model's state after two epochs of plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    state: dict[str, Tensor] = model.state_dict()
    return state


@cache
def compiled_once(inputs: str) -> Compiled:
    """With layers cut from the first one on, so that this has one replica."""
    pins = {"conv1": "shards:2", "fc3": "shards:2"}
    return parplan.compile(network(), torch.zeros(BATCH, 1, 8, 8, dtype=torch.float64), pins=pins, inputs=inputs)


def same_as_one_process(ranks: int, same_within_group: bool = False) -> None:
    """Training by a plan on all ranks gives the state of the plain model, trained on the same global batches."""
    compiled = compiled_once("group" if same_within_group else "own")
    compiled.load_state_dict(network().state_dict())
    sampler = PlanSampler(digits(), compiled.plan, seed=SEED, same_within_group=same_within_group)
    assert sampler.share.count == (1 if same_within_group else ranks)
    found = trained(compiled, loader(digits(), BATCH, sampler), sampler)
    alone = PlanSampler(digits(), compiled.plan, rank=0, world_size=1, seed=SEED)
    batch = BATCH * sampler.share.count
    wanted = trained(network(), loader(digits(), batch, alone), alone)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9)


def model_parallel(rank: int, ranks: int) -> None:
    same_as_one_process(ranks)


def the_same_in_a_group(rank: int, ranks: int) -> None:
    """Both ranks read the same samples, and the model takes them as the same."""
    same_as_one_process(ranks, same_within_group=True)


def parts_of_the_process_group(rank: int, ranks: int) -> None:
    mine = torch.tensor(list(shard_dataset(listed(7), plan(ranks))))
    everybody = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everybody, mine)
    assert sorted(torch.cat(everybody).tolist()) == [0, *range(7)]


CASES = {case.__name__: case for case in (model_parallel, the_same_in_a_group, parts_of_the_process_group)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_training_on_two_processes(case: str) -> None:
    run_case(CASES[case], 2)
