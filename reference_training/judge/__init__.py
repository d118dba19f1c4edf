"""What a trained model is worth: as a classifier, as a sampler, as a density.

A trainer may ask as it trains; `ebmguard evaluate` does of a run that has a checkpoint:
:mod:`.evaluate` is the command; `bism`, `jem`, `shortrun` and `toy` are what it does of each.
"""
