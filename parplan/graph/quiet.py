"""Keep an exporter quiet: what it prints before it fails would bury the one line that matters."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator

__all__ = ["quiet"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back warnings, log lines and prints; prints are passed on to stderr if all goes well."""
    held, disabled = io.StringIO(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(held), contextlib.redirect_stdout(held):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
    sys.stderr.write(held.getvalue())
