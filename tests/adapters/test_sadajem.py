"""SADAJEM's adapter in a loop of its structure: SAM takes two losses per step."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import Guard, guard
from ebmguard.adapters import sadajem
from ebmguard.errors import ConfigError
from ebmguard.sinks import read_jsonl
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

STEPS = 12


def arguments(folder: Path, **changes: Any) -> Namespace:
    """The script's settings, its defaults but for the sizes."""
    defaults = {
        "px": 1.0,
        "l2_coeff": 0.0,
        "sgld_lr": 1.0,
        "sgld_std": 0,
        "n_steps": 3,
        "save_dir": str(folder),
    }
    return Namespace(**defaults | changes)


class Sam(torch.optim.Optimizer):
    """Climbs, then descends with the gradient found there; its own ``step`` is never called."""

    def __init__(self, params: Any, rho: float, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def _weights(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        gradients = [p.grad for p in self._weights() if p.grad is not None]
        norm = torch.stack([each.norm() for each in gradients]).norm()
        by = self.param_groups[0]["rho"] / (norm + 1e-12)
        for p in self._weights():
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * by)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._weights():
            p.data = self.state[p]["old"]
        self.base_optimizer.step()
        self.zero_grad()


def sample_q(f, chains, y=None, n_steps=10, args=None):
    start, rows = draw(chains, y)
    x = start.requires_grad_()
    for _ in range(n_steps):
        (eta,) = torch.autograd.grad(f(x, y=y).sum(), [x], retain_graph=True)
        x.data = (x + eta.clamp(-1, 1) * args.sgld_lr).data
        if args.sgld_std > 0:
            x.data += args.sgld_std * torch.randn_like(x)
        x.data = x.data.clamp(-1, 1)
    f.train()
    chains[rows] = x.detach()
    return x.detach()


def train(
    args: Namespace, g: Guard | None = None, attach: Callable[[Sam], object] = lambda _: None
) -> tuple[list[Tensor], list[float]]:
    """What a run leaves behind, and its losses, first and second in turn."""
    cd_loss, sampler = (plain, sample_q) if g is None else g
    torch.manual_seed(1)
    f, chains, seen = Net(batch_norm=True), uniform(CHAINS), []
    optim = Sam(f.parameters(), rho=0.2, lr=0.02, momentum=0.9)
    attach(optim)
    images, labels = data()
    for _ in range(STEPS):
        x, rows = images[torch.randint(40, (BATCH,))], torch.randint(40, (BATCH,))
        f.norm.momentum = 0.1
        fp_all = f(x)
        x_q = sampler(f, chains, n_steps=args.n_steps, args=args)
        fq_all = f(x_q)
        l_p_x = cd_loss(fp_all, fq_all)
        seen.append(l_p_x.item())
        l_p_x += args.l2_coeff * (fp_all.mean() ** 2 + fq_all.mean() ** 2)
        total = args.px * l_p_x + cross_entropy(f, images[rows], labels[rows])
        optim.zero_grad()
        total.backward()
        optim.first_step()

        f.norm.momentum = 0.0
        second = cd_loss(f(x), f(x_q))
        seen.append(second.item())
        (second + cross_entropy(f, images[rows], labels[rows])).backward()
        optim.second_step()
    return state_of(f, optim.base_optimizer, chains), seen


@pytest.mark.parametrize("attach", [False, True], ids=["guard", "guard and attach"])
@pytest.mark.parametrize("options", [{}, {"l2_coeff": 0.1}, {"sgld_std": 1e-2}], ids=str)
def test_off_it_is_the_same_run(options, attach, tmp_path):
    args = arguments(tmp_path, **options)
    g = guard(None, sample_q, beta_star=0, **sadajem.settings(args))

    def inner(optim):
        if attach:
            g.attach(optimizer=optim.base_optimizer, **sadajem.sampler_settings(args))

    assert same(train(args, g, inner)[0], train(args)[0])


@pytest.mark.parametrize("attach", [False, True], ids=["guard", "guard and attach"])
def test_two_losses_are_one_row_and_one_step_of_a_schedule(attach, tmp_path):
    args = arguments(tmp_path, l2_coeff=0.1)
    g = guard(None, sample_q, beta_star=lambda step: 0.5 + step, **sadajem.settings(args))

    def inner(optim):
        if attach:
            g.attach(optimizer=optim.base_optimizer)

    _, seen = train(args, g, inner)
    g.close()
    rows = read_jsonl(tmp_path / "ebmguard" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["beta_star"] for row in rows] == [0.5 + step for step in range(STEPS)]
    # The row's loss is the mean of the two, without the L2 term that was added in place.
    means = [(a + b) / 2 for a, b in zip(seen[::2], seen[1::2], strict=True)]
    assert [row["loss"] for row in rows] == pytest.approx(means, rel=1e-5)


def test_the_outer_optimizer_never_ends_a_step(tmp_path):
    g = guard(None, sample_q, beta_star=0.5, **sadajem.settings(arguments(tmp_path)))
    train(arguments(tmp_path), g, lambda optim: g.attach(optimizer=optim))
    assert g.step == 0


@doubles()
def test_gradient_of_both_losses_is_the_closed_form(tmp_path):
    args, beta_star = arguments(tmp_path), 2.0
    g = guard(None, sample_q, beta_star=beta_star, **sadajem.settings(args))
    f, chains, x = Net(batch_norm=True), uniform(CHAINS), uniform(BATCH)
    torch.manual_seed(3)
    original = sample_q(f, chains.clone(), n_steps=3, args=args)
    torch.manual_seed(3)
    x_q = g.sampler(f, chains, n_steps=3, args=args)
    assert torch.equal(x_q, original)  # without noise the sampler is as it was
    for _ in range(2):
        f_pos, f_neg = f(x), f(x_q)
        found = gradient(g.loss(f_pos, f_neg), f)
        torch.testing.assert_close(found, expected_gradient(f, f_pos, f_neg, beta_star))
        with torch.no_grad():
            f.head.weight.mul_(1.5)  # as SAM's first step moves the weights


@doubles()
def test_with_noise_the_chain_climbs_the_tempered_energy(tmp_path):
    args = arguments(tmp_path, sgld_std=0.1)
    o = 2 * 1 / 0.1**2
    beta_star = o / 4
    _, sampler = guard(None, sample_q, beta_star=beta_star, **sadajem.settings(args))
    f, chains = Net(batch_norm=True), uniform(CHAINS)
    before = chains.clone()
    torch.manual_seed(3)
    x_q = sampler(f, chains, n_steps=3, args=args)
    torch.manual_seed(3)
    x, _ = draw(before)
    for _ in range(3):
        move = ((1 - beta_star / o) * slope(f, x)).clamp(-1, 1)
        x = (x + move + 0.1 * torch.randn_like(x)).clamp(-1, 1)
    torch.testing.assert_close(x_q, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"px": 0.0}, "weight of the term px is 0"),
        ({"sgld_lr": 0.0}, "step size is 0"),
        ({"save_dir": None}, "save_dir is missing or None"),
    ],
)
def test_refused(changes, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        sadajem.settings(arguments(tmp_path, **changes))


def test_settings_are_the_scripts_own(tmp_path):
    args = arguments(tmp_path)
    assert sadajem.settings(args) == {
        "convention": "log_density",
        "log_dir": str(tmp_path / "ebmguard"),
    }
    known = {"clamp": (-1.0, 1.0), "sgld_steps": 3, "steps_argument": "n_steps"}
    assert sadajem.sampler_settings(args) == known
