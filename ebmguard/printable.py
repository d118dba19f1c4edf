"""Texts that others wrote, before a terminal sees them."""

from __future__ import annotations

import re

__all__ = ["printable"]

# C0 but for tab and line feed, DEL and C1, by which a text moves the cursor, renames the window or
# types; marks and overrides of direction, by which it shows another text than it holds; and halves
# of surrogate pairs, of which file names with invalid UTF-8 consist, and which nothing can encode.
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: object) -> str:
    """The text with ``\N{REPLACEMENT CHARACTER}`` for what would control a terminal instead of
    being shown: control characters but tab and line feed, marks of direction, lone surrogates."""
    return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", str(text))
