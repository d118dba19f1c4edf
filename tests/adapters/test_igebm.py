"""A trainer like igebm-pytorch's: an inline, clipping sampler, (B, 1) energies, L2 on them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from ebmguard import guard
from ebmguard.adapters import igebm
from tests.adapters.closed_form import Call, Run, gradients

CLASSES = 3
STEP_SIZE = 10


class Net(nn.Module):
    """An energy (B, 1), with buffers that move in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = spectral_norm(nn.Conv2d(1, 6, 3, 2))
        self.embed = nn.Embedding(CLASSES, 6)
        self.linear = nn.Linear(6, 1)

    def forward(self, x, class_id):
        out = self.conv(x) * self.embed(class_id)[:, :, None, None]
        return self.linear(nn.functional.leaky_relu(out, 0.2).flatten(2).sum(2))


def clip_grad(optimizer):
    """Each entry within three of its root mean squares, of which Adam keeps the average."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            if "step" in state and state["step"] >= 1:
                mean_square = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"])
                bound = 3 * mean_square.sqrt() + 1e-4
                p.grad.copy_(torch.max(torch.min(p.grad, bound), -bound))


def outside(g, energies, pos_out, neg_out, groups):
    """The retrofit of docs/retrofit.md."""
    return energies.mean() + g.loss(pos_out, neg_out, groups=groups)


def inside(g, energies, pos_out, neg_out, groups):
    """The guarded loss in the place of the elementwise difference, before the mean."""
    return (energies + g.loss(pos_out, neg_out, groups=groups)).mean()


def train(
    g=None,
    combine=outside,
    *,
    batch=10,
    noise_std=0.005,
    clip=0.01,
    hand_scale=1.0,
    alpha=1.0,
    gain=1.0,
    attach=False,
    n=20,
):
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = Net()
    model.linear.weight.data *= gain
    data, labels = torch.rand(40, 1, 6, 6), torch.randint(CLASSES, (40,))
    replay: list[tuple[Tensor, Tensor]] = []
    noise = torch.randn(batch, 1, 6, 6)
    parameters = model.parameters()
    optimizer = torch.optim.Adam(parameters, lr=1e-2, betas=(0.0, 0.999))
    if attach:
        g.attach(model=model, optimizer=optimizer)
    temper = (lambda out: hand_scale * out) if g is None else g.temper
    run = Run(model)
    for _ in range(n):
        rows = torch.randint(40, (batch,))
        pos_img, pos_id = data[rows], labels[rows]
        neg_img, neg_id = torch.rand(batch, 1, 6, 6), torch.randint(CLASSES, (batch,))
        if replay:
            old = int((np.random.rand(batch) < 0.95).sum())
            kept, kept_id = zip(*random.choices(replay, k=old), strict=True)
            neg_img = torch.cat([torch.stack(kept), neg_img[old:]])
            neg_id = torch.cat([torch.stack(kept_id), neg_id[old:]])
        neg_img.requires_grad = True
        for p in parameters:  # Adam has used this generator up: nothing happens
            p.requires_grad = False
        model.eval()
        for _ in range(6):
            noise.normal_(0, noise_std)
            neg_img.data.add_(noise)
            temper(model(neg_img, neg_id)).sum().backward()
            slope = neg_img.grad
            assert slope is not None
            slope.clamp_(-clip, clip)
            neg_img.data.add_(slope, alpha=-STEP_SIZE)
            slope.zero_()
            neg_img.data.clamp_(0, 1)
        assert all(p.grad is not None for p in model.parameters())  # hence zero_grad
        neg_img = neg_img.detach()
        model.train()
        model.zero_grad()
        pos_out, neg_out = model(pos_img, pos_id), model(neg_img, neg_id)
        run.calls.append(Call(pos_out, neg_out, neg_img))
        energies = alpha * (pos_out**2 + neg_out**2)
        if g is None:
            loss = (energies + (pos_out - neg_out)).mean()
        else:
            loss = combine(g, energies, pos_out, neg_out, (pos_id, neg_id))
        loss.backward()
        clip_grad(optimizer)
        optimizer.step()
        replay += zip(neg_img, neg_id, strict=True)
        run.others.append((pos_id.tolist(), neg_id.tolist()))
    run.rng = torch.get_rng_state()
    run.others += [random.getstate(), np.random.random()]
    return run


def guarded(beta_star: float, **literals: float):
    return guard(None, None, beta_star=beta_star, **igebm.settings(STEP_SIZE, **literals))


@pytest.mark.parametrize("attach", [False, True])
def test_off_is_the_unguarded_trainer(attach):
    g = guarded(0.0)
    assert train(g, attach=attach).equals(train())
    assert g.step == (20 if attach else 19)  # else a step ends with the next one's sampler


def test_off_with_the_guarded_loss_inside_the_mean():
    # The gradient of the one number is a sum of B copies of 1/B: 1 in float32 where B is a power
    # of two, but not for every B, which is why the docs add it outside.
    assert train(guarded(0.0), inside, batch=8).equals(train(batch=8))


@pytest.mark.parametrize("combine", [outside, inside])
def test_the_gradient_has_the_closed_form_within_each_class(combine):
    alpha, beta_star = 0.5, 2.0
    run = train(guarded(beta_star), combine, alpha=alpha)
    for call, (pos_id, neg_id) in zip(run.calls, run.others, strict=False):
        y_pos, y_neg = torch.tensor(pos_id), torch.tensor(neg_id)
        E_pos, E_neg = call.f_pos.detach().double(), call.f_neg.detach().double()
        # The mean over positives that have a negative of their class; each class by itself.
        expected_pos, expected_neg = torch.zeros_like(E_pos), torch.zeros_like(E_neg)
        paired = torch.isin(y_pos, y_neg)
        for y in range(CLASSES):
            pos, neg = paired & (y_pos == y), y_neg == y
            if pos.any():
                to_pos, to_neg = gradients(-E_pos[pos], -E_neg[neg], beta_star)
                expected_pos[pos] = -to_pos * pos.sum() / paired.sum()
                expected_neg[neg] = -to_neg * pos.sum() / paired.sum()
        batch = len(E_pos)
        expected_pos += 2 * alpha * E_pos / batch
        expected_neg += 2 * alpha * E_neg / batch
        torch.testing.assert_close(call.to_pos, expected_pos, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(call.to_neg, expected_neg, rtol=1e-4, atol=1e-7)


def test_the_inline_sampler_runs_on_the_tempered_energy():
    # β = 0.5 / (2 · 10 / 2²) = 0.1, and no entry of the gradient reaches this clip
    settings = {"noise_std": 2.0, "clip": 1e3, "n": 1}
    run = train(guarded(0.5, noise_std=2.0), **settings)
    by_hand, plain = train(hand_scale=0.9, **settings), train(**settings)
    torch.testing.assert_close(run.calls[0].x_neg, by_hand.calls[0].x_neg, rtol=0, atol=1e-6)
    assert not torch.allclose(plain.calls[0].x_neg, by_hand.calls[0].x_neg, rtol=0, atol=1e-3)


def test_where_the_clip_saturates_tempering_moves_nothing():
    """The limit that the docs name; only the weights act there."""
    settings = {"noise_std": 2.0, "gain": 1e6, "n": 1}
    run = train(guarded(0.5, noise_std=2.0), **settings)
    plain, unmoved = train(**settings), train(clip=0.0, **settings)
    assert torch.equal(run.calls[0].x_neg, plain.calls[0].x_neg)
    assert not torch.allclose(plain.calls[0].x_neg, unmoved.calls[0].x_neg, rtol=0, atol=0.05)


def test_settings_are_the_published_ones():
    published = {"convention": "energy", "step_size": 10, "noise_std": 5e-3}
    assert igebm.settings(STEP_SIZE) == published
