"""The K-step map of a short-run sampler as a flow: its inverse, its determinant, its likelihood."""
