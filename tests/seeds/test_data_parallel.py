"""What users of nn.DataParallel rely on: devices, nested inputs, buffers, hooks, numbers, packed sequences, parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import parplan
from examples.seeds import data_parallel as example
from parplan.cost_models.measurement.runnable_parts import LayerPart
from parplan.errors import CaptureError, PlanError, RuntimeFailure
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer
from parplan.plan import Plan, Scheme, Strategy
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import compiled, differences, outcome, planner, spread
from tests.runtime.nets import conv_net, mlp

# Hooks here are meant to see one replica's samples.
pytestmark = pytest.mark.filterwarnings("ignore::parplan.errors.ReplicaHookWarning")

TWO = (0, 1)


def rows(samples: int = 6) -> Tensor:
    return torch.randn(samples, 6, dtype=torch.float64)


# --- device_ids, output_device, dim ----------------------------------------------------------


def test_device_ids_are_devices_and_results_go_to_the_output_device() -> None:
    model = parplan.compile(mlp(), devices=["cpu", "cpu"], output_device="cpu")
    assert model.device_count == 2
    assert model(rows()).device == torch.device("cpu")


@pytest.mark.gpu
def test_results_go_to_the_output_device_from_inputs_anywhere() -> None:
    plain = mlp()
    model = Compiled(plain, planner(spread(2, "data"), 2), devices=["cuda:0", "cpu"], output_device="cpu")
    x = rows()
    for place in ("cpu", "cuda:0"):
        torch.testing.assert_close(model(x.to(place)), plain(x), rtol=1e-9, atol=1e-9)


# --- inputs ----------------------------------------------------------------------------------


class Nest(nn.Module):
    """Takes what people pass: tuples, lists, dicts, and things that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, pair: tuple[Tensor, list[Tensor]], named: Mapping[str, Any], *, word: str) -> dict[str, Any]:
        """Sums, and what was shared."""
        total = self.net(pair[0]) + self.net(pair[1][0]) * named["scale"]
        return {"total": total, "list": [total * 2, named["nothing"]], "word": word}


def test_nested_inputs_are_cut_and_what_is_no_tensor_is_shared() -> None:
    plain = Nest()
    model = compiled(plain, spread(2, "data"), 2)

    def call(module: nn.Module) -> Callable[..., Any]:
        return lambda a, b: module((a, [b]), {"scale": 0.5, "nothing": None}, word="shared")

    a, b = rows(), rows()
    assert differences(outcome(model, call(model), a, b), outcome(plain, call(plain), a, b)) == {}
    result = call(model)(a, b)
    assert result["word"] == "shared"
    assert result["list"][1] is None


# --- buffers of the first device -------------------------------------------------------------


def test_the_first_replicas_running_statistics_are_recorded() -> None:
    plain = conv_net()
    model = compiled(plain, spread(2, "data"), 2, batch_norm="local")
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    model(x)
    plain(x[:3])
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=1e-9, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_keeps_its_vectors(norm: Callable[[nn.Module], nn.Module]) -> None:
    plain = nn.Sequential(norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 4)).double()
    model = compiled(plain, spread(2, "data"), 2)
    for _ in range(2):
        x = rows()
        assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}


# --- hooks -----------------------------------------------------------------------------------

Log = list[tuple[Any, ...]]


