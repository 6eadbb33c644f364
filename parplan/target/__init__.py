"""The model and the inputs that a command line names."""

from __future__ import annotations

from parplan.target.inputs import Target
from parplan.target.load import load

__all__ = ["Target", "load"]
