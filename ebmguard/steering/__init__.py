"""Controllers of the run: the number of SGLD steps, and β*. Both are off by default. No torch.

Settings make a controller, ``AdaptiveSteps().start(5)``, which observes every judged row once, in
the order of the steps, and has a ``value``; equal rows on all ranks give equal ones.
"""

from .beta import BetaController, SteerBeta
from .steps import AdaptiveSteps, StepsController

__all__ = ["AdaptiveSteps", "BetaController", "SteerBeta", "StepsController"]
