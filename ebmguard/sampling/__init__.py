"""Run a sampler on (1 - β) f, and measure its step, noise, scale and sign by its calls."""

from .drift import JOINED, Drift
from .measured import Measured
from .networks import find_module, is_compiled, other_networks, variables_of
from .recording import Draw, Evaluation, Recording, is_capturing, is_opaque
from .sampler_update import SamplerUpdate
from .substeps import Substeps
from .tempering import Tempering, changes, scale

__all__ = [
    "JOINED",
    "Draw",
    "Drift",
    "Evaluation",
    "Measured",
    "Recording",
    "SamplerUpdate",
    "Substeps",
    "Tempering",
    "changes",
    "find_module",
    "is_capturing",
    "is_compiled",
    "is_opaque",
    "other_networks",
    "scale",
    "variables_of",
]
