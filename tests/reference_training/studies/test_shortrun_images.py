"""Figures 12 to 15 and paths between samples, against loops, rows by hand and closed forms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.studies import measures
from ebmguard.reference_training.studies import shortrun_samples as module
from ebmguard.reference_training.studies.command import find
from ebmguard.reference_training.studies.measures import (
    energy_distance,
    nearest,
    saturation,
)
from ebmguard.reference_training.studies.shortrun_energies import separation
from ebmguard.reference_training.studies.shortrun_samples import (
    POINTS,
    arc,
    between,
    course,
    straight,
)
from tests.reference_training.parts import Quadratic, rng, tiny_run, uniform
from tests.reference_training.studies.small import study_of, write_rows

LEVELS = 16


def random_data(count: int, channels: int = 2, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, channels, 3, 3)
    return torch.randint(0, LEVELS + 1, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_the_nearest_image_is_that_of_sklearn(monkeypatch, rows):
    monkeypatch.setattr(measures, "ROWS", rows)
    data = random_data(20)
    x = torch.randn(9, 2, 3, 3, generator=rng(1), dtype=torch.float64)
    neighbours = NearestNeighbors(n_neighbors=1).fit(data.flatten(1).double() / 8 - 1)
    distances, places = neighbours.kneighbors(x.clamp(-1, 1).flatten(1))
    found, place = nearest(x, data, LEVELS)
    np.testing.assert_allclose(found, distances[:, 0] / 18**0.5, rtol=1e-12)
    assert place.tolist() == places[:, 0].tolist()


def test_saturation_of_images_made_by_hand():
    x = torch.tensor(
        [
            [[[-1.0, 1.0], [-1.0, 1.0]]],  # at the ends, and not beyond them
            [[[-1.5, 0.0], [0.0, 1.25]]],
            [[[0.5, 0.5], [0.5, 0.5]]],
            [[[-0.9, 0.95], [0.0, 0.9375]]],  # within half a level of an end: 1 - 1/16 and more
        ]
    )
    found = saturation(x, LEVELS)
    assert found["excess"].tolist() == [0.0, 0.1875, 0.0, 0.0]
    assert found["ends"].tolist() == [1.0, 0.5, 0.0, 0.5]
    second = math.sqrt((1.5**2 + 1.25**2) / 4 - 0.0625**2)
    assert found["contrast"][:3].tolist() == pytest.approx([1.0, second, 0.0], rel=1e-12)


def test_the_energy_distance_is_that_of_a_loop():
    generator = rng()
    x = torch.randn((5, 1, 2, 3), generator=generator, dtype=torch.float64)
    y = 1 + torch.randn((4, 1, 2, 3), generator=generator, dtype=torch.float64)

    def mean(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
        return fmean(math.sqrt(float((p - q).square().mean())) for p, q in pairs)

    expected = 2 * mean(product(x, y)) - mean(combinations(x, 2)) - mean(combinations(y, 2))
    assert energy_distance(x, y) == pytest.approx(expected)
    assert math.isnan(energy_distance(x[:1], y))


def test_runs_are_shown_the_same_starts_and_noise():
    first = tiny_run("a", beta_star=0.0, network=Quadratic(0.4), sgld_steps=3)
    x = study_of("15", first, count=5, seed=7)["shown"][1]
    # A flat energy gives starts and noise themselves: x is what three steps make of them.
    generator = rng(7)
    expected = torch.rand((5, 1, 8, 8), generator=generator) * 2 - 1
    for z in torch.randn((3, 5, 1, 8, 8), generator=generator):
        expected = expected * (1 - 0.4) + 0.01 * z
    torch.testing.assert_close(x, expected)
    assert not torch.equal(x, study_of("15", first, count=5, seed=8)["shown"][1])


def test_quality_of_images_beyond_the_cube():
    reference = uniform(30, 1, 4, 4)
    images = reference[:10].clone()
    images[0, 0, 0, 0] = 3.0
    found = module.quality(images, reference)
    assert found["beyond"] == pytest.approx(2 / 160)
    expected = energy_distance(images.clamp(-1, 1).double(), reference.double())
    assert found["distance"] == pytest.approx(expected)
    images[3, 0, 1, 1] = math.nan
    images[4, 0, 1, 1] = math.inf
    lost = module.quality(images, reference)
    assert lost["not_finite"] == 2
    assert all(math.isnan(lost[name]) for name in ("distance", "beyond"))


def test_paths_go_on_a_circle_and_blends_straight():
    z1, z2 = uniform(2, 3, 1, 4, 4)
    path = between(z1, z2, arc(5))
    assert path.shape == (3, 5, 1, 4, 4)
    assert torch.allclose(path[:, 0], z2)
    assert torch.allclose(path[:, -1], z1)
    assert torch.allclose(path[:, 2], (z1 + z2) / math.sqrt(2))
    assert torch.allclose(straight(path)[:, 1], 0.75 * z2 + 0.25 * z1)
    z1, z2 = torch.tensor([[3.0, 0.0]]).double(), torch.tensor([[0.0, 3.0]]).double()
    circle = between(z1, z2, arc(21))
    found, line = course(circle), course(straight(circle))
    # Root mean square over two entries: sqrt(2) less than the distance of the ends, 3 sqrt(2).
    assert [*found["apart"], *line["apart"]] == pytest.approx([3, 3])
    assert [*line["length"], *line["halved"]] == pytest.approx([1, 0.5])
    assert found["length"].item() == pytest.approx(math.pi / 2 / math.sqrt(2), rel=1e-3)
    path = torch.zeros(2, 21, 1)
    path[0, 7:] = 1.0
    path[1, :, 0] = torch.linspace(0, 1, 21).square()
    found = course(path)
    # Of u^2 the last step is 39/400, and at twice the spacing 76/400.
    assert found["halved"].tolist() == pytest.approx([1.0, 39 / 76])


def test_the_flow_of_a_quadratic_has_a_closed_form(monkeypatch):
    """M(z) = m + (1 - s (1 - β) a)^K (z - m): affine, so that images lie on the starts' path."""
    monkeypatch.setattr(module, "BATCH", 5)
    run = tiny_run(
        network=Quadratic(0.2, mean=0.1),
        sgld_steps=7,
        most_sgld_steps=12,
        step_size=0.5,
        noise_std=0.1,
        beta_star=50.0,
    )
    assert run.drift == pytest.approx(0.5)
    frame = study_of("interpolation", run, count=3, seed=5)
    z1, z2 = uniform(6, 1, 8, 8, seed=5).chunk(2)
    starts = between(z1, z2, arc(POINTS))
    shrink = (1 - 0.5 * 0.5 * 0.2) ** 7
    pairs = frame.iloc[:-1]
    images = torch.stack(pairs["path_images"].tolist())
    assert torch.allclose(images, 0.1 + shrink * (starts - 0.1), atol=1e-5)
    assert torch.allclose(torch.stack(pairs["blend_images"].tolist()), straight(images))
    of_starts = course(starts)
    assert pairs["length"].tolist() == pytest.approx(of_starts["length"].tolist(), rel=1e-4)
    assert pairs["apart"].tolist() == pytest.approx((shrink * of_starts["apart"]).tolist(), 1e-4)


