"""Figure "reconstruction": a model whose inverse is known, what is said of it, and the picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ebmguard.reference_training.shortrun.figures.config import FigureConfig
from ebmguard.reference_training.shortrun.figures.reconstructed import (
    CONTROLS,
    HELD_OUT,
    NOISE,
    PERMUTED,
    STAGES,
    TRAINED,
    UNTRAINED,
    Reconstructed,
    Reconstruction,
    reconstruct,
)
from ebmguard.reference_training.shortrun.figures.reconstruction import (
    draw,
    make,
    statements,
    table,
)
from ebmguard.reference_training.shortrun.trained import TrainedRun
from ebmguard.sinks import to_json

from ...pictures import assert_no_text_on_text
from ..parts import Quadratic, tiny_run

COUNT = 18
FACTOR = (1 - 0.2) ** 3
"""Of K = 3 steps on -0.1 |x|²: M(z) is this times z, and its cube reaches as far."""


def shrinking(path: str = "model", **settings: Any) -> TrainedRun:
    return tiny_run(path, network=Quadratic(0.2), activation="gelu", **settings)


def config(runs: Sequence[TrainedRun], count: int | None = COUNT) -> FigureConfig:
    return FigureConfig(name="reconstruction", runs=tuple(run.path for run in runs), count=count)


@pytest.fixture(scope="module")
def own() -> Reconstructed:
    return reconstruct(shrinking(beta_star=0.0), count=COUNT, seed=1)


def test_free_a_map_that_shrinks_reaches_everything(own: Reconstructed) -> None:
    for kind in (HELD_OUT, PERMUTED, NOISE):
        one = own.one(TRAINED, kind, inside=False)
        assert one.inverse.error.max() < 1e-10
        torch.testing.assert_close(one.inverse.z, one.target / FACTOR, rtol=1e-4, atol=1e-4)
    one = own.one(TRAINED, HELD_OUT, inside=False)
    assert one.outside == pytest.approx((one.target.abs() > FACTOR).double().mean().item())
    assert one.largest == pytest.approx(1 / FACTOR, rel=1e-4)


def test_in_the_cube_it_reaches_as_far_as_it_shrinks_to(own: Reconstructed) -> None:
    for kind in (HELD_OUT, PERMUTED, NOISE):
        one = own.one(TRAINED, kind, inside=True)
        expected = (one.target.abs() - FACTOR).clamp(min=0).square().flatten(1).mean(1)
        torch.testing.assert_close(one.inverse.error, expected, rtol=1e-4, atol=1e-6)
        assert one.outside == 0
        assert one.largest == 1


def test_what_is_reconstructed(own: Reconstructed) -> None:
    run, x = own.run, own.one(TRAINED, HELD_OUT, inside=True).target
    held_out = {tuple(image.flatten().tolist()) for image in run.data.scale(run.data.test_x)}
    assert len({tuple(image.flatten().tolist()) for image in x} & held_out) == COUNT
    permuted = own.one(TRAINED, PERMUTED, inside=True).target
    assert len(permuted) == CONTROLS
    torch.testing.assert_close(
        permuted.flatten(1).sort(1).values, x[:CONTROLS].flatten(1).sort(1).values
    )
    # One order for all images: equal pixels of all images stay so, and pairs keep their distance.
    torch.testing.assert_close(
        torch.cdist(permuted.flatten(1), permuted.flatten(1)),
        torch.cdist(x[:CONTROLS].flatten(1), x[:CONTROLS].flatten(1)),
        rtol=1e-4,
        atol=1e-3,
    )
    assert not torch.equal(permuted, x[:CONTROLS])
    assert torch.equal(own.one(UNTRAINED, HELD_OUT, inside=True).target, x[:CONTROLS])


def test_shares_of_the_variance(own: Reconstructed) -> None:
    data = own.run.data
    mean = data.scale(data.train_x).mean(0)
    one = own.one(TRAINED, HELD_OUT, inside=True)
    variance = (one.target - mean).square().mean().item()
    assert one.variance == pytest.approx(variance, rel=1e-5)
    assert own.principal[0].mean().item() == pytest.approx(variance, rel=1e-5)
    assert one.share == pytest.approx(one.inverse.error.mean().item() / variance, rel=1e-5)
    noise = own.one(TRAINED, NOISE, inside=True)
    assert noise.variance == pytest.approx(1 / 3, rel=0.15)


def test_the_nearest_training_image_is_searched_among_all(own: Reconstructed) -> None:
    data, x = own.run.data, own.one(TRAINED, HELD_OUT, inside=True).target
    errors = (data.scale(data.train_x)[None] - x[:, None]).square().flatten(2).mean(2)
    torch.testing.assert_close(own.neighbour_error.float(), errors.min(1).values)
    expected = data.scale(data.train_x)[errors.argmin(1)]
    assert torch.equal(own.neighbours, expected)


def test_statements_follow_from_the_numbers(own: Reconstructed) -> None:
    baselines, free, training, no_data = statements(own)
    cube = own.one(TRAINED, HELD_OUT, inside=True)
    below = int((cube.inverse.error < own.neighbour_error).sum())
    assert f"for {below} of them" in baselines
    assert f"as far as {1 / FACTOR:.3g}" in free
    assert f"before training, {CONTROLS} of these images" in training
    # A cube that shrinks reaches noise, of smaller entries, more easily than digits.
    assert "by this measure the model does not prefer data" in no_data
    assert f"noise {own.one(TRAINED, NOISE, inside=True).share:.1%}" in no_data


@pytest.mark.parametrize(
    ("data", "others", "words"),
    [
        (0.2, 0.5, "the model prefers data, by a factor of 2.5."),
        (0.2, 0.2, "by this measure the model does not prefer data."),
        (0.5, 0.2, "by this measure the model does not prefer data."),
        # What is left of an image that is reached is rounding, or nothing.
        (1e-9, 1e-7, "all of them are reached, and this measure does not tell data from others."),
        (0.0, 0.0, "all of them are reached, and this measure does not tell data from others."),
        (0.0, 0.1, "the model prefers data, by a factor of more than 10,000."),
        (0.1, 0.0, "by this measure the model does not prefer data."),
    ],
)
def test_what_is_rounding_tells_data_from_nothing(
    own: Reconstructed, data: float, others: float, words: str
) -> None:
    found = [left(one, data if one.images == HELD_OUT else others) for one in own.found]
    assert statements(replace(own, found=found))[3].endswith(words)


@pytest.mark.parametrize(("share", "said"), [(0.1, True), (1e-8, False)])
def test_a_descent_that_has_arrived_is_over(own: Reconstructed, share: float, said: bool) -> None:
    found = [left(one, share, before=2 * share) for one in own.found]
    assert said == any("was not over" in s for s in statements(replace(own, found=found)))


def left(one: Reconstruction, share: float, before: float | None = None) -> Reconstruction:
    """With this share of the variance left, and so much at the tenths of the descent before."""
    inverse = one.inverse
    error = torch.full_like(inverse.error, share * one.variance).double()
    course = inverse.course.double() * 0 + (share if before is None else before) * one.variance
    course[-1] = error
    return replace(one, inverse=replace(inverse, error=error, course=course))


def test_a_network_that_was_not_trained_from_its_seed_is_said_not_to_be(own: Reconstructed) -> None:
    words = "before training, with its seed's parameters and not those that it started from, 16 of"
    assert words not in statements(own)[2]
    assert words in statements(replace(own, run=shrinking(start_from="other")))[2]


def test_a_piecewise_linear_network_is_said_to_be_one(own: Reconstructed) -> None:
    kinks = replace(own, run=tiny_run("kinks", activation="leaky_relu"))
    assert not any("piecewise linear" in sentence for sentence in statements(own))
    assert any("kinks: its network is piecewise linear" in s for s in statements(kinks))


def test_the_table_has_every_reconstruction_and_baseline(own: Reconstructed) -> None:
    lines = table(own).splitlines()
    assert lines[0].startswith("model: digits")
    assert len(lines) == 4 + len(own.found) + 3
    assert len(own.found) == 8
    near = next(line for line in lines if "nearest training image" in line)
    assert f"{own.neighbour_error.mean().item():.3g}" in near


def test_runs_side_by_side() -> None:
    # β = β*/o is a half: f counts half in every step of the second.
    runs = [shrinking("one"), shrinking("two", beta_star=10_000.0)]
    made = make(runs, config(runs, count=3))
    numbers = json.loads(json.dumps(to_json(made.numbers)))
    first, second = numbers["runs"]
    assert (first["name"], second["name"]) == ("one", "two")
    free = [run["reconstructions"][3] for run in (first, second)]
    assert [(one["images"], one["inside"]) for one in free] == [(HELD_OUT, False)] * 2
    assert free[0]["largest"] == pytest.approx(1 / (1 - 0.2) ** 3, rel=1e-4)
    assert free[1]["largest"] == pytest.approx(1 / (1 - 0.1) ** 3, rel=1e-4)
    best = first["reconstructions"][0]
    assert (best["images"], best["network"], best["inside"]) == (HELD_OUT, TRAINED, True)
    assert len(best["errors"]) == len(first["nearest_errors"]) == 3
    assert len(best["course"]) == STAGES[-1] + 1
    assert set(first["baselines"]) == {
        "nearest training image",
        "16 principal components",
        "mean training image",
    }
    assert all(sentence in made.text for sentence in numbers["statements"])
    assert_no_text_on_text(made.figure)


def test_no_text_lies_on_text(own: Reconstructed) -> None:
    assert_no_text_on_text(draw([own]))
