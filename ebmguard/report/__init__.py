"""Pictures and tables from run folders: reads what sinks and trainers wrote, and nothing else."""

from .grid import sample_grid
from .runs import Run

__all__ = ["Run", "sample_grid"]