# -- Figure 12 --------------------------------------------------------------------------------


def rows_of(gaps: Any) -> dict[str, list[float]]:
    """Rows whose gaps are these; every number is another one."""
    found = {"f_pos/mean": [1 + float(gap) for gap in gaps], "f_neg/mean": [1.0 for _ in gaps]}
    starts = {"grad_scale": 0.5, "ess": 0.7, "ref/grad_scale": 0.1, "ref/ess": 0.2}
    return found | {name: [x + i / 1000 for i in range(len(gaps))] for name, x in starts.items()}


def run_of(path: Path, beta_star: float, gaps: Any, **settings: Any) -> Any:
    write_rows(path, rows_of(gaps))
    return tiny_run(path, beta_star=beta_star, **settings)


@pytest.mark.parametrize(("beta_star", "weights"), [(2.0, (0.554, 0.754)), (0.0, (0.154, 0.254))])
def test_the_end_is_the_last_tenth(tmp_path, beta_star, weights):
    gaps = np.random.default_rng(0).normal(size=57).tolist()
    (found,) = study_of("12", run_of(tmp_path / "x", beta_star, gaps)).to_dict("records")
    low, middle, high = statistics.quantiles(gaps[-5:], n=4, method="inclusive")
    assert (found["low"], found["gap"], found["high"]) == pytest.approx((low, middle, high))
    # Equal weights say nothing, so at β* = 0 those of the reference are shown.
    assert (found["grad_scale"], found["ess"]) == pytest.approx(weights)
    assert found["not_finite"] == 0
    # β is β* over the output scale of the published step, 2 / 0.01².
    assert found["beta"] == pytest.approx(beta_star / 20_000)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    write_rows(tmp_path / "empty", {"f_pos/mean": []})
    with pytest.raises(ConfigError, match=r"empty/metrics\.jsonl has no rows"):
        study_of("12", tiny_run(tmp_path / "empty"))
    run = run_of(tmp_path / "x", 1.0, [1.0])
    with pytest.raises(ConfigError, match="leave --count out"):
        study_of("12", run, count=3)
    other = run_of(tmp_path / "y", 1.0, [1.0], image_size=4)
    with pytest.raises(ConfigError, match="digits, 1x4x4"):
        study_of("12", run, other)


