"""The errors as objects: what they say and carry, also from another process."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import unicodedata
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebmguard import errors
from ebmguard.alerts import Alert, Level
from ebmguard.errors import (
    BudgetSpentError,
    ConfigError,
    DivergenceError,
    EbmguardError,
    Stateful,
    printable,
)
from tests import forks
from tests.parts import PATIENCE

ALERT = Alert("energy_blowup", Level.ERROR, 7, "energy_gap", 9.0, 0.5, 64, ("a", "b"), member=2)


class OwnError(DivergenceError):
    """Of a user's rule, with an argument of its own."""

    def __init__(self, alert: Alert, hint: str = "none") -> None:
        super().__init__(alert)
        self.hint = hint


def an_error(cls: type[EbmguardError]) -> EbmguardError:
    if issubclass(cls, BudgetSpentError):
        return cls(ALERT, 5)
    return cls(ALERT) if issubclass(cls, DivergenceError) else cls("wrong")


CLASSES = [each for name in errors.__all__ if inspect.isclass(each := getattr(errors, name))]
ALL = [each for each in CLASSES if issubclass(each, EbmguardError)]


def test_all_of_them_are_listed():
    found = {cls for _, cls in inspect.getmembers(errors, inspect.isclass)}
    assert {cls for cls in found if issubclass(cls, EbmguardError)} == set(ALL)


@pytest.mark.parametrize("cls", [*ALL, OwnError])
def test_it_goes_through_pickle_and_copy(cls):
    error = an_error(cls)
    error.add_note("seed 3")
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    for back in (*[pickle.loads(pickle.dumps(error, p)) for p in protocols], copy.copy(error)):
        assert type(back) is cls
        assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))


def fail(cls: type[EbmguardError]) -> None:
    raise an_error(cls)


def test_it_comes_out_of_a_process_pool():
    with ProcessPoolExecutor(1, mp_context=forks.SERVER) as pool:
        for cls in (errors.EnergyBlowupError, BudgetSpentError, errors.ConfigError):
            with pytest.raises(cls) as caught:
                pool.submit(fail, cls).result(timeout=PATIENCE)
            expected = an_error(cls)
            assert (str(caught.value), vars(caught.value)) == (str(expected), vars(expected))


# -- texts of others ------------------------------------------------------------------------------

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


# -- saved states ----------------------------------------------------------------------------------


class Colour(Enum):
    RED = "r"
    BLUE = "b"


@dataclass
class Pair:
    left: float
    right: str = ""


class Part(Stateful):
    def __init__(self) -> None:
        self.count = 0

    def _saved(self) -> dict[str, Any]:
        return {"count": int}


class Whole(Stateful):
    """Something of every kind."""

    _owner = "the whole"

    def __init__(self) -> None:
        self.part = Part()
        self.is_on = False
        self._size = 0.0
        self.since: int | None = None
        self.colour: Colour | None = None
        self.recent: deque[float] = deque(maxlen=3)
        self.marks: list[tuple[int, float]] = []
        self.pair = Pair(0.0)
        self.by_name: dict[str, Part] = {"a": Part()}

    def _saved(self) -> dict[str, Any]:
        return {
            "part": Stateful,
            "is_on": bool,
            "_size": float,
            "since": int | None,
            "colour": Colour | None,
            "recent": lambda saved: deque(map(float, saved), maxlen=3),
            "marks": list[tuple[int, float]],
            "pair": Pair,
            "by_name": self._parts,
        }

    def _parts(self, saved: Mapping[str, Any]) -> dict[str, Part]:
        parts = {name: Part() for name in saved}
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        return parts

    def _read(self, state: Mapping[str, Any]) -> dict[str, Any]:
        read = super()._read(state)
        if read["_size"] > 100:
            raise ConfigError("too large")
        return read


def a_whole() -> Whole:
    whole = Whole()
    whole.part.count, whole.is_on, whole._size, whole.since = 3, True, 2.5, 7
    whole.colour, whole.marks, whole.pair = Colour.BLUE, [(1, 2.0), (3, 4.0)], Pair(1.5, "x")
    whole.recent.extend([1.0, 2.0, 3.0, 4.0])
    whole.by_name = {"a": Part(), "b": Part()}
    whole.by_name["b"].count = 9
    return whole


STATE = {
    "part": {"count": 3},
    "is_on": True,
    "size": 2.5,
    "since": 7,
    "colour": "BLUE",
    "recent": [2.0, 3.0, 4.0],
    "marks": [[1, 2.0], [3, 4.0]],
    "pair": {"left": 1.5, "right": "x"},
    "by_name": {"a": {"count": 0}, "b": {"count": 9}},
}


def test_what_is_declared_is_saved_in_plain_values_and_goes_through_json():
    whole, other = a_whole(), Whole()
    part, state = other.part, whole.state_dict()
    assert state == STATE
    other.load_state_dict(json.loads(json.dumps(state)))
    assert other.state_dict() == STATE
    assert other.part is part  # it stays
    assert (other.colour, other.marks, other.pair) == (whole.colour, whole.marks, whole.pair)
    assert other.recent == whole.recent
    assert other.recent.maxlen == 3
    whole.recent.append(5.0)
    whole.marks.clear()
    assert state == STATE  # a copy


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"extra": 1}, "Not a state of the whole: expected the keys by_name, .*; got .*extra"),
        ({"size": "2.5"}, "The state of the whole is damaged: TypeError: '2.5' is not a number"),
        ({"size": True}, "True is not a number"),
        ({"since": 7.5}, "7.5 is not a whole number"),
        ({"is_on": 1}, "1 is not"),
        ({"colour": "GREEN"}, "KeyError: 'GREEN'"),
        ({"marks": [[1, 2.0, 3]]}, "damaged: ValueError"),
        ({"marks": 3}, "damaged: TypeError"),
        ({"pair": {"middle": 1.0}}, "damaged: TypeError"),
        ({"part": {}}, "Not a state of Part: expected the keys count"),
        ({"by_name": {"a": {"count": None}}}, "None is not a whole number"),
        ({"size": 101.0}, "too large"),
    ],
)
def test_a_damaged_state_changes_nothing(damage, said):
    other = Whole()
    before = other.state_dict()
    with pytest.raises(ConfigError, match=said):
        other.load_state_dict(STATE | damage)
    assert other.state_dict() == before
    with pytest.raises(ConfigError, match="Not a state of the whole"):
        other.load_state_dict({key: STATE[key] for key in STATE.keys() - {"size"}})


def test_tensors_are_copied_and_a_generator_saves_its_state():
    tensor, rng = torch.zeros(2), torch.Generator().manual_seed(3)
    saved = errors.plain([tensor, rng])
    tensor += 1
    assert saved[0].tolist() == [0, 0]
    assert torch.equal(saved[1], rng.get_state())
