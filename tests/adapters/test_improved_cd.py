"""A trainer like improved contrastive divergence's: heads, ``.forward``, and a KL term."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.adapters import improved_cd
from ebmguard.errors import ConfigError
from tests.adapters.closed_form import Call, Run, gradients

FLAGS = SimpleNamespace(step_lr=0.5, num_steps=4, anneal=False, hmc=False, kl=True)
HEADS = 3


class Net(nn.Module):
    """Energies (B, 3), one at each of three resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Conv2d(1, 4, 3) for _ in range(HEADS))
        self.maps = nn.ModuleList(nn.Linear(4, 1) for _ in range(HEADS))

    def forward(self, x: Tensor, label: Tensor | None) -> Tensor:
        features = [nn.functional.silu(conv(x)).mean((2, 3)) for conv in self.scales]
        return torch.cat([m(h) for m, h in zip(self.maps, features, strict=True)], 1)


def gen_image(label, FLAGS, model, im_neg, num_steps, *, noise_std=0.001, hand_scale=1.0):
    """Langevin steps, the last of them once more with a graph through to the parameters."""
    for i in range(num_steps):
        im_neg = im_neg + noise_std * torch.randn_like(im_neg)
        im_neg.requires_grad_(True)
        energy = hand_scale * model.forward(im_neg, label)
        im_grad = torch.autograd.grad([energy.sum()], [im_neg])[0]
        if i == num_steps - 1:
            energy = hand_scale * model.forward(im_neg, label)
            kl_grad = torch.autograd.grad([energy.sum()], [im_neg], create_graph=True)[0]
            im_neg_kl = torch.clamp(im_neg - FLAGS.step_lr * kl_grad, 0, 1)
        im_neg = torch.clamp((im_neg - FLAGS.step_lr * im_grad).detach(), 0, 1)
    return im_neg, im_neg_kl, im_grad


def train(retrofit=None, *, flags=FLAGS, l2=1.0, n=20, **sampler):
    """The trainer's structure; ``retrofit(flags, gen_image)`` gives guarded loss and sampler."""
    torch.manual_seed(3)
    model = Net()
    data = torch.rand(40, 1, 6, 6)

    def draw(*args):
        return gen_image(*args, **sampler)

    cd_loss = plain_difference
    if retrofit is not None:
        cd_loss, draw = retrofit(flags, draw)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.0, 0.9), eps=1e-8)
    run = Run(model)
    for _ in range(n):
        x_pos = data[torch.randint(40, (6,))]
        im_neg, im_neg_kl, _ = draw(None, flags, model, torch.rand(8, 1, 6, 6), flags.num_steps)
        energy_pos = model.forward(x_pos, None)
        energy_neg = model.forward(im_neg.clone(), None)
        run.calls.append(Call(energy_pos, energy_neg, im_neg))
        loss = cd_loss(energy_pos, energy_neg)
        loss = loss + l2 * (energy_pos.pow(2).mean() + energy_neg.pow(2).mean())
        if flags.kl:
            model.requires_grad_(False)
            loss_kl = model.forward(im_neg_kl, None)
            model.requires_grad_(True)
            loss = loss + loss_kl.mean()
        loss.backward()
        run.others += [p.grad.tolist() for p in model.parameters() if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    run.rng = torch.get_rng_state()
    return run


def plain_difference(energy_pos, energy_neg):
    return energy_pos.mean() - energy_neg.mean()


def retrofit(beta_star: float, **literals: float):
    return lambda flags, sampler: guard(
        improved_cd.difference,
        sampler,
        beta_star=beta_star,
        **improved_cd.settings(flags, **literals),
    )


def test_off_is_the_unguarded_trainer():
    assert train(retrofit(0.0)).equals(train())


@pytest.mark.parametrize("beta_star", [1.0, 8.0])
def test_the_gradient_has_the_closed_form_for_the_sum_of_the_heads(beta_star):
    run = train(retrofit(beta_star), l2=0.5)
    for call in run.calls:
        f_pos, f_neg = -call.f_pos.detach().double(), -call.f_neg.detach().double()
        to_pos, to_neg = gradients(f_pos.sum(1), f_neg.sum(1), beta_star)
        for f, grad, to in ((f_pos, call.to_pos, to_pos), (f_neg, call.to_neg, to_neg)):
            # The trainer's mean over heads is its factor 1/3; every head is part of the sum.
            expected = -to[:, None].expand(-1, HEADS) / HEADS - 2 * 0.5 * f / f.numel()
            torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-7)


