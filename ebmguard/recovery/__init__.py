"""Recovery: certified snapshots, and the changes of a rollback. See :class:`Recovery`.

The modules that keep snapshots are imported when they are first used: most runs have none.
"""

from typing import TYPE_CHECKING

from ..errors import lazy
from .policy import Change, Recovery, Rollback

if TYPE_CHECKING:
    from .archive import load_durably, save_durably
    from .recoverer import Recoverer

__all__ = ["Change", "Recoverer", "Recovery", "Rollback", "load_durably", "save_durably"]

if not TYPE_CHECKING:
    __getattr__ = lazy(
        __name__,
        {"Recoverer": ".recoverer", "load_durably": ".archive", "save_durably": ".archive"},
    )
