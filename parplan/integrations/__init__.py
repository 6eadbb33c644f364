"""Adapters for libraries that train models; each module is imported by itself, and needs its library."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["library"]


def library(name: str, extra: str) -> Any:
    """An optional library.

    Raises:
        ImportError: it is not installed; the text says how to install it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported ({error}); pip install 'parplan[{extra}]'") from error
