"""Runs a sampler on (1 - β) f; what its calls show; its step, noise, scale and sign from that."""

from .measured import Measured
from .recording import Draw, Evaluation, Recording, is_capturing
from .tempering import Tempering, find_module, scale

__all__ = [
    "Draw",
    "Evaluation",
    "Measured",
    "Recording",
    "Tempering",
    "find_module",
    "is_capturing",
    "scale",
]
