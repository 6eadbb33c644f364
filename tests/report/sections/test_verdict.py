"""The verdict: what to use, how fast, fit and proof, in the first lines and without a claim that is not made below."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.cost_models.costs import Source
from parplan.plan import Strategy
from parplan.planner.decision import (
    ANY_BLOCK,
    BRANCHES,
    NOT_COMPARED,
    ConcurrentBranches,
    Decision,
    LayerReport,
    Proof,
    Simpler,
)
from parplan.planner.decision import (
    SHARDED as IN_SLICES,
)
from parplan.report.sections.verdict import kind_of_plan
from parplan.report.terminal import Detail
from tests.every_case import every_case
from tests.report.decisions import DATA, HYBRID, ONE, SHARDED, alexnet, alone, chained, facts, pinned, schemes
from tests.report.golden import printed

STEP_S = alexnet().prediction.step_s


def verdict(decision: Decision) -> str:
    """The text in front of the first empty line."""
    return " ".join(printed(decision, 80).partition("\n\n")[0].split())


def described(decision: Decision) -> str:
    """The text behind the first empty line."""
    return " ".join(printed(decision, 80).split("\n\n")[1].split())


def of(*strategies: Strategy) -> Decision:
    """Linear layers with these strategies, each with a layer without weights behind it."""
    layers: list[LayerReport] = []
    for index, strategy in enumerate(strategies):
        layers += [facts(f"fc{index}", "linear", strategy, 1.0, ""), facts(f"relu{index}", "relu", ONE, 0.1, "")]
    return replace(alexnet(), layers=chained(layers), passes=None)


@pytest.mark.parametrize(
    ("strategies", "words"),
    [
        ((ONE,), "one device"),
        ((ONE, Strategy(devices=(1,))), "whole layers on 2 devices"),
        ((DATA, DATA), "data parallel: 4 replicas of every layer with weights"),
        ((SHARDED, replace(SHARDED, axis="in-features")), "model parallel: 4 shards of every layer with weights"),
        ((HYBRID,), "a hybrid of data and model parallel: 2 replicas x 2 shards of every layer with weights"),
        ((DATA, DATA, SHARDED), "a hybrid of data and model parallel: 4 replicas of fc0 and fc1, 4 shards of fc2"),
        ((DATA,) * 4 + (ONE,), "data parallel: 4 replicas of fc0 .. fc3, one device of fc4"),
        ((DATA, SHARDED, HYBRID, ONE, ONE),
         "a hybrid of data and model parallel: 4 replicas of fc0, 4 shards of fc1, 2 replicas x 2 shards of fc2, "
         "1 more way"),
        ((DATA, SHARDED) + (DATA,) * 3,
         "a hybrid of data and model parallel: 4 replicas of 4 layers, 4 shards of fc1"),
    ],
)  # fmt: skip
def test_kinds_of_plans(strategies: tuple[Strategy, ...], words: str) -> None:
    assert kind_of_plan(of(*strategies)) == words


def test_passes_and_branches_are_named() -> None:
    from parplan.plan import Scheme
    from parplan.planner.decision import Phase

    passes = schemes(alexnet().prediction.step_s, Scheme.INTERLEAVE)
    branches = ConcurrentBranches((Phase((), 0.1),))
    kind = kind_of_plan(replace(alexnet(), passes=passes, branches=branches))
    assert kind.startswith(
        "a hybrid of data and model parallel in 4 passes over parts of the batch with branches at the same time: "
    )


def test_this_plan_is_compared_with_one_device_and_the_best_by_hand() -> None:
    text = verdict(alexnet())
    assert text.startswith(
        "Use this plan on all 4 devices, a hybrid of data and model parallel: 4 replicas of conv1 .. conv5, 4 shards "
        "of fc6 .. fc8."
    )
    assert (
        "Speed 18.65 ms a step, 27,459 samples/s (estimated); 3.43 x as fast as one device, 1.00 x as fast as the"
        in text
    )
    assert "Fits yes: 3.21 GiB of 15.0 GiB on the fullest device (21 %)." in text


def test_figures_are_of_the_plan_of_the_report_whatever_would_be_better() -> None:
    decision = alexnet()
    advice = "Use pure data parallel instead of this plan: 2.00 x as fast."
    text = verdict(replace(decision, advised="pure data parallel", advice=advice))
    assert text.startswith(advice)
    assert "Speed 18.65 ms a step" in text
    assert "Fits yes: 3.21 GiB of 15.0 GiB" in text


def test_a_plan_by_hand_has_its_name_and_says_what_its_own_batch_norm_would_make_of_it() -> None:
    decision = alexnet()
    one, data, *others = decision.baselines
    step_s = decision.prediction.step_s
    for norm_s, words in ((0.0, "as one device. Fits"), (
        1e-3, "as one device. 17.65 ms with batch norm on each device's own samples, as DistributedDataParallel has it."
    )):  # fmt: skip
        same = replace(data, step_s=step_s - norm_s, plan=decision.plan, batch_norm_s=norm_s)
        taken = replace(decision, advised=same.name, baselines=(one, same, *others))
        text = verdict(taken)
        assert text.startswith(
            "Use plain data parallel on all 4 devices: 4 replicas of conv1 .. conv5, 4 shards of fc6"
        )
        assert words in text
        assert ("no plan without sharded state that has batch norm over the whole batch is faster" in text) is (
            norm_s > 0
        )


def test_the_faster_plan_is_a_line_below() -> None:
    """Where a simpler one is taken."""
    decision = alexnet()
    simpler = Simpler(0.987 * STEP_S, 4, 2, "pure data parallel", "8 shards of wte")
    proof = replace(decision.proof, status="FEASIBLE", bound=0.987 * STEP_S, gap=0.013, simpler=simpler)
    text = verdict(replace(decision, proof=proof))
    assert text.endswith("Faster by 1.3 % with 8 shards of wte: `--tolerance 0`.")
    assert "Proven within 1.3 %: no plan" in text
    assert "Faster" not in verdict(decision)


def test_layers_that_take_next_to_nothing_do_not_lead_the_verdict() -> None:
    decision = alexnet()
    first, *others = [layer for layer in decision.layers if layer.parameters]
    tiny = replace(
        first, name="tiny", forward_s=1e-9, backward_s=0.0, transfer_s=0.0, reduce_s=0.0,
        strategy=replace(first.strategy, replicas=2, shards=2, axis="channels"),
    )  # fmt: skip
    assert "tiny" not in kind_of_plan(replace(decision, layers=(tiny, first, *others)))
    alone = [replace(layer, strategy=first.strategy) for layer in others]
    text = kind_of_plan(replace(decision, layers=(tiny, first, *alone)))
    assert text == "data parallel: 4 replicas of every layer with weights, small layers aside"


@pytest.mark.parametrize(("source", "words"), [
    (Source.MEASURED, "samples/s (measured here)"), (Source.SHIPPED, "samples/s (measured elsewhere)"),
    (Source.ESTIMATED, "samples/s (estimated)"),
])  # fmt: skip
def test_the_speed_says_what_it_rests_on(source: Source, words: str) -> None:
    first, *others = alexnet().layers
    layers = (replace(first, source=source), *(replace(layer, source=Source.MEASURED) for layer in others))
    assert words in verdict(replace(alexnet(), layers=layers))


def test_too_much_memory_is_no_fit() -> None:
    step = alexnet().prediction
    text = verdict(replace(alexnet(), prediction=replace(step, memory_bytes=(16 * 2**30,) * 4)))
    assert "Fits no: 16.0 GiB of 15.0 GiB on the fullest device (107 %)." in text


WHOLE = "no plan without sharded state"


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (Proof("OPTIMAL", STEP_S, STEP_S, 0, 1, covered=(ANY_BLOCK, BRANCHES)), f"yes: {WHOLE} is faster under"),
        (Proof("OPTIMAL", STEP_S, STEP_S, 0, 1, covered=(ANY_BLOCK, BRANCHES, IN_SLICES)), "yes: no plan is faster"),
        (Proof("OPTIMAL", STEP_S, STEP_S, 0, 1, covered=(ANY_BLOCK, BRANCHES), stages=NOT_COMPARED),
         f"yes: {WHOLE} or stages is faster under"),
        (Proof("OPTIMAL", STEP_S, STEP_S, 0, 1), f"yes: {WHOLE} that has its layers on the first"),
        (Proof("OPTIMAL", STEP_S, STEP_S, 0, 1, equal_parts=True),
         f"yes: {WHOLE} that has its layers on the first devices and splits the batch evenly is faster"),
        (Proof("OPTIMAL", STEP_S, STEP_S, 0, 1, equal_parts=True, alike="blocks"),
         f"yes, under the conditions below: {WHOLE} is faster"),
        (Proof("FEASIBLE", STEP_S, 0.9 * STEP_S, 0.1, 1, covered=(ANY_BLOCK, BRANCHES)),
         f"within 10 %: {WHOLE} takes less than 16.78 ms under these costs."),
        (Proof("FEASIBLE", STEP_S, 0.99999 * STEP_S, 1e-5, 1, covered=(ANY_BLOCK, BRANCHES)),
         f"within 0.1 %: {WHOLE} takes less than 18.65 ms under these costs."),
        (Proof("FEASIBLE", STEP_S, 0.9 * STEP_S, 0.1, 1), f"within 10 %: {WHOLE} that has its layers on the first"),
        (Proof("FEASIBLE", STEP_S, float("-inf"), float("inf"), 1), "no: no bound was found"),
        (Proof("FEASIBLE", STEP_S, 0.0, 1.0, 1), "no: no bound was found"),
        (Proof("FEASIBLE", STEP_S, 0.9 * STEP_S, 0.1, 1, given=True), "within 10 %: no plan that"),
        (Proof("OPTIMAL", STEP_S, 1.2 * STEP_S, 0.0, 1, covered=(ANY_BLOCK, BRANCHES)),
         f"yes: {WHOLE} that hands the model's results to all 4 devices is faster"),
        (Proof("GIVEN", STEP_S, float("-inf"), float("inf"), 0), "no: no bound was found"),
    ],
)  # fmt: skip
def test_the_proof_in_a_few_words(proof: Proof, words: str) -> None:
    assert f"Proven {words}" in verdict(replace(alexnet(), proof=proof))


@pytest.mark.parametrize("gap", [0.0, 1e-5, 0.004, 0.1, float("inf")])
def test_the_verdict_and_the_proof_say_the_same(gap: float) -> None:
    status = "FEASIBLE" if gap else "OPTIMAL"
    decision = replace(
        alexnet(), proof=Proof(status, STEP_S, (1 - gap) * STEP_S, gap, 1, covered=(ANY_BLOCK, BRANCHES))
    )
    text = " ".join(printed(decision, 80).split())
    above = {"OPTIMAL": "Proven yes: ", "FEASIBLE": "Proven within ", "": "Proven no: "}[status if gap < 1 else ""]
    below = {"OPTIMAL": " OPTIMAL: ", "FEASIBLE": " WITHIN ", "": " NOT PROVEN: "}[status if gap < 1 else ""]
    assert above in text
    assert below in text
    assert "FEASIBLE" not in text
    assert "<0.1 % under" not in text


def test_pins_limit_the_proof() -> None:
    assert "no plan with these pins and without sharded state is faster" in verdict(pinned())


@pytest.mark.parametrize("make", [alexnet, alone, pinned])
@pytest.mark.parametrize("width", [50, 80, 120])
def test_the_first_screen_has_verdict_and_groups(make: object, width: int) -> None:
    assert callable(make)
    lines = printed(make(), width, detail=Detail.SUMMARY).splitlines()
    assert len(lines) <= 24 + 6 * (width == 50)
    assert printed(make(), width).startswith("\n".join(lines))


@pytest.mark.full
@every_case("detail", list(Detail))
@every_case("name", ["\x1b[31mred\x1b[0m", "a\nb\rc", "\u202egnihtyna", "x" * 10_000, "[bold]b[/bold]", ""])
def test_hostile_names_are_text_on_the_terminal(name: str, detail: Detail) -> None:
    decision = alexnet()
    first, second, *others = decision.layers
    layers = (replace(first, name=name, why=name), replace(second, inputs=(name,)), *others)
    plan = replace(
        decision.plan, model=name, note=name, notes={name: name},
        layers={layer.name: layer.strategy for layer in layers},
    )  # fmt: skip
    shown = replace(decision, layers=layers, plan=plan, notes=(name,), advice=name, advised="pure data parallel")
    text = printed(shown, 80, detail=detail)
    assert not set(text) & {"\x1b", "\r", "\u202e"}
    whole = f"  {name} .. pool1" if detail is Detail.DEFAULT else f"  {name}"
    assert [line for line in text.splitlines() if len(line) > 80 and line not in (whole, f"  {name}")] == []
