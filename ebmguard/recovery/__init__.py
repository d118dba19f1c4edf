"""Recovery: certified snapshots, and what a rollback changes. See :class:`Recovery`."""

from .archive import load_durably, save_durably
from .policy import Change, Recovery, Rollback
from .recoverer import Recoverer

__all__ = ["Change", "Recoverer", "Recovery", "Rollback", "load_durably", "save_durably"]
