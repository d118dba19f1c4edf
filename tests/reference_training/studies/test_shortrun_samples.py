"""Images in numbers, samples from the same noise, and paths between them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations, product
from statistics import fmean

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from ebmguard.reference_training.studies import measures
from ebmguard.reference_training.studies import shortrun_samples as module
from ebmguard.reference_training.studies.command import find
from ebmguard.reference_training.studies.measures import (
    energy_distance,
    nearest,
    saturation,
)
from ebmguard.reference_training.studies.shortrun_samples import (
    POINTS,
    arc,
    between,
    course,
    straight,
)
from tests.reference_training.parts import Quadratic, rng, tiny_run, uniform
from tests.reference_training.studies.small import assert_no_text_on_text, study_of

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


def test_an_image_of_the_data_is_at_distance_0_and_one_off_is_not():
    data = random_data(50)
    x = data.float() / 8 - 1
    assert nearest(x, data, LEVELS)[0].tolist() == [0.0] * 50
    # The shortcut by a product of matrices alone would lose this among its rounding errors.
    x[4, 0, 0, 0] += 1e-3 if x[4, 0, 0, 0] < 1 else -1e-3
    assert nearest(x, data, LEVELS)[0][4].item() == pytest.approx(1e-3 / 18**0.5, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_image_that_is_not_finite_has_no_numbers(value):
    x = torch.zeros(2, 1, 3, 3)
    x[0, 0, 1, 1] = value
    assert saturation(x, LEVELS).isna().all(axis=1).tolist() == [True, False]
    assert nearest(x, random_data(5, 1), LEVELS)[0].isnan().tolist() == [True, False]


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


def test_lost_samples_are_counted_and_red_and_single_pairs_drawn():
    frame = study_of("15", tiny_run(network=Quadratic(math.nan)))
    assert frame["not_finite"][1] == 64
    (figure,) = find("15").drawn(frame).values()
    assert (np.asarray(figure.axes[1].images[0].get_array())[10, 10] == (1, 0, 0)).all()
    for run in (tiny_run(), tiny_run(network=Quadratic(-1e30))):
        frame = study_of("interpolation", run, count=1)
        (figure,) = find("interpolation").drawn(frame).values()
        assert_no_text_on_text(figure)
    assert find("interpolation").verdict(frame).endswith(": cannot be told.")


def test_paths_go_on_a_circle_and_blends_straight():
    z1, z2 = uniform(2, 3, 1, 4, 4)
    path = between(z1, z2, arc(5))
    assert path.shape == (3, 5, 1, 4, 4)
    assert torch.allclose(path[:, 0], z2)
    assert torch.allclose(path[:, -1], z1)
    assert torch.allclose(path[:, 2], (z1 + z2) / math.sqrt(2))
    blend = straight(path)
    assert torch.allclose(blend[:, 1], 0.75 * z2 + 0.25 * z1)
    assert torch.equal(blend[:, 0], path[:, 0])
    z1, z2 = torch.tensor([[3.0, 0.0]]).double(), torch.tensor([[0.0, 3.0]]).double()
    circle = between(z1, z2, arc(21))
    found, line = course(circle), course(straight(circle))
    # Root mean square over two entries: sqrt(2) less than the distance of the ends, 3 sqrt(2).
    assert [*found["apart"], *line["apart"]] == pytest.approx([3, 3])
    assert [*line["length"], *line["halved"]] == pytest.approx([1, 0.5])
    assert line["steps"].tolist() == [pytest.approx([0.05] * 20)]
    assert found["length"].item() == pytest.approx(math.pi / 2 / math.sqrt(2), rel=1e-3)
    assert found["halved"].item() == pytest.approx(0.5, abs=1e-3)
    path = torch.zeros(2, 21, 1)
    path[0, 7:] = 1.0
    path[1, :, 0] = torch.linspace(0, 1, 21).square()
    found = course(path)
    # Of u^2 the last step is 39/400, and at twice the spacing 76/400.
    assert found["halved"].tolist() == pytest.approx([1.0, 39 / 76])
    assert found["length"].tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("batch", [5, 500])
def test_the_flow_of_a_quadratic_has_a_closed_form(monkeypatch, batch):
    """M(z) = m + (1 - s (1 - β) a)^K (z - m): affine, so that images lie on the starts' path."""
    monkeypatch.setattr(module, "BATCH", batch)
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
