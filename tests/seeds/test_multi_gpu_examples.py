"""What users of the multi-GPU examples rely on: data_parallel() from the primitives, and models over CPU and GPU."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parplan
from examples.seeds import multi_gpu_examples as example
from parplan.errors import RuntimeFailure
from parplan.graph.capture.capture import capture
from parplan.lowering.program import Compute
from parplan.plan import Plan, Strategy
from parplan.runtime import gather, parallel_apply, scatter
from parplan.runtime.module import data_parallel as module_under_test
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import compiled, differences, outcome, planner
from tests.runtime.nets import conv_net, mlp

THREE = ["cpu"] * 3


def rows(samples: int = 6) -> Tensor:
    return torch.randn(samples, 6, dtype=torch.float64)


# --- data_parallel ---------------------------------------------------------------------------


def by_primitives(module: nn.Module, x: Tensor, devices: list[str]) -> Any:
    """The seed's function: replicas of the plain model, each with its own samples."""
    parts = scatter(x, devices)
    return gather(parallel_apply([copy.deepcopy(module) for _ in devices], [(part,) for part in parts]), "cpu")


@pytest.mark.parametrize("samples", [6, 5, 3])
def test_it_is_what_the_primitives_make(samples: int) -> None:
    net = conv_net()
    x = torch.randn(samples, 3, 8, 8, dtype=torch.float64)
    wanted = by_primitives(net, x, THREE)
    torch.testing.assert_close(parplan.data_parallel(net, x, THREE), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("samples", [6, 5, 2, 1])
def test_its_gradients_are_the_plain_models(samples: int) -> None:
    plain = mlp()
    net = copy.deepcopy(plain)

    def call(x: Tensor) -> Any:
        return parplan.data_parallel(net, x, THREE)

    x = rows(samples)
    assert differences(outcome(net, call, x), outcome(plain, plain, x)) == {}


def test_without_devices_the_module_is_called() -> None:
    net = mlp()
    x = rows()
    assert torch.equal(parplan.data_parallel(net, x, []), net(x))


def test_several_inputs_names_and_a_dimension() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
            result: Tensor = self.net(a.t()).t() * scale + b
            return result

    net = Two()
    a, b = rows().t().contiguous(), torch.randn(4, 6, dtype=torch.float64)
    found = parplan.data_parallel(net, (a, b), THREE, dim=1, module_kwargs={"scale": 0.5})
    torch.testing.assert_close(found, net(a, b, scale=0.5), rtol=1e-9, atol=1e-9)


def test_a_loss_is_one_number_per_device() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.net(x).square().mean()
            return result

    net, x = Loss(), rows()
    wanted = torch.stack([net(part) for part in x.chunk(3)])
    torch.testing.assert_close(parplan.data_parallel(net, x, THREE), wanted, rtol=1e-9, atol=1e-9)


def test_a_loop_captures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Compiled] = []

    class Counted(Compiled):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(module_under_test, "Compiled", Counted)
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    x = rows()
    for _ in range(4):
        optimizer.zero_grad()
        loss = parplan.data_parallel(net, x, THREE).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert len(made) == 1
    parplan.data_parallel(net, x, ["cpu"])
    assert len(made) == 2


def test_the_mode_is_the_modules_own() -> None:
    net = conv_net()
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    parplan.data_parallel(net, x, THREE)
    net.eval()
    torch.testing.assert_close(parplan.data_parallel(net, x, THREE), net(x), rtol=1e-9, atol=1e-9)


def test_what_is_kept_dies_with_the_module_and_is_not_saved_with_it() -> None:
    net = mlp()
    x = rows()
    names = list(net.state_dict())
    wanted = parplan.data_parallel(net, x, THREE)
    assert list(net.state_dict()) == names
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.testing.assert_close(parplan.data_parallel(other, x, THREE), wanted, rtol=1e-9, atol=1e-9)
    gone = weakref.ref(net)
    del net, other
    gc.collect()
    assert gone() is None


def test_devices_have_to_exist() -> None:
    with pytest.raises(RuntimeFailure, match=r"cuda:\d+: this machine has"):
        parplan.data_parallel(mlp(), rows(), [torch.cuda.device_count()])
    with pytest.raises(RuntimeFailure, match="is no device"):
        parplan.data_parallel(mlp(), rows(), [None])  # type: ignore[list-item]


