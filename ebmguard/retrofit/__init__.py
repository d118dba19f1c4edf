"""The guard: all that a trainer touches, and what it is wired from. See :func:`guard`."""

from .arguments import guard
from .guard import Guard

__all__ = ["Guard", "guard"]
