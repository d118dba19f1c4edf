"""Loops whose structure is another than JEM's: pairs, methods, two chains, generators, bits."""

from __future__ import annotations

from typing import Any

import ebm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parts import Classifier, Energy, difference, langevin, rising_difference, uniform
from tests.runs import Call, Run, Trial, begin

# -- recovery: pairs at noise levels, a weight and an output scale of each level ------------------

SIGMAS = torch.tensor([0.25, 0.5, 1.0])


class Levels(nn.Module):
    """Two numbers for x at noise level t, whose sum is the energy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        heads: Tensor = self.net(torch.cat([x, SIGMAS.to(x)[t].unsqueeze(-1)], -1))
        return heads


class Recovery:
    """Draws x given its noisy self, and weighs each pair by its level."""

    def __init__(self, net: Levels, trial: Trial, noise_scale: float) -> None:
        self.net, self.trial, self.noise_scale = net, trial, noise_scale

    def step_size_square(self, t: Tensor) -> Tensor:
        return 0.04 * SIGMAS.to(torch.get_default_dtype())[t] ** 2

    def p_sample_langevin(self, tilde_x: Tensor, t: Tensor, start: Tensor | None = None) -> Tensor:
        sigma, b0 = SIGMAS.to(tilde_x)[t].unsqueeze(-1), self.step_size_square(t)
        y = (tilde_x if start is None else start).detach().clone().requires_grad_()
        for _ in range(4):
            f = self.trial.temper(self.net(y, t)).sum(1)
            log_p = f / b0 - ((y - tilde_x) ** 2 / 2 / sigma**2).sum(1)
            (grad,) = torch.autograd.grad(log_p.sum(), [y])
            noise = self.noise_scale * b0.sqrt().unsqueeze(-1) * torch.randn_like(y)
            y = (y + 0.5 * b0.unsqueeze(-1) * grad + noise).detach().requires_grad_()
        return y.detach()


def train_recovery(trial: Trial, *, noise_scale: float = 1.0, is_cooperative: bool = False) -> Run:
    """The density of x at level t is exp(f / b0(t)) times a Gaussian around its partner.

    Cooperative: chains start from a network, each side has a backward pass, and data come first.
    """
    torch.manual_seed(7)
    net, proposal = Levels(), nn.Linear(2, 2)
    diffusion: Any = Recovery(net, trial, noise_scale)
    run = Run(net, torch.optim.Adam(net.parameters(), lr=1e-2), extra={"proposal": proposal})
    p_optimizer = torch.optim.Adam(proposal.parameters(), lr=1e-2)
    b0 = diffusion.step_size_square(torch.arange(3))
    settings = {"model": net, "output_scale": 1 / b0[0].item()}
    _, diffusion.p_sample_langevin = trial.around(run, None, diffusion.p_sample_langevin, settings)
    data = torch.randn(40, 2)
    for _ in range(trial.n):
        x_0, t = data[torch.randint(40, (8,))], torch.randint(3, (8,))
        tilde_x = x_0 + SIGMAS.to(x_0)[t].unsqueeze(-1) * torch.randn(8, 2)
        pair, weight = torch.arange(8), SIGMAS[0] / SIGMAS.to(x_0)[t]
        groups = (pair, pair, b0[0] / b0[t])
        run.optimizer.zero_grad()
        pos_f = net(x_0, t).sum(1)
        is_early = is_cooperative and not run.guards
        if is_early:
            (-(pos_f * weight).mean()).backward()
        start = proposal(tilde_x) if is_cooperative else tilde_x
        x_neg = diffusion.p_sample_langevin(tilde_x, t, start)
        neg_f = net(x_neg, t).sum(1)
        run.calls.append(Call(pos_f, neg_f, x_neg, groups, weight))
        for g in run.guards:
            pos_f, neg_f = g.reweight(pos_f, neg_f, groups=groups)
        if is_cooperative:
            if not is_early:
                (-(pos_f * weight).mean()).backward()
            (neg_f * weight).mean().backward()
            p_optimizer.zero_grad()
            (x_neg - start).square().sum(1).mean().backward()
            p_optimizer.step()
        else:
            (-(pos_f - neg_f) * weight).mean().backward()
        run.optimizer.step()
    return run.end()


# -- method: the energy is a method, and so is the sampler ----------------------------------------


class Joint(Classifier):
    """Logits in `forward`; the energy and the sampler are methods."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.classify(x)

    def energy(self, x: Tensor) -> Tensor:
        logits: Tensor = self(x)
        return -logits.logsumexp(1)

    def sample(self, x: Tensor, noise_std: float, trial: Trial) -> Tensor:
        return langevin(lambda x: -trial.temper(self.energy(x)), x, 3, 1.0, noise_std)


