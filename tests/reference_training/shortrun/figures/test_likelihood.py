"""Figure "likelihood": a model whose densities are known, what is said of it, and the picture."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun.figures.config import FigureConfig
from ebmguard.reference_training.shortrun.figures.densities import (
    DEQUANTISED,
    GAUSSIAN,
    NOISY,
    OWN,
    PIXELS,
    STORED,
    UNIFORM,
    Densities,
    measure,
    median,
)
from ebmguard.reference_training.shortrun.figures.likelihood import draw, make, statements, table
from ebmguard.reference_training.shortrun.flow.invert import Inverse, invert
from ebmguard.reference_training.shortrun.trained import TrainedRun
from ebmguard.sinks import to_json
from tests.reference_training.pictures import assert_no_text_on_text
from tests.reference_training.shortrun.parts import Quadratic, tiny_run

COUNT = 6
STRENGTH = 0.2
FACTOR = (1 - STRENGTH) ** 3
"""Of K = 3 steps on -0.1 |x|²: M(z) is this times z, in every one of D = 64 dimensions."""
BITS = 1 + math.log2(FACTOR) + 3
"""Per dimension, of any image: a box of 2 FACTOR a side, in levels of 0..16."""


def shrinking(path: str = "model", **settings: Any) -> TrainedRun:
    given: dict[str, Any] = {"activation": "gelu", "beta_star": 0.0, **settings}
    return tiny_run(path, network=Quadratic(STRENGTH), **given)


def config(runs: Sequence[TrainedRun], count: int | None = COUNT) -> FigureConfig:
    return FigureConfig(name="likelihood", runs=tuple(run.path for run in runs), count=count)


@pytest.fixture(scope="module")
def own() -> Densities:
    return measure(shrinking(), count=COUNT, seed=1)


def test_bits_of_a_linear_flow_are_those_of_its_box(own: Densities) -> None:
    assert [(one.images, one.inside) for one in own.flows] == [
        (STORED, False),
        (STORED, True),
        (NOISY, True),
        (DEQUANTISED, True),
        (OWN, True),
    ]
    for one in own.flows:
        torch.testing.assert_close(
            one.bits, torch.full((COUNT,), BITS, dtype=torch.float64), rtol=0, atol=1e-6
        )
        assert one.flips.tolist() == [0] * COUNT
        expected = [k / 3 * math.log2(FACTOR) for k in range(4)]
        assert one.course.mean(1).tolist() == pytest.approx(expected, abs=1e-6)


def test_outside_of_the_flows_box_the_density_is_said_to_be_zero(own: Densities) -> None:
    free, cube = own.one(STORED, inside=False), own.one(STORED)
    # Every digit has black pixels, at -1, where the flow does not come from within the cube.
    assert free.share_within == 0
    assert free.miss < 1e-3
    assert cube.share_within == 1
    expected = (cube.target.abs() - FACTOR).clamp(min=0).square().mean().sqrt().item()
    assert cube.miss == pytest.approx(expected, rel=1e-3)
    said = " ".join(statements(own))
    assert f"in the cube for 0 of {COUNT} images; the likelihood of the others is 0, unless" in said
    assert f"farther than the {own.run.settings.data_noise:g} of the training's noise" in said


def test_what_lies_in_the_box_has_a_density(own: Densities) -> None:
    def near(network: nn.Module, x: Tensor, **asked: Any) -> Inverse:
        z = torch.full_like(x, 0.5)
        nothing = torch.zeros(0)
        return Inverse(z, FACTOR * z, nothing, nothing, nothing)

    found = measure(own.run, count=2, seed=1, search=near)
    free = found.one(STORED, inside=False)
    assert free.share_within == 1
    # M(z) is computed anew, and so is its distance from the image.
    torch.testing.assert_close(free.x, torch.full_like(free.x, FACTOR / 2))
    expected = (free.target.double() - FACTOR / 2).square().flatten(1).mean(1).sqrt()
    torch.testing.assert_close(free.misses, expected)
    assert "in the cube for 2 of 2 images." in statements(found)[0]


def test_the_map_is_that_of_the_tempered_sampler() -> None:
    # β = β*/o is a half: f counts half in every step.
    run = shrinking(beta_star=10_000.0)
    found = measure(run, count=2, seed=0).one(STORED, inside=False)
    assert found.bits[0].item() == pytest.approx(4 + 3 * math.log2(1 - STRENGTH / 2), abs=1e-6)


def test_images_are_held_out_and_noise_is_as_said(own: Densities) -> None:
    data = own.run.data
    test = {tuple(row.tolist()) for row in data.scale(data.test_x).flatten(1)}
    stored = own.one(STORED).target
    assert all(tuple(row.tolist()) in test for row in stored.flatten(1))
    assert len({tuple(row.tolist()) for row in stored.flatten(1)}) == COUNT
    noise = own.one(NOISY).target - stored
    assert noise.std().item() == pytest.approx(own.run.settings.data_noise, rel=0.2)
    cells = (own.one(DEQUANTISED).target - stored) * data.levels / 2
    assert float(cells.abs().max()) <= 0.5 + 1e-5
    assert cells.std().item() == pytest.approx(12**-0.5, rel=0.2)


def test_its_own_images_are_where_its_starts_lead(own: Densities) -> None:
    drawn = own.one(OWN)
    assert drawn.share_within == 1
    assert drawn.misses.tolist() == [0.0] * COUNT
    # A uniform box of 2 FACTOR a side.
    assert FACTOR * 0.99 < float(drawn.x.abs().max()) <= FACTOR
    assert drawn.x.std().item() == pytest.approx(FACTOR * 3**-0.5, rel=0.05)


def test_references_are_densities_of_the_same_images(own: Densities) -> None:
    assert own.fitted[UNIFORM][STORED].tolist() == [4.0] * COUNT
    run, noise = own.run, own.run.settings.data_noise
    rows = run.data.scale(run.data.train_x).flatten(1).double()
    covariance = torch.cov(rows.T, correction=0) + noise**2 * torch.eye(64)
    density = torch.distributions.MultivariateNormal(rows.mean(0), covariance)
    pixels = torch.distributions.Normal(rows.mean(0), covariance.diagonal().sqrt())
    for images in (STORED, NOISY, DEQUANTISED):
        x = own.one(images).target.flatten(1).double()
        for name, nats in ((GAUSSIAN, density.log_prob(x)), (PIXELS, pixels.log_prob(x).sum(1))):
            expected = -nats / (64 * math.log(2)) + 3
            torch.testing.assert_close(own.fitted[name][images], expected)
    # Entropy of N(0, (8 * noise)²), in bits.
    assert own.noise == pytest.approx(0.5 * math.log2(2 * math.pi * math.e * (8 * noise) ** 2))


def test_without_noise_in_the_training_there_is_no_reading_of_it() -> None:
    found = measure(shrinking(data_noise=0.0), count=2, seed=0)
    assert [one.images for one in found.flows] == [STORED, STORED, DEQUANTISED, OWN]
    assert list(found.fitted) == [UNIFORM]
    assert found.noise is None
    assert "noise" not in table(found).replace("β", "")
    draw([found])
    assert len(statements(found)) == 4


def test_fewer_bits_than_the_noise_has_are_called_impossible(own: Densities) -> None:
    # A box of half a level has fewer bits than noise of a quarter of a level, and cannot hold it.
    flows = [dataclasses.replace(one, bits=one.bits - 6) for one in own.flows]
    said = statements(dataclasses.replace(own, flows=flows))
    honest = statements(own)
    for words in (
        "fewer bits than any density has there in expectation",
        "less than nothing",
        "not distributed as the images",
    ):
        assert any(words in one for one in said)
        assert not any(words in one for one in honest)


def test_table_shows_every_density(own: Densities) -> None:
    lines = table(own).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert "6 held-out images, D = 64, levels 0..16" in lines[0]
    assert cells[2][:6] == ["flow, z free", STORED, *[f"{BITS:.2f}"] * 4]
    assert cells[2][6] == "0%"
    assert cells[3][:2] == ["flow, z in the cube", STORED]
    assert cells[3][6:] == ["100%", f"{own.one(STORED).miss:.3g}", "0 of 6"]
    assert [UNIFORM, STORED, "4.00"] in [row[:3] for row in cells]
    assert [row[:2] for row in cells].count([GAUSSIAN, NOISY]) == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0, 1.0, 2.0], 2.0), ([1.0, math.inf], math.inf), ([-math.inf, 1.0, 2.0], 1.0)],
)
def test_medians_of_what_may_be_infinite(values: list[float], expected: float) -> None:
    assert median(torch.tensor(values)) == expected
    assert math.isnan(median(torch.tensor([*values, math.nan])))


def test_a_figure_of_a_network_of_its_own() -> None:
    run = tiny_run("net", activation="gelu", data="digits")
    made = make([run], config([run], count=2))
    assert "net: digits" in made.text
    text = json.dumps(to_json(made.numbers), allow_nan=False)
    (own,) = json.loads(text)["runs"]
    assert own["dimensions"] == 64
    assert len(own["flows"]) == 5
    assert all(len(flow["bits"]) == 2 for flow in own["flows"])
    assert_no_text_on_text(made.figure)


def test_no_text_lies_on_text(own: Densities) -> None:
    assert_no_text_on_text(draw([own, own]))


def test_determinants_that_are_not_finite_are_told_and_not_drawn(own: Densities) -> None:
    bits = own.flows[0].bits.clone()
    bits[0], bits[1] = -math.inf, math.nan
    found = dataclasses.replace(
        own, flows=[dataclasses.replace(own.flows[0], bits=bits), *own.flows[1:]]
    )
    assert "undefined" in table(found)
    draw([found])


def test_a_network_without_second_derivatives_is_refused() -> None:
    run = shrinking(activation="leaky_relu")
    with pytest.raises(ConfigError, match="--activation gelu"):
        make([run], config([run]))


def test_the_search_is_the_inversion_of_the_figure_of_reconstructions() -> None:
    assert measure.__kwdefaults__ == {"search": invert}
