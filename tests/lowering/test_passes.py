"""Passes in a program: what is split, what travels beside what, what is joined; and the steps pass by pass."""

from __future__ import annotations

import random
import textwrap

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.errors import PlanError
from parplan.graph.capture.capture import capture
from parplan.layout import Range
from parplan.lowering.lower import lower
from parplan.lowering.passes import Pass, local_ranges, put, take
from parplan.lowering.program import Compute, Program, Staged, Step, Transfer
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Scheme, Strategy
from parplan.runtime.module.compiled import Compiled
from tests.every_case import every_case
from tests.runtime.helpers import planner
from tests.runtime.module.test_train_step import hybrid
from tests.runtime.nets import mlp

# Hooks here are meant to see one replica's samples.
pytestmark = pytest.mark.filterwarnings("ignore::parplan.errors.ReplicaHookWarning")


class Scored(nn.Module):
    """Two linear layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.second(self.first(x)), target)


class TwoResults(Scored):
    """What both layers make."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.first(x)
        return x, self.second(x)


def program(devices: int, scheme: Scheme, fewest: int = 1, processes: bool = True) -> Program:
    case = hybrid(devices, scheme, {}, fewest)
    one = StepSetting(devices, (2 * devices,), (0,) * devices, scheme=scheme)
    setting = StepSetting(devices, (2,) * devices, tuple(range(devices)), scheme=scheme) if processes else one
    return lower(case.graph, case.plan.layers, setting)


def staged(found: Program) -> Staged:
    assert found.staged is not None
    return found.staged


def test_the_next_pass_travels_beside_this_one() -> None:
    expected = """
    forward:
      0 + 1 + 2 + 3 on 2x1 (0,1): input -> flatten
      split flatten -> flatten#0, flatten#1
      move flatten#0 2x1 (0,1) rows:0 -> flatten#0@1 1x2 (0,1)
      move flatten#1 2x1 (0,1) rows:0 -> flatten#1@1 1x2 (0,1)
      pass 0: 4 + 5 on 1x2 (0,1): flatten#0@1 -> relu_1#0
      pass 0: 6 on 1x2 (0,1): relu_1#0 -> linear_1#0
      move linear_1#0 1x2 (0,1) terms -> linear_1#0@1 2x1 (0,1) rows:0
      pass 1: 4 + 5 on 1x2 (0,1): flatten#1@1 -> relu_1#1
      pass 1: 6 on 1x2 (0,1): relu_1#1 -> linear_1#1
      move linear_1#1 1x2 (0,1) terms -> linear_1#1@1 2x1 (0,1) rows:0
      join linear_1#0@1, linear_1#1@1 -> linear_1
    backward:
      split linear_1 back to linear_1#0@1, linear_1#1@1
      move linear_1#1@1 back to linear_1#1
      move linear_1#0@1 back to linear_1#0
      pass 1: back through 6
      pass 1: back through 4 + 5
      move flatten#1@1 back to flatten#1
      pass 0: back through 6
      sum gradients of p_6_bias
      pass 0: back through 4 + 5
      move flatten#0@1 back to flatten#0
      join flatten#0, flatten#1 back to flatten
      back through 0 + 1 + 2 + 3
      sum gradients of p_0_bias, p_0_weight
    """
    for scheme in (Scheme.BROADCAST, Scheme.INTERLEAVE):
        assert program(2, scheme).text() == textwrap.dedent(expected).lstrip()


def test_a_lone_sender_deals_its_samples_out_and_the_receivers_exchange_them_one_segment_later() -> None:
    lines = program(4, Scheme.BROADCAST).text().splitlines()
    first = lines.index("  move flatten#2 4x1 (0,1,2,3) rows:0 -> flatten#2@1 4x1 (0,1,2,3) rows:0")
    second = lines.index("  move flatten#2@1 4x1 (0,1,2,3) rows:0 -> flatten#2@2 1x4 (0,1,2,3)")
    beside = [line for line in lines[first:second] if "on 1x4" in line]
    assert [line.split(":")[0].strip() for line in beside] == ["pass 1"]
    assert next(i for i, line in enumerate(lines) if line.startswith("  pass 2")) > second
    back = lines[lines.index("backward:") :]
    half, rest = (back.index(f"  move {text}") for text in ("flatten#2@2 back to flatten#2@1",
                                                             "flatten#2@1 back to flatten#2"))  # fmt: skip
    assert [line for line in back[half:rest] if "pass 1: back through" in line]
    with_two = program(4, Scheme.BROADCAST, fewest=2)
    assert not any("#0@2 2x2" in line and "4x1" in line for line in with_two.text().splitlines())


