"""An EBM of a noisy circle; needs ebmguard[cli]."""

import torch
from torch import nn

from ebmguard import guard

torch.manual_seed(0)
energy = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(energy.parameters(), lr=1e-3)


def langevin(energy, x, steps=20, eps=0.02):  # your sampler, as it is
    for _ in range(steps):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(energy(x).sum(), x)
        x = x - eps / 2 * grad + eps**0.5 * torch.randn_like(x)
    return x.detach()


loss_fn, sample = g = guard(
    None,
    langevin,
    model=energy,
    optimizer=optimizer,
    convention="energy",
    log_dir="runs/ring",
)
chains = torch.randn(128, 2)
for step in range(1, 1001):
    angle = 2 * torch.pi * torch.rand(128)
    data = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(128, 2)
    chains = sample(energy, chains)
    loss = loss_fn(energy(data), energy(chains))
    optimizer.zero_grad()
    loss.backward()
    g.log({"radius": chains.norm(dim=1).mean()})  # numbers of your own
    optimizer.step()
    if step % 200 == 0:
        row = g.last
        print(f"step {step}: gap {row['energy_gap']:.2f}, GradScale {row['grad_scale']:.2f}")
print(f"samples: mean radius {chains.norm(dim=1).mean():.2f}")
