"""Recovery as data: the policy, what a rollback changes, and what one has done."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from ..alerts import Alert, Remedy, Situation
from ..errors import ConfigError, folder_path, plain, typed

__all__ = ["BY_CAUSE", "FALLBACK", "Change", "Recovery", "Rollback"]


@typed
@dataclass(frozen=True)
class Change:
    """The changes of one rollback, or of all so far, besides the random numbers.

    Attributes:
        beta_star: β* from then on, where the run's is lower and not on the other side of 0, up to
            half of the output scale; None leaves it.
        sgld_steps, lr: factors on the number of SGLD steps, and on the learning rate.
        beta_factor: factor on β*, before ``beta_star`` raises it.
        substeps: factor on the finer steps of an SGLD step, which are 16 at most.
    """

    beta_star: float | None = None
    sgld_steps: float = 1.0
    lr: float = 1.0
    beta_factor: float = 1.0
    substeps: int = 1

    def __post_init__(self) -> None:
        for name in ("sgld_steps", "lr", "beta_factor", "substeps"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"Change: {name}={value!r}; expected a positive factor.")
        star = self.beta_star
        if star is not None and not (math.isfinite(star) and star):
            raise ConfigError(f"Change: beta_star={star!r}; expected a finite number other than 0.")


BY_CAUSE = {
    Remedy.SUBSTEPS: Change(substeps=4),
    Remedy.LOWER_LR: Change(lr=1 / 10),
    Remedy.RAISE_BETA: Change(beta_star=2.0),
    Remedy.LOWER_BETA: Change(beta_factor=0.5),
    Remedy.TOWARDS_ZERO: Change(beta_factor=0.5),
    Remedy.MORE_STEPS: Change(sgld_steps=2.0),
    Remedy.FEWER_STEPS: Change(sgld_steps=0.5),
}
"""The change that a rollback makes for a remedy of the alert."""
FALLBACK = (Remedy.SUBSTEPS, Remedy.LOWER_LR, Remedy.RAISE_BETA, Remedy.MORE_STEPS)
"""The remedies that are tried, in this order, after those of the alert."""


@typed
@dataclass(frozen=True)
class Recovery:
    """Settings of ``action="rollback"``. The defaults are those measured in docs/recovery.md.

    Attributes:
        ladder: None changes what the alert's remedies name, the likeliest first, and
            :data:`FALLBACK` after them: what has been tried least and changes something, but never
            the opposite of what alerts have named. Otherwise the n-th rollback applies the n-th
            change, and the last one from then on. Changes add up; what does not fit is skipped.
        budget: rollbacks before :class:`~ebmguard.BudgetSpentError` ends the run.
        reseed: go on with other random numbers.
        every: steps between snapshots.
        certify_after: quiet steps after which a snapshot counts as good: more than rules need.
        relapse_within: an ERROR so few steps after a restore is a relapse, as is one within twice
            the steps from there to where the run had broken. Unless it has come farther, the
            snapshot is condemned, and the next restore goes deeper.
        keep: certified snapshots that are kept, in ages that grow by factors.
        folder, folder_every: where certified ones are also written, for a run whose process dies,
            and the steps between these. ``~`` is the home folder.
    """

    ladder: tuple[Change, ...] | None = None
    budget: int = 5
    reseed: bool = True
    every: int = 50
    certify_after: int = 50
    relapse_within: int = 100
    keep: int = 4
    folder: str | PathLike[str] | None = None
    folder_every: int = 1000

    def __post_init__(self) -> None:
        if self.ladder == ():
            raise ConfigError("Recovery: ladder= takes at least one Change(...), or None.")
        if self.folder is not None:
            folder_path("Recovery: folder", self.folder)
        for name in ("budget", "every", "certify_after", "relapse_within", "keep", "folder_every"):
            value, least = getattr(self, name), int(name not in ("budget", "relapse_within"))
            if value < least:
                raise ConfigError(f"Recovery: {name}={value!r}; expected {least} or more.")

    def not_followed(self, now: Situation) -> Iterator[str]:
        """Yield, in words, the changes that a run cannot follow."""
        for change in self.ladder or [BY_CAUSE[remedy] for remedy in FALLBACK]:
            if change.beta_star is not None:
                text = f"beta_star -> {change.beta_star:g}"
                if math.isnan(now.beta_star):
                    yield f"{text} (it is no single number)"
                elif now.beta_star * change.beta_star < 0:
                    yield f"{text} (never over to the other side of 0)"
                elif change.beta_star > now.most:
                    yield f"{text} (to {now.most:g} at most)"
            if change.substeps != 1 and now.most_substeps == now.substeps:
                yield f"finer steps x {change.substeps} (there are as many as there can be)"
            if change.sgld_steps != 1 and now.sgld_steps is None:
                yield f"SGLD steps x {change.sgld_steps:g} (their number is unknown)"


_WORDS = {
    "lr": "learning rate",
    "largest_lr": "largest learning rate",
    "sgld_steps": "SGLD steps",
    "substeps": "finer steps of each SGLD step",
}


@dataclass(frozen=True)
class Rollback:
    """One line of the audit log.

    Attributes:
        alert: why.
        step, restored_step: the step at whose end it happened, and that which comes next.
        attempt, budget_left: how many rollbacks there were, with this one, and how many may come.
        certified: whether the snapshot was; only the first of a run may not be.
        relapse, condemned: whether the last restore had not held, and snapshots given up for it.
        changes: ``beta_star``, ``sgld_steps``, ``lr`` (of parameter groups that differ
            ``largest_lr``), ``substeps`` to their values before and after.
        reseeded: number of random generators.
    """

    alert: Alert
    step: int
    restored_step: int
    attempt: int
    certified: bool
    relapse: bool
    condemned: tuple[int, ...]
    budget_left: int
    changes: dict[str, tuple[float, float]] = field(default_factory=dict)
    reseeded: int = 0

    @property
    def message(self) -> str:
        """The rollback in words."""
        why = f"{self.alert.rule} ({self.alert.tag} = {self.alert.value:.4g})"
        again = ", a relapse" if self.relapse else ""
        pairs = self.changes.items()
        changed = [f"{_WORDS.get(what, what)} {old:.3g} -> {new:.3g}" for what, (old, new) in pairs]
        changed += ["new random numbers"] if self.reseeded else []
        kind = "" if self.certified else "uncertified "
        left = f"{self.budget_left} left."
        if not self.budget_left:
            left = "None is left: a later ERROR is not taken back."
        return (
            f"Rollback {self.attempt} at step {self.step}{again}: {why}. Back to the "
            f"{kind}snapshot of step {self.restored_step}, with "
            f"{', '.join(changed) or 'nothing changed'}. {left}"
        )

    def record(self) -> dict[str, Any]:
        """The rollback as a plain dict with its message, ready for JSON."""
        facts = {name: plain(value) for name, value in vars(self).items() if name != "alert"}
        why = {name: getattr(self.alert, name) for name in ("rule", "tag", "value")}
        return {**facts, **why, "message": self.message}