def test_the_sampler_runs_on_the_tempered_sum_of_the_heads():
    # β = 0.5 / (2 · 0.5 / 1²) = 0.5
    run = train(retrofit(0.5, noise_std=1.0), noise_std=1.0, n=1, l2=0.0)
    by_hand = train(noise_std=1.0, hand_scale=0.5, n=1, l2=0.0)
    plain = train(noise_std=1.0, n=1, l2=0.0)
    torch.testing.assert_close(run.calls[0].x_neg, by_hand.calls[0].x_neg, rtol=0, atol=1e-7)
    assert not torch.allclose(run.calls[0].x_neg, plain.calls[0].x_neg, rtol=0, atol=1e-4)


def test_the_kl_terms_gradient_has_the_factor_of_the_tempering():
    """E = θ/2 |x|², whose last step and its derivative are known: the factor 1 - β, at its samples.

    With x' = x - s (1 - β) θ x, the term is mean θ'/2 |x'|² with θ' held, and its derivative
    d/dθ = θ x' · (-s (1 - β) x).
    """

    class Quadratic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.tensor(0.3))

        def forward(self, x, label):
            return self.theta / 2 * x.flatten(1).pow(2).sum(1, keepdim=True)

    model, x = Quadratic(), torch.rand(5, 1, 2, 2)
    beta = 0.25
    flags = SimpleNamespace(step_lr=0.5, anneal=False, hmc=False)
    # o = 2 · 0.5 / 0.5², and β* = β o
    _, sampler = retrofit(beta * 4, noise_std=0.5)(flags, gen_image_without_noise)
    _, im_neg_kl, _ = sampler(None, flags, model, x, 1)
    model.requires_grad_(False)
    loss_kl = model.forward(im_neg_kl, None).mean()
    model.requires_grad_(True)
    loss_kl.backward()
    moved = x * (1 - 0.5 * (1 - beta) * 0.3)
    by_hand = (0.3 * moved * (-0.5 * (1 - beta) * x)).flatten(1).sum(1).mean()
    torch.testing.assert_close(im_neg_kl.detach(), moved)
    torch.testing.assert_close(model.theta.grad, by_hand)


def gen_image_without_noise(*args):
    return gen_image(*args, noise_std=0.0)


def test_annealed_noise_leaves_the_sampler_as_it_is():
    flags = SimpleNamespace(**{**vars(FLAGS), "anneal": True})
    run, plain = train(retrofit(4.0), flags=flags, n=1), train(flags=flags, n=1)
    assert torch.equal(run.calls[0].x_neg, plain.calls[0].x_neg)
    assert not torch.equal(run.calls[0].to_neg, plain.calls[0].to_neg)


def test_the_hamiltonian_sampler_is_refused():
    with pytest.raises(ConfigError, match=r"FLAGS\.hmc.*guard gen_image"):
        improved_cd.settings(SimpleNamespace(**{**vars(FLAGS), "hmc": True}))


def test_flags_of_another_script_are_refused():
    with pytest.raises(ConfigError, match="these args anneal, step_lr is missing"):
        improved_cd.settings(SimpleNamespace(hmc=False))


def test_settings_are_the_published_ones():
    flags = SimpleNamespace(hmc=False, anneal=False, step_lr=100.0)
    published = {"convention": "energy", "step_size": 100.0, "noise_std": 1e-3}
    assert improved_cd.settings(flags) == published
