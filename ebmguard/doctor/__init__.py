"""`ebmguard doctor`: what is wrong with a trainer's source, or went wrong in a run, and the fix.

A source file is read and never run; a run folder is what the guard's sinks wrote.
"""

from .problems_of_run import problems_of_run
from .problems_of_source import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose", "problems_of_run"]
