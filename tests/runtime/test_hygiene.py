"""A compiled model in daily life: memory over many steps, other modes and types, copies, errors, outside changes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import RuntimeFailure
from tests.runtime.helpers import compiled, spread
from tests.runtime.nets import conv_net, mlp


def images(samples: int = 8) -> Tensor:
    return torch.randn(samples, 3, 8, 8, dtype=torch.float64)


def vectors(samples: int = 4) -> Tensor:
    return torch.randn(samples, 6, dtype=torch.float64)


def live_tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # isinstance wakes what other modules have deprecated
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.full
def test_fifty_steps_leave_no_tensor_behind() -> None:
    model = compiled(conv_net(), spread(4, "hybrid"), 4)
    optimizer = torch.optim.Adam(model.parameters())
    counts = []
    for step in range(50):
        optimizer.zero_grad()
        model(images()).square().mean().backward()
        optimizer.step()
        model(images())  # a forward that is never followed by its backward
        if step in (4, 49):
            counts.append(live_tensors())
    assert counts[1] <= counts[0]  # tensors of tests before this one may go


class Weighed(nn.Module):
    """Holds a tensor made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = conv_net()

    def forward(self, x: Tensor) -> Tensor:
        """Scores times a constant."""
        result: Tensor = self.net(x) * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).repeat(4)
        return result


@pytest.mark.full
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_first_called_without_gradients_can_be_trained(mode: Callable[[], torch.no_grad]) -> None:
    plain = Weighed()
    model = compiled(plain, spread(2, "hybrid"), 2)
    x = images()
    with mode():
        found = model(x)
        assert not found.requires_grad
        torch.testing.assert_close(found, plain(x), rtol=1e-9, atol=1e-9)
    model(x).sum().backward()
    plain(x).sum().backward()
    for (name, parameter), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("kind", ["data", "out-features"])
def test_autocast_around_a_call_is_that_of_the_plain_model(kind: str) -> None:
    plain = mlp().float()
    model = compiled(plain, spread(2, kind), 2)
    x = vectors().float()
    for enabled in (True, False, True):
        model.zero_grad()
        plain.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found, wanted = model(x), plain(x)
        assert found.dtype is wanted.dtype
        torch.testing.assert_close(found, wanted)
        found.float().sum().backward()
        wanted.float().sum().backward()
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=3e-2, atol=1e-2)


def test_a_deep_copy_is_a_model_of_its_own_with_the_same_plan() -> None:
    model = compiled(mlp(), spread(2, "hybrid"), 2)
    x = vectors()
    model(x)
    twin = copy.deepcopy(model)
    assert twin.plan == model.plan
    before = model(x)
    torch.testing.assert_close(twin(x), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(model(x), before)
    torch.testing.assert_close(twin(x), twin.module(x))


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy])
def test_a_compiled_model_is_not_pickled(copied: Callable[[nn.Module], object]) -> None:
    with pytest.raises(RuntimeFailure, match=r"save model.state_dict\(\) and model.plan.to_json\(\)"):
        copied(compiled(mlp(), spread(2, "data"), 2))


def test_its_state_is_saved_and_loaded() -> None:
    model, other = (compiled(conv_net(), spread(2, kind), 2) for kind in ("data", "hybrid"))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    x = images()
    torch.testing.assert_close(other(x), model(x), rtol=1e-9, atol=1e-9)


def test_another_type_after_the_first_call() -> None:
    model = compiled(conv_net(), spread(2, "hybrid"), 2)
    x = images()
    wanted = model.eval()(x)
    torch.testing.assert_close(model.float()(x.float()), wanted.float(), rtol=1e-3, atol=1e-4)
    assert model.to("cpu").double()(x).dtype is torch.float64


def test_two_models_do_not_disturb_each_other() -> None:
    nets = [conv_net(), conv_net()]
    models = [compiled(net, spread(2, kind), 2) for net, kind in zip(nets, ("data", "hybrid"), strict=True)]
    x = images()
    losses = [model(x).square().sum() for model in models]  # both forwards before both backwards
    for loss in losses:
        loss.backward()
    for model, plain in zip(models, nets, strict=True):
        plain(x).square().sum().backward()
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-9)


def test_an_error_in_the_middle_of_a_forward_leaves_the_model_usable() -> None:
    words = nn.Sequential(nn.Embedding(5, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    model = compiled(words, spread(2, "data"), 2)
    good = torch.tensor([0, 1, 2, 3])
    wanted = model(good)
    with pytest.raises(IndexError):
        model(torch.tensor([0, 1, 2, 9]))
    torch.testing.assert_close(model(good), wanted)
    model(good).sum().backward()


CHANGES: dict[str, Callable[[nn.Module, nn.Module], object]] = {
    "in place": lambda inner, other: [p.data.mul_(2) for p in inner.parameters()],
    "loaded": lambda inner, other: inner.load_state_dict(other.state_dict()),
    "assigned": lambda inner, other: inner.load_state_dict(other.state_dict(), assign=True),
    "replaced": lambda inner, other: setattr(inner, "0", other.get_submodule("0")),
    "given other memory": lambda inner, other: setattr(inner.get_parameter("0.weight"), "data", other[0].weight.data),  # type: ignore[index]
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_user_changes_between_calls_is_seen(change: str) -> None:
    model = compiled(mlp(), spread(2, "hybrid"), 2)
    x = vectors()
    before = model(x)
    CHANGES[change](model.module, mlp())
    wanted = model.module(x)
    assert not torch.allclose(before, wanted)
    torch.testing.assert_close(model(x), wanted, rtol=1e-9, atol=1e-9)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
