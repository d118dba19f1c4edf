"""An EBM of a noisy circle; needs the extra cli."""

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
    action="rollback",
    log_dir="runs/ring",
)
chains = torch.randn(128, 2)
while g.step < 1000:  # which a rollback takes back
    angle = 2 * torch.pi * torch.rand(128)
    data = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(128, 2)
    chains = sample(energy, chains)
    loss = loss_fn(energy(data), energy(chains))
    optimizer.zero_grad()
    loss.backward()
    g.log({"radius": chains.norm(dim=1).mean()})  # numbers of your own
    optimizer.step()
    if g.step % 200 == 0:
        gap, S = g.last["energy_gap"], g.last["sampler/sharpness"]
        print(f"step {g.step}: gap {gap:.2f}, S {S:.2f}")
print(f"samples: mean radius {chains.norm(dim=1).mean():.2f}")
