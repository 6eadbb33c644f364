"""What the runtime expects of torch beyond its documentation."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed._checkpointable import _Checkpointable
from torch.distributed.checkpoint import state_dict as checkpoint_states
from torch.overrides import TorchFunctionMode

from parplan.graph.export.stand_ins import DataDetached
from parplan.runtime.compat import (
    FOREACH_CLASSES,
    WeakGroup,
    as_subclass_with_dispatch,
    become,
    before_optimizer_state,
    default_store,
    gradient_hooks,
    group_timeout,
    in_backward,
    keeps_graph,
    loaded_metadata,
    local_ops_only,
    memory_in_use,
    read_all,
    release_destroyed_group,
    replace_given_data,
    state_by_block,
    support_foreach,
    tensors_of_memory,
    version,
    without_tensor_hooks,
    without_weak_references,
    wrapper_tensor,
    write_counter,
    writes,
)
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor


def test_a_version_changes_when_the_tensor_is_written() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    marks = [version(parameter)]
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones(3)
    optimizer.step()
    marks.append(version(parameter))
    with torch.no_grad():
        parameter.detach()[1:].zero_()  # through a view
    marks.append(version(parameter))
    kept = parameter.data
    parameter.data = torch.ones(3)  # given other memory
    marks.append(version(parameter))
    assert kept.tolist() == [-1.0, 0.0, 0.0]
    assert len(set(marks)) == 4
    assert version(parameter) == marks[-1]


class _Asks(torch.autograd.Function):
    answers: list[bool] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Asks.answers.append(keeps_graph())
        return gradient


@pytest.mark.parametrize("keep", [True, False])
def test_a_backward_knows_whether_its_graph_is_kept(keep: bool) -> None:
    _Asks.answers.clear()
    x = torch.ones(1, requires_grad=True)
    y: Tensor = _Asks.apply(x)  # type: ignore[no-untyped-call]
    y.backward(retain_graph=keep)
    assert _Asks.answers == [keep]


def test_a_hook_knows_that_it_is_called_within_a_backward() -> None:
    x, told = torch.ones(1, requires_grad=True), [in_backward()]
    x.register_hook(lambda gradient: told.append(in_backward()))
    x.exp().backward()
    assert [*told, in_backward()] == [False, True, False]


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizers_step_changes_the_version_of_its_parameters(fused: bool) -> None:
    """Copies in other memories are brought up to date by it; torch does not count what fused optimizers write."""
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        parameter = nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        optimizer = kind([parameter], lr=0.1, fused=fused)
        before = version(parameter)
        optimizer.step()
        assert version(parameter) != before, kind


class _Half(torch.Tensor):
    """Answers every op with its name."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        cls.seen.append(func.overloadpacket.__name__)
        return args[0] if func.overloadpacket.__name__ == "mul_" else torch.zeros(2)


local_ops_only(_Half)


def test_a_wrapper_has_a_shape_without_memory_and_answers_ops_itself() -> None:
    wrapper = wrapper_tensor(_Half, (4, 2), torch.zeros(2, 2, dtype=torch.float64))
    assert (wrapper.shape, wrapper.dtype, wrapper.numel(), wrapper.is_leaf) == ((4, 2), torch.float64, 8, True)
    _Half.seen.clear()
    wrapper.mul_(2)
    torch.linalg.vector_norm(wrapper)
    assert type(wrapper.data) is Tensor
    assert _Half.seen == ["mul_", "linalg_vector_norm", "detach"]
    view = as_subclass_with_dispatch(_Half, torch.ones(3))
    view.sum()
    assert _Half.seen[-1] == "sum"


