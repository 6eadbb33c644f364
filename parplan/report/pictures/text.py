"""Names from models and files as text for a page: nothing invisible, nothing that turns the direction, not too long."""

from __future__ import annotations

import unicodedata

__all__ = ["LONGEST", "shortened", "visible"]

LONGEST = 160
"""Characters of a name that a page shows where there is room."""
_INVISIBLE = frozenset(["Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"])


def visible(text: str, longest: int = LONGEST) -> str:
    """The text with escapes for what cannot be seen (controls, marks of direction, half surrogates), shortened.

    >>> visible("a\\x1b[31m\\u202eb")
    'a\\\\x1b[31m\\\\u202eb'
    """
    few = shortened(text, longest)
    found = (one if unicodedata.category(one) not in _INVISIBLE else _escape(one) for one in few)
    return shortened("".join(found), longest)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def shortened(text: str, longest: int) -> str:
    """At most so many characters, the middle left out: the ends of a dotted name tell most.

    >>> shortened("features.denseblock4.norm1", 15)
    'feature…4.norm1'
    """
    if len(text) <= longest:
        return text
    tail = max(1, longest // 2)
    return f"{text[: max(0, longest - tail - 1)]}…{text[-tail:]}"
