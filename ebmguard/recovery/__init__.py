"""Recovery: certified snapshots, and what a rollback changes. See :class:`Recovery`."""

from .files import load_durably, save_durably
from .policy import Change, Recovery
from .recoverer import Recoverer
from .rollback import Rollback

__all__ = ["Change", "Recoverer", "Recovery", "Rollback", "load_durably", "save_durably"]
