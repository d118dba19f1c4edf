"""VERA's adapter in a loop of its MCMC mode.

The sampler takes all by position; the network gives energies, or energies and logits, or without
classes a column that the script squeezes.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebmguard import guard
from ebmguard.adapters import vera
from ebmguard.errors import ConfigError
from ebmguard.sinks import read_jsonl
from tests.adapters.jem_parts import (
    BATCH,
    CHAINS,
    Net,
    data,
    doubles,
    draw,
    expected_gradient,
    gradient,
    same,
    slope,
    state_of,
    uniform,
)


def arguments(folder: Path, **changes: Any) -> Namespace:
    """The script's settings, its defaults but for the sizes."""
    defaults = {
        "jem_baseline": True,
        "jem": True,
        "clf_only": False,
        "maximum_likelihood": False,
        "ssm": False,
        "vat": False,
        "sgld_lr": 1e-2**2 / 2,
        "sgld_std": 1e-2,
        "n_steps": 3,
        "reinit_freq": 0.05,
        "pg_control": 0.1,
        "p_control": 0.01,
        "save_dir": str(folder),
    }
    return Namespace(**defaults | changes)


class Jem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logp_net = Net()

    def forward(self, x: Tensor, return_logits: bool = False) -> Any:
        logits = self.logp_net.classify(x)
        return (logits.logsumexp(1), logits) if return_logits else logits.logsumexp(1)


class Column(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logp_net = Net()

    def forward(self, x: Tensor) -> Tensor:
        energies: Tensor = self.logp_net(x)[:, None]
        return energies


def sample_q(f, chains, batch_size, n_steps, sgld_lr, sgld_std, reinit_freq, device):
    assert (batch_size, reinit_freq, device) == (BATCH, 0.05, "cpu")
    f.eval()
    start, rows = draw(chains)
    x = start.to(device).requires_grad_()
    for _ in range(n_steps):
        (f_prime,) = torch.autograd.grad(f(x).sum(), [x], retain_graph=True)
        x.data += sgld_lr * f_prime + sgld_std * torch.randn_like(x)
    f.train()
    chains[rows] = x.detach().cpu()
    return x.detach()


def positional(args: Namespace) -> tuple[Any, ...]:
    return (BATCH, args.n_steps, args.sgld_lr, args.sgld_std, args.reinit_freq, "cpu")


def plain(ld: Tensor, lg: Tensor) -> Tensor:
    return -(ld - lg).mean()


def train(args: Namespace, cd_loss: Any = plain, sampler: Any = sample_q) -> list[Tensor]:
    torch.manual_seed(1)
    f, chains = Jem() if args.jem else Column(), uniform(CHAINS)
    optimizer = torch.optim.Adam(f.parameters(), lr=1e-3, betas=(0.0, 0.9))
    images, labels = data()
    for _ in range(20):
        rows = torch.randint(40, (BATCH,))
        x = images[rows].requires_grad_()
        ld, logits = f(x, return_logits=True) if args.jem else (f(x).squeeze(), None)
        (grad_ld,) = torch.autograd.grad(ld.sum(), x, create_graph=True)
        x_g = sampler(f, chains, *positional(args))
        lg_detach = f(x_g).squeeze()
        logp_obj = -cd_loss(ld, lg_detach)
        e_loss = -logp_obj + (ld**2).mean() * args.p_control
        e_loss = e_loss + (grad_ld.flatten(1).norm(2, 1) ** 2 / 2).mean() * args.pg_control
        if logits is not None:
            e_loss = e_loss + F.cross_entropy(logits, labels[rows])
        optimizer.zero_grad()
        e_loss.backward()
        optimizer.step()
    return state_of(f, optimizer, chains)


@pytest.mark.parametrize("options", [{}, {"jem": False}, {"sgld_std": 0.0}], ids=str)
def test_off_it_is_the_same_run(options, tmp_path):
    args = arguments(tmp_path, **options)
    g = guard(None, sample_q, beta_star=0, **vera.settings(args))
    g.attach(**vera.sampler_settings(args))

    assert same(train(args, *g), train(args))
    g.close()
    assert len(read_jsonl(tmp_path / "ebmguard" / "metrics.jsonl")) == 20


@doubles()
@pytest.mark.parametrize("kind", [Jem, Column])
def test_gradient_is_the_closed_form_on_samples_of_the_tempered_energy(kind, tmp_path):
    args, beta_star = arguments(tmp_path), 0.5  # o = 1, so that β = 0.5
    cd_loss, sampler = guard(None, sample_q, beta_star=beta_star, **vera.settings(args))
    f, chains = kind(), uniform(CHAINS)
    before = chains.clone()
    torch.manual_seed(3)
    x_g = sampler(f, chains, *positional(args))
    torch.manual_seed(3)
    x, _ = draw(before)
    for _ in range(args.n_steps):
        x = x + (1 - 0.5) * 1e-2**2 / 2 * slope(f, x) + 1e-2 * torch.randn_like(x)
    torch.testing.assert_close(x_g, x, rtol=0, atol=1e-12)

    ld = f(uniform(BATCH), return_logits=True)[0] if kind is Jem else f(uniform(BATCH)).squeeze()
    lg = f(x_g).squeeze()
    found = gradient(cd_loss(ld, lg), f)
    torch.testing.assert_close(found, expected_gradient(f, ld, lg, beta_star))


def test_exponents_above_the_output_scale_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="beta = beta_star / output_scale = 2 / 1 = 2 is above 1"):
        guard(None, sample_q, beta_star=2.0, **vera.settings(arguments(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"jem_baseline": False}, r"Without --jem_baseline.*generator.*Add --jem_baseline"),
        ({"vat": True}, "--vat trains without contrastive samples"),
        ({"clf_only": True}, "--clf_only trains without"),
        ({"maximum_likelihood": True, "jem_baseline": False}, "--maximum_likelihood"),
        ({"ssm": True}, "--ssm"),
        ({"sgld_lr": None}, "sgld_lr is missing or None"),
        ({"sgld_lr": 0.0}, "step size is 0"),
    ],
)
def test_refused(changes, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        vera.settings(arguments(tmp_path, **changes))


def test_settings_are_the_scripts_own(tmp_path):
    args = arguments(tmp_path)
    langevin = {"step_size": 5e-5, "noise_std": 1e-2}
    assert vera.settings(args) == {
        **langevin,
        "convention": "log_density",
        "log_dir": str(tmp_path / "ebmguard"),
    }
    assert vera.sampler_settings(args) == langevin
