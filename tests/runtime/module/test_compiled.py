"""A compiled model in one process against the plain model, in float64: numbers, state, modes, and errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from parplan.errors import PlanError, RuntimeFailure
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.programs import captures
from tests.runtime.helpers import Rule, compiled, differences, outcome, planner, spread
from tests.runtime.nets import ConvNet, Nested, Tied, Towers, conv_net, mlp

NETS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "conv": conv_net, "tied": lambda: Tied().double()}
SHAPES = {"mlp": (6,), "conv": (3, 8, 8), "tied": (8,)}
LINEAR = ("data", "out-features", "in-features", "hybrid")
KINDS = {"mlp": LINEAR, "conv": (*LINEAR, "out-channels", "in-channels", "channels"), "tied": LINEAR}
PLANS = [(net, kind, devices) for net in NETS for kind in KINDS[net] for devices in (2, 3, 4)]


def batch(net: str, samples: int) -> Tensor:
    return torch.randn(samples, *SHAPES[net], dtype=torch.float64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("net", "kind", "devices"), [*PLANS, *((net, "one", 2) for net in NETS)])
def test_a_step_gives_the_plain_models_numbers(net: str, kind: str, devices: int) -> None:
    plain = NETS[net]()
    model = compiled(plain, spread(devices, kind), devices)
    for samples in (12, 5, 2):  # divisible, uneven, fewer than devices
        x = batch(net, samples)
        assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}


def test_towers_on_disjoint_devices() -> None:
    table = {name: Strategy(devices=(i % 3,)) for i, name in enumerate(("a1", "b1", "b2", "a2", "a3", "b3", "last"))}
    plain = Towers().double()
    model = compiled(plain, table, 3)
    x = torch.randn(4, 6, dtype=torch.float64)
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}


def test_nested_arguments_and_several_results() -> None:
    plain = Nested().double()
    model = compiled(plain, spread(2, "data"), 2)
    left, right = (torch.randn(4, width, dtype=torch.float64) for width in (4, 5))

    def call(module: nn.Module) -> Callable[..., Any]:
        return lambda a, b: module((a, {"b": b}), scale=2.0)

    assert differences(outcome(model, call(model), left, right), outcome(plain, call(plain), left, right)) == {}
    assert call(model)(left, right)["scale"] == 2.0


@pytest.mark.full
def test_evaluation_runs_by_the_plan_made_for_training() -> None:
    plain = conv_net()
    asked: list[bool] = []

    def plan(graph: LayerGraph) -> Plan:
        asked.append(graph.training)
        return planner(spread(2, "hybrid"), 2)(graph)

    model = Compiled(copy.deepcopy(plain), plan, devices=["cpu"] * 2)
    x = batch("conv", 6)
    for module in (model, plain):
        module.eval()
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}
    for module in (model, plain):
        module.train()
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}
    assert asked == [True]


def test_training_follows_the_plain_model() -> None:
    plain = conv_net()
    model = compiled(plain, spread(4, "hybrid"), 4)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain)]
    for _ in range(4):
        x = batch("conv", 8)
        for module, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)


def test_local_batch_norm_is_that_of_each_replica() -> None:
    plain = conv_net()
    model = compiled(plain, spread(2, "data"), 2, batch_norm="local")
    x = batch("conv", 6)
    halves = [copy.deepcopy(plain), copy.deepcopy(plain)]
    wanted = torch.cat([half(part) for half, part in zip(halves, x.chunk(2), strict=True)])
    torch.testing.assert_close(model(x), wanted, rtol=1e-9, atol=1e-9)
    for name, buffer in halves[0].named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=1e-9, atol=1e-9)


def test_a_model_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing leaves equal settings that are other objects (a convolution's stride): nothing was changed."""
    seen: list[object] = []

    def counted(*args: Any, **kwargs: Any) -> LayerGraph:
        seen.append(args)
        return capture(*args, **kwargs)

    monkeypatch.setattr(captures, "capture", counted)
    model = compiled(nn.Conv2d(3, 4, 3, stride=2, padding=1).double(), spread(2, "data"), 2)
    for samples in (4, 4, 2):
        model(torch.randn(samples, 3, 8, 8, dtype=torch.float64))
    assert len(seen) == 1


