"""JEM++'s adapter in a loop of its structure.

A sampler at module level that reads the gradient behind the first layer (PYLD), clips elementwise,
and leaves batch normalisation in train mode.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.adapters import jempp
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


def arguments(folder: Path, **changes: Any) -> Namespace:
    """The script's settings, its defaults but for the sizes."""
    defaults = {
        "p_x_weight": 1.0,
        "p_x_y_weight": 0.0,
        "sgld_lr": 0.0,
        "sgld_std": 0,
        "pyld_lr": 0.2,
        "eps": 1,
        "n_steps": 3,
        "in_steps": 4,
        "plc": "alltrain1",
        "save_dir": str(folder),
    }
    return Namespace(**defaults | changes)


def sample_q(f, chains, y=None, n_steps=10, in_steps=10, args=None):
    start, rows = draw(chains, y)
    x = start.requires_grad_()
    for _ in range(n_steps):
        (eta,) = torch.autograd.grad(f(x, y=y).sum(), [x], retain_graph=True)
        p = f.layer_one_out.grad.detach() if in_steps else None
        moved = x.data.requires_grad_()
        if args.sgld_lr > 0:
            moved = (x + eta.clamp(-args.eps, args.eps) * args.sgld_lr).clamp(-1, 1)
        for _ in range(in_steps):
            hamiltonian = (f.layer_one(moved) * p).sum()
            (inner,) = torch.autograd.grad(hamiltonian, [moved], retain_graph=True)
            moved.data = moved.data + inner.clamp(-args.eps, args.eps) * args.pyld_lr
            moved = moved.clamp(-1, 1)
        x.data = moved.data
        if args.sgld_std > 0:
            x.data += args.sgld_std * torch.randn_like(x)
    if in_steps:
        (-(f.layer_one(x.data) * p).sum()).backward()  # leaves gradients on the first layer
    f.train()
    chains[rows] = x.detach()
    return x.detach()


cd_loss = plain


def frozen(f: nn.Module, is_frozen: bool) -> None:
    for module in f.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train(not is_frozen)


def main(args: Namespace, steps: int = 20) -> list[Tensor]:
    torch.manual_seed(1)
    f, chains = Net(batch_norm=True), uniform(CHAINS)
    optimizer = torch.optim.SGD(f.parameters(), lr=0.05, momentum=0.9)
    images, labels = data()
    for _ in range(steps):
        x = images[torch.randint(40, (BATCH,))]
        rows = torch.randint(40, (BATCH,))
        if args.plc == "alltrain1":
            fp_all = f(x)
        x_q = sample_q(f, chains, n_steps=args.n_steps, in_steps=args.in_steps, args=args)
        if args.plc == "eval":
            frozen(f, True)
        if args.plc != "alltrain1":
            fp_all = f(x)
        fq_all = f(x_q)
        l_p_x = cd_loss(fp_all, fq_all)
        if args.plc == "eval":
            frozen(f, False)
        total = args.p_x_weight * l_p_x + cross_entropy(f, images[rows], labels[rows])
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return state_of(f, optimizer, chains)


@pytest.fixture
def guarded(monkeypatch):
    """Rebinds the module's two names, as the retrofit does before it calls ``main``."""

    def rebind(beta_star, args):
        g = guard(None, sample_q, beta_star=beta_star, **jempp.settings(args))
        g.attach(**jempp.sampler_settings(args))
        monkeypatch.setitem(globals(), "cd_loss", g.loss_fn)
        monkeypatch.setitem(globals(), "sample_q", g.sampler)
        return g

    return rebind


@pytest.mark.parametrize(
    "options",
    [
        {"plc": "alltrain1"},
        {"plc": "alltrain2"},
        {"plc": "eval"},
        {"in_steps": 0, "sgld_lr": 1.0, "sgld_std": 1e-2},
        {"sgld_lr": 0.5, "sgld_std": 1e-2},
    ],
    ids=str,
)
def test_off_it_is_the_same_run(options, guarded, tmp_path):
    args = arguments(tmp_path, **options)
    unguarded = main(args)
    g = guarded(0, args)
    assert same(main(args), unguarded)
    assert g.step == 19


