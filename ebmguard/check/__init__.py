"""Every problem that can be seen before step 0 or after it, each with its fix: ``g.check()``."""

from .itself import OF_GRADIENT, SelfCheck, of_diagnostics, of_unknown
from .problem import Problem, Setup, in_order, show

__all__ = [
    "OF_GRADIENT",
    "Problem",
    "SelfCheck",
    "Setup",
    "find_problems",
    "in_order",
    "of_unknown",
    "show",
]

_UNKNOWABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def find_problems(setup: Setup) -> list[Problem]:
    """Every problem of a trainer, the worst first.

    Of a run that goes on, one that cannot be found out is none; at β* = 0 it has those of rollbacks
    and diagnostics alone, since the guard changes nothing else.
    """
    # Here, because they need torch, which readers of a run's problems do without.
    from .network import of_network, of_outputs
    from .training import of_actions, of_chains, of_exponents, of_rollback, of_training

    checks = [of_network, of_outputs, of_exponents, of_training, of_chains, of_actions]
    if setup.is_running and not any(setup.beta_star):
        checks = []
    found: list[Problem] = []
    for check in (*checks, of_rollback, of_diagnostics):
        try:
            found += check(setup)
        except _UNKNOWABLE:
            if not setup.is_running:
                raise
    return in_order(found)
