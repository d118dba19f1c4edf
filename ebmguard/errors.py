"""The errors of ebmguard; checks of states, folders, texts and arguments; lazy package names."""

from __future__ import annotations

import codecs
import errno
import inspect
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum, EnumType
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

__all__ = [
    *("MISFITS", "SPELLED", "BudgetSpentError", "CollapsedError", "ConfigError", "DiskError"),
    *("DivergenceError", "EbmguardError", "EnergyBlowupError", "EnergyTypeError", "LossError"),
    *("NonFiniteError", "SamplerError", "SamplerFailingError", "ShapeError", "Stateful"),
    *("WeightsDegenerateError", "folder_path", "lazy", "plain", "printable", "spelled"),
    *("typed", "undamaged"),
]

T = TypeVar("T", bound=Callable[..., Any])

SPELLED = "ebmguard"
"""An ``errors=`` of ``str.encode``: replaces characters that an encoding lacks by ASCII."""
# The ASCII characters that stand for others; "?" for the rest.
_PLAIN = dict(zip("▁▂▃▄▅▆▇█×●━─…≥≤→−⁺⁻·—", "_.-=+*%#x*=-~><>-+-.-", strict=True))
_PLAIN |= {"β": "beta", "±": "+/-", "∞": "inf"}

_ATOMS = {str, float, int, bool, NoneType}


class EbmguardError(Exception):
    """Base of every error raised by ebmguard."""


class ConfigError(EbmguardError, ValueError):
    """An argument, or a combination of arguments, that makes no sense."""


class DiskError(EbmguardError, OSError):
    """A file that could not be written, as on a full disk; the earlier file is whole."""

    @classmethod
    def of(cls, file: object, error: OSError) -> DiskError:
        """Return the error of a file, from the system's."""
        why = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = f"the disk is full ({why}); make room, and try again"
        return cls(f"{file} could not be written: {why}")


class ShapeError(EbmguardError, ValueError):
    """Energies whose shapes are not per-sample vectors, or do not fit together."""


class EnergyTypeError(EbmguardError, TypeError):
    """Energies that are not floating-point tensors."""


class LossError(EbmguardError, ValueError):
    """A loss function that is not an affine contrastive difference of the declared sign, energies
    that are not those of data and samples, or a guarded loss inside a CUDA graph."""


class SamplerError(EbmguardError, RuntimeError):
    """A sampler that the guard could not run on the tempered energy."""


class DivergenceError(EbmguardError, RuntimeError):
    """The run was stopped by ``alert``, of level ERROR (``action="raise"``)."""

    def __init__(self, alert: Any) -> None:
        super().__init__(alert.message)
        self.alert = alert

    def __reduce__(self) -> tuple[Any, ...]:
        # Its arguments are a message, which is not what __init__ takes.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class BudgetSpentError(DivergenceError):
    """The run was lost again after its last rollback was spent (``action="rollback"``)."""

    def __init__(self, alert: Any, rollbacks: int) -> None:
        super().__init__(alert)
        self.args = (
            f"{alert.message} The run cannot recover by itself, and the budget of rollbacks is "
            f"spent ({rollbacks} done). Its audit log is "
            "g.rollbacks, and recovery.jsonl in log_dir. Start anew with what the alert advises.",
        )
        self.rollbacks = rollbacks


class NonFiniteError(DivergenceError):
    """Energies or samples were NaN or infinite."""


class EnergyBlowupError(DivergenceError):
    """The energies outgrew the run's past."""


class CollapsedError(DivergenceError):
    """The network became a constant: every sample had the same energy."""


class SamplerFailingError(DivergenceError):
    """No negative was competitive for a long time: GradScale stayed under its floor."""


class WeightsDegenerateError(DivergenceError):
    """The weights of the negatives were carried by a few samples for a whole window."""


MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors of reading a saved state that does not fit."""


@contextmanager
def undamaged(owner: str) -> Iterator[None]:
    """Turn the errors of reading a saved state into a ``ConfigError``."""
    try:
        yield
    except MISFITS as e:
        if isinstance(e, EbmguardError):
            raise
        raise ConfigError(
            f"The state of {owner} is damaged: {type(e).__name__}: {e}. Pass what its state_dict() "
            "returned."
        ) from e


def folder_path(name: str, folder: str | os.PathLike[str]) -> Path:
    """Return the folder that an argument names, with ``~`` as the home; else a ``ConfigError``."""
    try:
        path = os.fspath(folder)
        if isinstance(path, str) and path and "\0" not in path and os.fsencode(path):
            return Path(path).expanduser()
        why = "it is empty" if not path else "it holds a NUL" if isinstance(path, str) else "bytes"
    except (RuntimeError, UnicodeError) as error:  # a home that nobody has, halves of surrogates
        why = str(error)
    raise ConfigError(
        f"{name}={folder!r} names no folder ({why}); expected a path, such as runs/a."
    )


class Stateful:
    """An object whose ``_saved`` maps attributes to the kinds by which saved values are read.

    A kind is ``float``, ``int``, ``bool`` or ``str`` (nothing else passes for one), an enum (saved
    by name), a dataclass (by its fields), ``list[...]``, ``tuple[...]``, ``... | None``, any
    function, or ``Stateful`` for an object that stays and loads its part of the state.

    A class that checks more overrides ``_read``, which changes nothing; one that does more than to
    set the attributes overrides ``_take``, which must not fail. Errors name it by ``_owner``.
    """

    _owner = ""

    def _saved(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the saved fields as plain numbers, texts, lists, dicts, and copies of tensors."""
        return {name.lstrip("_"): plain(getattr(self, name)) for name in self._saved()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ConfigError: the state is damaged, or of another object or version; nothing changes.
        """
        with undamaged(self._owner or type(self).__name__):
            self._take(self._read(state))

    def _read(self, state: Mapping[str, Any]) -> dict[str, Any]:
        kinds = {name.lstrip("_"): (name, kind) for name, kind in self._saved().items()}
        if state.keys() != kinds.keys():
            raise ConfigError(
                f"Not a state of {self._owner or type(self).__name__}: expected the keys "
                f"{', '.join(sorted(kinds))}; got {', '.join(sorted(map(str, state)))}."
            )
        return {
            name: _read_as(getattr(self, name)._read if kind is Stateful else kind, state[key])
            for key, (name, kind) in kinds.items()
        }

    def _take(self, read: Mapping[str, Any]) -> None:
        for name, kind in self._saved().items():
            if kind is Stateful:
                getattr(self, name)._take(read[name])
            else:
                setattr(self, name, read[name])


def plain(value: Any) -> Any:
    """Return a value as states hold it: the saved part of an object, a copy, the enum's name."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Enum):
        return value.name
    if type(value).__module__ == "numpy":
        return value.tolist()
    for method in ("state_dict", "clone", "get_state"):  # the last one is a generator's
        if hasattr(value, method):
            return getattr(value, method)()
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in [*value.items()]}
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    # A copy: another thread may add to it.
    return [item if type(item) in _ATOMS else plain(item) for item in [*value]]


def _read_as(kind: Any, value: Any) -> Any:
    if isinstance(kind, UnionType):
        return None if value is None else _read_as(kind.__args__[0], value)
    if isinstance(kind, GenericAlias):
        if kind.__origin__ is tuple:
            return tuple(_read_as(*pair) for pair in zip(kind.__args__, value, strict=True))
        return [_read_as(kind.__args__[0], item) for item in value]
    if kind in (bool, float, int, str) and not _is(kind, value):
        raise TypeError(f"{value!r} is not {_wanted(kind)}")
    if isinstance(kind, EnumType):
        return kind[value]
    if is_dataclass(kind):
        return cast("Any", kind)(**value)
    return kind(value)


