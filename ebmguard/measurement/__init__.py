"""A sampler measured: step, noise, output scale and sign, from what it draws and differentiates."""

from .recording import Draw, Draws, Evaluation, Recording
from .verdict import Measured, measured

__all__ = ["Draw", "Draws", "Evaluation", "Measured", "Recording", "measured"]
