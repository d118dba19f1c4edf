"""Keeps energy-based model training alive.

    loss_fn, sample_q = guard(None, sample_q, beta_star=0.5, output_scale=20_000, log_dir="runs")

reweights the negatives by exp(β* f), lets every positive serve as its own extra negative, runs the
sampler on (1 - β) f, and watches the run. See :func:`guard`, and :mod:`ebmguard.objective` for the
mathematics alone.
"""

from . import diagnostics, errors, objective, recovery, samplers, sinks
from .alerts import Alert, Level
from .errors import BudgetSpentError, DivergenceError, EbmguardError
from .objective import contrastive_loss
from .recovery import Recovery
from .retrofit.arguments import guard
from .retrofit.guard import Guard

__all__ = [
    "Alert",
    "BudgetSpentError",
    "DivergenceError",
    "EbmguardError",
    "Guard",
    "Level",
    "Recovery",
    "contrastive_loss",
    "diagnostics",
    "errors",
    "guard",
    "objective",
    "recovery",
    "samplers",
    "sinks",
]
__version__ = "0.1.0"
