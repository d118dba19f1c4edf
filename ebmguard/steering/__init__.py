"""Controllers of the run: the number of SGLD steps, and β*. Both are off by default. No torch.

Settings make a controller, which reads rows and answers with a number::

    steps = AdaptiveSteps().start(5)             # the sampler's usual number of steps
    beta = SteerBeta(most=4.0).start(0.5)        # β* at the start

    # once for every judged row, in the order of the steps:
    steps.observe(row)
    beta.observe(row)
    # before the next sampler call, whose loss shares the same β*:
    sampler(..., n_steps=steps.value)            # with β* = beta.value

The additional steps should be finer ones, by ``steps.factor``: see :mod:`.steps`. Equal rows on all
ranks give equal decisions, and rows without a number (NaN, or absent) change none. In an ensemble
the rows are the means over its members, who share one sampler; β* of an ensemble is not steered.

A recovery changes ``steps.base``, the number of steps that counts as usual, and ``beta.move_to()``.
"""

from .beta import BetaController, SteerBeta
from .steps import AdaptiveSteps, StepsController

__all__ = ["AdaptiveSteps", "BetaController", "SteerBeta", "StepsController"]
