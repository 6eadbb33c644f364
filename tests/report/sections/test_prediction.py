"""The lines of a predicted step: its parts, and its range."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.cost_models.costs import Source
from parplan.planner.decision import Decision
from tests.every_case import every_case
from tests.report.decisions import DECISIONS, alexnet, alone
from tests.report.golden import printed


def with_more(decision: Decision, update_s: float = 0.0, overhead_s: float = 0.0, doubt: float = 0.0) -> Decision:
    """The same with an update and overhead in the step, and a range around it."""
    step = decision.prediction
    step_s = step.step_s + update_s + overhead_s
    more = replace(
        step,
        step_s=step_s,
        update_s=update_s,
        overhead_s=overhead_s,
        low_s=step_s * (1 - doubt),
        high_s=step_s * (1 + doubt),
    )
    return replace(decision, prediction=more)


def lines(decision: Decision, width: int = 80) -> list[str]:
    found = printed(decision, width).splitlines()
    start = next(index for index, line in enumerate(found) if line.startswith("Predicted step"))
    end = next(index for index in range(start, len(found)) if not found[index].strip())
    return found[start:end]


def line(decision: Decision, name: str) -> str:
    (only,) = (text for text in lines(decision) if text.startswith(f"  {name} "))
    return only


def test_an_update_and_the_runtime_have_lines_of_their_own() -> None:
    decision = with_more(alexnet(), update_s=2e-3, overhead_s=1e-3)
    assert line(decision, "update").split()[1:3] == ["2.00", "ms"]
    assert line(decision, "update").endswith("the optimizer's, of what each device holds")
    assert line(decision, "runtime").split()[1:3] == ["1.00", "ms"]
    assert line(decision, "runtime").endswith("Python and autograd, whatever the plan")


def test_what_takes_no_time_and_is_certain_has_no_line() -> None:
    names = {text.split()[0] for text in lines(with_more(alexnet())) if text.startswith("  ")}
    assert not names & {"update", "runtime", "range"}


def test_what_can_be_hidden_is_told_where_it_is_not_all() -> None:
    decision = alexnet()
    text = " ".join(" ".join(lines(decision)).split())
    assert "of gradient sums runs beside the backward pass (87 %)" in text
    step = decision.prediction
    half = replace(decision, prediction=replace(step, most_hidden=0.5, exposed_reduce_s=0.5 * step.reduce_s))
    assert "runs beside the backward pass (50 %, 50 % at most)" in " ".join(" ".join(lines(half)).split())


def test_more_than_can_be_hidden_is_hidden_behind_other_devices() -> None:
    """On the clock the step waits for the device that is done last; sums of the others may end when they like."""
    step = alexnet().prediction
    most = replace(alexnet(), prediction=replace(step, most_hidden=0.5, exposed_reduce_s=0.1 * step.reduce_s))
    text = " ".join(" ".join(lines(most)).split())
    assert "runs beside the backward pass and other devices' work (90 %)" in text
    assert "at most" not in text


def test_the_range() -> None:
    step_s = alexnet().prediction.step_s
    decision = with_more(alexnet(), doubt=0.25)
    text = " ".join(" ".join(lines(decision)).split())
    expected = f"range {0.75 * step_s * 1e3:.2f} ms to {1.25 * step_s * 1e3:.2f} ms, by the uncertainty of each figure"
    assert expected in text


def test_parts_with_update_and_runtime_add_up() -> None:
    found = lines(with_more(alexnet(), update_s=2e-3, overhead_s=1e-3))
    figures = {text.split()[0]: float(text.split()[1]) for text in found if " ms " in text and text[:3].strip()}
    parts = ("forward", "backward", "transfer", "reduce", "update", "runtime")
    assert sum(figures.get(name, 0.0) for name in parts) == pytest.approx(figures["step"], abs=0.031)


@pytest.mark.full
@every_case("scale", [1e-6, 1.0, 1e4])
@every_case("width", [80, 120])
@every_case("name", sorted(DECISIONS))
def test_no_line_is_wider_than_the_page(name: str, width: int, scale: float) -> None:
    decision = with_more(DECISIONS[name](), update_s=1.234 * scale, overhead_s=0.123 * scale, doubt=0.4)
    for each in (decision, replace(decision, links=Source.MEASURED)):
        assert [text for text in printed(each, width).splitlines() if len(text) > width] == []


def test_where_transfers_come_from() -> None:
    estimated, measured = (
        " ".join(printed(replace(alexnet(), links=source), 80).split())
        for source in (Source.ESTIMATED, Source.MEASURED)
    )
    assert "Transfers and reductions are computed from the links: nvlink 2 at 150 GB/s." in estimated
    assert "Some figures of nvlink 2 are not verified: `parplan presets` has their sources." in estimated
    assert "Transfers and reductions were measured here." in measured
    assert "nvlink 2 are not verified" not in measured
    assert "Transfers" not in printed(replace(alone(), links=Source.MEASURED), 80)


def test_results_sent_back_are_in_no_layers_line_and_the_transfers_say_so() -> None:
    decision = alexnet()
    assert line(decision, "transfer").split()[-1] == "%"
    step = decision.prediction
    more = replace(step, transfer_s=step.transfer_s + 2e-3, step_s=step.step_s + 2e-3)
    text = " ".join(" ".join(lines(replace(decision, prediction=more))).split())
    assert "2.00 ms of it brings results back to all devices, in no line above" in text


def test_a_simulated_step_says_that_lines_need_not_add_up_to_it() -> None:
    decision = alexnet()
    heading = lines(decision, 80)[0]
    assert heading == "Predicted step"
    simulated = replace(decision, prediction=replace(decision.prediction, simulated=True))
    assert lines(simulated, 80)[0] == "Predicted step  of the device done last; lines above need not add up to it"


def test_what_batch_norm_over_the_whole_batch_costs_is_said_with_the_way_to_save_it() -> None:
    step = alexnet().prediction
    said = replace(alexnet(), prediction=replace(step, batch_norm_s=0.1 * step.step_s))
    text = " ".join(" ".join(lines(said)).split())
    assert "of it (10 % of the step) shares batch norm's statistics among replicas" in text
    assert '`batch_norm="local"` takes each replica\'s own, as DDP does, and saves it' in text
    assert "batch norm" not in " ".join(lines(alexnet()))


def test_data_parallel_says_what_batch_norm_over_the_whole_batch_would_add() -> None:
    decision = alexnet()
    one, data, *others = decision.baselines
    local = replace(data, batch_norm_s=1.5e-3)
    text = " ".join(printed(replace(decision, baselines=(one, local, *others)), 80).split())
    assert "batch norm on each device's samples, as DDP has it; on the whole batch +1.50 ms" in text
