"""Grids of runs of any trainer: cells as tasks of Ray, each the plain command of a single run."""

from __future__ import annotations
