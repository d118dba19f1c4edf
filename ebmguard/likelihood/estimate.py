"""What chains that were weighed say of log Z."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Estimate"]


@dataclass(frozen=True)
class Estimate:
    """log Z from B chains that walked between base and model.

    Attributes:
        log_weights: ``(B,)`` in nats; their exponentials are Z in expectation, or 1 / Z if reverse.
        samples: where the chains ended, ``(B, ...)``: with ``weights``, samples of the model; if
            reverse, of the base.
        f: negative energy at the model's end of the chains, ``(B,)``.
        acceptance: mean at each temperature at which the chains moved, in the order of the walk;
            NaN where a path has a transition of its own.
        conditional_ess: of each step between temperatures, as a share of the chains.
        is_reverse: whether the chains walked from the model to the base.
    """

    log_weights: Tensor
    samples: Tensor
    f: Tensor
    acceptance: Tensor
    conditional_ess: Tensor
    is_reverse: bool

    @property
    def log_z(self) -> float:
        """In nats: too low in expectation; if reverse and from exact samples, too high."""
        mean = float(self.log_weights.logsumexp(0)) - math.log(len(self.log_weights))
        return -mean if self.is_reverse else mean

    @property
    def weights(self) -> Tensor:
        """``(B,)``, which add up to 1."""
        return self.log_weights.softmax(0)

    @property
    def ess(self) -> float:
        """Effective sample size of the weights, 1 to B."""
        return 1 / float(self.weights.square().sum())

    @property
    def standard_error(self) -> float:
        """Of ``log_z``, by the delta method; far too small where ``ess`` is a few chains."""
        return math.sqrt(max(1 / self.ess - 1 / len(self.log_weights), 0.0))

    @property
    def log_q(self) -> Tensor:
        """What the guard takes as log q: of annealed negatives or, if reverse, positives: ``(B,)``.

        The density of the whole walk to the model over that of the walk back from its end, so that
        exp(f - log_q) are the weights of annealed importance sampling.
        """
        return self.f + self.log_weights if self.is_reverse else self.f - self.log_weights