class Block(nn.Module):
    """A block, a layer, and code around them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """(N, 6) to (N, 4)."""
        result: Tensor = self.last(self.block(x)) * scale
        return result


def watch(model: Block) -> Log:
    """Hooks of all four kinds on the root, a container and two layers; what they were given."""
    log: Log = []
    for name, module in (("", model), ("block", model.block), ("block.0", model.block[0]), ("last", model.last)):
        _hooks(name, module, log)
    return log


def _hooks(name: str, module: nn.Module, log: Log) -> None:
    def before(_: nn.Module, args: Any) -> None:
        log.append((name, "before", args[0].detach().clone()))

    def after(_: nn.Module, args: Any, result: Tensor) -> None:
        log.append((name, "after", args[0].detach().clone(), result.detach().clone()))

    def back_before(_: Any, taken: Any) -> None:
        log.append((name, "back before", taken[0].clone()))

    def back(_: nn.Module, given: Any, taken: Any) -> None:
        log.append((name, "back", given[0].clone(), taken[0].clone()))

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    module.register_full_backward_pre_hook(back_before)
    module.register_full_backward_hook(back)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("kind", ["data", "hybrid", "one"])
def test_every_hook_is_called_once_per_replica_with_its_own_tensors(kind: str, threads: bool) -> None:
    plain = Block().double()
    inner = copy.deepcopy(plain)
    wanted, found = watch(plain), watch(inner)
    model = Compiled(inner, planner(spread(2, kind), 2), devices=["cpu"] * 2, threads=threads)
    for _ in range(2):
        x = rows()
        wanted.clear()
        found.clear()
        assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}
        replicas = 1 if kind == "one" else 2
        for name, what, *tensors in wanted:
            own = [entry[2:] for entry in found if entry[:2] == (name, what)]
            assert len(own) == replicas
            # Together the replicas have seen what the plain model's hook saw.
            for index, tensor in enumerate(tensors):
                parts = sorted((part[index] for part in own), key=lambda part: _distance(part, tensor))
                torch.testing.assert_close(torch.cat(parts), tensor, rtol=1e-9, atol=1e-9)


def _distance(part: Tensor, whole: Tensor) -> float:
    """Zero for the first replica's part: threads come in any order."""
    return (part[0] - whole[0]).abs().max().item()


def threefold(module: nn.Module, gradients: Any, *_: Any) -> Any:
    """Three times the gradient a hook is given."""
    return (gradients[0] * 3,)


def test_hooks_may_change_what_they_are_given() -> None:
    def change(model: Block) -> Block:
        model.block.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model.block.register_forward_hook(lambda module, args, kwargs, result: result.sin(), with_kwargs=True)
        model.block[0].register_full_backward_pre_hook(threefold)
        model.last.register_full_backward_hook(threefold)
        return model

    plain = change(Block().double())
    model = Compiled(copy.deepcopy(plain), planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    x = rows()
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}


def test_hooks_see_whole_tensors_of_a_layer_that_is_cut() -> None:
    shapes: list[torch.Size] = []
    net = Block().double()
    net.last.register_forward_hook(lambda module, args, result: shapes.append(result.shape))
    cut = {"last": Strategy(1, 2, "out-features", TWO)}
    model = Compiled(net, planner(cut, 2), devices=["cpu"] * 2)
    model(rows())
    assert shapes == [(6, 4)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(("scheme", "calls"), [("gather", [6]), ("broadcast", [3, 3]), ("interleave", [2, 4])])
def test_hooks_are_called_once_per_pass(scheme: str, calls: list[int], threads: bool) -> None:
    """Two replicas of the first layer, one of the last; as many samples in each pass as the scheme says."""
    forward: list[int] = []
    backward: list[int] = []
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    inner = copy.deepcopy(plain)
    inner[1].register_forward_hook(lambda module, args, result: forward.append(len(result)))
    inner[1].register_full_backward_hook(lambda module, given, taken: backward.append(len(shape_of_first(taken))))

    def plan(graph: LayerGraph) -> Plan:
        wide = {name: Strategy(2, 1, None, TWO) for name in graph.layers}
        narrow = {name: Strategy(1, 2, "out-features", TWO) if name == "1" else Strategy() for name in graph.layers}
        chosen = {name: wide[name] if name == "0" else narrow[name] for name in graph.layers}
        return Plan(graph.model, graph.fingerprint, 6, 2, chosen, scheme=Scheme(scheme))

    model = Compiled(inner, plan, devices=["cpu"] * 2, threads=threads)
    x = rows()
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}
    assert len(forward) == len(backward) == len(calls)
    assert sorted(forward) == sorted(calls)