# -- Figures 13 and 14 ------------------------------------------------------------------------


def test_what_is_not_finite_is_counted_left_out_and_has_no_histogram():
    data = np.array([0.0, 1.0, 2.0])
    found = separation(data, np.array([1.0, math.nan, 3.0, -math.inf]))
    assert (found["mean"], found["std"], found["gap"], found["not_finite"]) == (2, 1, -1, 2)
    assert found["above"] == pytest.approx((1.5 + 3) / 6)
    lost = separation(data, np.array([math.nan, math.inf]))
    assert all(math.isnan(lost[name]) for name in ("mean", "std", "above", "gap"))
    assert lost["not_finite"] == 2
    frame = study_of("13", tiny_run(network=Quadratic(math.nan)), count=50)
    (figure,) = find("13").drawn(frame).values()
    assert figure.axes[0].texts[0].get_text() == "f is finite nowhere on data"


def test_negatives_are_the_chain_in_closed_form():
    """Of f = -a/2 |x - m|² every pixel is an AR(1) process, and f is a sum of 64 squares."""
    a, m, steps, beta_star = 0.3, 0.2, 4, 4000.0
    given: dict[str, Any] = {"beta_star": beta_star, "sgld_steps": steps, "train_images": 1400}
    run = tiny_run(network=Quadratic(a, m), data_noise=0.5, **given)
    found = study_of("14", run, count=1400)
    assert found["step_size"].tolist() == [1, 4]
    for factor, mean in found[["step_size", "mean"]].to_numpy():
        shrink = (1 - factor * (1 - beta_star / 20_000) * a) ** 2
        square = 1 / 3 + m**2  # of a pixel of U(-1, 1), from m
        for _ in range(steps):
            square = shrink * square + factor * 0.01**2
        assert mean == pytest.approx(-a / 2 * 64 * square, rel=0.01)
    expected = (found["mean"][1] - found["mean"][0]) / found["data_std"][0]
    assert found["rise"].tolist() == [None, pytest.approx(expected)]
    # Data have the noise of the training, which takes 64 times its variance on average.
    squares = (run.data.scale(run.data.train_x).double() - m).square().flatten(1).sum(1)
    data_mean = -a / 2 * (squares.mean().item() + 64 * 0.25)
    assert found["data_mean"][0] == pytest.approx(data_mean, rel=0.01)