@pytest.mark.gpu
def test_numbers_are_cuda_devices() -> None:
    plain = mlp()
    x = rows()
    found = parplan.data_parallel(plain, x, [0, 0], output_device="cpu")
    torch.testing.assert_close(found, plain(x), rtol=1e-9, atol=1e-9)


# --- part on one device, part on another -----------------------------------------------------


class Words(nn.Module):
    """The seed's model without any word about devices: an embedding, then a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 10)
        self.rnn = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, time) to (N, time, 10)."""
        result: Tensor = self.rnn(self.enter(self.embedding(x)))
        return result

    def enter(self, x: Tensor) -> Tensor:
        """What happens between the two."""
        return x


class ByTo(Words):
    place = "cuda:0"

    def enter(self, x: Tensor) -> Tensor:
        return x.to(self.place)


class ByToOther(ByTo):
    place = "xpu:0"


class ByCuda(Words):
    def enter(self, x: Tensor) -> Tensor:
        x = x.cuda(0)
        return x + torch.zeros(10, dtype=x.dtype, device=x.device) + torch.full((1,), 0.5, device="cuda").to(x)


SPLIT = {"embedding": Strategy(devices=(0,)), "rnn": Strategy(devices=(1,))}


# Without a GPU the plain module cannot run: there is nothing that the self-check could compare with.
UNCHECKED = pytest.mark.filterwarnings(
    "ignore:.* runs unchecked. the plain module fails:parplan.errors.UncheckedWarning"
)


@UNCHECKED
@pytest.mark.parametrize("kind", [Words, ByTo, ByToOther, ByCuda])
def test_an_embedding_on_one_device_and_the_rest_on_another(kind: Callable[[], Words]) -> None:
    plain = kind().double()
    model = compiled(plain, SPLIT, 2)
    x = torch.randint(50, (4, 7))
    reference = Words().double()
    reference.load_state_dict(plain.state_dict())
    offset = 0.5 if kind is ByCuda else 0.0
    found = outcome(model, model, x)
    wanted = outcome(reference, lambda words: reference.rnn(reference.embedding(words) + offset), x)
    assert differences(found, wanted) == {}
    assert model.program is not None
    steps = [step for step in model.program.forward if isinstance(step, Compute)]
    where = {layer: step.grid.devices for step in steps for layer in step.layers}
    assert (where["embedding"], where["rnn"]) == ((0,), (1,))


def test_a_plan_for_it_can_be_written_by_hand_and_kept() -> None:
    plain = Words()
    x = torch.randint(50, (4, 7))
    text = planner(SPLIT, 2)(capture(plain, (x,))).to_json()
    model = parplan.compile(plain, x, devices=["cpu", "cpu"], plan=Plan.from_json(text))
    torch.testing.assert_close(model(x), plain(x))


@UNCHECKED
def test_training_the_split_model() -> None:
    plain = ByTo()
    reference = Words()
    reference.load_state_dict(plain.state_dict())
    model = Compiled(plain, planner(SPLIT, 2), devices=["cpu"] * 2)
    x = torch.randint(50, (4, 7))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, reference)]
    for _ in range(3):
        for net, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Words, ByTo])
def test_an_embedding_on_the_cpu_and_the_rest_on_the_gpu(kind: Callable[[], Words]) -> None:
    plain = Words().double()
    inner = kind().double()
    inner.load_state_dict(plain.state_dict())
    if kind is ByTo:
        inner.rnn.cuda(0)
    model = Compiled(inner, planner(SPLIT, 2), devices=["cpu", "cuda:0"], output_device="cpu")
    x = torch.randint(50, (4, 7))
    torch.testing.assert_close(model(x), plain(x), rtol=1e-9, atol=1e-9)


# --- the example program ---------------------------------------------------------------------


@pytest.mark.full
def test_the_example_program_gives_the_plain_models_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    example.main([])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all(float(line.split(": ")[1].split()[0]) < 1e-9 for line in lines)


def test_the_example_program_fails_when_numbers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "ROUNDING", -1.0)
    with pytest.raises(SystemExit, match="that is more than"):
        example.main([])
