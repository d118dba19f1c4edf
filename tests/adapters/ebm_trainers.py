"""Loops of three codebases without an adapter, whose energies are low on data."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.parts import CLASSES, Energy, rising_difference
from tests.runs import Call, Run, Trial

IMAGE = (1, 6, 6)


def images(n: int) -> Tensor:
    return torch.rand(n, *IMAGE) * 2 - 1


# -- ebm_anatomy: closures over one energy; the loss is multiplied by 2/ε² in place ---------------


def train_ebm_anatomy(trial: Trial, *, by_weights: bool = False, epsilon: float = 1e-2) -> Run:
    """Every fifth iteration draws a long-run chain from the data.

    ``others`` are the difference and the mean size of the sampler's gradients, in turn;
    ``by_weights`` keeps the trainer's own line of the difference and reweights its energies.
    """
    config = {"epsilon": epsilon, "batch_size": 8}
    torch.manual_seed(123)
    f = Energy(shape=IMAGE)
    q, s_t_0 = images(40), images(40)
    run = Run(f, torch.optim.Adam(f.parameters(), lr=1e-2), s_t_0)

    def sample_image_set(of):
        rows = torch.randperm(len(of))[: config["batch_size"]]
        return of[rows], rows

    def sample_q():
        x_q = sample_image_set(q)[0]
        return x_q + 0.03 * torch.randn_like(x_q)

    def sample_s_t(L, init_type, update_s_t_0=True):
        bank = init_type == "persistent"
        start, rows = sample_image_set(s_t_0) if bank else (sample_q(), None)
        x_s_t = start.clone().requires_grad_()
        r_s_t = torch.zeros(1)
        for _ in range(L):
            energy = trial.temper(f(x_s_t)) if bank else f(x_s_t)
            slope = torch.autograd.grad(energy.sum(), [x_s_t])[0]
            x_s_t.data += -slope + epsilon * torch.randn_like(x_s_t)
            r_s_t += slope.flatten(1).norm(dim=1).mean()
        if bank and update_s_t_0:
            s_t_0[rows] = x_s_t.detach()
        return x_s_t.detach(), r_s_t.squeeze() / L

    settings: dict[str, Any] = {"model": f, "convention": "energy"}
    if epsilon > 0:
        settings |= {"step_size": 1.0, "noise_std": epsilon}
    loss_fn, sampler = trial.around(run, rising_difference, sample_s_t, settings)
    long_run = getattr(sampler, "original", sample_s_t)
    for i in range(trial.n):
        x_q = sample_q()
        x_s_t, r_s_t = sampler(L=5, init_type="persistent")
        f_q, f_s_t = f(x_q), f(x_s_t)
        run.calls.append(Call(f_q, f_s_t, x_s_t))
        if by_weights:
            d_s_t = rising_difference(*run.guards[0].reweight(f_q, f_s_t))
        else:
            d_s_t = loss_fn(f_q, f_s_t)
        if epsilon > 0:
            d_s_t *= 2 / epsilon**2
        run.optimizer.zero_grad()
        d_s_t.backward()
        run.optimizer.step()
        run.others += [d_s_t.item(), r_s_t.item()]
        if (i + 1) % 5 == 0:
            run.extra[f"long {i}"] = long_run(L=12, init_type="data", update_s_t_0=False)
    return run.end()


# -- igebm: an inline, clipping sampler, (B, 1) energies of classes, L2 on them -------------------


class Conditional(nn.Module):
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


def train_igebm(
    trial: Trial, *, inside: bool = False, noise_std: float = 0.005, clip: float = 0.01
) -> Run:
    """The guarded loss is added to the mean as in docs/codebases.md, or ``inside`` before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model, batch = Conditional(), 8 if inside else 10
    data, labels = torch.rand(40, *IMAGE), torch.randint(CLASSES, (40,))
    replay: list[tuple[Tensor, Tensor]] = []
    noise = torch.randn(batch, *IMAGE)
    parameters = model.parameters()
    run = Run(model, torch.optim.Adam(parameters, lr=1e-2, betas=(0.0, 0.999)), replay)
    settings = {"convention": "energy", "step_size": 10, "noise_std": noise_std}
    trial.around(run, None, None, settings, {"model": model})
    g = run.guards[0] if run.guards else None
    for _ in range(trial.n):
        rows = torch.randint(40, (batch,))
        pos_img, pos_id = data[rows], labels[rows]
        neg_img, neg_id = torch.rand(batch, *IMAGE), torch.randint(CLASSES, (batch,))
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
            out = model(neg_img, neg_id)
            (trial.temper(out) if g is None else g.temper(out)).sum().backward()
            slope = neg_img.grad
            assert slope is not None
            slope.clamp_(-clip, clip)
            neg_img.data.add_(slope, alpha=-10)
            slope.zero_()
            neg_img.data.clamp_(0, 1)
        assert all(p.grad is not None for p in model.parameters())  # hence zero_grad
        neg_img = neg_img.detach()
        model.train()
        model.zero_grad()
        pos_out, neg_out = model(pos_img, pos_id), model(neg_img, neg_id)
        groups = (pos_id, neg_id)
        run.calls.append(Call(pos_out, neg_out, neg_img, groups))
        loss = pos_out**2 + neg_out**2
        if g is None:
            loss = (loss + (pos_out - neg_out)).mean()
        elif inside:
            loss = (loss + g.loss(pos_out, neg_out, groups=groups)).mean()
        else:
            loss = loss.mean() + g.loss(pos_out, neg_out, groups=groups)
        loss.backward()
        clip_grad(run.optimizer)
        run.optimizer.step()
        replay += zip(neg_img, neg_id, strict=True)
    return run.end()


