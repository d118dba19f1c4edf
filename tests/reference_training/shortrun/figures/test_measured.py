from __future__ import annotations

import pytest
import torch

from ebmguard.reference_training.shortrun.figures import measured as module
from ebmguard.reference_training.shortrun.figures.measured import (
    describe,
    measure,
    some_of,
)
from tests.reference_training.shortrun.parts import Quadratic, tiny_run


def test_images_in_numbers():
    run = tiny_run(network=Quadratic(1.0))
    own = run.data.scale(run.data.train_x[:4])
    found = measure(run, 1.5 * own)
    assert found.mean("f") == pytest.approx(-(1.5**2) / 2 * own.square().sum().item() / 4, rel=1e-5)
    # Cut to the cube, before it is compared, a stretched background is one again.
    expected = (1.5 * own).clamp(-1, 1).sub(own).square().flatten(1).mean(dim=1).sqrt()
    assert found.each["distance"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert found.each["size"].tolist() == pytest.approx(
        (1.5 * own).abs().flatten(1).mean(dim=1).tolist(), rel=1e-5
    )
    assert found.means() == {name: found.mean(name) for name in found.each}
    assert all(values.dtype == torch.float64 for values in found.each.values())


def test_some_images_are_drawn_without_replacement_and_scaled(monkeypatch):
    monkeypatch.setattr(module, "REFERENCES", 10)
    run = tiny_run()
    drawn = some_of(run, run.data.train_x, torch.Generator().manual_seed(0))
    rows = {tuple(image.flatten().tolist()) for image in drawn}
    known = {tuple(image.flatten().tolist()) for image in run.data.scale(run.data.train_x)}
    assert len(rows) == len(drawn) == 10
    assert rows <= known


def test_a_run_in_a_line():
    assert describe(tiny_run("runs/a", beta_star=0.5)) == "a: digits, β* = 0.5, K = 3, 6 updates"
    ranged = tiny_run("b", sgld_steps=10, most_sgld_steps=12, step=3000)
    assert describe(ranged).endswith("K from 10 to 12, 3,000 updates")
    finer = tiny_run("runs/c", most_steps=4)
    assert "K = 3 (in training up to 4 times as many, as much finer), 6" in describe(finer)
