"""An ensemble of models that differ in exponent and variant: each member as if alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ebmguard.energies import Variant, variant_runs
from ebmguard.errors import ConfigError, ShapeError
from ebmguard.objective import coefficients, contrastive_loss
from tests.objective.oracles import VARIANTS, slopes

N, M = 6, 5
# Runs of one, two and three; "true" comes back after others.
MIXED: list[Variant] = ["true", "default", "default", "no_pos", "batch", "batch", "batch", "true"]
STARS = torch.tensor([0.5, 0.0, 2.0, -0.7, 1.0, 0.0, 3.0, 0.1], dtype=torch.float64)


def leaves(*models: int) -> tuple[Tensor, Tensor]:
    pos = torch.randn(*models, N, dtype=torch.float64).requires_grad_()
    neg = torch.randn(*models, M, dtype=torch.float64).requires_grad_()
    return pos, neg


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inner", [(), (3,), (2, 2)])
def test_members_of_other_variants_are_as_if_alone(inner):
    pos, neg = leaves(len(MIXED), *inner)
    star = STARS.reshape(-1, *(1 for _ in inner)).expand(len(MIXED), *inner)
    loss = contrastive_loss(pos, neg, star, variant=MIXED)
    assert loss.shape == (len(MIXED), *inner)
    to_pos, to_neg = slopes(loss, pos, neg)
    closed = coefficients(pos, neg, star, variant=MIXED)
    close(closed[0], to_pos)
    close(closed[1], to_neg)
    for i, variant in enumerate(MIXED):
        alone = contrastive_loss(pos[i], neg[i], star[i], variant=variant)
        close(loss[i], alone)
        own_pos, own_neg = slopes(alone, pos, neg)
        close(to_pos[i], own_pos[i])
        close(to_neg[i], own_neg[i])


@pytest.mark.parametrize("several", [[0.5], [0.1, 2.0], [STARS, 0.3, -STARS]])
def test_closed_gradient_of_several_exponents(several):
    pos, neg = leaves(*(STARS.shape if any(map(torch.is_tensor, several)) else ()))
    found = slopes(contrastive_loss(pos, neg, several), pos, neg)
    for side, closed in zip(found, coefficients(pos, neg, several), strict=True):
        close(closed, side)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_variant_for_all_is_that_variant(variant):
    pos, neg = leaves(3)
    star = STARS[:3]
    named = contrastive_loss(pos, neg, star, variant=(variant,) * 3)
    assert torch.equal(named, contrastive_loss(pos, neg, star, variant=variant))


@given(st.lists(st.sampled_from(VARIANTS), min_size=1, max_size=12))
def test_runs_cover_the_members_in_their_order(variants):
    found = variant_runs(variants)
    assert [name for name, run in found for _ in variants[run]] == variants
    assert all(a[0] != b[0] for a, b in pairwise(found))


@given(
    st.lists(st.tuples(st.sampled_from(VARIANTS), st.floats(-3, 3)), min_size=1, max_size=6),
    st.integers(0, 2**31),
)
def test_any_mix(members, seed):
    rng = torch.Generator().manual_seed(seed)
    pos = torch.randn(len(members), N, generator=rng, dtype=torch.float64)
    neg = torch.randn(len(members), M, generator=rng, dtype=torch.float64)
    star = torch.tensor([beta for _, beta in members], dtype=torch.float64)
    loss = contrastive_loss(pos, neg, star, variant=[name for name, _ in members])
    for i, (name, beta) in enumerate(members):
        # A vanishing exponent has few digits in either form.
        if abs(beta) > 1e-3 or beta == 0:
            close(loss[i], contrastive_loss(pos[i], neg[i], beta, variant=name))


@pytest.mark.parametrize("variant", ["default", MIXED])
def test_several_exponents_per_member_are_averaged(variant):
    pos, neg = leaves(len(MIXED))
    stars: list[float | Tensor] = [
        STARS,
        2 * STARS + 0.1,
        0.4,
        torch.tensor(0.3, dtype=torch.float64),
    ]
    everyone = [torch.as_tensor(s, dtype=torch.float64).expand(len(MIXED)) for s in stars]
    each = [contrastive_loss(pos, neg, star, variant=variant) for star in everyone]
    loss = contrastive_loss(pos, neg, stars, variant=variant)
    close(loss, torch.stack(each).mean(0))
    alone = [star[2].item() for star in everyone]
    name: Any = variant if isinstance(variant, str) else variant[2]
    close(loss[2], contrastive_loss(pos[2], neg[2], alone, variant=name))


def test_groups_with_the_two_variants_that_have_them():
    pos, neg = leaves(3)
    groups = (torch.tensor([0, 1, 0, 1, 2, 2]), torch.tensor([0, 0, 1, 1, 2]))
    names: list[Variant] = ["no_pos", "default", "no_pos"]
    loss = contrastive_loss(pos, neg, STARS[:3], variant=names, groups=groups)
    for i, name in enumerate(names):
        alone = contrastive_loss(pos[i], neg[i], STARS[i], variant=name, groups=groups)
        close(loss[i], alone)


TWO = torch.ones(2)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no models": ({"beta_star": 1.0}, ConfigError, "beta_star has no model dimensions. Pass one"),
    "0-dim": ({"beta_star": torch.tensor(1.0)}, ConfigError, "has no model dimensions"),
    "several numbers": ({"beta_star": [1.0, 2.0]}, ConfigError, "has no model dimensions"),
    "too few": ({"variant": ["true"]}, ConfigError, "variant= has 1 names, but beta_star has"),
    "none": ({"variant": []}, ConfigError, "has 0 names, but beta_star has model dimensions (2,)"),
    "too many": ({"variant": ["true"] * 3}, ConfigError, "expected 2 names, one for each entry"),
    "unknown": ({"variant": ["true", "both"]}, ConfigError, "variant='both'; expected one of"),
    "number": ({"variant": ["true", 3]}, ConfigError, "variant=3; expected one of"),
    "one unknown": ({"variant": 3}, ConfigError, "variant=3; expected one of default, no_pos"),
    "groups": (
        {"groups": (torch.zeros(4), torch.zeros(4))},
        ConfigError,
        "not for 'batch'",
    ),
    "true of one positive": (
        {"f_pos": torch.zeros(2, 1), "variant": ["default", "true"]},
        ShapeError,
        "halves the positives",
    ),
    "exponents of other models": (
        {"beta_star": [TWO, torch.ones(3)], "variant": "default"},
        ShapeError,
        "model dimensions (2,) and (3,); expected the same for all",
    ),
    "energies of other models": (
        {"beta_star": [0.5, torch.ones(3)], "variant": "default"},
        ShapeError,
        "beta_star has model dimensions (3,), so f_pos must have shape (3, samples)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_message(name):
    change, error, message = REFUSED[name]
    call: dict[str, Any] = {
        "f_pos": torch.zeros(2, 4),
        "f_neg": torch.zeros(2, 4),
        "beta_star": TWO,
        "variant": ["default", "batch"],
    }
    with pytest.raises(error) as caught:
        contrastive_loss(**(call | change))
    assert message in str(caught.value)
