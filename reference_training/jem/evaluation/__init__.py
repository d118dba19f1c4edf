"""What a joint energy-based model is worth: as a classifier, as a sampler, as a density.

During training an :class:`Evaluator` measures what one line of evaluations.jsonl holds;
`ebmguard evaluate jem` measures more, of a run that has a checkpoint.
"""

from __future__ import annotations

from .evaluator import Evaluator
from .features import Features, load_features
from .quality import SampleQuality

__all__ = ["Evaluator", "Features", "SampleQuality", "load_features"]