def test_parts_are_found_and_applied_to_as_in_the_module() -> None:
    plain = nn.BatchNorm2d(3).double()
    model = Compiled(plain, planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    assert model.get_parameter("weight") is plain.weight
    assert model.get_buffer("running_mean") is plain.running_mean
    assert model.get_submodule("") is plain
    seen: list[nn.Module] = []
    assert model.apply(seen.append) is model
    assert seen == [plain]


def test_the_modules_own_parameters_and_buffers_are_told_from_its_childrens() -> None:
    plain = nn.Linear(4, 4)
    plain.child = nn.BatchNorm1d(4)
    plain.register_buffer("steps", torch.zeros(1))
    model = compiled(plain, spread(2, "data"), 2)
    for recurse in (False, True):
        for members in ("named_parameters", "named_buffers"):
            wanted = [name for name, _ in getattr(plain, members)(recurse=recurse)]
            assert [name for name, _ in getattr(model, members)(recurse=recurse)] == wanted
    assert [name for name, _ in model.named_parameters(recurse=False)] == ["weight", "bias"]
    # As torch.distributed.checkpoint reads them.
    optimizer = torch.optim.Adam(model.parameters())
    weights, updates = get_state_dict(model, optimizer)
    assert list(weights) == list(plain.state_dict())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=updates)


def test_names_and_state_are_the_modules_own() -> None:
    plain = conv_net()
    model = Compiled(plain, planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [id(p) for p in model.parameters()] == [id(p) for p in plain.parameters()]
    other = conv_net()
    model.load_state_dict(other.state_dict())
    assert torch.equal(plain.fc1.weight, other.fc1.weight)


def test_frozen_parameters_get_no_gradient() -> None:
    plain = mlp()
    plain[0].requires_grad_(False)
    model = compiled(plain, spread(2, "out-features"), 2)
    x = batch("mlp", 4)
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}
    model.module[0].requires_grad_(True)  # type: ignore[index]
    plain[0].requires_grad_(True)
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}


class Scalar(nn.Module):
    """A model whose loss is a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean squared error, as a scalar."""
        return nn.functional.mse_loss(self.net(x), y)


def test_a_loss_in_the_model_is_that_of_the_whole_batch() -> None:
    plain = Scalar()
    model = compiled(plain, spread(3, "data"), 3)
    x, y = batch("mlp", 7), torch.randn(7, 4, dtype=torch.float64)
    found, wanted = outcome(model, model, x, y), outcome(plain, plain, x, y)
    assert found.tensors["result 0"].shape == ()
    assert differences(found, wanted) == {}


def test_samples_along_another_dimension() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.net(x.t())
            return result

    plain = Last()
    model = compiled(plain, spread(2, "data"), 2, dim=1)
    x = torch.randn(6, 5, dtype=torch.float64)
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}


def test_gradients_without_backward_and_hooks() -> None:
    plain = mlp()
    model = compiled(plain, spread(2, "hybrid"), 2)
    x = batch("mlp", 4)
    seen: list[torch.Size] = []
    next(model.parameters()).register_hook(lambda gradient: seen.append(gradient.shape))
    given = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    wanted = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
    for found, tensor in zip(given, wanted, strict=True):
        torch.testing.assert_close(found, tensor, rtol=1e-9, atol=1e-9)
    assert seen == [torch.Size((12, 6))]


def test_a_second_backward() -> None:
    model = compiled(mlp(), spread(2, "data"), 2)
    loss = model(batch("mlp", 4)).sum()
    loss.backward(retain_graph=True)
    once = next(model.parameters()).grad
    assert once is not None
    once = once.clone()
    loss.backward()
    twice = next(model.parameters()).grad
    assert twice is not None
    torch.testing.assert_close(twice, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize(("kind", "options"), [("data", {}), ("one", {"caller_autograd": False})])
def test_a_double_backward_is_refused(kind: str, options: dict[str, Any]) -> None:
    model = compiled(mlp(), spread(2, kind), 2, **options)
    x = batch("mlp", 4).requires_grad_()
    for loss in (model(x).square().sum(), model(x).sum()):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeFailure, match=r"second derivatives .* are refused .* `module`"):
            gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_gradient_that_keeps_its_graph_can_be_used() -> None:
    plain, x = mlp(), batch("mlp", 4)
    model = compiled(copy.deepcopy(plain), spread(2, "data"), 2)
    for one in (plain, model):
        one(x).sum().backward(create_graph=True)
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9)


