"""Reports against text files, and what holds for every report at every width and on every stream."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from parplan.plan import Scheme
from parplan.planner.decision import ANY_BLOCK, BRANCHES, MicroBatchesTried, Proof
from parplan.report.terminal import Detail, render
from tests.every_case import every_case
from tests.report.decisions import DECISIONS, alexnet, crowded, on_two_kinds, resnet, schemes
from tests.report.golden import CASES, golden, printed

ESCAPE = "\x1b"


@pytest.mark.parametrize(("name", "width"), CASES)
def test_report_is_the_golden_one(name: str, width: int) -> None:
    assert printed(DECISIONS[name](), width) == golden(name, width).read_text(encoding="utf-8")


@pytest.mark.full
@every_case("detail", list(Detail))
@every_case("width", [50, 60, 80, 100, 200])
@every_case("name", sorted(DECISIONS))
def test_no_line_is_wider_than_the_page_and_none_ends_in_blanks(name: str, width: int, detail: Detail) -> None:
    decision = DECISIONS[name]()
    lines = printed(decision, width, detail=detail).splitlines()
    pins = [] if decision.pins is None else [one.pin for one in decision.pins.each]
    whole = [f"  {name}" for name in (*(layer.name for layer in decision.layers), *pins)]  # alone on a line, never cut
    assert [line for line in lines if (len(line) > width and line not in whole) or line != line.rstrip()] == []


def test_a_long_name_is_never_cut() -> None:
    (name,) = (layer.name for layer in crowded().layers if len(layer.name) > 50)
    lines = printed(crowded(), 80).splitlines()
    assert f"  {name}" in lines
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", sorted(DECISIONS))
def test_a_pipe_gets_the_terminals_text_without_colours(name: str) -> None:
    coloured, piped = (printed(DECISIONS[name](), 80, terminal=terminal) for terminal in (True, False))
    assert ESCAPE in coloured
    assert ESCAPE not in piped
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == piped


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stream_that_is_not_utf8_gets_what_it_can_show(encoding: str) -> None:
    bytes_ = io.BytesIO()
    stream = io.TextIOWrapper(bytes_, encoding=encoding, errors="strict")
    decision = replace(
        DECISIONS["alone"](), advice="use one GPU \N{EN DASH} 3 µs → 2 \N{MULTIPLICATION SIGN} faster, \N{SNOWMAN}."
    )
    render(decision, Console(file=stream, width=80))
    stream.flush()
    text = bytes_.getvalue().decode(encoding)
    assert "use one GPU - 3 us -> 2 x faster, ?." in text
    assert ("times in us" in text) is (encoding == "ascii")


def test_names_are_not_markup() -> None:
    decision = alexnet()
    layers = (replace(decision.layers[0], name="[red]0[/red]", why=":smile: [bold]"), *decision.layers[1:])
    text = printed(replace(decision, layers=layers), 80)
    assert "  [red]0[/red]  " in text
    assert ":smile: [bold]" in text


def test_every_layer_has_its_line_and_reason_when_asked() -> None:
    decision = resnet()
    text = printed(decision, 120, detail=Detail.FULL)
    lines = text[text.index("\nLayers ") :].splitlines()
    for layer in decision.layers:
        (line,) = (line for line in lines if line.startswith(f"  {layer.name} "))
        assert layer.why.split()[0] in line


def test_a_long_model_is_folded() -> None:
    folded, unfolded = (printed(resnet(), 80, detail=one).splitlines() for one in (Detail.DEFAULT, Detail.FULL))
    assert len(folded) < 90 < 175 < len(unfolded)
    assert "175 layers on 15 lines, figures summed; `--full` prints each." in folded


PROOFS = [
    pytest.param("OPTIMAL", 0.0, "OPTIMAL: no plan of this model is faster under these", id="optimal"),
    pytest.param("FEASIBLE", 0.032, "WITHIN 3.2 %: no plan of this model takes less than 18.05 ms", id="feasible"),
    pytest.param("FEASIBLE", float("inf"), "how much faster another one could be is not known", id="no bound"),
    pytest.param("CHECKED", float("inf"), "NOT PROVEN: the best plan found in the time", id="no claim"),
]


@pytest.mark.parametrize(("status", "gap", "words"), PROOFS)
def test_the_proof_in_words(status: str, gap: float, words: str) -> None:
    decision = alexnet()
    bound = decision.prediction.step_s * (1 - gap)
    proof = Proof(status, decision.prediction.step_s, bound, gap, 1.0, covered=(ANY_BLOCK, BRANCHES))
    text = printed(replace(decision, proof=proof), 100)
    assert words in " ".join(text.split())
    assert ("inf" in text) is False


@pytest.mark.parametrize(("covered", "words"), [
    (("gather",), "no plan of this model that has its layers on the first devices is faster under these costs"),
    ((ANY_BLOCK, BRANCHES), "no plan of this model is faster under these costs"),
])  # fmt: skip
def test_what_was_not_searched_is_not_called_optimal(covered: tuple[str, ...], words: str) -> None:
    step_s = alexnet().prediction.step_s
    proof = Proof("OPTIMAL", step_s, step_s, 0.0, 1.0, covered=covered)
    assert words in " ".join(printed(replace(alexnet(), proof=proof), 100).split())


@pytest.mark.parametrize(("layers", "words"), [
    ((), None),
    (("fc6",), "Pins have the weights of fc6 updated between passes"),
    (("fc6", "fc7"), "Pins have the weights of fc6 and fc7 updated between passes"),
    (("fc6", "fc7", "fc8"), "Pins have the weights of fc6 and 2 more layers updated between passes"),
])  # fmt: skip
def test_updates_that_ask_for_passes_are_named(layers: tuple[str, ...], words: str | None) -> None:
    passes = replace(schemes(alexnet().prediction.step_s, Scheme.INTERLEAVE, ""), updated=layers)
    text = " ".join(printed(replace(alexnet(), passes=passes), 100).split())
    assert words in text if words else "Pins have" not in text


def test_a_layer_that_runs_once_is_not_said_to_be_updated_between_passes() -> None:
    decision = alexnet()
    first, *others = decision.layers
    layers = (replace(first, strategy=replace(first.strategy, update_period=2)), *others)
    passes = replace(schemes(decision.prediction.step_s, Scheme.INTERLEAVE, ""), in_front=(first.name,))
    text = " ".join(printed(replace(decision, layers=layers, passes=passes), 100).split())
    assert f"{first.name} runs once, in front of the passes: its weights are updated once." in text
    assert "every 2 passes" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_schemes_are_compared_and_reasons_given(width: int) -> None:
    passes = schemes(alexnet().prediction.step_s, Scheme.INTERLEAVE, "loss: it needs all samples")
    text = printed(replace(alexnet(), passes=passes), width)
    lines, together = text.splitlines(), " ".join(text.split())
    (taken,) = (line for line in lines if line.startswith("  interleave (taken)"))
    assert taken.split() == ["interleave", "(taken)", "4", "128", "18.69", "ms", "0.44", "ms", "3.21", "GiB"]
    assert "not possible: loss: it needs all samples" in together
    assert "as fast as one device, 4 passes" in together
    assert max(map(len, lines)) <= width


def test_a_plan_given_is_not_called_the_best_found() -> None:
    decision = alexnet()
    step_s = decision.prediction.step_s
    text = printed(replace(decision, proof=Proof("FEASIBLE", step_s, step_s * 0.65, 0.35, 1.0, given=True)), 100)
    words = " ".join(text.split())
    assert "WITHIN 35 %: no plan of this model that has its layers on the first devices takes less than 12.12" in words
    assert "best plan found" not in words
    assert "--time-limit" not in words


def test_one_device_that_is_faster_is_not_denied_by_the_proof() -> None:
    decision = alexnet()
    one, *others = decision.baselines
    faster = replace(one, step_s=decision.prediction.step_s / 2)
    words = " ".join(printed(replace(decision, baselines=(faster, *others)), 100).split())
    assert "no plan of this model that hands the model's results to all 4 devices is faster" in words


def test_too_much_memory_is_said() -> None:
    decision = alexnet()
    memory = (16 * 2**30, *decision.prediction.memory_bytes[1:])
    text = printed(replace(decision, prediction=replace(decision.prediction, memory_bytes=memory)), 100)
    assert "  memory    16.0 GiB  107 %  of 15.0 GiB on device 0: 1.0 GiB TOO MUCH" in text.splitlines()


def test_parts_add_up_to_the_step() -> None:
    lines = printed(alexnet(), 80).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("  step"))
    step, *parts = (float(line.split()[1]) for line in lines[start:] if re.match(r"  \w+ +[\d.]+ ms", line))
    assert sum(parts[:4]) == pytest.approx(step, abs=0.021)


@pytest.mark.parametrize("width", [80, 120])
def test_several_kinds_of_devices_are_named_with_their_memories(width: int) -> None:
    text = printed(on_two_kinds(alexnet()), width)
    assert max(map(len, text.splitlines())) <= width
    together = " ".join(text.split())
    assert "3 x v100-sxm2 + 1 x cpu, nvlink 2; 15.0 GiB on each v100-sxm2, 4.00 GiB on each cpu " in together
    assert "one device (v100-sxm2)" in together
    assert "of 15.0 GiB on " in together
    assert "of 4.00 GiB on device 3" in together


@pytest.mark.parametrize("width", [80, 120])
def test_numbers_of_micro_batches_are_compared(width: int) -> None:
    found = alexnet()
    tried = (
        MicroBatchesTried(1, None, None, False),
        MicroBatchesTried(2, 0.0123, 5 * 2**30, False),
        MicroBatchesTried(4, 0.0131, 3 * 2**30, True),
        MicroBatchesTried(8, None, None, True),
    )
    plan = replace(found.plan, micro_batches=4)
    text = printed(replace(found, plan=plan, micro_batches=tried), width)
    assert re.search(r"^Use .* in 4 micro-batches", text)
    assert f"batch {plan.batch:,} in 4 micro-batches" in text
    rows = text[text.index("\nMicro-batches ") :].splitlines()[4:8]
    assert [" ".join(row.split()) for row in rows] == [
        f"1 {plan.batch} no plan fits",
        f"2 {plan.batch // 2} 5.00 GiB does not fit",
        f"4 {plan.batch // 4} 13.10 ms 3.00 GiB chosen",
        f"8 {plan.batch // 8} none is faster",
    ]
