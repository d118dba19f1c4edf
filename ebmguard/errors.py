"""The errors of ebmguard: what was wrong, what was expected, how to fix it.

Everything derives from :class:`EbmguardError`. Errors about input are also the built-in error that
callers expect (``ValueError``, ``TypeError``); errors about the run derive from
:class:`DivergenceError` and carry the alert that caused them. All of them can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "BudgetSpentError",
    "CollapsedError",
    "ConfigError",
    "DivergenceError",
    "EbmguardError",
    "EnergyBlowupError",
    "EnergyTypeError",
    "LossError",
    "NonFiniteError",
    "SamplerError",
    "SamplerFailingError",
    "ShapeError",
    "WeightsDegenerateError",
    "check_keys",
]


class EbmguardError(Exception):
    """Base of every error raised by ebmguard."""


class ConfigError(EbmguardError, ValueError):
    """An argument, or a combination of arguments, that cannot be meant."""


class ShapeError(EbmguardError, ValueError):
    """Energies whose shapes are not per-sample vectors, or do not fit together."""


class EnergyTypeError(EbmguardError, TypeError):
    """Energies that are not floating-point tensors."""


class LossError(EbmguardError, ValueError):
    """A loss function that is not an affine contrastive difference of the declared sign, or a
    guarded loss inside a CUDA graph."""


class SamplerError(EbmguardError, RuntimeError):
    """A sampler that the guard could not run on the tempered energy."""


class DivergenceError(EbmguardError, RuntimeError):
    """The run was stopped by an alert of level ERROR (``action="raise"``).

    Attributes:
        alert: the :class:`~ebmguard.Alert` that caused it.
    """

    def __init__(self, alert: Any) -> None:
        super().__init__(alert.message)
        self.alert = alert

    def __reduce__(self) -> tuple[Any, ...]:
        # As it stands: its arguments are a message, and not what __init__ takes.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class BudgetSpentError(DivergenceError):
    """The run was lost once more than its rollbacks could mend (``action="rollback"``).

    Attributes:
        rollbacks: how many there were.
    """

    def __init__(self, alert: Any, rollbacks: int, *, nothing_to_go_back_to: bool = False) -> None:
        super().__init__(alert)
        why = f"and the budget of rollbacks is spent ({rollbacks} done)"
        if nothing_to_go_back_to:
            why = "and there is no snapshot yet to go back to"
        self.args = (
            f"{alert.message} The run cannot recover by itself, {why}. Its audit log is "
            "g.rollbacks, and recovery.jsonl in log_dir; docs/recovery.md says what to try.",
        )
        self.rollbacks = rollbacks


class NonFiniteError(DivergenceError):
    """Energies or samples were NaN or infinite."""


class EnergyBlowupError(DivergenceError):
    """The energies outgrew the run's own past."""


class CollapsedError(DivergenceError):
    """The network became a constant: every sample had the same energy."""


class SamplerFailingError(DivergenceError):
    """No negative was competitive for a long time: GradScale stayed under its floor."""


class WeightsDegenerateError(DivergenceError):
    """The weights of the negatives were carried by a few samples for a whole window."""


def check_keys(what: str, state: Mapping[str, Any], expected: Iterable[str]) -> None:
    """Refuse, with a ``ConfigError``, a saved state that has not these keys."""
    names, found = sorted(expected), sorted(map(str, state))
    if found != names:
        raise ConfigError(
            f"Not {what}: expected the keys {', '.join(names)}; got {', '.join(found)}."
        )
