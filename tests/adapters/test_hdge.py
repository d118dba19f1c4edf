"""HDGE's adapter in a loop of its structure: JEM's sampler, which may climb f.joint, not f."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ebmguard import guard
from ebmguard.adapters import hdge
from ebmguard.errors import ConfigError, SamplerError
from tests.adapters.jem_parts import (
    BATCH,
    CHAINS,
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
    """The script's settings for log q(y|x) + log q(x|y) + log q(x), but for the sizes."""
    defaults = {
        "pxsgld": 1.0,
        "pxysgld": 0.0,
        "pxycontrast": 1.0,
        "sgld_lr": 1.0,
        "sgld_std": 1e-2,
        "n_steps": 3,
        "plot_contrast": 0,
        "log_dir": str(folder),
    }
    return Namespace(**defaults | changes)


class Hybrid(Net):
    """With the contrastive term, which compares logits with those in a queue."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(12, 3))

    def joint(self, x: Tensor) -> Tensor:
        logits = F.normalize(self.classify(x), dim=1)
        others = logits @ F.normalize(self.queue, dim=1).T
        return torch.cat([logits.logsumexp(1, keepdim=True), others], dim=1) / 0.1


def get_sample_q(args: Namespace) -> Callable[..., Tensor]:
    def sample_q(f, chains, y=None, n_steps=args.n_steps, contrast=False):
        f.eval()
        start, rows = draw(chains, y)
        x = start.clone()
        x.requires_grad = True
        for _ in range(n_steps):
            if contrast:
                f_x = -F.cross_entropy(f.joint(x), torch.zeros(len(x), dtype=torch.long))
            else:
                f_x = f(x, y=y).sum()
            (f_prime,) = torch.autograd.grad(f_x, [x], retain_graph=True)
            x.data += args.sgld_lr * f_prime + args.sgld_std * torch.randn_like(x)
        f.train()
        chains[rows] = x.detach()
        return x.detach()

    return sample_q


def train(args: Namespace, guards: Any = None) -> list[Tensor]:
    torch.manual_seed(1)
    f, chains = Hybrid(), uniform(CHAINS)
    optimizer = torch.optim.Adam(f.parameters(), lr=1e-3)
    images, labels = data()
    (x_loss, sampler), *more = guards or [(plain, get_sample_q(args))]
    xy_loss, sampler_y = more[0] if more else (x_loss, sampler)
    for _ in range(20):
        x, rows = images[torch.randint(40, (BATCH,))], torch.randint(40, (BATCH,))
        x_lab, y_lab = images[rows], labels[rows]
        total = cross_entropy(f, x_lab, y_lab)
        x_q = sampler(f, chains)
        total = total + args.pxsgld * x_loss(f(x), f(x_q))
        if args.pxysgld > 0:  # chains given y, scored without it, as the script does
            x_q_lab = sampler_y(f, chains, y=y_lab)
            total = total + args.pxsgld * xy_loss(f(x_lab), f(x_q_lab))
        if args.pxycontrast > 0:
            target = torch.zeros(BATCH, dtype=torch.long)
            total = total + args.pxycontrast * F.cross_entropy(f.joint(x_lab), target)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return state_of(f, optimizer, chains)


@pytest.mark.parametrize("terms", [(None,), ("pxsgld", "pxysgld")], ids=str)
def test_off_it_is_the_same_run(terms, tmp_path):
    args = arguments(tmp_path, pxysgld=float(len(terms) - 1))
    guards = [
        guard(None, get_sample_q(args), beta_star=0, **hdge.settings(args, term)) for term in terms
    ]
    for g in guards:
        g.attach(**hdge.sampler_settings(args))
    assert same(train(args, guards), train(args))


@doubles()
def test_gradient_is_the_closed_form_on_samples_of_the_tempered_energy(tmp_path):
    args = arguments(tmp_path, sgld_std=0.5)  # o = 2 * 1 / 0.5² = 8
    beta_star = 2.0
    cd_loss, sample_q = guard(None, get_sample_q(args), beta_star=beta_star, **hdge.settings(args))
    f, chains = Hybrid(), uniform(CHAINS)
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


def test_the_contrastive_chain_is_no_chain_of_f(tmp_path):
    args = arguments(tmp_path)
    with pytest.raises(ConfigError, match=r"--plot_contrast.*f\.joint.*Leave it out"):
        hdge.settings(arguments(tmp_path, plot_contrast=1))
    # The guard itself says so too, at the call.
    g = guard(None, get_sample_q(args), beta_star=0.5, **hdge.settings(args))
    f, chains = Hybrid(), uniform(CHAINS)
    with pytest.raises(SamplerError, match=r"never called Hybrid\.forward"):
        g.sampler(f, chains, contrast=True)
    with g.paused():
        assert g.sampler(f, chains, contrast=True).shape == (BATCH, 2, 6, 6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pxsgld": 0.0}, "weight of the term pxsgld is 0"),
        ({"pxysgld": 1.0}, "pxysgld is on"),
        ({"sgld_lr": 0.0}, "step size is 0"),
        ({"log_dir": None}, "log_dir is missing or None"),
    ],
)
def test_refused(changes, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        hdge.settings(arguments(tmp_path, **changes))


def test_settings_are_the_scripts_own(tmp_path):
    args = arguments(tmp_path)
    langevin = {"step_size": 1.0, "noise_std": 1e-2}
    assert hdge.settings(args) == {
        **langevin,
        "convention": "log_density",
        "log_dir": str(tmp_path / "ebmguard"),
    }
    steps = {"sgld_steps": 3, "steps_argument": "n_steps"}
    assert hdge.sampler_settings(args) == {**langevin, **steps}
    assert hdge.sampler_settings(arguments(tmp_path, sgld_std=0.0)) == steps