def test_results_can_be_written() -> None:
    plain, x = mlp(), batch("mlp", 4)
    model = compiled(copy.deepcopy(plain), spread(2, "data"), 2)
    for one in (plain, model):
        scores = one(x)
        scores[:, 0] = 0
        scores.mul_(2).square().sum().backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9)


class Aliases(nn.Module):
    """Results that share memory: with each other, with an input, with a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.fc(x)
        return h, h[:, 1:], x, self.fc.weight[1:]


def written(model: nn.Module, given: Tensor, number: int) -> tuple[str, list[Tensor]]:
    """The error after a write into a result, or none; and the results, the input and the gradients."""
    x, refused = given.clone(), ""
    results = model(x)
    try:
        results[number].mul_(2)
        (results[0] * results[1].sum() + results[3].sum()).square().sum().backward()
    except RuntimeError as error:
        refused = str(error)
    return refused, [*results, x, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("number", range(4))
def test_on_one_device_autograd_follows_writes_as_in_the_plain_model(number: int) -> None:
    plain, x = Aliases(), batch("mlp", 4)
    refused, found = written(compiled(copy.deepcopy(plain), spread(2, "one"), 2), x, number)
    expected_refusal, expected = written(plain, x, number)
    assert refused == expected_refusal
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_on_one_device_a_gradient_is_differentiated_as_in_the_plain_model() -> None:
    plain, x = mlp(), batch("mlp", 4).requires_grad_()
    model = compiled(copy.deepcopy(plain), spread(2, "one"), 2)
    for one in (plain, model):
        (gradient,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(4))
def test_a_write_that_autograd_would_not_follow_is_refused(number: int) -> None:
    x = batch("mlp", 4)
    model = compiled(Aliases(), spread(2, "one"), 2, threads=lambda device: None)  # a thread of its own
    before = x.clone()
    result = model(x)[number]
    with pytest.raises(RuntimeError, match=r"view|leaf"):
        result.mul_(2)
    assert torch.equal(x, before)


class TwoResults(nn.Module):
    """A body with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.left(h), self.right(h)


def test_hooks_of_parameters_that_no_loss_uses_are_not_called() -> None:
    model = compiled(TwoResults().double(), spread(2, "data"), 2)
    called: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: called.append(name))
    removed = model.get_parameter("left.bias").register_hook(lambda gradient: called.append("removed"))
    for _ in range(2):
        model(batch("mlp", 4))[0].sum().backward()
        removed.remove()
    assert {name: called.count(name) for name in called} == {
        "body.weight": 2, "body.bias": 2, "left.weight": 2, "left.bias": 2, "removed": 1
    }  # fmt: skip


def test_functional_transforms_are_refused() -> None:
    model, x = compiled(mlp(), spread(2, "data"), 2), batch("mlp", 4)
    model(x)
    for transform in (torch.func.grad(lambda x: model(x).sum()), torch.func.vmap(model)):
        with pytest.raises(RuntimeFailure, match=r"torch\.func .* plain model"):
            transform(x)
    others = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeFailure, match=r"functional_call .* plain model"):
        torch.func.functional_call(model, others, (x,))
    assert model(x).requires_grad


def test_torch_compile_leaves_a_compiled_model_as_it_is() -> None:
    plain, x = mlp(), batch("mlp", 4)
    model = compiled(copy.deepcopy(plain), spread(2, "data"), 2)
    plain(x).square().sum().backward()
    torch.compile(model, backend="eager")(x).square().sum().backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9)


def test_a_compiled_list_or_dictionary_is_one() -> None:
    model = compiled(mlp(), spread(2, "data"), 2)
    assert model
    assert model[0] is model.module[0]  # type: ignore[index]
    assert len(model) == len(model.module)  # type: ignore[arg-type]
    assert list(model) == list(model.module)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        len(compiled(Aliases(), spread(2, "one"), 2))


def test_nothing_is_recorded_without_gradients() -> None:
    model = compiled(mlp(), spread(2, "data"), 2)
    with torch.no_grad():
        assert not model(batch("mlp", 4)).requires_grad


