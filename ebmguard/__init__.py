"""Keeps energy-based model training alive.

    loss_fn, sample_q = guard(None, sample_q, log_dir="runs")

reweights the negatives by exp(β* f), takes every positive as an extra negative too, runs the
sampler on (1 - β) f, and watches the run. See :func:`guard`, and :mod:`ebmguard.objective` for the
mathematics alone.

Names are imported when they are first used, so that the command line lists its commands without
torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from .errors import lazy

if TYPE_CHECKING:
    from . import diagnostics, errors, objective, recovery, samplers, sinks
    from .alerts import Alert, Level
    from .errors import BudgetSpentError, DivergenceError, EbmguardError
    from .objective import contrastive_loss
    from .recovery import Recovery
    from .retrofit import Guard, guard

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

if not TYPE_CHECKING:  # A type checker would take every misspelt name for a good one.
    __getattr__ = lazy(
        __name__,
        {
            **dict.fromkeys(("Alert", "Level"), ".alerts"),
            **dict.fromkeys(("BudgetSpentError", "DivergenceError", "EbmguardError"), ".errors"),
            **dict.fromkeys(("Guard", "guard"), ".retrofit"),
            "Recovery": ".recovery",
            "contrastive_loss": ".objective",
        },
    )

    def _runs_attribute(name: str) -> object:
        if name.startswith("__") and name != "__all__":  # as tools do that look at all modules
            raise AttributeError(name)
        return getattr(import_module(f"{__name__}.report.frames"), name)

    runs = sys.modules[f"{__name__}.runs"] = ModuleType(f"{__name__}.runs")
    runs.__getattr__ = _runs_attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
