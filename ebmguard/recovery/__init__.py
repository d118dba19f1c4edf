"""Recovery: certified snapshots, and what a rollback changes. See :class:`Recovery`.

What keeps snapshots is imported when it is first used: most runs have none.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .policy import Change, Recovery, Rollback

if TYPE_CHECKING:
    from .archive import load_durably, save_durably
    from .recoverer import Recoverer

__all__ = ["Change", "Recoverer", "Recovery", "Rollback", "load_durably", "save_durably"]
_HOMES = {"Recoverer": ".recoverer", "load_durably": ".archive", "save_durably": ".archive"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name], __name__), name)