def test_dropout_can_be_switched_off() -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 2)).double()
    model = compiled(plain, spread(2, "data"), 2, dropout=False)
    x = batch("mlp", 4)
    torch.testing.assert_close(model(x), plain.eval()(x), rtol=1e-9, atol=1e-9)


def test_dropout_drops() -> None:
    model = compiled(nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Identity()).double(), spread(2, "data"), 2)
    assert 0.2 < (model(batch("mlp", 64)) == 0).double().mean().item() < 0.8


def test_moving_the_module_starts_afresh() -> None:
    model = compiled(mlp(), spread(2, "data"), 2)
    x = batch("mlp", 4)
    wanted = model(x)
    torch.testing.assert_close(model.float()(x.float()), wanted.float(), rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class Refused:
    """A plan or option that is refused, and a word of why."""

    rule: Rule | Mapping[str, Strategy]
    why: str
    devices: int = 2


REFUSED = {
    "too many devices": Refused({"0": Strategy(devices=(5,))}, "only 2"),
    "unknown axis": Refused({"0": Strategy(1, 2, "heads", (0, 1))}, "no axis 'heads'"),
    "axis not divisible": Refused({"4": Strategy(1, 3, "out-features", (0, 1, 2))}, "cannot be cut in 3 \\(R5\\)", 3),
    "devices not filled": Refused({"0": Strategy(2, 1, None, (0,))}, "do not fill 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_cannot_run_is_refused(case: str) -> None:
    refused = REFUSED[case]
    model = compiled(mlp(), refused.rule, refused.devices)
    with pytest.raises(PlanError, match=refused.why):
        model(batch("mlp", 6))


def test_a_plan_for_more_devices_is_refused() -> None:
    model = Compiled(mlp(), planner(spread(4, "data"), 4), devices=["cpu"] * 2)
    with pytest.raises(PlanError, match="for 4 devices, here are 2"):
        model(batch("mlp", 4))


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(RuntimeFailure, match="0 samples"):
        compiled(mlp(), spread(2, "data"), 2)(batch("mlp", 0))


def test_options_are_checked() -> None:
    with pytest.raises(PlanError, match='"global" or "local"'):
        compiled(mlp(), {}, 1, batch_norm="both")
    with pytest.raises(RuntimeFailure, match="devices is empty"):
        Compiled(mlp(), planner({}, 1), devices=[])
    with pytest.raises(TypeError, match="unexpected keyword"):
        compiled(mlp(), {}, 1, device_ids=[0])
    with pytest.raises(RuntimeFailure, match="cuda device"):
        Compiled(mlp(), planner({}, 1), devices=[f"cuda:{torch.cuda.device_count()}"])


def test_a_copy_of_the_plan_and_program_can_be_read() -> None:
    model = compiled(ConvNet().double(), spread(2, "data"), 2)
    assert model.plan is None
    plan = model.prepare(batch("conv", 4))
    assert plan.layers["fc1"].replicas == 2
    model(batch("conv", 4))
    assert model.program is not None
    assert "statistics of norm on 2x1 (0,1)" in model.program.text()


class Bound(nn.Module):
    """A model whose code depends on the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Sums over samples, divided by how many there are."""
        result: Tensor = self.net(x) - self.net(x).sum(0) / x.shape[0]
        return result


@pytest.mark.full
def test_code_that_depends_on_the_batch_is_captured_for_each() -> None:
    plain = Bound()
    model = compiled(plain, spread(2, "data"), 2)
    for samples in (6, 1, 4, 6):
        x = batch("mlp", samples)
        assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ("cpu", "devices is 'cpu'; give a list"),
        (2, "devices is 2; give a list"),
        (["gpu"], "'gpu' names no device"),
        ([None], "None names no device"),
    ],
)
def test_what_names_no_device_is_refused(devices: Any, text: str) -> None:
    with pytest.raises(RuntimeFailure, match=text):
        Compiled(mlp(), planner(spread(2, "data"), 2), devices=devices)


def test_a_dimension_that_no_input_has_is_refused() -> None:
    model = Compiled(mlp(), planner(spread(2, "data"), 2), devices=["cpu"] * 2, dim=5)
    with pytest.raises(RuntimeFailure, match=r"along dimension 5, which no input has \(shapes \(4, 6\)\)"):
        model(torch.zeros(4, 6, dtype=torch.float64))
