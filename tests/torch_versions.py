"""Tests of what some releases of torch do and others do not."""

from __future__ import annotations

import re

import pytest
import torch

_RELEASE = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def fails_before(release: tuple[int, int], reason: str) -> pytest.MarkDecorator:
    """Mark of a test that has to fail on every torch older than `release`, and only there; docs/limits.md says why."""
    return pytest.mark.xfail(release > _RELEASE, reason=reason, strict=True)


def only_before(release: tuple[int, int], reason: str) -> pytest.MarkDecorator:
    """Mark of a test of what torch has done up to `release`."""
    return pytest.mark.skipif(release <= _RELEASE, reason=reason)
