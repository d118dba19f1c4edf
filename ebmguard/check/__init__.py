"""Every problem that can be seen before step 0, each with its fix: what ``g.check()`` lists.

Pure functions of a :class:`Setup` to :class:`Problem`; nothing is raised and nothing is changed.
"""

from .all import find_problems
from .problem import Problem, in_order
from .setup import Setup
from .words import show

__all__ = ["Problem", "Setup", "find_problems", "in_order", "show"]
