"""Joint energy-based models: a classifier that is also an EBM (Grathwohl et al., 2020)."""
