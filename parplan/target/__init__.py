"""The model and the inputs that a command line names."""

from __future__ import annotations

from parplan.target.load import Target, load

__all__ = ["Target", "load"]