@pytest.mark.parametrize("scheme", [Scheme.BROADCAST, Scheme.INTERLEAVE], ids=lambda scheme: scheme.value)
def test_most_that_one_device_sends_at_once(scheme: Scheme) -> None:
    """By broadcast the only sender of a pass sends its samples once, not three times."""
    found = program(4, scheme)
    per_sample = 128
    source = "flatten#1" if scheme is Scheme.BROADCAST else "flatten#2"  # passes 0 and 2 have samples of each replica
    first = next(t for t in found.transfers if t.source == source)
    sent = [sum(p.elements for p in first.exchange.pieces if p.source == d != p.target) for d in range(4)]
    # Each has two samples. broadcast: the one's are dealt out to two others; interleave: one sample to each other one.
    expected = [0, 2 * per_sample, 0, 0] if scheme is Scheme.BROADCAST else [3 * per_sample] * 4
    assert sent == expected


def listed(found: Staged) -> str:
    """Part by part, what is computed, moved, split or summed; transfers by the slot that they fill."""
    halves = [(f"pass {n} {way}", getattr(one, way)) for n, one in enumerate(found.passes)
              for way in ("forward", "backward")]  # fmt: skip
    parts = [("before", found.before), *halves, ("sums", found.sums), ("after", found.after)]

    def words(step: Step) -> str:
        if isinstance(step, Compute):
            return "+".join(step.layers)
        return step.target if isinstance(step, Transfer) else " ".join(step.text().split()[:2])

    return "\n".join(f"{name}: {', '.join(map(words, steps))}" for name, steps in parts)


@pytest.mark.full
def test_a_staged_program_as_a_table() -> None:
    """The next pass's samples leave before this one computes; a pass goes back before the next one computes."""
    expected = """
    before: 0+1+2+3, split flatten, flatten#0@1
    pass 0 forward: flatten#1@1, 4+5, 6, linear_1#0@1
    pass 0 backward: linear_1#0@1, 6, 4+5, flatten#0@1
    pass 1 forward: 4+5, 6, linear_1#1@1
    pass 1 backward: linear_1#1@1, 6, 4+5, flatten#1@1
    sums: sum gradients
    after: split flatten, 0+1+2+3, sum gradients
    """
    for scheme in (Scheme.BROADCAST, Scheme.INTERLEAVE):
        assert listed(staged(program(2, scheme))) == textwrap.dedent(expected).strip()


def test_results_that_a_loss_waits_for_leave_before_samples_of_the_next_pass_go_on() -> None:
    """A lone sender's samples are dealt out beside the pass before, and exchanged behind that pass's only segment."""
    graph = capture(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8)), (torch.zeros(8, 6),))
    plan = {"0": Strategy(4, 1, None, (0, 1, 2, 3)), "1": Strategy(1, 4, "out-features", (0, 1, 2, 3))}
    found = lower(graph, plan, StepSetting.per_process(4, 8, Scheme.BROADCAST))
    expected = """
    pass 0 forward: linear#1@1, 1, linear_1#0@1, linear#1@2
    pass 1 forward: linear#2@1, 1, linear_1#1@1, linear#2@2
    pass 2 forward: linear#3@1, 1, linear_1#2@1, linear#3@2
    pass 3 forward: 1, linear_1#3@1
    """
    lines = listed(staged(found)).splitlines()
    assert [line for line in lines if "forward" in line] == textwrap.dedent(expected).strip().splitlines()


@pytest.mark.full
def test_no_order_pass_by_pass_where_something_needs_the_samples_of_several_passes() -> None:
    """A loss inside the model runs on all results; a result of a layer in front is there before the passes."""
    one, two = Strategy(), Strategy(2, devices=(0, 1))
    inside = capture(Scored(), (torch.zeros(4, 6), torch.zeros(4, dtype=torch.long)))
    front = capture(TwoResults(), (torch.zeros(4, 6),))
    for graph in (inside, front):
        plan = {name: two if name == "first" else one for name in graph.layers}
        found = lower(graph, plan, StepSetting.per_process(2, 4, Scheme.INTERLEAVE))
        assert "pass 1: " in found.text()
        assert found.staged is None


@pytest.mark.full
def test_staged_steps_are_the_same_steps_pass_by_pass() -> None:
    for scheme, devices, fewest in ((Scheme.BROADCAST, 4, 1), (Scheme.INTERLEAVE, 4, 2), (Scheme.BROADCAST, 2, 1)):
        found = program(devices, scheme, fewest)
        steps = staged(found)
        forward = [*steps.before, *(step for one in steps.passes for step in one.forward)]
        backward = [*(step for one in steps.passes for step in one.backward), *steps.sums, *steps.after]
        joins = [step.text() for step in found.forward if step.text().startswith("join")]
        texts = sorted(step.text() for step in found.forward)
        assert sorted([*(step.text() for step in forward), *joins]) == texts
        assert sorted([*(step.text() for step in backward), *joins]) == sorted(s.text() for s in found.backward)
        for number, one in enumerate(steps.passes):
            numbers = {getattr(step, "pass_number", None) for step in (*one.forward, *one.backward)} - {None}
            assert numbers == {number}
            assert [found.slots[slot].pass_number for slot in one.outputs] == [number]


