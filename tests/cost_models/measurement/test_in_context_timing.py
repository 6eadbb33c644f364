"""Sweeps: parts run forward in order and backward in reverse, on new inputs, and are freed where a step frees them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from parplan.cost_models.measurement import in_context_timing
from parplan.cost_models.measurement.in_context_timing import ProcessGroup, time_in_context
from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.measurement.runnable_parts import LayerPart
from parplan.cost_models.sampling import StoppingRule

CPU = torch.device("cpu")
QUICK = StoppingRule(cap_s=0.0, least_runs=1)


@dataclass
class Log:
    """What happened, in order, and which tensors were made."""

    events: list[str] = field(default_factory=list)
    saved: dict[str, weakref.ref[Tensor]] = field(default_factory=dict)
    gradients: dict[str, weakref.ref[Tensor]] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)

    def alive(self, kept: dict[str, weakref.ref[Tensor]]) -> list[str]:
        return [name for name, ref in kept.items() if ref() is not None]


def _logged(log: Log, name: str) -> Any:
    class Logged(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            log.events.append(f"forward {name}")
            log.inputs.append(x.data_ptr())
            saved = x * 2
            ctx.save_for_backward(saved)
            log.saved[name] = weakref.ref(saved)
            return x * weight

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            log.events.append(f"backward {name}, saved of {log.alive(log.saved)}, kept {log.alive(log.gradients)}")
            weight_gradient = gradients[0].sum().reshape(1)
            log.gradients[name] = weakref.ref(weight_gradient)
            return gradients[0] * 1.0, weight_gradient

    return Logged.apply


def piece(log: Log, name: str, trained: bool = True) -> LayerPart:
    """x times a weight, with a note of when it runs."""
    run = _logged(log, name)
    tensors = (torch.ones(4, requires_grad=True), torch.ones(1, requires_grad=trained))
    return LayerPart(lambda x, weight: (run(x, weight),), tensors, 1)


def test_forward_in_order_then_backward_in_reverse_with_gradients_kept_to_the_end() -> None:
    log = Log()
    in_context_timing._sweep([piece(log, "a"), piece(log, "b"), piece(log, "c")], in_context_timing._Stopwatch(CPU))
    assert log.events == [
        "forward a",
        "forward b",
        "forward c",
        "backward c, saved of ['a', 'b', 'c'], kept []",
        "backward b, saved of ['a', 'b'], kept ['c']",
        "backward a, saved of ['a'], kept ['c', 'b']",
    ]
    assert log.alive(log.gradients) == []


def test_what_arrives_is_new_in_every_sweep_and_weights_stay() -> None:
    one = piece(Log(), "a")
    first, second = one.fresh_inputs(), one.fresh_inputs()
    assert first[0].data_ptr() != second[0].data_ptr() != one.tensors[0].data_ptr()
    assert first[1] is second[1] is one.tensors[1]
    assert (first[0].requires_grad, first[0].is_leaf) == (True, True)


def test_one_measurement_a_piece_with_all_that_a_profile_keeps() -> None:
    log = Log()
    found = time_in_context([piece(log, "a"), piece(log, "b")], CPU, StoppingRule(error=0.0, cap_s=60.0, most_runs=4))
    assert [m.runs for m in found] == [4, 4]
    assert log.events.count("forward a") == 5  # one more, to warm up
    assert all(m.forward_s >= 0 and m.backward_s >= 0 and m.reference_s > 0 and m.when for m in found)


def test_runs_go_on_while_a_median_is_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 1.0, 1.2, 0.8, 1.1, 0.9, *[1.0] * 30])

    def sweep(pieces: Sequence[LayerPart], clock: object) -> list[tuple[float, float]]:
        return [(next(times), 0.0), (0.0, 0.0)]

    monkeypatch.setattr(in_context_timing, "_sweep", sweep)
    (found,) = time_in_context([piece(Log(), "a")], CPU, StoppingRule(error=0.02, cap_s=1e9, least_runs=2))
    assert (found.forward_s, found.runs) == (1.0, 9)  # five of nine agree; of eight it was four


def test_what_calling_takes_is_taken_off_and_nothing_is_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_context_timing, "_sweep", lambda pieces, clock: [(5.0, 7.0), (1.0, 0.5), (2.0, 1.0)])
    first, second = time_in_context([piece(Log(), "a"), piece(Log(), "b")], CPU, QUICK)
    assert (first.forward_s, first.backward_s) == (3.0, 6.0)
    assert (second.forward_s, second.backward_s) == (0.0, 0.0)


def test_pieces_without_gradients_have_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    still = LayerPart(lambda x: (x + 1,), (torch.ones(3),), 1)
    index = LayerPart(lambda x: (x.argmax(), 3), (torch.ones(3, requires_grad=True),), 1)
    called: list[str] = []

    def grad(*_: object, **__: object) -> list[Tensor]:
        called.append("grad")
        return []

    monkeypatch.setattr(torch.autograd, "grad", grad)
    in_context_timing._sweep([still, index], in_context_timing._Stopwatch(CPU))
    assert called == []


def test_all_processes_stop_together() -> None:
    class Slower(ProcessGroup):
        """Another process that wants three more runs."""

        def __init__(self) -> None:
            self.more = 3

        def any(self, wish: bool) -> bool:
            self.more -= 1
            return wish or self.more >= 0

        def mean(self, figures: Sequence[float]) -> list[float]:
            return [figure * 0 + 2 for figure in figures]

    (found,) = time_in_context([piece(Log(), "a")], CPU, QUICK, Slower())
    assert found.runs == 4
    assert (found.forward_s, found.reference_s) == (0.0, 2.0)


def test_threads_are_put_back_whatever_happens() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:

        def fails(x: Tensor) -> tuple[Tensor]:
            assert torch.get_num_threads() == 1
            raise RuntimeError("no such kernel")

        with pytest.raises(RuntimeError, match="no such kernel"):
            time_in_context([LayerPart(fails, (torch.ones(1),), 1)], CPU, QUICK)
        assert torch.get_num_threads() == 2
        assert Reference(CPU).seconds(3) > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