class _Calls(TorchFunctionMode):
    """Notes which calls are those of `tensor.data`, as seen from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        data: Any = Tensor.data
        self.seen += [name for name, call in (("get", data.__get__), ("set", data.__set__)) if func == call]
        return func(*args, **(kwargs or {}))


def test_data_is_replaced_as_a_tensor_is_given_it_and_modes_see_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "data" not in vars(Tensor)  # but torch's own, of a class below, until a process cuts parameters
    monkeypatch.setattr(Tensor, "data", Tensor.data)  # to be taken away after this test
    wrapper = wrapper_tensor(_Half, (2,), torch.zeros(2))
    replace_given_data(lambda tensor, value: torch.ones(len(tensor)) if value is wrapper else value)
    parameter, other = nn.Parameter(torch.zeros(2)), torch.full((2,), 5.0)
    kept = parameter.data
    parameter.data = wrapper
    assert (kept.tolist(), parameter.tolist(), parameter.requires_grad) == ([0.0, 0.0], [1.0, 1.0], True)
    parameter.data = other
    assert parameter.data_ptr() == other.data_ptr()
    with _Calls() as calls:
        parameter.data = parameter.data * 2
        parameter.data = wrapper
    assert (calls.seen, parameter.tolist()) == (["get", "set", "set"], [1.0, 1.0])
    with DataDetached():
        parameter.data *= 3  # type: ignore[misc]
    assert parameter.tolist() == [3.0, 3.0]
    with pytest.raises(TypeError):
        parameter.data = None  # type: ignore[assignment]


def test_a_memory_is_in_use_as_long_as_a_tensor_uses_it() -> None:
    tensor = torch.zeros(3)
    in_use = memory_in_use(tensor)
    other = tensor.detach()
    del tensor
    assert in_use()
    other.data = torch.zeros(3)
    assert not in_use()


def test_a_parameter_becomes_another_one_in_place() -> None:
    parameter, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    calls: list[str] = []
    handles = [
        parameter.register_hook(lambda gradient: calls.append("gradient")),
        parameter.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated")),
    ]
    become(parameter, other)
    assert parameter.shape == (2, 2)
    parameter.sum().backward()
    optimizer.step()
    assert parameter.tolist() == [[-1.0, -1.0], [-1.0, -1.0]]
    for handle in handles:
        handle.remove()
    parameter.sum().backward()
    assert calls == ["gradient", "accumulated"]


@pytest.mark.parametrize("obstacle", [weakref.ref, lambda p: (p * p).sum()], ids=["weak reference", "graph"])
def test_a_parameter_that_is_in_use_does_not_become_another_one(obstacle: Any) -> None:
    parameter = nn.Parameter(torch.ones(3))
    held = obstacle(parameter)
    with pytest.raises(RuntimeError, match=r"weakref|use_count"):
        become(parameter, nn.Parameter(torch.zeros(2)))
    assert parameter.shape == (3,)
    del held


def test_recurrent_layers_work_without_their_weak_references_and_get_them_back() -> None:
    layer = nn.LSTM(3, 2)
    module, weight = nn.Sequential(layer, nn.Identity()), layer.weight_ih_l0
    assert isinstance(weight, nn.Parameter)
    with without_weak_references(module):
        assert not weakref.getweakrefcount(weight)
        become(weight, nn.Parameter(torch.zeros(8, 3)))
    assert copy.deepcopy(layer)(torch.ones(1, 3))[0].shape == (1, 2)
    assert weakref.getweakrefcount(weight) == 1


def test_optimizers_and_clipping_take_a_class_for_their_foreach_forms() -> None:
    support_foreach(_Half)
    support_foreach(_Half)
    for types in FOREACH_CLASSES:
        assert types.count(_Half) == 1
        assert Tensor in types
        types.remove(_Half)


def test_writes_are_counted() -> None:
    tensor = torch.zeros(2)
    before = writes(tensor)
    tensor.add_(1)
    torch.autograd.graph.increment_version(tensor)
    assert writes(tensor) == before + 2


@pytest.fixture
def lone_process() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lone_process")
def test_a_process_group_tells_its_timeout() -> None:
    assert group_timeout(None) == timedelta(seconds=77)
    assert group_timeout(dist.new_group([0], timedelta(seconds=5))) == timedelta(seconds=5)


@pytest.mark.usefixtures("lone_process")
def test_a_weak_group_goes_with_its_group() -> None:
    group = dist.new_group([0])
    own, default = WeakGroup(group), WeakGroup(None)
    assert own() is group
    assert default() is None
    dist.destroy_process_group()
    assert own() is group  # held here
    del group
    with pytest.raises(RuntimeError, match="process group is destroyed"):
        own()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


@pytest.mark.usefixtures("lone_process")
def test_the_default_group_that_torch_holds_is_released_once_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.distributed.nn.functional"
    monkeypatch.delitem(sys.modules, name, raising=False)  # a fresh one is imported here, and leaves with the test
    held = importlib.import_module(name)
    known = weakref.ref(dist.group.WORLD)
    assert inspect.signature(held.all_reduce).parameters["group"].default is known()
    release_destroyed_group()
    assert inspect.signature(held.all_reduce).parameters["group"].default is known()  # in use
    dist.destroy_process_group()
    assert known() is not None
    release_destroyed_group()
    assert inspect.signature(held.all_reduce).parameters["group"].default is None
    assert known() is None
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


@pytest.mark.usefixtures("lone_process")
def test_the_store_of_the_default_group_is_found() -> None:
    store = default_store()
    store.set("a", "1 2")
    assert read_all(store, ["a"]) == [b"1 2"]
    assert [store.compare_set("b", "", text) for text in ("first", "second")] == [b"first"] * 2
    assert [store.check([key]) for key in ("b", "c")] == [True, False]
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="has not been initialized"):
        default_store()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def test_hooks_on_a_gradient_are_found() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert gradient_hooks(parameter) == []

    def hook(gradient: Tensor) -> None: ...

    handles = [parameter.register_hook(hook), parameter.register_post_accumulate_grad_hook(hook)]
    assert gradient_hooks(parameter) == [hook, hook]
    for handle in handles:
        handle.remove()
    assert gradient_hooks(parameter) == []


class _Module(nn.Module):
    """Keeps what it was asked for when its state is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.by_block: list[bool] = []

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.by_block.append(state_by_block())
        return super().state_dict(*args, **kwargs)