def test_on_it_is_another_run_that_batch_normalisation_counts_alike(guarded, tmp_path):
    args = arguments(tmp_path)
    unguarded = main(args)
    g = guarded(0.5, args)
    state = main(args)
    g.close()
    assert not same(state, unguarded)
    counts = [x for x in state if x.dtype == torch.int64]  # num_batches_tracked
    assert same(counts, [x for x in unguarded if x.dtype == torch.int64])
    rows = read_jsonl(tmp_path / "ebmguard" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(20))
    assert all(0 <= row["sampler/clamped"] <= 1 for row in rows)


@doubles()
@pytest.mark.parametrize("plc", ["alltrain1", "alltrain2"])
def test_gradient_is_the_closed_form_and_the_sampler_without_noise_is_as_it_was(plc, tmp_path):
    args, beta_star = arguments(tmp_path, plc=plc), 2.0
    g = guard(None, sample_q, beta_star=beta_star, **jempp.settings(args))
    f, chains = Net(batch_norm=True), uniform(CHAINS)
    x, steps = uniform(BATCH), {"n_steps": 3, "in_steps": 4, "args": args}
    torch.manual_seed(3)
    original = sample_q(f, chains.clone(), **steps)
    f_pos = f(x) if plc == "alltrain1" else None
    torch.manual_seed(3)
    x_q = g.sampler(f, chains, **steps)
    assert torch.equal(x_q, original)
    f_pos = f(x) if f_pos is None else f_pos
    f_neg = f(x_q)
    found = gradient(g.loss(f_pos, f_neg), f)
    torch.testing.assert_close(found, expected_gradient(f, f_pos, f_neg, beta_star))


@doubles()
@pytest.mark.parametrize(
    ("outer", "in_steps"), [(0.0, 4), (0.5, 4), (1.0, 0)], ids=["PYLD", "both", "SGLD"]
)
def test_with_noise_a_whole_step_climbs_the_tempered_energy(outer, in_steps, tmp_path):
    args = arguments(tmp_path, sgld_lr=outer, in_steps=in_steps, sgld_std=0.5)
    step_size = outer + in_steps * 0.2
    o = 2 * step_size / 0.5**2
    beta_star = o / 4
    _, sampler = guard(None, sample_q, beta_star=beta_star, **jempp.settings(args))
    f, chains = Net(batch_norm=True), 0.1 * uniform(CHAINS)
    f.head.weight.data *= 0.1  # slopes so small that neither clip nor bounds are reached
    before = chains.clone()
    torch.manual_seed(3)
    x_q = sampler(f, chains, n_steps=1, in_steps=in_steps, args=args)
    torch.manual_seed(3)
    x, _ = draw(before)
    inside = x.abs().amax((1, 2, 3)) < 0.5
    assert inside.sum() >= 3
    x = x + (1 - beta_star / o) * step_size * slope(f, x) + 0.5 * torch.randn_like(x)
    torch.testing.assert_close(x_q[inside], x[inside], rtol=0, atol=1e-12)


@doubles()
def test_where_the_clip_saturates_the_move_is_the_untempered_one(tmp_path):
    args = arguments(tmp_path, eps=1e-9, sgld_std=0.5)
    _, sampler = guard(None, sample_q, beta_star=1.0, **jempp.settings(args))
    f, chains = Net(batch_norm=True), uniform(CHAINS)
    torch.manual_seed(3)
    x_q = sampler(f, chains.clone(), n_steps=1, in_steps=4, args=args)
    torch.manual_seed(3)
    assert torch.equal(x_q, sample_q(f, chains, n_steps=1, in_steps=4, args=args))


@pytest.mark.parametrize(
    ("changes", "term", "says"),
    [
        ({"p_x_weight": 0.0}, None, "weight of the term p_x is 0"),
        ({"p_x_y_weight": 1.0}, None, "p_x_y is on"),
        ({"in_steps": 0}, None, "step size is 0"),
        ({"pyld_lr": 0.0}, None, "step size is 0"),
        ({"sgld_std": None}, None, "sgld_std is missing or None"),
    ],
)
def test_refused(changes, term, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        jempp.settings(arguments(tmp_path, **changes), term)


def test_settings_are_the_scripts_own(tmp_path):
    args = arguments(tmp_path)
    assert jempp.settings(args) == {
        "convention": "log_density",
        "log_dir": str(tmp_path / "ebmguard"),
    }
    known = {"clamp": (-1.0, 1.0), "sgld_steps": 3, "steps_argument": "n_steps"}
    assert jempp.sampler_settings(args) == known
    assert "clamp" not in jempp.sampler_settings(arguments(tmp_path, sgld_std=0.01))
