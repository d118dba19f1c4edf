"""What type checkers see of ``ebmguard.runs``; see ``ebmguard/__init__.py``."""

from .report.frames import Runs as Runs
from .report.frames import load as load
