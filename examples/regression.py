"""Regression by f(x, y): a density of y for each x, with 8 negatives each. Needs torch alone."""

import sys

import torch
from torch import nn

from ebmguard import guard

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
torch.manual_seed(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
STEP = 0.02  # and noise of (2 * STEP)**0.5: o = 1


def truth(x):
    return torch.distributions.Normal(torch.sin(2 * x), 0.3 + 0.2 * x.abs())


class F(nn.Module):
    """x of shape (B, 1) and y of (B, N) to energies (B, N)."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        self.net = nn.Sequential(*layers)

    def forward(self, x, y):
        return self.net(torch.stack([x.expand_as(y), y], -1)).squeeze(-1) - y.square() / 2


def sample_q(f, x, y):
    for _ in range(30):
        y = y.detach().requires_grad_()
        slope = torch.autograd.grad(f(x, y).sum(), y)[0]
        y = y + STEP * slope + (2 * STEP) ** 0.5 * torch.randn_like(y)
    return y.detach()


f = F()
optimizer = torch.optim.Adam(f.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
loss_fn, sample_q = g = guard(None, sample_q, model=f, optimizer=optimizer, beta_star=0.5)
for _ in range(steps):
    x = 2 * torch.rand(64, 1) - 1
    y = truth(x).sample()
    negatives = sample_q(f, x, 1.5 * torch.randn(64, 8))
    loss = loss_fn(f(x, y), f(x, negatives), groups="rows")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()

grid, x = torch.linspace(-4, 4, 401), torch.linspace(-0.9, 0.9, 19)[:, None]
width = grid[1] - grid[0]
energies = f(x, grid.expand(19, -1)).detach()
log_p = energies - (energies.logsumexp(1, keepdim=True) + width.log())
log_q = truth(x).log_prob(grid)
kl = (log_q.exp() * (log_q - log_p)).sum(1) * width
print(f"KL(data || model) {kl.mean():.3f} nats, GradScale {g.last['grad_scale']:.2f} of 0.89")
