"""Grids of JEM runs: scenarios × β* × seeds, one process per GPU, resumed cell by cell."""

from __future__ import annotations