# -- improved contrastive divergence: heads, ``.forward``, and a KL term --------------------------

FLAGS = {"step_lr": 0.5, "num_steps": 4}


class Heads(nn.Module):
    """Energies (B, 3), one at each of three resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Conv2d(1, 4, 3) for _ in range(3))
        self.maps = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: Tensor, label: Tensor | None) -> Tensor:
        features = [nn.functional.silu(conv(x)).mean((2, 3)) for conv in self.scales]
        return torch.cat([m(h) for m, h in zip(self.maps, features, strict=True)], 1)


def gen_image(label, FLAGS, model, im_neg, num_steps, *, noise_std=0.001, temper=lambda E: E):
    """Langevin steps, the last of them once more with a graph through to the parameters."""
    for i in range(num_steps):
        im_neg = im_neg + noise_std * torch.randn_like(im_neg)
        im_neg.requires_grad_(True)
        energy = temper(model.forward(im_neg, label))
        im_grad = torch.autograd.grad([energy.sum()], [im_neg])[0]
        if i == num_steps - 1:
            energy = temper(model.forward(im_neg, label))
            kl_grad = torch.autograd.grad([energy.sum()], [im_neg], create_graph=True)[0]
            im_neg_kl = torch.clamp(im_neg - FLAGS.step_lr * kl_grad, 0, 1)
        im_neg = torch.clamp((im_neg - FLAGS.step_lr * im_grad).detach(), 0, 1)
    return im_neg, im_neg_kl, im_grad


def train_improved_cd(trial: Trial, *, noise_std: float = 0.001) -> Run:
    """``others`` are the gradients of every step, to which the KL term adds its part."""
    flags = SimpleNamespace(**FLAGS)
    torch.manual_seed(3)
    model = Heads()
    data = torch.rand(40, *IMAGE)
    run = Run(model, torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.0, 0.9), eps=1e-8))

    settings = {"convention": "energy", "step_size": flags.step_lr, "noise_std": noise_std}
    sampler = functools.partial(gen_image, noise_std=noise_std, temper=trial.temper)
    given = rising_difference
    loss_fn, draw = trial.around(run, given, sampler, settings, given=given)
    for _ in range(trial.n):
        x_pos = data[torch.randint(40, (6,))]
        im_neg, im_neg_kl, _ = draw(None, flags, model, torch.rand(8, *IMAGE), flags.num_steps)
        energy_pos, energy_neg = model.forward(x_pos, None), model.forward(im_neg.clone(), None)
        run.calls.append(Call(energy_pos, energy_neg, im_neg))
        loss = loss_fn(energy_pos, energy_neg)
        loss = loss + energy_pos.pow(2).mean() + energy_neg.pow(2).mean()
        model.requires_grad_(False)
        loss_kl = model.forward(im_neg_kl, None)
        model.requires_grad_(True)
        loss = loss + loss_kl.mean()
        loss.backward()
        run.others += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run.end()