def test_torch_distributed_checkpoint_is_noticed() -> None:
    module = _Module()
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    optimizer.register_state_dict_pre_hook(lambda optimizer: module.by_block.append(state_by_block()))
    optimizer.state_dict()
    module.state_dict()
    assert module.by_block == [False, False]
    for full in (False, True):
        module.by_block.clear()
        checkpoint_states.get_state_dict(
            module, optimizer, options=checkpoint_states.StateDictOptions(full_state_dict=full)
        )
        assert module.by_block == [not full] * 2
    module.by_block.clear()
    checkpoint_states.get_model_state_dict(module)
    assert module.by_block == [True]


def test_a_sharded_tensor_has_what_torch_distributed_checkpoint_asks_for() -> None:
    wanted = {name for name in vars(_Checkpointable) if name.startswith("__create_") or name.startswith("__get_tensor")}
    assert wanted == {"__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"}
    for name in wanted:
        found = inspect.signature(getattr(ShardedTensor, name)), inspect.signature(getattr(_Checkpointable, name))
        assert list(found[0].parameters) == list(found[1].parameters)


def test_tensor_hooks_rest_and_come_back() -> None:
    parameter = nn.Parameter(torch.ones(2))
    calls: list[str] = []
    handle = parameter.register_hook(lambda gradient: calls.append("gradient"))
    parameter.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    with without_tensor_hooks([parameter]):
        parameter.sum().backward()
    assert calls == []
    parameter.sum().backward()
    assert calls == ["gradient", "accumulated"]
    handle.remove()
    parameter.sum().backward()
    assert calls == ["gradient", "accumulated", "accumulated"]


def test_a_write_counter_counts_the_writes_to_a_tensor_without_its_memory() -> None:
    tensor = torch.zeros(3)
    counter = write_counter(tensor)
    marks = [writes(counter)]
    tensor.add_(1)
    marks.append(writes(counter))
    tensor[1:].zero_()  # through a view
    marks.append(writes(counter))
    assert marks == [0, 1, 2]
    assert counter.untyped_storage().nbytes() == 0
    assert tensor.tolist() == [1.0, 0.0, 0.0]


def test_tensors_of_a_memory_are_counted() -> None:
    flat = torch.zeros(6)
    assert tensors_of_memory(flat) == 1
    parameter = nn.Parameter(torch.zeros(3))
    parameter.data = flat[:3]
    assert tensors_of_memory(parameter) == 2
    kept = parameter.detach()
    assert tensors_of_memory(parameter) == 3
    loss = (parameter * parameter).sum()  # which autograd keeps for the backward
    assert loss.requires_grad
    assert tensors_of_memory(kept) == 3
    del flat
    assert tensors_of_memory(parameter) == 2
    lstm = nn.LSTM(2, 3)
    assert {tensors_of_memory(weight) for weight in lstm.parameters()} == {1}


def test_optimizers_are_seen_before_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.Optimizer, "state_dict", torch.optim.Optimizer.state_dict)
    seen: list[object] = []
    before_optimizer_state(seen.append)
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.ones(2))])
    again = copy.deepcopy(optimizer)
    torch.testing.assert_close(again.state_dict(), optimizer.state_dict())
    assert seen == [again, optimizer]


def test_a_module_that_is_loaded_can_ask_what_the_state_says_of_others() -> None:
    found: list[Any] = []

    class Asks(nn.Linear):
        def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
            found.append(loaded_metadata())

    model = nn.Sequential(Asks(2, 2), nn.BatchNorm1d(2))
    assert loaded_metadata() == {}
    model.load_state_dict(model.state_dict(), strict=False)
    model.load_state_dict(dict(model.state_dict()), strict=False)
    assert found == [{"": {"version": 1}, "0": {"version": 1}, "1": {"version": 2}}, {}]
