"""Keeps energy-based model training alive.

    loss_fn, sample_q = guard(None, sample_q, log_dir="runs")

reweights the negatives by exp(β* f), lets every positive serve as its own extra negative, runs the
sampler on (1 - β) f, and watches the run. See :func:`guard`, and :mod:`ebmguard.objective` for the
mathematics alone.

Names are imported when they are first used, so that the command line lists its commands without
torch.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

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

# Where a name that is no room comes from.
_HOMES = {
    **dict.fromkeys(("Alert", "Level"), "alerts"),
    **dict.fromkeys(("BudgetSpentError", "DivergenceError", "EbmguardError"), "errors"),
    **dict.fromkeys(("Guard", "guard"), "retrofit"),
    "Recovery": "recovery",
    "contrastive_loss": "objective",
}

if not TYPE_CHECKING:  # To a type checker it would make every misspelt name a good one.

    def __getattr__(name: str) -> object:
        room = _HOMES.get(name, name)
        if name.startswith("_") or find_spec(f"{__name__}.{room}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = import_module(f"{__name__}.{room}")
        value = globals()[name] = home if name == room else getattr(home, name)
        return value

    def _of_runs(name: str) -> object:
        if name.startswith("__") and name != "__all__":  # as who looks at all modules asks for
            raise AttributeError(name)
        return getattr(import_module(f"{__name__}.report.frames"), name)

    runs = sys.modules[f"{__name__}.runs"] = ModuleType(f"{__name__}.runs")
    runs.__getattr__ = _of_runs


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
