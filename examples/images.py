"""An EBM of 1,797 real digits, in minutes on a CPU. Needs pip install ".[train]" in a clone."""

import sys

import torch
from torch import nn

from ebmguard import guard

try:
    from matplotlib.image import imsave
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit('images.py needs scikit-learn and matplotlib: pip install ".[train]" in a clone')
updates = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
torch.manual_seed(0)
images = torch.tensor(load_digits().images).float()[:, None] / 8 - 1  # (1797, 1, 8, 8), in [-1, 1]
convs = [nn.Conv2d(1, 32, 3, 1, 1), nn.Conv2d(32, 64, 4, 2, 1), nn.Conv2d(64, 128, 4, 2, 1)]
layers = [layer for conv in convs for layer in (conv, nn.SiLU())]
f = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 1))  # high on data
optimizer = torch.optim.Adam(f.parameters(), lr=1e-3)
buffer = 2 * torch.rand(1000, 1, 8, 8) - 1  # chains that persist


def langevin(f, x, steps=20, step_size=1.0, noise_std=0.01):
    for _ in range(steps):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(f(x).sum(), x)
        x = x + step_size * slope + noise_std * torch.randn_like(x)
    return x.detach()


def from_buffer(f, rows):
    fresh = torch.rand(64, 1, 1, 1) < 0.05  # one chain in twenty starts afresh
    buffer[rows] = langevin(f, torch.where(fresh, 2 * torch.rand(64, 1, 8, 8) - 1, buffer[rows]))
    return buffer[rows]


parts = {"model": f, "optimizer": optimizer, "buffer": buffer}
loss_fn, sample = g = guard(None, from_buffer, **parts, action="rollback", log_dir="runs/images")
while g.step < updates:  # which a rollback takes back
    x = images[torch.randint(1500, (64,))] + 0.03 * torch.randn(64, 1, 8, 8)
    loss = loss_fn(f(x), f(sample(f, torch.randperm(1000)[:64])))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if g.step % 200 == 0:
        gap, S = g.last["energy_gap"], g.last["sampler/sharpness"]
        print(f"step {g.step}: gap {gap:.3f}, S {S:.2f}")
rows = torch.cat([images[1500:1532], buffer[:64]]).clamp(-1, 1).view(6, 16, 8, 8)
rows = nn.functional.pad(rows, (1, 1, 1, 1)).transpose(1, 2).reshape(60, 160)  # with a grey frame
imsave("samples.png", rows.repeat_interleave(5, 0).repeat_interleave(5, 1), cmap="gray")
print(f"{g.verdict}; samples.png: two rows of data, four of samples")
