"""Captured models compute what the models compute: results, gradients and buffers, whole and in parts."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parplan.errors import CaptureError
from parplan.graph.capture.capture import batch_of, capture
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.plan import Strategy
from tests.graph.by_hand import assert_same_numbers, halves, run_by_hand, whole
from tests.graph.models import MODELS, Buffers, Residual, rand
from tests.torch_versions import only_before


def thirds(graph: LayerGraph, layer: Layer) -> Strategy:
    """Three shards of the first axis that allows it."""
    axis = next((axis.name for axis in layer.axes if axis.units % 3 == 0), None)
    return Strategy(1, 3, axis, (0, 1, 2)) if axis else Strategy()


def last_axis(graph: LayerGraph, layer: Layer) -> Strategy:
    """Two replicas by two shards of the last axis, where both are allowed."""
    axis = next((axis.name for axis in reversed(layer.axes) if axis.units % 2 == 0), None)
    replicas, shards = halves(graph, layer).replicas, 2 if axis else 1
    return Strategy(replicas, shards, axis, tuple(range(replicas * shards)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_same_numbers(name: str, training: bool) -> None:
    case = MODELS[name]()
    graph = capture(case.model, case.args, case.kwargs, training=training)
    for choose in (whole, halves, thirds, last_axis):
        assert_same_numbers(graph, case.model, case.args, case.kwargs, choose)


# --- what capture leaves alone ---------------------------------------------------------------


def test_nothing_of_a_capture_waits_for_the_garbage_collector() -> None:
    layer = nn.LSTM(4, 4)
    gc.disable()
    try:
        capture(layer, (torch.ones(3, 2, 4),), dim=1)
        layer._flat_weight_refs = []  # the layer's own weak references; parameters that have any cannot be cut
        assert weakref.getweakrefcount(layer.weight_ih_l0) == 0
    finally:
        gc.enable()


def test_nothing_of_the_model_changes_and_nothing_is_drawn() -> None:
    model = Residual().double()
    model.drop.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    capture(model, (rand_at(state, 6, 3, 8, 8),), training=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def rand_at(state: Tensor, *shape: int) -> Tensor:
    """Random values that leave the generator where it was."""
    value = rand(*shape)
    torch.set_rng_state(state)
    return value


def test_large_inputs_take_no_memory() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    images = torch.zeros(1, 4).expand(2**28, -1)  # 4 GiB if it were real
    capture(model, (torch.zeros(8, 4),))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = capture(model, (images,))
    assert graph.batch == 2**28
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


@pytest.mark.parametrize(
    ("leaves", "dim", "batch"),
    [
        ([rand(4, 2)], 0, 4),
        ([None, 3, rand(4, 2)], 1, 2),
        ([torch.tensor(1.0), rand(5)], 0, 5),
        ([torch.tensor(1.0)], 0, None),
        ([], 0, None),
        ([rand(4, 2)], None, None),
    ],
)
def test_the_batch_is_that_of_the_first_tensor_that_has_one(
    leaves: list[Any], dim: int | None, batch: int | None
) -> None:
    assert batch_of(leaves, dim) == batch


def test_an_input_that_has_no_room_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"no room for an input of shape \[1099511627776, 6\].*a smaller batch"):
        capture(Residual().double(), (torch.zeros(1, 6).expand(2**40, 6),))


def test_samples_may_lie_along_another_dimension() -> None:
    model = nn.Linear(4, 6).double()
    graph = capture(model, (rand(5, 8, 4),), dim=1)
    assert graph.batch == 8
    assert graph.batch_dims["x" if "x" in graph.values else "input"] == 1
    assert_same_numbers(graph, model, (rand(5, 8, 4),), None, halves)


def test_a_model_without_a_batch() -> None:
    graph = capture(nn.Softplus(), (torch.tensor(1.0),))
    assert graph.batch is None
    assert [layer.batch for layer in graph.layers.values()] == [None]


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore")
def test_a_sparse_tensor_is_refused_with_what_to_bring(layout: str) -> None:
    sparse = getattr(torch.eye(6), layout)()
    with pytest.raises(CaptureError, match=r"input 0, of shape \[6, 6\], is no dense tensor .*make it dense"):
        capture(nn.Linear(6, 2), (sparse,))
    model = nn.Linear(6, 2)
    model.register_buffer("adjacency", sparse)
    with pytest.raises(CaptureError, match=r"^adjacency, of shape"):
        capture(model, (torch.ones(6, 6),))


def test_a_tensor_that_has_the_batch_size_by_chance_is_shared() -> None:
    class Biased(nn.Module):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return (x @ x.new_ones(6, 6)) + bias

    graph = capture(Biased(), (rand(6, 6), rand(6)))
    assert graph.user_inputs == ("x", "bias")
    assert "bias" not in graph.batch_dims
    assert [layer.batch is not None for layer in graph.layers.values()] == [True]


# --- buffers, parameters, values -------------------------------------------------------------


@pytest.mark.full
def test_buffers_that_change_are_known() -> None:
    graph = capture(Buffers().double(), (rand(6, 6),))
    assert graph.buffers == {"b_steps": "steps", "b_average": "average", "b_last": "last"}
    assert graph.counters == {"b_steps": 1}
    assert set(graph.buffer_updates) == {"b_average", "b_last"}
    assert len(graph.constants) == 1


def test_batch_norm_updates_its_own_statistics() -> None:
    graph = capture(Residual().double(), (rand(6, 3, 8, 8),))
    counters = {graph.buffers[name]: step for name, step in graph.counters.items()}
    assert counters == {"bn1.num_batches_tracked": 1, "bn2.num_batches_tracked": 1}
    assert graph.buffer_updates == {}
    assert [name for name, layer in graph.layers.items() if layer.mixes_batch] == ["bn1", "bn2"]


@pytest.mark.full
def test_a_batch_norm_called_twice_updates_its_own_statistics_twice() -> None:
    case = MODELS["siamese"]()
    graph = capture(case.model, case.args)
    assert {graph.buffers[name]: step for name, step in graph.counters.items()} == {"encoder.1.num_batches_tracked": 2}
    assert graph.buffer_updates == {}
    for name in ("encoder.1", "encoder.1@1"):
        layer = graph.layers[name]
        assert [node.target for node in layer.nodes] == [torch.ops.aten.batch_norm.default]
        assert layer.batch is not None
        assert sorted(graph.buffers[name] for name in layer.buffers) == [
            "encoder.1.running_mean",
            "encoder.1.running_var",
        ]


class Ends(nn.Module):
    """Writes into a view, which takes the long way of functionalisation, and ends in a given layer."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        """(N, 6) to (N, 8)."""
        y = self.linear(x).clone()
        y[:, :2].add_(1.0)
        result: Tensor = self.last(y)
        return result


@pytest.mark.parametrize(
    ("last", "training", "op"),
    [
        (lambda: nn.Dropout(), True, torch.ops.aten.dropout.default),
        (lambda: nn.BatchNorm1d(8), True, torch.ops.aten.batch_norm.default),
        (lambda: nn.BatchNorm1d(8), False, torch.ops.aten.batch_norm.default),
    ],
)
def test_a_result_may_come_from_dropout_or_batch_norm(last: Callable[[], nn.Module], training: bool, op: Any) -> None:
    graph = capture(Ends(last()), (torch.zeros(4, 6),), training=training)
    (node,) = graph.layers["last"].nodes
    assert node.target is op
    assert graph.user_outputs == (node.name,)


def test_tied_parameters_share_one_placeholder() -> None:
    case = MODELS["tied"]()
    graph = capture(case.model, case.args)
    assert sorted(graph.parameters.values()) == ["embed.weight", "position"]
    (table,) = graph.layers["embed"].parameters
    assert graph.layers["head"].parameters == (table,)
    assert graph.parameter_count == 12 * 6 + 5 * 6


def test_gradients_flow_where_parameters_want_them() -> None:
    case = MODELS["frozen"]()
    graph = capture(case.model, case.args)
    unused = {"c.weight": False, "c.bias": False}
    wants = {graph.parameters[name]: graph.values[name].requires_grad for name in graph.parameters}
    assert wants == {"a.weight": False, "a.bias": False, "b.weight": True, "b.bias": False, **unused}
    outputs = {name: graph.values[layer.outputs[0]].requires_grad for name, layer in graph.layers.items()}
    assert outputs == {"a": False, "relu": False, "b": True, "relu_1": True}


def test_the_result_of_a_no_grad_region_carries_no_gradient() -> None:
    case = MODELS["no_grad"]()
    graph = capture(case.model, case.args)
    (goal,) = graph.layers["add"].outputs
    assert not graph.values[goal].requires_grad
    assert graph.values[graph.layers["tanh"].outputs[0]].requires_grad


class Autocast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.t()


@pytest.mark.full
def test_autocast_regions_are_captured_with_their_casts() -> None:
    model, x = Autocast(), torch.randn(4, 4)
    graph = capture(model, (x,))
    ran = run_by_hand(graph, model, (x,), {}, whole)
    assert ran.result.dtype is torch.bfloat16
    assert torch.equal(ran.result, model(x))


# --- refusals --------------------------------------------------------------------------------


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line the error names
            return x
        return -x


class Checked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Normal(x, 1.0, validate_args=True).mean


class ChangesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


class ChangesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.mul_(0.9)
        return x * self.w


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class WrongShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Any:
        return self.encoder(x.unsqueeze(-1).expand(-1, -1, 4), x @ x.mT)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Masked, r"encoder: nn\.Transformer looks at a mask's values to see whether it is causal; say so in the call"),
        (Branches, r"Branches cannot be captured: .*data-dependent(.|\n)*test_capture\.py:\d+: if x\.sum\(\) > 0"),
        (Branches, r"torch\.where"),
        pytest.param(
            Checked,
            r"torch\.distributions checks values of tensors; pass it validate_args=False\n  at .*Normal\(",
            marks=only_before((2, 15), "its export makes assertions of these checks"),
        ),
        (ChangesInput, r"changes 'x' in place; compute .*\n  at .*test_capture\.py:\d+: x\.add_\(1\)"),
        (ChangesParameter, r"the model changes 'w' in place; compute .*\n  at .*self\.w\.mul_\(0\.9\)"),
        (Conditional, r"holds a sub-graph, which parplan does not plan yet"),
        (WrongShape, r"WrongShape cannot be captured(.|\n)*test_capture\.py:\d+: return self\.fc\(x\)"),
        (WrongShape, r"\n  the forward itself fails on the example inputs; check their number, names, shapes"),
        (lambda: nn.Bilinear(4, 4, 2), r"captured: TypeError: missing a required argument: 'input2'\n  the forward"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_captured_is_refused_with_its_line(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    model.eval()
    with pytest.raises(CaptureError, match=message):
        capture(model, (torch.zeros(4, 4),))
    assert not model.training


def test_keyword_arguments_given_as_one_dict_are_told_apart() -> None:
    with pytest.raises(CaptureError, match=r"a dict among them is one argument: keyword arguments go into kwargs="):
        capture(WrongShape(), ({"x": torch.zeros(4, 3)},))


def test_keyword_arguments_that_the_forward_does_not_have_are_named() -> None:
    with pytest.raises(CaptureError, match=r"it has no argument zz, its arguments are input1, input2$"):
        capture(nn.Bilinear(4, 4, 2), (torch.zeros(4, 4),), {"zz": torch.zeros(4, 4)})


class SumsOverProcesses(nn.Module):
    """A sum over the batch that the forward adds up over processes itself, as codebooks' averages do."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum(0)
        dist.all_reduce(total)
        return x - total


def test_a_collective_in_the_forward_is_refused() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(CaptureError, match=r"calls a collective itself \(all_reduce\).*\n  at .*dist\.all_reduce"):
            capture(SumsOverProcesses(), (torch.zeros(4, 4),))
    finally:
        dist.destroy_process_group()


class FlagInBuffer(nn.Module):
    """A branch on a buffer, as codebooks that are initialised by their first samples have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("initted", torch.tensor([True]))

    def forward(self, x: Tensor) -> Tensor:
        if not self.initted:
            return x
        return x * 2


def test_a_branch_on_a_buffer_names_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), FlagInBuffer())
    with pytest.raises(CaptureError, match=r"captured: 1: a branch is data-dependent: the buffer 'initted' decides it"):
        capture(model, (torch.zeros(4, 4),))
