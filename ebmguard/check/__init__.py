"""All problems that can be seen before step 0 or after it, with their fixes: ``g.check()``."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping

from ..alerts import Level
from ..tags import (
    GRADIENTS_SKIPPED,
    REFERENCE,
    SAMPLER_GRAD_NORM,
    SCALER_SKIPPED,
    SHARPNESS,
    TAGS,
)
from .problem import CHAINS, Problem, Setup, by_severity, info, show, warn

__all__ = [
    "NEED_GRADIENT",
    "Problem",
    "SelfCheck",
    "Setup",
    "find_problems",
    "show",
    "unknown_problems",
]

_log = logging.getLogger("ebmguard")

# Rows after which the guard checks itself: one; two of all chains; one of the slow tier.
_FIRST, _TWICE, _SLOW = 1, 3, 52
_EQUAL = 1 + 1e-5  # the largest norm to the mean one, where all are the same
# Diagnostics of a step that makes numbers NaN for once.
_BROKEN = ("nonfinite/energies", "nonfinite/samples", GRADIENTS_SKIPPED, SCALER_SKIPPED)
_EVALUATIONS = "sampler/evaluations"
NEED_GRADIENT = {SAMPLER_GRAD_NORM, "sampler/grad_norm_max", "sampler/drift_to_noise"}
"""Diagnostics for which the gradients of the sampler's energies must be seen."""
NEED_GRADIENT |= {"sampler/acceptance", SHARPNESS, _EVALUATIONS}
_HIDDEN = (
    "the sampler's gradients are taken in torch.func (grad, vmap), batched, of sparse or nested "
    "tensors, or for all members of an ensemble at once, where none of one sample can be seen",
    "torch.autograd.grad(f(x).sum(), x) in the sampler; else nothing, the energies are watched.",
)
_UNSEEN = (
    "no gradient of the energy module was seen in the sampler: it takes none, or takes it of "
    "another module, in forward mode (torch.func.jvp), or in code that torch.compile has compiled",
    "nothing, where it needs no gradient; else guard(..., model=f), the module that it calls, and "
    "torch.autograd.grad(f(x).sum(), x) instead of a score by hand, which is untempered.",
)
_STUCK = (
    "exactly 0 in every row: the chains move, and not a bit of their gradient changes. "
    "Autocast does this to a leaf that the sampler moves by x.data: it keeps its first cast of x.",
    "torch.autocast(..., cache_enabled=False) around the sampler, or a new leaf for each step, "
    "x = x.detach().requires_grad_().",
)
_REASONS = {
    _EVALUATIONS: "a CUDA graph's replays cannot be counted",
    SHARPNESS: "a sampler call takes one gradient, and it needs two that follow each other",
    "sampler/drift_to_noise": "there is no noise, or samples differ in their number of entries",
    "sampler/acceptance": "there is no noise, or the last two evaluations are no step of chains "
    "that do not look at each other",
    "optim/grad_norm": "this optimizer calls its closure by itself",
}
_UNKNOWABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def find_problems(setup: Setup) -> list[Problem]:
    """Return every problem of a trainer, the worst first.

    While a run goes on, problems that only a trial could show are left out. At β* = 0 only
    rollbacks and diagnostics can have problems, since the guard changes nothing else.
    """
    # They are imported here because they need torch, and readers of run folders do not.
    from . import network, training

    changes_nothing = setup.is_running and not any(setup.beta_star)
    checks = () if changes_nothing else (*network.CHECKS, *training.CHECKS)
    problems: list[Problem] = []
    for check in (*checks, training.check_rollback):
        try:
            problems += check(setup)
        except _UNKNOWABLE:
            if not setup.is_running:
                raise
    if setup.is_stuck:
        problems.append(warn("stuck", SHARPNESS, *_STUCK))
    return by_severity([*problems, *unknown_problems(setup.unknown)])


class SelfCheck:
    """Logs every WARN or ERROR of the guard's check once, in the first few steps.

    Attributes:
        unknown: diagnostics that were NaN in every row so far.
        is_stuck: whether the sampler's sharpness was 0 in all of the first rows.
    """

    def __init__(self) -> None:
        self.unknown, self.is_stuck = frozenset[str](), False
        self._flat = 0
        self._rows = 0
        self._nan, self._known = set[str](), set[str]()
        self._logged = set[str]()

    def is_due(self, row: Mapping[str, float]) -> bool:
        """Take the row of a step that is over; return whether to check now."""
        if self._rows >= _SLOW or any(row.get(tag) for tag in _BROKEN):
            return False
        self._rows += 1
        nan = {tag for tag, value in row.items() if math.isnan(value)}
        self._nan |= nan
        self._known |= row.keys() - nan
        # All samples have one gradient where f is linear in x: there none changes either.
        largest = row.get("sampler/grad_norm_max", math.nan)
        is_linear = largest <= _EQUAL * row.get(SAMPLER_GRAD_NORM, math.nan)
        self._flat += row.get(SHARPNESS) == 0 and not is_linear
        self.is_stuck = self._flat == self._rows >= _TWICE
        if self._rows >= _TWICE:  # the optimizer is measured in the slow tier
            left = self._nan - self._known - {tag.removeprefix(REFERENCE) for tag in self._known}
            is_slow = self._rows >= _SLOW
            self.unknown = frozenset(x for x in left if is_slow or x in NEED_GRADIENT)
        return self._rows in (_FIRST, _TWICE, _SLOW)

    def say(self, problems: Iterable[Problem]) -> None:
        """Log the problems that have not been logged yet, one line a problem."""
        for problem in problems:
            is_early = self._rows < _TWICE and problem.where == CHAINS
            is_new = problem.message not in self._logged
            if problem.severity > Level.INFO and not is_early and is_new:
                self._logged.add(problem.message)
                _log.warning("g.check(): %s", problem.message)


def unknown_problems(tags: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem, with its cause, for every diagnostic that was NaN in all rows."""
    left = {*tags}
    if SAMPLER_GRAD_NORM in left:
        why, fix = _UNSEEN if _EVALUATIONS in left else _HIDDEN
        names = ", ".join(tag for tag in TAGS if tag in left & NEED_GRADIENT)
        what = f"NaN in every row ({names}), and with it the first sign of a blow-up: {why}."
        yield warn("unknown", SAMPLER_GRAD_NORM, what, fix)
        left -= NEED_GRADIENT
    for tag in sorted(left):
        known = TAGS.get(tag.removeprefix(REFERENCE))
        why = _REASONS.get(tag) or (f"it is {known.definition}" if known else "a trainer's number")
        yield info("unknown", tag, f"NaN in every row: {why}.", "nothing, if that is meant.")
