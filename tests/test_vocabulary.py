"""The field's words in code and docstrings (docs/glossary.md): identifiers and metaphors of parplan's own are refused.

A folder of parplan/ is checked once its names are standard; `UNCHECKED` lists the others. To check one more: take its
line out of `UNCHECKED`, and rename what the tests then name. A word of the field that only looks like a metaphor goes
into `EXCEPTIONS`, with the reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.source_code import Identifier, Module, docstring_starts, identifiers, modules

ROOT = Path(__file__).resolve().parent.parent

UNCHECKED = (
    "cost_models/communication/", "cost_models/memory/", "layout/pieces.py", "planner/batch_size.py",
    "planner/decide.py", "planner/decision.py", "planner/explain/", "planner/request.py", "planner/search/",
)  # fmt: skip
"""Folders and files below parplan/ that are not checked yet; planner/search/ waits for its redesign."""

ANY = frozenset(("module", "class", "function", "field", "parameter", "variable"))
# Words that read well as a local variable, or as one kind of name, and badly as a concept.
CONCEPT = ANY - {"variable"}
COUNT = frozenset(("field", "parameter"))

# fmt: off
BANNED: tuple[tuple[frozenset[str], str, str], ...] = (
    # roles, identifiers, the standard words instead
    (ANY, "asked Asked", "requested, ClusterRequest"),
    (CONCEPT, "here", "local_devices, current_conditions"),
    (ANY, "strangers", "mismatches"),
    (ANY, "company Company Alone", "ranks, ProcessGroup, SingleProcess"),
    (frozenset(("function",)), "meet agree", "barrier, any, intersection"),
    (ANY, "player Player play plays played NEVER", "simulated, simulate, Timeline, INFEASIBLE"),
    (ANY, "clock clocked needs_clock clock_reasons", "simulated step, needs_simulation, with_simulated_times"),
    (COUNT, "yields holds shares", "low_priority, exclusive, capacity"),
    (CONCEPT, "ahead back tail", "forward_s, backward_s, reduction_s"),
    (CONCEPT, "trials Piece", "runnable_parts, LayerPart"),
    (ANY, "placing Placing Placed", "placement, SlotAssigner, ScheduledMove"),
    (CONCEPT, "setting Setting", "step_setting, StepSetting"),
    (ANY, "draws Draws", "random_state, SeededOps"),
    (CONCEPT, "codes Codes", "code_cache, SegmentCache"),
    (frozenset(("module",)), "moves sweeps facts kept worth case polish towers", "traffic, in_context_timing, "
     "layer_report, saved, potential_gain, context, refine, branch_search"),
    (ANY, "stolen_s late_s tail_s", "compute_interference_s, post_update_s, overlappable_s"),
    (ANY, "statistics_s", "batch_norm_sync_s"),
    (ANY, "Manner in_turn", "PassPolicy, one_f_one_b"),
    (ANY, "look_back foreseen foresee Foreseen", "predicted_vs_measured, prediction, predict"),
    (ANY, "rivals rival habits habit", "baselines"),
    (frozenset(("function",)), "sketch", "estimate"),
    (ANY, "Kept Case Ground Attempts Worth worthwhile Beside Track Handover",
     "StoredEntry, PlanningContext, SearchInput, CandidatePlans, potential gain, ConcurrentBranches, DeviceTrack, "
     "BufferBroadcast"),
    (COUNT, "many few most fewest", "max_replicas, min_replicas, limit"),
    (frozenset(("field",)), "behind", "critical_predecessor"),
)

METAPHORS = ("company", "clock", "play", "plays", "played", "strangers", "stranger", "rivals", "rival", "habits",
             "towers", "tower", "at home", "at work", "stolen", "polish", "polishes", "worth", "handover", "foreseen")
# fmt: on

# (path below parplan/, identifier or word of a docstring's first line) -> why it stays.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("fields.py", "most"): "the upper limit of a number, beside `least`",
}

FREE_CLAUSE = re.compile(r"(What|Who|Whoever|Whose)\b")
METAPHOR = re.compile(rf"\b({'|'.join(METAPHORS)})\b", re.IGNORECASE)


def checked() -> list[Module]:
    """The modules to check."""
    return [module for module in modules() if not module.path.startswith(UNCHECKED)]


def standard_word(found: Identifier) -> str | None:
    """The standard words in place of a banned identifier; None for one that is fine."""
    name = found.name.lstrip("_")
    return next((better for roles, names, better in BANNED if found.role in roles and name in names.split()), None)


def test_identifiers_are_the_fields() -> None:
    found = [
        f"parplan/{module.path}:{one.line}: {one.role} {one.name}; the field says {better}"
        for module in checked()
        for one in identifiers(module)
        if (better := standard_word(one)) and (module.path, one.name) not in EXCEPTIONS
    ]
    assert found == []


def test_docstrings_start_with_a_mechanism() -> None:
    found = [
        f"parplan/{module.path}:{line}: {text}"
        for module in checked()
        for line, text in docstring_starts(module)
        if (word := FREE_CLAUSE.match(text) or METAPHOR.search(text)) and (module.path, word[0]) not in EXCEPTIONS
    ]
    assert found == []


def test_every_unchecked_path_exists() -> None:
    assert [path for path in UNCHECKED if not (ROOT / "parplan" / path).exists()] == []


@pytest.mark.parametrize(
    ("one", "better"),
    [
        (Identifier("Company", "class"), "ranks, ProcessGroup, SingleProcess"),
        (Identifier("_tail", "field"), "forward_s, backward_s, reduction_s"),
        (Identifier("tail", "variable"), None),
        (Identifier("heads", "field"), None),
    ],
)
def test_standard_word(one: Identifier, better: str | None) -> None:
    assert standard_word(one) == better


GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


def test_the_glossary_is_in_alphabetical_order() -> None:
    words = re.findall(r"^\| \*\*(.+?)\*\*", GLOSSARY, flags=re.MULTILINE)
    assert len(words) > 30
    assert words == sorted(words, key=str.lower)
