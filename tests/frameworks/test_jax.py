"""The JAX twin equals the torch original."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ebmguard
from ebmguard.adapters.jax import contrastive_loss, diagnostics, temper
from ebmguard.diagnostics import energy_diagnostics, nonfinite_diagnostics, weight_diagnostics
from ebmguard.errors import ConfigError, EnergyTypeError, ShapeError

pytestmark = pytest.mark.usefixtures("double_precision")
VARIANTS = ["default", "no_pos", "batch", "true"]
BETA_STARS = st.one_of(
    st.just(0.0), st.floats(0.01, 4.0), st.floats(-2.0, -0.01), st.just(1e-6), st.just(200.0)
)


Sides: TypeAlias = "tuple[np.ndarray, np.ndarray]"

# Few, since every shape is compiled anew.
SHAPES = [(2, 1), (5, 8), (8, 5)]


@st.composite
def energies(draw: st.DrawFn) -> Sides:
    """Both sides in float64, with an offset that the objective must not mind."""
    n, m = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([1e-3, 1.0, 30.0, 1e4]))
    offset = draw(st.sampled_from([0.0, -5.0, 1e3]))
    gap = draw(st.sampled_from([0.0, 2.0, -2.0])) * spread
    return rng.normal(offset + gap, spread, n), rng.normal(offset, spread, m)


def in_torch(
    sides: Sides, beta_star: float, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    f_pos, f_neg = (torch.tensor(x, requires_grad=True) for x in sides)
    # A tensor, since a traced β* is one: only then is a β* of 0 found at run time.
    star = torch.tensor(beta_star, dtype=f_pos.dtype)
    loss = ebmguard.contrastive_loss(f_pos, f_neg, star, **kwargs)
    to_pos, to_neg = torch.autograd.grad(loss, (f_pos, f_neg))
    return loss.detach(), to_pos, to_neg


@cache
def _differentiated(variant: str, *, has_groups: bool) -> Any:
    def loss(f_pos: Any, f_neg: Any, beta_star: Any, y_pos: Any, y_neg: Any) -> Any:
        groups = (y_pos, y_neg) if has_groups else None
        return contrastive_loss(f_pos, f_neg, beta_star, variant=variant, groups=groups)

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def in_jax(
    sides: Sides, beta_star: float, *, variant: str = "default", groups: Any = (None, None)
) -> tuple[Any, Any, Any]:
    function = _differentiated(variant, has_groups=groups[0] is not None)
    star = np.asarray(beta_star, sides[0].dtype)
    value, (to_pos, to_neg) = function(*sides, star, *groups)
    return value, to_pos, to_neg


@cache
def _diagnosed(*, has_groups: bool) -> Any:
    def row(f_pos: Any, f_neg: Any, beta_star: Any, y_pos: Any, y_neg: Any) -> Any:
        return diagnostics(f_pos, f_neg, beta_star, groups=(y_pos, y_neg) if has_groups else None)

    return jax.jit(row)


def assert_same(found: Any, expected: Any, *, rtol: float, atol: float) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=rtol, atol=atol)


LOST = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 8), st.sampled_from([np.nan, np.inf, -np.inf])),
    max_size=6,
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("has_groups", [False, True])
@given(sides=energies(), beta_star=BETA_STARS, seed=st.integers(0, 2**16), lost=LOST)
def test_loss_and_gradient_are_those_of_torch_to_twelve_digits(
    variant, has_groups, sides, beta_star, seed, lost
):
    """With classes or without, and where energies are lost, which are left out."""
    groups: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    if has_groups and variant in ("default", "no_pos"):
        rng = np.random.default_rng(seed)
        groups["groups"] = tuple(rng.integers(0, 3, len(side)) for side in sides)
        theirs["groups"] = tuple(map(torch.tensor, groups["groups"]))
    for side, i, value in lost:
        sides[side][i % len(sides[side])] = value
    finite = [x[np.isfinite(x)] for x in sides]
    size = max([1.0, 1 / max(abs(beta_star), 1e-6), *(np.abs(x).max() for x in finite if x.size)])
    expected = in_torch(sides, beta_star, variant=variant, **theirs)
    found = in_jax(sides, beta_star, variant=variant, **groups)
    assert_same(found[0], expected[0], rtol=1e-12, atol=1e-12 * size)
    # Exponents are products with β*, and known to their own last digit.
    atol = 1e-14 * max(1.0, abs(beta_star) * size)
    for mine, other in zip(found[1:], expected[1:], strict=True):
        assert np.isfinite(np.asarray(mine)).all()
        assert_same(mine, other, rtol=1e-12, atol=atol)


def test_a_finite_energy_whose_sums_would_not_be_is_lost():
    rng = np.random.default_rng(0)
    pos, neg = rng.normal(0, 2, 6).astype("f4"), rng.normal(0, 2, 7).astype("f4")
    sides = pos, np.append(neg, np.float32(3e35))
    for mine, other in zip(in_jax(sides, 1e-6), in_torch(sides, 1e-6), strict=True):
        assert_same(mine, other, rtol=1e-6, atol=1e-6)
    assert in_jax(sides, 1e-6)[2][-1] == 0
    assert diagnostics(*map(jnp.asarray, sides), 1e-6)["nonfinite/neg"] == 1


def test_off_it_is_the_plain_difference():
    key = jax.random.key(0)
    pos, neg = jax.random.normal(key, (6,)), jax.random.normal(key, (5,)) - 1
    plain = jnp.mean(neg) - jnp.mean(pos)
    assert contrastive_loss(pos, neg, 0.0) == plain
    assert contrastive_loss(pos, neg, 0) == plain
    for variant in VARIANTS:
        value, to_pos, to_neg = in_jax((pos, neg), 0.0, variant=variant)
        assert float(value) == pytest.approx(float(plain), rel=1e-14)
        assert_same(to_pos, np.full(6, -1 / 6), rtol=1e-15, atol=0)
        assert_same(to_neg, np.full(5, 1 / 5), rtol=1e-15, atol=0)


def test_a_schedule_compiles_once():
    @jax.jit
    def step(f_pos: Any, f_neg: Any, beta_star: Any) -> Any:
        row = diagnostics(f_pos, f_neg, beta_star, output_scale=20_000.0)
        return contrastive_loss(f_pos, f_neg, beta_star), row

    pos, neg = jnp.array([1.0, 2.0]), jnp.array([0.5, 0.0, -1.0])
    for i in range(5):  # from 0 on: that it is 0 is found at run time
        loss, row = step(pos, neg, 0.1 * i)
        assert float(loss) == pytest.approx(float(contrastive_loss(pos, neg, 0.1 * i)), rel=1e-13)
        assert float(row["beta_star"]) == pytest.approx(0.1 * i)
    assert step._cache_size() == 1


def test_an_ensemble_is_a_vmap_over_beta_star():
    rng = np.random.default_rng(0)
    pos, neg = rng.normal(0, 2, (3, 8)), rng.normal(0, 2, (3, 6))
    stars = [0.0, 0.5, 2.0]
    found = jax.vmap(contrastive_loss)(jnp.asarray(pos), jnp.asarray(neg), jnp.asarray(stars))
    theirs = map(torch.tensor, (pos, neg, np.array(stars)))
    expected = torch.vmap(ebmguard.contrastive_loss)(*theirs)
    assert_same(found, expected, rtol=1e-12, atol=0)
    rows = jax.vmap(diagnostics)(jnp.asarray(pos), jnp.asarray(neg), jnp.asarray(stars))
    alone = diagnostics(jnp.asarray(pos[2]), jnp.asarray(neg[2]), 2.0)
    assert rows.keys() == alone.keys()
    for name, value in alone.items():
        assert_same(rows[name][2], value, rtol=1e-12, atol=1e-12)


def test_the_tempered_function_and_its_gradient():
    def f(x: Any, scale: float) -> Any:
        return -scale * (x * x).sum(-1)

    x = jnp.array([[1.0, 2.0], [0.0, -3.0]], jnp.float32)
    tempered = temper(f, 5.0, 20.0)
    assert tempered(x, scale=2.0).dtype == jnp.float32
    assert_same(tempered(x, scale=2.0), 0.75 * f(x, 2.0), rtol=1e-6, atol=0)
    grad = jax.grad(lambda x: tempered(x, 1.0).sum())(x)
    assert_same(grad, -1.5 * x, rtol=1e-6, atol=0)
    assert (temper(f, 0.0, 20.0)(x, 1.0) == f(x, 1.0)).all()

    @jax.jit
    def at(beta_star: Any) -> Any:
        return temper(f, beta_star, 20.0)(x, 1.0)

    for beta_star in (0.0, 5.0, 10.0):
        assert_same(at(beta_star), (1 - beta_star / 20) * f(x, 1.0), rtol=1e-6, atol=0)
    assert at._cache_size() == 1


def torch_row(sides: Sides, beta_star: float, groups: Any = None) -> dict[str, torch.Tensor]:
    f_pos, f_neg = (torch.tensor(x) for x in sides)
    reference = weight_diagnostics(f_pos, f_neg, 0.5, groups)
    return {
        **weight_diagnostics(f_pos, f_neg, beta_star, groups),
        **{f"ref/{name}": value for name, value in reference.items()},
        **energy_diagnostics(f_pos, f_neg),
        **nonfinite_diagnostics(f_pos, f_neg, beta_star),
        "beta_star": torch.tensor(beta_star, dtype=torch.float64),
    }


@given(
    sides=energies(),
    beta_star=BETA_STARS,
    seed=st.one_of(st.none(), st.integers(0, 2**16)),
    lost=st.sampled_from([None, np.nan, np.inf, -np.inf]),
)
def test_every_diagnostic_is_that_of_torch_to_twelve_digits(sides, beta_star, seed, lost):
    if lost is not None:
        sides[1][0] = lost
    groups: Any = None
    labels: Any = None, None
    if seed is not None:
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, 3, len(sides[0])), rng.integers(0, 3, len(sides[1]))
        groups = tuple(torch.tensor(y) for y in labels)
    expected = torch_row(sides, beta_star, groups)
    found = _diagnosed(has_groups=seed is not None)(*sides, beta_star, *labels)
    assert found.keys() == expected.keys()
    size = max(np.abs(x[np.isfinite(x)]).max(initial=1.0) for x in sides)
    # Exponents are β* f, whose last digit is that many times the rounding of a number near 1.
    in_exponent = 1e-14 * max(1.0, abs(beta_star) * size)
    for name, value in expected.items():
        is_energy = name.startswith(("f_pos", "f_neg", "energy_gap"))
        atol = 1e-12 * size if is_energy else 1e-12 + in_exponent
        assert found[name].shape == ()
        np.testing.assert_allclose(
            np.asarray(found[name]), value.numpy(), rtol=1e-12, atol=atol, err_msg=name
        )


def test_diagnostics_carry_no_gradient_and_scale_the_gap():
    pos, neg = jnp.array([1.0, 2.0]), jnp.array([0.0, 1.0])

    def total(f_pos: Any, f_neg: Any, beta_star: Any) -> Any:
        return sum(diagnostics(f_pos, f_neg, beta_star).values())

    for gradient in jax.grad(total, (0, 1, 2))(pos, neg, 0.5):
        assert not jnp.any(gradient)
    row = diagnostics(pos, neg, 0.5, output_scale=20_000.0, reference_beta_star=2.0)
    assert float(row["energy_gap_scaled"]) == pytest.approx(20_000)
    other = diagnostics(pos, neg, 2.0)
    assert float(row["ref/ess"]) == pytest.approx(float(other["ess"]))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"f_pos": jnp.float32(1.0)}, ShapeError, "batch mean"),
        ({"f_neg": jnp.zeros((3, 1), jnp.float32)}, ShapeError, "both must agree"),
        ({"f_neg": jnp.zeros((0,), jnp.float32)}, ShapeError, "holds no sample"),
        ({"f_pos": jnp.zeros(3, jnp.int32)}, EnergyTypeError, "int32"),
        ({"f_pos": [1.0, 2.0]}, EnergyTypeError, "list"),
        ({"variant": "best"}, ConfigError, "default, no_pos"),
        ({"variant": "true", "f_pos": jnp.zeros(1, jnp.float32)}, ShapeError, "at least two"),
        ({"variant": "batch", "groups": (jnp.zeros(3), jnp.zeros(3))}, ConfigError, "groups"),
        ({"groups": (jnp.zeros(3), jnp.zeros(2))}, ShapeError, "y_neg has shape \\(2,\\)"),
        ({"groups": (jnp.zeros(3),)}, ShapeError, "a pair"),
        ({"groups": ([0, 1, 1], [0, 1, 1])}, ShapeError, "a pair"),
        ({"beta_star": math.nan}, ConfigError, "beta_star=nan; expected a finite number"),
        ({"beta_star": np.float32("inf")}, ConfigError, "expected a finite number"),
        ({"beta_star": jnp.ones(3)}, ConfigError, "take jax.vmap"),
        ({"beta_star": [0.5]}, ConfigError, "0-dim array"),
    ],
)
def test_what_is_no_energy_is_refused_while_tracing(change, error, words):
    arguments: dict[str, Any] = {
        "f_pos": jnp.zeros(3, jnp.float32),
        "f_neg": jnp.zeros(3, jnp.float32),
        "beta_star": 0.5,
    }
    with pytest.raises(error, match=words):
        contrastive_loss(**arguments | change)
    if "variant" not in change:
        with pytest.raises(error, match=words):
            diagnostics(**arguments | change)


@pytest.mark.parametrize(
    ("beta_star", "scale", "words"),
    [
        (0.5, 0.0, "output_scale"),
        (0.5, -1.0, "output_scale"),
        (3.0, 2.0, "output_scale"),
        (math.nan, 1.0, "beta_star=nan"),
        (np.array([0.5, 1.0]), 2.0, "take jax.vmap"),
    ],
)
def test_temperatures_that_cannot_be_meant(beta_star, scale, words):
    with pytest.raises(ConfigError, match=words):
        temper(lambda x: x, beta_star, scale)


def test_a_run_at_beta_star_0_is_the_plain_one_bit_for_bit() -> None:
    """Ten updates of a small network with chains of its own, compiled, in single precision."""
    jax.config.update("jax_enable_x64", False)

    def f(params: Any, x: Any) -> Any:
        return (jnp.tanh(x @ params[0]) @ params[1])[:, 0]

    def plain(f_pos: Any, f_neg: Any) -> Any:
        return f_neg.mean() - f_pos.mean()

    def guarded(f_pos: Any, f_neg: Any) -> Any:
        return contrastive_loss(f_pos, f_neg, 0.0)

    def train(loss: Any, sampled: Any) -> Any:
        @jax.jit
        def update(params: Any, state: Any, key: Any) -> Any:
            keys = jax.random.split(key, 3)
            x_pos, x_neg = jax.random.normal(keys[0], (8, 2)), jax.random.normal(keys[1], (5, 2))
            for noise in jax.random.normal(keys[2], (3, 5, 2)):
                x_neg += 0.1 * jax.grad(lambda x: sampled(params)(x).sum())(x_neg) + 0.1 * noise
            gradients = jax.grad(lambda p: loss(f(p, x_pos), f(p, x_neg)))(params)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(params, updates), state

        params = [
            jax.random.normal(jax.random.key(i), size) for i, size in enumerate([(2, 4), (4, 1)])
        ]
        state = optimizer.init(params)
        for key in jax.random.split(jax.random.key(2), 10):
            params, state = update(params, state, key)
        return params

    optimizer = optax.adam(0.05)
    unguarded = train(plain, lambda params: lambda x: f(params, x))
    found = train(guarded, lambda params: temper(lambda x: f(params, x), 0.0, 20.0))
    for ours, theirs in zip(found, unguarded, strict=True):
        assert (np.asarray(ours) == np.asarray(theirs)).all()
