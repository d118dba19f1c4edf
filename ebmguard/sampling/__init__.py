"""Runs a sampler on (1 - β) f; what its calls show; its step, noise, scale and sign from that."""

from .drift import JOINED, Drift
from .measured import Measured
from .moves import Moves
from .recording import (
    Draw,
    Evaluation,
    Recording,
    find_module,
    is_capturing,
    is_opaque,
    other_networks,
    variables_of,
)
from .substeps import Substeps
from .tempering import Tempering, changes, scale

__all__ = [
    "JOINED",
    "Draw",
    "Drift",
    "Evaluation",
    "Measured",
    "Moves",
    "Recording",
    "Substeps",
    "Tempering",
    "changes",
    "find_module",
    "is_capturing",
    "is_opaque",
    "other_networks",
    "scale",
    "variables_of",
]
