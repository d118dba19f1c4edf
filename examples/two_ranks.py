"""Two ranks, one guard. Needs torchrun: torchrun --standalone --nproc-per-node 2 two_ranks.py"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ebmguard import guard
from ebmguard.samplers import sgld

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
if "RANK" not in os.environ:
    sys.exit("Start it as: torchrun --standalone --nproc-per-node 2 two_ranks.py")
dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)  # the same network everywhere
energy = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
f = DistributedDataParallel(energy)
optimizer = torch.optim.Adam(energy.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())  # other data and other noise on each rank


def sample_q(f, x):
    return sgld(f, x, steps=20, step_size=0.01, noise_std=0.2)


loss_fn, sample_q = g = guard(
    None,
    sample_q,
    model=energy,
    optimizer=optimizer,
    log_dir="runs/ranks",  # which the first rank writes
    process_group=dist.group.WORLD,
)
for _ in range(steps):
    angle = 2 * torch.pi * torch.rand(64)
    x = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(64, 2)
    loss = loss_fn(f(x), f(sample_q(energy, torch.randn(64, 2))))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
row = g.last  # the same on every rank: that of the joined batch
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks, {g.step} steps, GradScale {row['grad_scale']:.3f}")
dist.destroy_process_group()
