"""The guard: the objects that a trainer uses, and their parts. See :func:`guard`."""

from .arguments import guard
from .guard import Guard

__all__ = ["Guard", "guard"]