def test_hooks_may_come_and_go() -> None:
    calls: list[int] = []
    net = mlp()
    model = Compiled(net, planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    model(rows())
    handle = net[2].register_forward_hook(lambda module, args, result: calls.append(len(result)))
    more = net[2].register_forward_hook(lambda module, args, result: calls.append(-1))
    model(rows())
    assert calls == [3, -1, 3, -1]
    more.remove()
    model(rows())
    handle.remove()
    model(rows())
    assert calls == [3, -1, 3, -1, 3, 3]


def shape_of_first(gradients: Any) -> torch.Size:
    shape: torch.Size = gradients[0].shape
    return shape


def test_hooks_of_the_compiled_model_itself_are_called_once_per_call() -> None:
    seen: list[torch.Size] = []
    model = compiled(mlp(), spread(2, "data"), 2)
    model.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    model.register_full_backward_hook(lambda module, given, taken: seen.append(shape_of_first(taken)))
    model(rows().requires_grad_()).sum().backward()
    assert seen == [(6, 4), (6, 4)]


def test_capture_calls_no_hook_and_leaves_them_as_they_were() -> None:
    calls: list[str] = []
    net = mlp()
    net[0].register_forward_hook(lambda module, args, result: calls.append("hook"))
    before = dict(net[0]._forward_hooks)
    Compiled(net, planner(spread(2, "data"), 2), devices=["cpu"] * 2).prepare(rows())
    assert calls == []
    assert dict(net[0]._forward_hooks) == before
    net(rows())
    assert calls == ["hook"]


def test_hooks_in_a_model_with_ops_that_are_not_in_the_table() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.net(x) + torch.linspace(0, 1, 4, dtype=x.dtype)
            return result

    calls: list[int] = []
    plain = Odd()
    inner = copy.deepcopy(plain)
    inner.net[0].register_forward_hook(lambda module, args, result: calls.append(len(result)))
    model = Compiled(inner, planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    x = rows()
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}
    assert calls == [3, 3]


def test_what_a_hook_keeps_has_no_way_back_and_says_so() -> None:
    kept: list[Tensor] = []
    net = mlp()
    net[0].register_forward_hook(lambda module, args, result: kept.append(result))
    model = Compiled(net, planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    model(rows())
    with pytest.raises(RuntimeFailure, match="Return the tensor from forward"):
        kept[0].sum().backward()


def test_a_hook_that_changes_shapes_is_refused() -> None:
    net = mlp()
    net[0].register_forward_hook(lambda module, args, result: result[:, :3])
    model = Compiled(net, planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    with pytest.raises(RuntimeFailure, match=r"0: a forward hook returned tensors of shapes \[\(3, 3\)\]"):
        model(rows())


def test_hooks_of_the_old_kind_are_refused() -> None:
    net = mlp()
    net[0].register_backward_hook(lambda module, given, taken: None)
    with pytest.raises(CaptureError, match="use register_full_backward_hook"):
        Compiled(net, planner(spread(2, "data"), 2), devices=["cpu"] * 2)(rows())


def test_backward_hooks_need_one_number_of_replicas_at_both_ends() -> None:
    net = Block().double()
    net.block.register_full_backward_hook(lambda module, given, taken: None)
    table = {name: Strategy(2, 1, None, TWO) for name in ("block.pre_hooks", "block.0")}
    with pytest.raises(PlanError, match=r"block\.hooks: 1 replicas, but 2"):
        Compiled(net, planner(table, 2), devices=["cpu"] * 2)(rows())


# --- results that are one number -------------------------------------------------------------


class Loss(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(self.net(x), y)


def test_a_number_becomes_a_vector_with_one_entry_per_device() -> None:
    plain = Loss()
    model = compiled(plain, spread(3, "data"), 3, scalars="per_replica")
    x, y = rows(), torch.randn(6, 4, dtype=torch.float64)
    wanted = torch.stack([plain(*part) for part in zip(x.chunk(3), y.chunk(3), strict=True)])
    torch.testing.assert_close(model(x, y), wanted, rtol=1e-9, atol=1e-9)


# --- packed sequences ------------------------------------------------------------------------


class Reader(nn.Module):
    """Packs, runs recurrent layers, unpacks."""

    def __init__(self, kind: Callable[..., nn.RNNBase], batch_first: bool, total: bool = True, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)
        self.first = kind(4, 6, batch_first=batch_first, **options)
        width = (self.first.proj_size or 6) * (2 if self.first.bidirectional else 1)
        self.second = nn.GRU(width, 5, batch_first=batch_first)
        self.out = nn.Linear(5, 3)
        self.batch_first = batch_first
        self.total = total

    def forward(self, words: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [samples, time, 3], the second layer's last state, and the lengths."""
        x = self.words(words if self.batch_first else words.t())
        packed = pack_padded_sequence(x, lengths, batch_first=self.batch_first, enforce_sorted=False)
        packed, _ = self.first(packed)
        packed, state = self.second(packed)
        total = words.shape[1] if self.total else None
        result, sizes = pad_packed_sequence(packed, batch_first=True, padding_value=-1.0, total_length=total)
        return self.out(result), state.transpose(0, 1), sizes


READERS: dict[str, Callable[[], Reader]] = {
    "lstm": lambda: Reader(nn.LSTM, True),
    "gru in two directions, time first": lambda: Reader(nn.GRU, False, bidirectional=True),
    "rnn of two layers": lambda: Reader(nn.RNN, True, num_layers=2),
    "lstm with a projection": lambda: Reader(nn.LSTM, True, proj_size=3),
}
LENGTHS = torch.tensor([3, 7, 1, 5, 4])  # the longest sample is on the first device


@pytest.mark.full
@pytest.mark.parametrize("reader", READERS)
def test_packed_sequences_with_total_length(reader: str) -> None:
    plain = READERS[reader]().double()
    model = compiled(plain, spread(2, "data"), 2)
    words = torch.randint(20, (5, 7))
    assert differences(outcome(model, model, words, LENGTHS), outcome(plain, plain, words, LENGTHS)) == {}
    assert model.plan is not None
    assert model.plan.layers["first"].replicas == 2


def test_packed_sequences_from_a_given_state() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(6, 4, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor, h: Tensor, c: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            state = h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()
            result, _ = self.cells(packed, state)
            return pad_packed_sequence(result, batch_first=True, total_length=x.shape[1] + 2)[0]

    plain = Given().double()
    model = compiled(plain, spread(2, "data"), 2)
    x, h, c = torch.randn(5, 7, 6), torch.randn(5, 1, 4), torch.randn(5, 1, 4)
    args = (x.double(), LENGTHS, h.double(), c.double())
    assert differences(outcome(model, model, *args), outcome(plain, plain, *args)) == {}


def test_unpacking_without_total_length_is_refused_with_what_to_write() -> None:
    model = compiled(Reader(nn.LSTM, True, total=False), spread(2, "data"), 2)
    with pytest.raises(CaptureError, match=r"give total_length=x\.size\(1\)"):
        model(torch.randint(20, (5, 7)), LENGTHS)


def test_looking_into_a_packed_sequence_is_refused() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            result: Tensor = self.net(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False).data)
            return result

    with pytest.raises(CaptureError, match="reads 'data' of a packed sequence"):
        compiled(Looks(), spread(2, "data"), 2)(torch.randn(5, 7, 6, dtype=torch.float64), LENGTHS)


def test_hooks_that_would_see_a_packed_sequence_are_refused() -> None:
    net = Reader(nn.LSTM, True)
    net.first.register_forward_hook(lambda module, args, result: None)
    with pytest.raises(CaptureError, match="first has hooks, and takes or returns a packed sequence"):
        compiled(net, spread(2, "data"), 2)(torch.randint(20, (5, 7)), LENGTHS)


def test_packed_layers_and_hooks_can_be_timed_by_themselves() -> None:
    net = Reader(nn.LSTM, True)
    net.out.register_forward_hook(lambda module, args, result: None)
    graph = capture(net, (torch.randint(20, (4, 7)), torch.tensor([1, 7, 2, 3])))
    for name in ("first", "out.hooks"):
        layer = graph.layers[name]
        piece = LayerPart.of(graph, LocalLayer(layer, Strategy(2, 1, None, TWO), 0, 2), torch.device("cpu"))
        shapes = [graph.values[value].shape for value in layer.outputs]
        assert [len(result.shape) for result in piece.code(*piece.fresh_inputs())] == [len(shape) for shape in shapes]


def test_packing_outside_of_a_captured_model_is_torchs_own() -> None:
    plain = Reader(nn.LSTM, True)
    compiled(plain, spread(2, "data"), 2)(torch.randint(20, (5, 7)), LENGTHS)
    packed = pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    assert packed.data.shape == (5, 4)
    assert plain.first(packed)[0].data.shape == (5, 6)


# --- only a part of a model ------------------------------------------------------------------


def test_a_wrapped_part_is_trained_by_one_optimizer_and_saved_under_its_own_names() -> None:
    plain = Block().double()
    whole = copy.deepcopy(plain)
    names = list(whole.state_dict())
    whole.block = Compiled(whole.block, planner(spread(2, "hybrid"), 2), devices=["cpu"] * 2)  # type: ignore[assignment]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (whole, plain)]
    for _ in range(3):
        x = rows()
        for model, optimizer in zip((whole, plain), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert list(whole.state_dict()) == names
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(whole.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)
    fresh = Block().double()
    whole.load_state_dict(fresh.state_dict())
    x = rows()
    torch.testing.assert_close(whole.eval()(x), fresh(x), rtol=1e-9, atol=1e-9)
    assert not whole.block.module.training  # type: ignore[union-attr]


def test_loading_into_a_wrapped_part_names_what_is_wrong() -> None:
    whole = Block()
    whole.block = Compiled(whole.block, planner(spread(2, "data"), 2), devices=["cpu"] * 2)  # type: ignore[assignment]
    state = whole.state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        whole.load_state_dict({**state, "block.0.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "block\.9"'):
        whole.load_state_dict({**state, "block.9": torch.zeros(1)})
    del state["block.0.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "block\.0\.bias"'):
        whole.load_state_dict(state)


def test_a_model_with_a_wrapped_part_can_be_compiled_whole() -> None:
    plain = Block().double()
    whole = copy.deepcopy(plain)
    whole.block = Compiled(whole.block, planner(spread(2, "data"), 2), devices=["cpu"] * 2)  # type: ignore[assignment]
    model = Compiled(whole, planner(spread(3, "data"), 3), devices=["cpu"] * 3)
    x = rows()
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}
    assert model.plan is not None
    assert model.plan.layers["block.0"].replicas == 3


def test_attributes_of_the_module_are_found_on_the_compiled_model() -> None:
    net = Block()
    model = Compiled(net, planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    assert model.last is net.last
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = model.other


# --- the example program ---------------------------------------------------------------------


def test_the_example_program_gives_the_plain_models_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    example.main([])
    lines = capsys.readouterr().out.splitlines()
    compared = [line for line in lines if line.endswith(" from the plain model")]
    assert len(compared) == 6
    assert all(float(line.split(": ")[1].split()[0]) < 1e-9 for line in compared)
    assert sum(line.startswith("the hook on block was called") for line in lines) == 1


@pytest.mark.full
def test_the_example_program_fails_when_numbers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "ROUNDING", -1.0)
    with pytest.raises(SystemExit, match="that is more than"):
        example.main([])
