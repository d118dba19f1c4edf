"""The benchmark of the guard's cost runs, on its smallest step."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from benchmarks import overhead
from benchmarks.jem_step import SCENARIOS

PARTS = ["loss", "diagnostics", "judge", "sinks", "sampler", "whole step"]


def test_every_part_is_measured(monkeypatch):
    monkeypatch.setattr(overhead, "FLUSH_EVERY", 2)  # which is also how long it warms up
    smallest = replace(SCENARIOS["digits"], batch=4, sgld_steps=1)
    found = overhead.parts(smallest, torch.device("cpu"), repeats=2)
    assert list(found) == PARTS
    assert all(map(math.isfinite, found.values()))