# C0 but for tab and line feed, DEL and C1 control a terminal; marks of direction show another text
# than there is; nothing can encode halves of surrogate pairs.
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: object) -> str:
    """Replace characters that would control a terminal by ``\N{REPLACEMENT CHARACTER}``."""
    return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", str(text))


def spelled(text: str, encoding: str) -> str:
    """Spell a text in the characters of an encoding; otherwise logging would lose the line."""
    return text.encode(encoding, SPELLED).decode(encoding)


def _spell(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in lacking), error.end


codecs.register_error(SPELLED, _spell)


def typed(called: T) -> T:
    """Make a function or class refuse, with a ``ConfigError``, arguments of undeclared types.

    Types are classes, unions, literals and containers of these. Numbers of NumPy are numbers, and a
    class keeps them as Python's; True and False are no numbers, and text is no sequence.
    """
    function: Any = called.__init__ if inspect.isclass(called) else called
    names = [*inspect.signature(function).parameters]
    expected: dict[str, Any] = {}  # read at the first call: later classes may be named

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not expected:
            expected.update(get_type_hints(function) | {"return": Any})
        if inspect.isclass(called):
            args, kwargs = (*map(_plain, args),), {name: _plain(x) for name, x in kwargs.items()}
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if name in expected and not _is(expected[name], value):
                raise ConfigError(
                    f"{called.__qualname__}: {name}= is {_words(value)}; expected "
                    f"{_wanted(expected[name])}."
                )
        return function(*args, **kwargs)

    if inspect.isclass(called):
        called.__init__ = checked  # type: ignore[method-assign]
        return called
    return cast("T", checked)


def _plain(value: Any) -> Any:
    """Return Python's number for NumPy's, which JSON and weights-only checkpoints refuse."""
    return value.item() if type(value).__module__ == "numpy" and _is(float, value) else value


def _is(kind: Any, value: Any) -> bool:
    """Return whether a value is of a type; True also for types that cannot be checked."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is(option, value) for option in inner)
    if origin is Literal:
        return any(
            value is option or (isinstance(value, str) and value == option) for option in inner
        )
    if kind in (float, int):
        numbers = Real if kind is float else Integral
        return isinstance(value, numbers) and not isinstance(value, bool)
    kind = origin or kind
    if kind is Any or not inspect.isclass(kind) or getattr(kind, "_is_protocol", False):
        return True
    fits = isinstance(value, kind)
    if not fits or issubclass(kind, str | bytes) or not issubclass(kind, Sequence):
        return fits
    if isinstance(value, str | bytes):
        return False
    kinds = inner if kind is tuple and inner[-1:] != (...,) else inner[:1] * len(value)
    return not inner or (len(kinds) == len(value) and all(map(_is, kinds, value)))


def _wanted(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        *rest, last = map(_wanted, inner)
        return f"{', '.join(rest)} or {last}"
    if origin is Literal:
        return ("one of " * (len(inner) > 1)) + ", ".join(map(repr, inner))
    known: dict[Any, str] = {float: "a number", int: "a whole number", bool: "True or False"}
    known |= {NoneType: "None", str: "a text", Callable: "a function", os.PathLike: "a path"}
    return known.get(origin or kind) or re.sub(
        r"(\w+\.)+(?=\w)", "", inspect.formatannotation(kind)
    )


def _words(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, list | tuple):
        return reprlib.repr(value)
    return repr(value) if isinstance(value, str | float | NoneType) else f"a {type(value).__name__}"


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package that imports names when they are first used.

    Args:
        package: its name.
        homes: the module, ``.module`` within the package, of every name that is no module.
    """

    def find(name: str) -> object:
        home = homes.get(name, f".{name}")
        if name.startswith("_") or find_spec(home, package) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(home, package)
        value = getattr(module, name) if name in homes else module
        setattr(sys.modules[package], name, value)
        return value

    return find