def train_method(trial: Trial, *, noise_std: float = 0.01) -> Run:
    run = begin(Joint)
    settings = {
        "energy": "energy",
        "convention": "energy",
        "step_size": 1.0,
        "noise_std": noise_std,
    }
    loss_fn, sample = trial.around(run, rising_difference, run.model.sample, settings)
    for _ in range(trial.n):
        x, y = uniform(6), torch.randint(3, (6,))
        x_q = sample(uniform(6), noise_std, trial)
        e_pos, e_neg = run.model.energy(x), run.model.energy(x_q)
        run.calls.append(Call(e_pos, e_neg, x_q))
        loss = loss_fn(e_pos, e_neg) + F.cross_entropy(run.model(x), y)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
    return run.end()


# -- latent: a prior's chain and a posterior's, both on one energy --------------------------------


class Prior(nn.Module):
    """The energy of z, as (B, 1, 1, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Energy(shape=(4,))

    def forward(self, z: Tensor) -> Tensor:
        return self.net.forward(z.squeeze()).view(-1, 1, 1, 1)


def train_latent(trial: Trial, *, step: float = 0.4) -> Run:
    """``others`` are the losses of the generator."""
    torch.manual_seed(4)
    net_e, net_g = Prior(), nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh())
    run = Run(net_e, torch.optim.Adam(net_e.parameters(), lr=1e-2), extra={"generator": net_g})
    opt_g = torch.optim.Adam(net_g.parameters(), lr=1e-2)
    data = torch.randn(40, 6)

    def energy(score):
        return score.squeeze()

    def sample_prior(z, net_e):
        z = z.clone().detach().requires_grad_()
        for _ in range(5):
            en = trial.temper(energy(net_e(z)))
            z_grad = torch.autograd.grad(en.sum(), z)[0]
            z.data = z.data - 0.5 * step * step * (z_grad + z.data) + step * torch.randn_like(z)
        return z.detach(), z_grad.norm()

    def sample_posterior(z, x, net_g, net_e):
        z = z.clone().detach().requires_grad_()
        for _ in range(5):
            g_grad = torch.autograd.grad((net_g(z) - x).square().sum() / 0.18, z)[0]
            z_grad = torch.autograd.grad(energy(net_e(z)).sum(), z)[0]
            z.data = z.data - 0.005 * (g_grad + z_grad + z.data) + 0.1 * torch.randn_like(z)
        return z.detach(), g_grad.norm(), z_grad.norm()

    settings = {"convention": "energy", "output_scale": 1.0}
    loss_fn, sample_prior = trial.around(run, rising_difference, sample_prior, settings)
    watched = Trial(None if trial.beta_star is None else 0.0, attach=trial.attach)
    settings = {"convention": "energy", "model": net_e}
    watch, sample_posterior = watched.around(run, rising_difference, sample_posterior, settings)
    for _ in range(trial.n):
        x = data[torch.randint(40, (8,))]
        z_g, *_ = sample_posterior(torch.randn(8, 4, 1, 1), x, net_g, net_e)
        z_e, _ = sample_prior(torch.randn(8, 4, 1, 1), net_e)
        loss_g = (net_g(z_g) - x).square().mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        e_neg, e_pos = energy(net_e(z_e)), energy(net_e(z_g))
        run.calls.append(Call(e_pos, e_neg, z_e))
        run.optimizer.zero_grad()
        loss_fn(e_pos, e_neg).backward()
        watch(e_pos, e_neg)
        run.optimizer.step()
        run.others.append(loss_g.item())
    return run.end()


# -- gwg: Gibbs with gradients on bits, one Metropolis step per call ------------------------------


class DiffSampler(nn.Module):
    """Proposes one bit to flip from the gradient, and accepts by Metropolis and Hastings."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial

    def step(self, x: Tensor, model: nn.Module) -> Tensor:
        def flips(x):
            x = x.detach().requires_grad_()
            (gx,) = torch.autograd.grad(self.trial.temper(model(x)).sum(), x)
            return torch.distributions.OneHotCategorical(logits=-(2 * x.detach() - 1) * gx / 2)

        forward = flips(x)
        bit = forward.sample()
        there = (1 - x) * bit + x * (1 - bit)
        rise = self.trial.temper(model(there).squeeze()) - self.trial.temper(model(x).squeeze())
        a = (rise + flips(there).log_prob(bit) - forward.log_prob(bit)).exp()
        a = (a > torch.rand_like(a)).to(x)[:, None]
        moved: Tensor = there * a + x * (1 - a)
        return moved.detach()


