"""Failures of tests on old releases of torch that lie in torch itself."""

from __future__ import annotations

import re

import pytest
import torch

_RELEASE = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def fails_before(release: tuple[int, int], reason: str) -> pytest.MarkDecorator:
    """Mark of a test that has to fail on every torch older than `release`, and only there; docs/limits.md says why."""
    return pytest.mark.xfail(release > _RELEASE, reason=reason, strict=True)
