"""JEM's adapter in a loop of JEM's structure: closure as a sampler, p(x) and p(x, y) terms."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard import guard
from ebmguard.adapters import jem
from ebmguard.errors import ConfigError
from ebmguard.sinks import read_jsonl
from tests.adapters.jem_parts import (
    BATCH,
    CHAINS,
    CLASSES,
    Net,
    cross_entropy,
    data,
    doubles,
    draw,
    expected_gradient,
    gradient,
    plain,
    same,
    slope,
    state_of,
    uniform,
)


def arguments(folder: Path, **changes: Any) -> Namespace:
    """The script's settings, its defaults but for the sizes."""
    defaults = {
        "p_x_weight": 1.0,
        "p_x_y_weight": 0.0,
        "class_cond_p_x_sample": False,
        "sgld_lr": 1.0,
        "sgld_std": 1e-2,
        "n_steps": 3,
        "save_dir": str(folder),
    }
    return Namespace(**defaults | changes)


def get_sample_q(args: Namespace) -> Callable[..., Tensor]:
    def sample_q(f, chains, y=None, n_steps=args.n_steps):
        f.eval()
        start, rows = draw(chains, y)
        x = start.requires_grad_()
        for _ in range(n_steps):
            (f_prime,) = torch.autograd.grad(f(x, y=y).sum(), [x], retain_graph=True)
            x.data += args.sgld_lr * f_prime + args.sgld_std * torch.randn_like(x)
        f.train()
        chains[rows] = x.detach()
        return x.detach()

    return sample_q


def train(args: Namespace, make: Callable[..., Any] | None = None, steps: int = 20) -> list[Tensor]:
    """Train; ``make`` puts guards around the losses and samplers of the two terms."""
    torch.manual_seed(1)
    f, chains = Net(), uniform(CHAINS)
    optimizer = torch.optim.Adam(f.parameters(), lr=1e-3)
    images, labels = data()
    x_loss, sample_q = plain, get_sample_q(args)
    xy_loss, sample_q_y = plain, get_sample_q(args)
    if make is not None:
        (x_loss, sample_q), (xy_loss, sample_q_y) = make(f, optimizer, chains)
    for _ in range(steps):
        x = images[torch.randint(40, (BATCH,))]
        rows = torch.randint(40, (BATCH,))
        x_lab, y_lab = images[rows], labels[rows]
        total = cross_entropy(f, x_lab, y_lab)
        if args.p_x_weight > 0:
            y_q = torch.randint(CLASSES, (BATCH,)) if args.class_cond_p_x_sample else None
            x_q = sample_q(f, chains, y=y_q)
            total = total + args.p_x_weight * x_loss(f(x), f(x_q))
        if args.p_x_y_weight > 0:
            x_q_lab = sample_q_y(f, chains, y=y_lab)
            f_pos, f_neg = f(x_lab, y_lab), f(x_q_lab, y_lab)
            assert f_pos.shape == (BATCH, 1)
            groups = {} if xy_loss is plain else {"groups": (y_lab, y_lab)}
            total = total + args.p_x_y_weight * xy_loss(f_pos, f_neg, **groups)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return state_of(f, optimizer, chains)


@pytest.mark.parametrize("attached", [False, True], ids=["guard", "guard and attach"])
@pytest.mark.parametrize(
    "options",
    [{}, {"class_cond_p_x_sample": True}, {"p_x_y_weight": 0.5}, {"sgld_std": 0.0}],
    ids=str,
)
def test_off_it_is_the_same_run(options, attached, tmp_path):
    args = arguments(tmp_path, **options)
    terms = ("p_x", "p_x_y") if args.p_x_y_weight else (None, None)

    def make(f, optimizer, chains):
        made = []
        for term in dict.fromkeys(terms):
            g = guard(None, get_sample_q(args), beta_star=0, **jem.settings(args, term))
            if attached:
                g.attach(model=f, optimizer=optimizer, buffer=chains, **jem.sampler_settings(args))
            made.append(g)
        return made if len(made) == 2 else [made[0], (plain, None)]

    assert same(train(args, make), train(args))


def test_rows_of_the_terms_are_written_apart(tmp_path):
    args = arguments(tmp_path, p_x_y_weight=1.0)
    guards = []

    def make(*_):
        for term in ("p_x", "p_x_y"):
            settings = jem.settings(args, term)
            guards.append(guard(None, get_sample_q(args), beta_star=0.5, **settings))
        return guards

    guarded = train(args, make, steps=5)
    assert not same(guarded, train(args, steps=5))
    for g in guards:
        g.close()
    for term in ("p_x", "p_x_y"):
        rows = read_jsonl(tmp_path / "ebmguard" / term / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(5))