def test_one_pass_is_on_its_way_while_another_is_computed_there_and_back() -> None:
    """Gradients of the results: the last pass's and the next one's at once, then one as each pass goes back."""
    found = program(8, Scheme.BROADCAST, fewest=2)
    lines = [line.strip() for line in found.text().splitlines()]
    lines = lines[lines.index("backward:") :]
    back = [lines.index(next(line for line in lines if line.startswith(f"move linear_1#{p}"))) for p in range(4)]
    begins = [lines.index(next(line for line in lines if line.startswith(f"pass {p}:"))) for p in range(4)]
    assert back[3] < back[2] < begins[3] < back[1] < begins[2] < back[0] < begins[1]
    for number, one in enumerate(staged(found).passes):
        texts = [step.text() for step in one.forward]
        first = next(place for place, text in enumerate(texts) if text.startswith(f"pass {number}:"))
        others = [text for text in texts[:first] if f"#{number + 1}" in text]
        assert bool(others) is (number < 3)
        assert not [text for text in texts if f"#{number + 2}" in text]


@pytest.mark.full
def test_passes_know_every_process_own_samples() -> None:
    samples = [one.samples for one in staged(program(2, Scheme.BROADCAST)).passes]
    assert samples == [((Range(0, 2),), ()), ((), (Range(0, 2),))]
    samples = [one.samples for one in staged(program(2, Scheme.INTERLEAVE)).passes]
    assert samples == [((Range(0, 1),), (Range(0, 1),)), ((Range(1, 2),), (Range(1, 2),))]
    samples = [one.samples for one in staged(program(2, Scheme.INTERLEAVE, processes=False)).passes]
    assert samples == [((Range(0, 1), Range(2, 3)),), ((Range(1, 2), Range(3, 4)),)]


def test_gather_has_no_passes() -> None:
    found = program(4, Scheme.GATHER)
    assert found.staged is None
    assert "#" not in found.text()


@every_case("seed", range(20))
def test_put_reverses_take(seed: int) -> None:
    draw = random.Random(seed)
    size, per_sample = draw.randrange(1, 12), draw.choice((1, 3))
    bounds = sorted(draw.randrange(size + 1) for _ in range(4))
    ranges = (Range(bounds[0], bounds[1]), Range(bounds[2], bounds[3]))
    held = Range(0, size * per_sample)
    whole = torch.arange(2.0 * size * per_sample).view(2, -1)
    places = local_ranges(ranges, held, per_sample)
    part = take(whole, 1, places)
    assert part.shape[1] == per_sample * sum(map(len, ranges))
    copy = torch.zeros_like(whole)
    put(copy, 1, places, part)
    assert torch.equal(take(copy, 1, places), part)
    assert copy.count_nonzero() == part.count_nonzero()


def test_rows_of_a_pass() -> None:
    one = Pass(0, (Range(0, 3), Range(4, 6)))
    assert (one.batch, one.rows(1), one.rows(2), one.rows(3)) == (5, (5,), (3, 2), (2, 2, 1))


def hooked(seen: list[tuple[int, ...]], narrow: set[str]) -> Compiled:
    """A network with hooks on its second linear layer; layers in `narrow` have one replica, all others two."""
    net, one = mlp(), Strategy(devices=(1,))
    net[2].register_forward_hook(lambda *given: seen.append(tuple(given[2].shape)))
    net[2].register_full_backward_hook(lambda *given: seen.append(tuple(given[2][0].shape)))
    names = ("0", "1", "2.pre_hooks", "2", "2.hooks", "3", "4")
    table = {name: one if name in narrow else Strategy(2, 1, None, (0, 1)) for name in names}
    return Compiled(net, planner(table, 2, Scheme.INTERLEAVE), devices=["cpu"] * 2)


@pytest.mark.full
def test_hooks_are_called_once_per_pass() -> None:
    seen: list[tuple[int, ...]] = []
    hooked(seen, {"2.pre_hooks", "2", "2.hooks", "3", "4"})(torch.randn(8, 6, dtype=torch.float64)).sum().backward()
    assert seen == [(4, 12)] * 4


def test_a_module_with_backward_hooks_has_both_ends_in_the_passes() -> None:
    model = hooked([], {"2", "3", "4"})
    with pytest.raises(PlanError, match=r"2\.hooks: 2 replicas in 2 passes, but 2 replicas where this module"):
        model(torch.randn(8, 6, dtype=torch.float64))