def train_gwg(trial: Trial, *, gain: float = 1.0) -> Run:
    """Each training step is five calls of the sampler."""
    torch.manual_seed(11)
    model = Energy(shape=(10,))
    for p in model.net[-1].parameters():
        p.data *= gain
    buffer = torch.rand(30, 10).round()
    run = Run(model, torch.optim.Adam(model.parameters(), lr=1e-2), buffer)
    settings = {"methods": ("step",), "model": model, "output_scale": 1.0}
    loss_fn, sampler = trial.around(run, difference, DiffSampler(trial), settings)
    data = torch.rand(40, 10).round()
    for _ in range(trial.n):
        rows = torch.randperm(30)[:8]
        x, x_fake = data[torch.randint(40, (8,))], buffer[rows]
        for _ in range(5):
            x_fake = sampler.step(x_fake.detach(), model).detach()
        buffer[rows] = x_fake
        logp_real, logp_fake = model(x).squeeze(), model(x_fake).squeeze()
        run.calls.append(Call(logp_real, logp_fake, x_fake))
        obj = -loss_fn(logp_real, logp_fake)
        loss = -obj + 0.01 * ((logp_real**2.0).mean() + (logp_fake**2.0).mean())
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        run.others.append(obj.item())
    return run.end()


# -- energy matching: flow matching beside chains whose temperature rises, half of them from data --


def train_energy_matching(trial: Trial, *, epsilon: float = 0.5) -> Run:
    """Chains from data are at the highest temperature, those from the source end there."""
    run = begin(lambda: Energy(shape=(2,)))
    data, dt = torch.randn(40, 2) + 3, 0.1

    def gibbs_sampler(model: Any, x: Tensor, start: Tensor) -> Tensor:
        for step in range(10):
            t = start + (1 - start) * (step + 1) / 10
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(trial.temper(model(x)).sum(), x)
            std = (2 * dt * epsilon * ((t - 0.8) / 0.2).clamp(0, 1)).sqrt()
            x = x - dt * slope + std.unsqueeze(-1) * torch.randn_like(x)
        return x.detach()

    settings = {"convention": "energy", "output_scale": 1 / epsilon}
    loss_fn, gibbs_sampler = trial.around(run, rising_difference, gibbs_sampler, settings)
    start = torch.tensor([1.0, 0.0]).repeat_interleave(4)
    for _ in range(trial.n):
        x0, x1 = torch.randn(8, 2), data[torch.randint(40, (8,))]
        x_t = torch.lerp(x0, x1, torch.rand(8, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(run.model(x_t).sum(), x_t, create_graph=True)
        x_neg = gibbs_sampler(run.model, torch.cat([x1[:4], x0[4:]]), start)
        v_pos, v_neg = run.model(x1), run.model(x_neg)
        run.calls.append(Call(v_pos, v_neg, x_neg))
        run.optimizer.zero_grad()
        ((slope + x1 - x0).square().mean() + 2 * loss_fn(v_pos, v_neg)).backward()
        run.optimizer.step()
    return run.end()


# -- ebmkit: its own Trainer, whose loss draws the negatives --------------------------------------


def train_ebmkit(trial: Trial) -> Run:
    run = begin(lambda: Energy(shape=(2,)))

    class Langevin(ebm.LangevinDynamics):
        def step(self, energy: Any, x: Tensor) -> Any:
            return super().step(lambda x: trial.temper(energy(x)), x)

    class Guarded(ebm.ContrastiveDivergence):
        def forward(self, energy: Any, x: Tensor) -> Any:
            out: Any = super().forward(energy, x)
            e_pos, e_neg = energy(x), energy(out.x_neg)
            run.calls.append(Call(e_pos, e_neg, out.x_neg))
            if run.guards:
                out.loss = contrast(e_pos, e_neg)
            return out

    run.chains = ebm.ReplayBuffer(40, (2,))
    cd: Any = Guarded(Langevin(step_size=0.1, steps=4), buffer=run.chains)
    settings = {"methods": ("sample",), "convention": "energy", "output_scale": 1.0}
    contrast, cd.sampler = trial.around(run, None, cd.sampler, settings)
    trainer = ebm.Trainer(run.model, cd, run.optimizer, device="cpu")
    run.others = trainer.fit(torch.randn(40, 2), steps=trial.n, batch_size=8, verbose=False)
    return run.end()