@doubles()
def test_gradient_is_the_closed_form_on_samples_of_the_tempered_energy(tmp_path):
    args = arguments(tmp_path, sgld_std=0.5)  # o = 2 * 1 / 0.5² = 8
    beta_star = 2.0
    cd_loss, sample_q = guard(None, get_sample_q(args), beta_star=beta_star, **jem.settings(args))
    f, chains = Net(), uniform(CHAINS)
    before = chains.clone()
    torch.manual_seed(3)
    x_q = sample_q(f, chains)
    torch.manual_seed(3)
    x, _ = draw(before)
    for _ in range(args.n_steps):
        x = x + (1 - beta_star / 8) * slope(f, x) + 0.5 * torch.randn_like(x)
    torch.testing.assert_close(x_q, x, rtol=0, atol=1e-12)

    f_pos, f_neg = f(uniform(BATCH)), f(x_q)
    found = gradient(cd_loss(f_pos, f_neg), f)
    torch.testing.assert_close(found, expected_gradient(f, f_pos, f_neg, beta_star))


@doubles()
def test_joint_term_compares_samples_of_one_class(tmp_path):
    args = arguments(tmp_path, p_x_y_weight=1.0)
    beta_star = 1.0
    xy_loss, sample_q_y = guard(
        None, get_sample_q(args), beta_star=beta_star, **jem.settings(args, "p_x_y")
    )
    f, y = Net(), torch.arange(BATCH) % CLASSES
    f_pos, f_neg = f(uniform(BATCH), y), f(sample_q_y(f, uniform(CHAINS), y=y), y)
    found = gradient(xy_loss(f_pos, f_neg, groups=(y, y)), f)

    # Every class on its own, weighted by its share of the positives.
    of_classes = [
        [
            (y == c).sum() / BATCH * part
            for part in expected_gradient(f, f_pos[y == c], f_neg[y == c], beta_star)
        ]
        for c in range(CLASSES)
    ]
    expected = tuple(sum(parts) for parts in zip(*of_classes, strict=True))
    torch.testing.assert_close(found, expected)


def test_settings_are_the_scripts_own(tmp_path):
    args = arguments(tmp_path)
    assert jem.settings(args) == {
        "step_size": 1.0,
        "noise_std": 1e-2,
        "convention": "log_density",
        "log_dir": str(tmp_path / "ebmguard"),
    }
    assert jem.sampler_settings(args) == {
        "step_size": 1.0,
        "noise_std": 1e-2,
        "sgld_steps": 3,
        "steps_argument": "n_steps",
    }


def test_without_noise_the_sampler_is_left_as_it_is(tmp_path):
    args = arguments(tmp_path, sgld_std=0.0)
    _, sample_q = guard(None, get_sample_q(args), beta_star=0.5, **jem.settings(args))
    f, chains = Net(), uniform(CHAINS)
    again = copy.deepcopy(chains)
    torch.manual_seed(3)
    guarded = sample_q(f, chains)
    torch.manual_seed(3)
    assert torch.equal(guarded, get_sample_q(args)(f, again))
    assert "noise_std" not in jem.sampler_settings(args)


@pytest.mark.parametrize(
    ("changes", "term", "says"),
    [
        (
            {"p_x_y_weight": 1.0},
            None,
            r"p_x_y is on.*settings\(args, 'p_x'\), settings\(args, 'p_x_y'\)",
        ),
        (
            {"p_x_weight": 0.0, "p_x_y_weight": 1.0},
            None,
            r"for each term that is on.*: settings\(args, 'p_x_y'\);",
        ),
        ({"p_x_weight": 0.0}, None, "weight of the term p_x is 0"),
        ({}, "p_x_y", "weight of the term p_x_y is 0"),
        ({}, "p_y", "term='p_y'; expected one of 'p_x', 'p_x_y'"),
        ({"sgld_lr": 0.0}, None, "step size is 0"),
        ({"save_dir": None}, None, "save_dir is missing or None"),
    ],
)
def test_refused(changes, term, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        jem.settings(arguments(tmp_path, **changes), term)


def test_args_of_another_script_are_refused():
    with pytest.raises(
        ConfigError, match="p_x_weight, p_x_y_weight, sgld_lr, sgld_std, save_dir is"
    ):
        jem.settings(Namespace())
