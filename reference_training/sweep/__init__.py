"""Grids of runs of any trainer: a process each, of the plain command of a single run."""
