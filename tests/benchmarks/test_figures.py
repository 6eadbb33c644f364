"""Figures in documents are found, and told where a command gives others."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.figures import CLAIMS, ROOT, SOURCES, differences

PUBLISHED: dict[str, Any] = {"krizhevsky2014": {"2": 1.9929, "4": 3.9233, "8": 7.1906}}


def test_a_figure_that_the_command_gives_otherwise_is_told() -> None:
    assert differences("published", PUBLISHED) == []
    found = differences("published", {"krizhevsky2014": {**PUBLISHED["krizhevsky2014"], "4": 3.93}})
    assert found == [
        "README.md: not found: 1.99x, 3.93x, 7.19x where 1.95x, 3.74x, 6.25x were measured on 2, 4, 8 GPUs",
        "docs/predictions.md: not found: | 3.74x | 3.93x |",
    ]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.document} {claim.source}")
def test_every_claim_has_a_document_and_a_source(claim: Any) -> None:
    assert (ROOT / claim.document).is_file()
    assert claim.source in SOURCES
