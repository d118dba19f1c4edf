from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from ebmguard.printable import printable

# Control characters, surrogates, and what orders text from right to left or ends a line.
_UNFIT_KINDS = {"Cc", "Cs", "Zl", "Zp"}
_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def is_unfit(character: str) -> bool:
    """By the Unicode character database."""
    return (
        unicodedata.category(character) in _UNFIT_KINDS and character not in "\t\n"
    ) or unicodedata.bidirectional(character) in _DIRECTIONS


@given(st.text(st.characters(codec=None) | st.sampled_from("\x1b\x07\x9b\x7f\u202e\u2066\ud800")))
def test_what_controls_a_terminal_is_replaced_and_all_else_stays(text):
    shown = printable(text)
    assert not any(map(is_unfit, shown))
    marks = "\u200e\u200f\u061c\ufffd"
    pairs = zip(text, shown, strict=True)
    assert all(a == b or (b == "\ufffd" and (is_unfit(a) or a in marks)) for a, b in pairs)
    shown.encode()  # a surrogate cannot be
