"""Every problem that can be seen before step 0 or after it, each with its fix: ``g.check()``."""

from .itself import SelfCheck, of_unknown
from .problem import Problem, Setup, in_order, show

__all__ = ["Problem", "SelfCheck", "Setup", "find_problems", "show"]

_UNKNOWABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def find_problems(setup: Setup) -> list[Problem]:
    """Every problem of a trainer, the worst first.

    Of a run that goes on, one that cannot be found out is none; at β* = 0 it has those of rollbacks
    and diagnostics alone, since the guard changes nothing else.
    """
    # Here, because they need torch, which readers of a run's problems do without.
    from . import network, training

    changes_nothing = setup.is_running and not any(setup.beta_star)
    checks = () if changes_nothing else (*network.CHECKS, *training.CHECKS)
    found: list[Problem] = []
    for check in (*checks, training.of_rollback):
        try:
            found += check(setup)
        except _UNKNOWABLE:
            if not setup.is_running:
                raise
    return in_order([*found, *of_unknown(setup.unknown)])
