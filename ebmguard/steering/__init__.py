"""Controllers of the run: the number of SGLD steps, and β*. Both are off by default. No torch.

Settings make a controller, ``AdaptiveSteps().start(5)``, which observes every judged row once, in
the order of the steps, and answers with a number, its ``value``. Equal rows on all ranks give equal
decisions, and rows without a number (NaN, or absent) change none. In an ensemble the rows are the
means over its members, who share one sampler; β* of an ensemble is not steered.
"""

from .beta import BetaController, SteerBeta
from .steps import AdaptiveSteps, StepsController

__all__ = ["AdaptiveSteps", "BetaController", "SteerBeta", "StepsController"]
