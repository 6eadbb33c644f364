"""What parplan expects of PyTorch beyond its documentation; a new release that changes it fails here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from parplan.compat import (
    HOOK_FIELDS,
    BackwardHook,
    bent_sizes,
    conversion_of,
    expression_of,
    guards_of,
    hooks_of_all_modules,
    in_functional_transform,
    intercepted_functions,
    intercepted_modules,
    is_composite,
    lazy_code,
    memory_of,
    mended_export,
    overload_name,
    own_buffer_assignments,
    pytree,
    schema_of,
    symbolic_sizes,
    traced_node,
    value_of,
    warn_if_newer,
    without_modes,
)


def test_trees_come_apart_and_together() -> None:
    tree = ((1, {"a": [2, None]}), {"b": 3})
    leaves, spec = pytree.tree_flatten(tree)
    assert leaves == [1, 2, None, 3]
    assert pytree.tree_unflatten(leaves, spec) == tree
    assert pytree.tree_flatten(tree)[1] == spec
    assert pytree.tree_leaves(tree) == leaves
    assert pytree.tree_map(lambda leaf: leaf and leaf + 1, tree) == ((2, {"a": [3, None]}), {"b": 4})


def test_ops_are_composite_or_not() -> None:
    aten = torch.ops.aten
    assert all(map(is_composite, (aten.reshape.default, aten.dropout.default, aten.to.device)))
    assert not any(map(is_composite, (aten.arange.default, aten.relu.default, aten.view.default)))


def test_ops_have_schemas() -> None:
    schema = schema_of(torch.ops.aten.linear.default)
    assert schema.name == "aten::linear"
    assert [argument.name for argument in schema.arguments] == ["input", "weight", "bias"]
    assert [argument.has_default_value() for argument in schema.arguments] == [False, False, True]
    assert isinstance(schema.arguments[2].type, torch.OptionalType)
    assert not schema.is_mutable
    assert schema_of(torch.ops.aten.add_.Tensor).is_mutable
    assert overload_name(torch.ops.aten.add_.Tensor) == "Tensor"
    assert schema_of(len) is None


def test_views_share_memory_and_copies_do_not() -> None:
    with FakeTensorMode():
        fake = torch.zeros(4)
        assert memory_of(fake) == memory_of(fake[1:])
        assert memory_of(fake) != memory_of(torch.zeros(4))
    real = torch.zeros(4)
    assert memory_of(real) == memory_of(real.view(2, 2))
    assert memory_of(real) != memory_of(real.clone())


def test_modules_keep_their_hooks_in_these_fields() -> None:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    module.register_full_backward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    assert {name: len(vars(module)[name]) for name in HOOK_FIELDS[:-1]} == dict.fromkeys(HOOK_FIELDS[:-1], 1)
    assert vars(module)[HOOK_FIELDS[-1]] is True


def test_hooks_for_all_modules_are_counted() -> None:
    assert hooks_of_all_modules() == 0
    registered = [
        register(lambda *_: None)
        for register in (
            nn.modules.module.register_module_forward_pre_hook,
            nn.modules.module.register_module_forward_hook,
            nn.modules.module.register_module_full_backward_pre_hook,
            nn.modules.module.register_module_full_backward_hook,
        )
    ]
    assert hooks_of_all_modules() == 4
    for handle in registered:
        handle.remove()
    assert hooks_of_all_modules() == 0


def test_backward_hooks_can_be_put_around_tensors() -> None:
    seen: list[list[float]] = []

    def hook(module: object, given: tuple[Tensor, ...], taken: tuple[Tensor, ...]) -> None:
        seen.append([given[0].item(), taken[0].item()])

    around = BackwardHook(nn.Identity(), [hook], [])
    leaf = torch.tensor(2.0, requires_grad=True)
    (x,) = around.setup_input_hook((leaf,))
    around.setup_output_hook(x * 3).backward()
    assert seen == [[3.0, 1.0]]


def test_recurrent_layers_name_their_flat_weights() -> None:
    layer = nn.LSTM(2, 3, num_layers=2, bidirectional=True, proj_size=2)
    named = [getattr(layer, name) for name in layer._flat_weights_names]
    assert [id(weight) for weight in named] == [id(weight) for weight in layer._flat_weights]


def test_function_apply_can_be_intercepted_wherever_it_is_held() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x + 1

    class Named(Same):
        @staticmethod
        def setup_context(ctx: object, inputs: object, output: object) -> None:
            pass

        @staticmethod
        def forward(x: Tensor, scale: float = 2.0) -> Tensor:  # type: ignore[override]
            return x * scale + 1

    seen: list[tuple[Any, bool]] = []

    def handler(plain: Any, cls: type, args: Any, kwargs: Any) -> Any:
        seen.append((cls, torch.is_grad_enabled()))
        return plain(cls, *args, **kwargs)

    for kind, result in ((Same, 2.0), (Named, 3.0)):
        own, held, x = vars(kind)["forward"], kind.apply, torch.ones(1, requires_grad=True)
        with intercepted_functions(handler):
            assert held(x).item() == result  # type: ignore[no-untyped-call]
            assert kind.apply(x).item() == result  # type: ignore[no-untyped-call]
        assert (vars(kind)["forward"], set(seen)) == (own, {(kind, True)})
        assert held(x).item() == result  # type: ignore[no-untyped-call]
        seen.clear()
    with intercepted_functions(lambda plain, cls, args, kwargs: args[0] * 5):
        assert Same.apply(torch.ones(1)).item() == 5.0  # type: ignore[no-untyped-call]
        assert held(torch.ones(1)).item() == 5.0  # type: ignore[no-untyped-call]
    try:
        Named.apply(torch.ones(1), scale=4.0)  # type: ignore[no-untyped-call]
    except TypeError:  # torch 2.11 hands named arguments on twice
        return
    with intercepted_functions(handler):  # torch fills in defaults and puts named arguments in their places
        for call in (held, Named.apply):
            assert call(torch.ones(1), scale=4.0).item() == 5.0  # type: ignore[no-untyped-call]


def test_calls_of_modules_can_be_intercepted() -> None:
    seen: list[nn.Module] = []

    def handler(plain: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append(module)
        return plain(module, *args, **kwargs) + 1

    model = nn.Sequential(nn.Identity())
    with intercepted_modules(handler):
        assert model(torch.zeros(())) == 2
    assert seen == [model, model[0]]
    assert model(torch.zeros(())) == 0


def test_graph_modules_write_their_code_when_they_are_called() -> None:
    with lazy_code():
        module = fx.symbolic_trace(nn.ReLU())
        node = next(node for node in module.graph.nodes if node.op == "call_function")
        node.target = torch.neg
        node.kwargs = {}
        module.recompile()
        assert not hasattr(module, "_code")
        assert module(torch.ones(())) == -1
        exported = torch.export.export(nn.Linear(4, 4), (torch.zeros(2, 4),))
        assert not hasattr(exported.graph_module, "_code")
        assert not hasattr(exported.module(), "_code")
    assert exported.module()(torch.zeros(2, 4)).shape == (2, 4)
    assert "neg" in module.code


class _Bounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._check(x.max().item() < 100)
        return x * 2


def test_conditions_on_numbers_of_tensors_are_exported() -> None:
    with mended_export():
        graph = torch.export.export(_Bounded(), (torch.ones(2),), strict=False).graph
    assert any(node.target is torch.ops.aten._assert_scalar.default for node in graph.nodes)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, 2, bidirectional=True, proj_size=3)

    def forward(self, x: Tensor) -> list[Tensor]:
        return pytree.tree_leaves(self.lstm(x))


@pytest.mark.filterwarnings("ignore:The tensor attributes", "ignore:LSTM with projections")
def test_the_states_of_an_lstm_are_exported_with_their_shapes() -> None:
    model, x = _Recurrent(), torch.zeros(5, 6, 4)
    with mended_export():
        graph = torch.export.export(model, (x,), strict=False).graph
    results: Any = graph.output_node().args[0]
    assert [node.meta["val"].shape for node in results] == [made.shape for made in model(x)]


def test_all_ways_to_compute_a_gradient_go_through_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise LookupError

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", stop)
    x = torch.ones(1, requires_grad=True)
    calls: list[Callable[[], object]] = [x.backward, lambda: torch.autograd.backward(x)]
    for call in (*calls, lambda: torch.autograd.grad(x * 2, x)):
        with pytest.raises(LookupError):
            call()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("version", "known"), [("2.11.0", True), ("2.15.1+cpu", True), ("2.16.0a0", False), ("3.0", False)]
)
def test_a_newer_torch_is_told_of(version: str, known: bool) -> None:
    with nullcontext() if known else pytest.warns(UserWarning, match=f"torch {version[:4]}"):
        warn_if_newer(version)


def test_real_tensors_can_be_copied_while_a_model_is_traced() -> None:
    real = torch.ones(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(real.clone()) is not Tensor
        with without_modes():
            copied = real.detach().clone()
    assert type(copied) is Tensor
    assert copied.tolist() == [1.0, 1.0]


def test_a_transform_of_torch_func_is_seen_from_inside() -> None:
    seen: list[bool] = []

    def total(x: Tensor) -> Tensor:
        seen.append(in_functional_transform())
        return x.sum()

    torch.func.grad(total)(torch.ones(2))
    total(torch.ones(2))
    assert seen == [True, False]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((torch.float64,), (None, torch.float64)),
        (("cpu",), (torch.device("cpu"), None)),
        ((torch.ones(1, dtype=torch.half),), (torch.device("cpu"), torch.half)),
    ],
)
def test_arguments_of_a_conversion(arguments: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    assert conversion_of(*arguments) == found
    assert conversion_of(dtype=torch.half) == (None, torch.half)


class _Assigns(nn.Module):
    """Assigns a buffer of another shape, and shows the node of its result."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """A tensor to twice its values."""
        before, self.table = self.table, torch.ones(3)
        self.table = before
        result = x * 2
        _SEEN.append(traced_node(result))
        return result


_SEEN: list[Any] = []


def test_an_export_leaves_assignments_to_the_roots_buffers_alone_where_it_is_told_to() -> None:
    with own_buffer_assignments():
        graph = torch.export.export(_Assigns(), (torch.ones(2),), strict=False).graph
    assert not any("copy_" in str(node.target) for node in graph.nodes)


def test_a_running_export_knows_the_node_of_a_tensor() -> None:
    with own_buffer_assignments():
        torch.export.export(_Assigns(), (torch.ones(2),), strict=False)
    node, root = _SEEN[-1]
    assert node.target is torch.ops.aten.mul.Tensor
    assert isinstance(root, nn.Module)
    assert traced_node(torch.ones(2)) is None


SAID = list[str]()


class Sized(nn.Module):
    """A branch, a number of the samples that is not linear, and one that Python takes."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        made = x.reshape(-1, 2)[: x.shape[0] // 2] * (2 if 0.5 * x.shape[0] > 2 else 1)
        SAID.extend([f"{x.shape[0]}"] if self.fixed else [])
        return made


@pytest.mark.parametrize("fixed", [False, True])
def test_a_symbolic_export_keeps_its_conditions(fixed: bool) -> None:
    model, x = Sized(fixed), torch.randn(6, 4)
    SAID.clear()
    shapes: Any = torch.export.ShapesCollection()
    shapes[x] = {0: torch.export.Dim.AUTO}
    with symbolic_sizes(lambda frame: frame.f_code.co_filename == __file__):
        program = torch.export.export(model, (x,), strict=False, dynamic_shapes=shapes)
    assert set(SAID) == ({"6"} if fixed else set())
    condition, _, place = guards_of(program)[0]
    assert place is not None
    assert place[0] == __file__
    assert [value_of(condition, size) for size in (4, 5, 60)] == [False, True, True]
    assert [(is_fixed, place) for _, is_fixed, place in guards_of(program)[1:]] == ([(True, None)] if fixed else [])
    assert fixed or {value_of(bent, 7) for bent in bent_sizes(program)} == {3}


def test_plain_sizes_are_their_own_formulas() -> None:
    assert expression_of(7) == 7
