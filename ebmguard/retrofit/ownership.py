"""The parts of a run that one guard holds: a second guard, made once an epoch say, is refused."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Any

from ..errors import ConfigError
from ..trainer import Trainer, is_function, optimizers_of

__all__ = ["ONCE", "Ownership"]

ONCE = (
    "Make the guard once, before the loop over epochs, and pass what it returned to the function "
    "that trains"
)
_TAKEN = (
    "The {} has a guard already. A second one of the same run knows nothing of its rows, alerts "
    f"and snapshots, and measures the sampler anew. {ONCE}. To begin another run, {{}}."
)
_ORDER = count(1)
# By an object and what of it is used: whose it is.
_OWNERS: weakref.WeakKeyDictionary[Any, dict[str, Ownership]] = weakref.WeakKeyDictionary()


class Ownership:
    """The parts of a run that a guard has: optimizers, a sampler's object. It outlives the guard.

    Guards that are made side by side, before one has had a loss, may share them: one for every
    term of a loss, say. One that is made later is of a function that is called again.

    Attributes:
        began: when it had its first loss, in the order of the process; 0 before.
        is_shared: whether another guard has one of its optimizers, too.
        is_over: whether it is closed.
    """

    def __init__(self, guard: object, *, rolls_back: bool = False) -> None:
        self.began, self.is_over, self.is_shared = 0, False, False
        self._made, self._rolls_back = next(_ORDER), rolls_back
        self._guard = weakref.ref(guard)
        self._model: Any = None
        self._name = ""  # of a sampler that is a function, where no optimizer tells the run

    def take(self, trainer: Trainer, sampler: Any) -> None:
        """Take what is attached; a ``ConfigError`` where another guard has it."""
        self._model = None if trainer.model is None else weakref.ref(trainer.model)
        optimizers = [] if trainer.optimizer is None else optimizers_of(trainer.optimizer)
        sampler = getattr(sampler, "original", sampler)
        instance = getattr(sampler, "__self__", None) if is_function(sampler) else sampler
        name: str = getattr(sampler, "__qualname__", type(sampler).__name__)
        self._name = "" if optimizers or instance is not None else name
        keys = [(x, "", f"optimizer, {type(x).__name__},") for x in optimizers]
        self._take([*keys, (instance, name, f"sampler, {name},")])

    def begin(self, models: Iterable[object]) -> None:
        """Begin with the first loss, which has samples of these models."""
        self._take([(x, self._name, f"sampler, {self._name},") for x in models if self._name])
        self.began = next(_ORDER)

    def _take(self, keys: Iterable[tuple[Any, str, str]]) -> None:
        # Objects of slots, whose end nothing shows, and those without a hash are not known.
        known = [x for x in keys if isinstance(x[0], Hashable) and hasattr(x[0], "__weakref__")]
        for x, use, what in known:
            owner = _OWNERS.get(x, {}).get(use, self)
            models = owner._model, self._model
            is_other = use and None not in models and models[0] != models[1]
            is_alive, is_again = owner._guard() is not None, 0 < owner.began < self._made
            clashes = is_alive and not use and (owner._rolls_back or self._rolls_back)
            if owner is self or owner.is_over or is_other or not (is_again or clashes):
                if is_alive and not (owner is self or owner.is_over or use):
                    owner.is_shared = self.is_shared = True
                continue
            owner.is_over = not is_alive  # what is gone cannot be closed
            way = "close that one first, loss_fn.guard.close()"
            raise ConfigError(_TAKEN.format(what, way if is_alive else "call guard(...) once more"))
        for x, use, _ in known:
            _OWNERS.setdefault(x, {})[use] = self
