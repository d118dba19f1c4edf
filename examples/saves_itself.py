"""A run that saves itself: a batch of garbage spoils it, it goes back. Needs the extra cli."""

import torch
from torch import nn

from ebmguard import Recovery, guard
from ebmguard.samplers import sgld

torch.manual_seed(0)
f = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(f.parameters(), lr=1e-3)
unlucky = 300  # the step that gets a batch of garbage
chains = torch.randn(500, 2)


def sample_q(f, rows):
    chains[rows] = sgld(f, chains[rows], steps=20, step_size=0.005, noise_std=0.1)
    return chains[rows]


loss_fn, sample_q = g = guard(
    None,
    sample_q,
    model=f,
    optimizer=optimizer,
    buffer=chains,
    action="rollback",
    recovery=Recovery(every=20, certify_after=50),
    log_dir="runs/saves_itself",
)
while g.step < 500:  # which a rollback takes back
    angle = 2 * torch.pi * torch.rand(128)
    x = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(128, 2)
    if g.step == unlucky:  # once, also where a rollback repeats the step
        x, unlucky = 1e4 * x, None
    loss = loss_fn(f(x), f(sample_q(f, torch.randperm(500)[:128])))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
for rollback in g.rollbacks:
    print(rollback.message)
print(f"finished at step {g.step}, energy gap {g.last['energy_gap']:.2f}")
