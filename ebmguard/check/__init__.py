"""Every problem that can be seen before step 0, each with its fix: what ``g.check()`` lists."""

from .problem import Problem, Setup, in_order, show

__all__ = ["Problem", "Setup", "find_problems", "in_order", "show"]


def find_problems(setup: Setup) -> list[Problem]:
    """Every problem of a trainer, the worst first."""
    # Here, because they need torch, which readers of a run's problems do without.
    from .network import of_network, of_outputs
    from .training import of_actions, of_chains, of_exponents, of_training

    checks = (of_network, of_outputs, of_exponents, of_training, of_chains, of_actions)
    return in_order(problem for check in checks for problem in check(setup))
