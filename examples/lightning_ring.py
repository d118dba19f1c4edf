"""A LightningModule with a guard. Needs Lightning: pip install ".[lightning]" in a clone"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ebmguard import guard
from ebmguard.samplers import sgld

try:
    from lightning import LightningModule, Trainer

    from ebmguard.adapters.lightning import GuardedModule
except ImportError:
    sys.exit('lightning_ring.py needs Lightning: pip install ".[lightning]" in a clone')
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
torch.manual_seed(0)


def sample_q(f, x):
    return sgld(f, x, steps=20, step_size=0.01, noise_std=0.2)


class Ring(GuardedModule, LightningModule):
    """An EBM of points in the plane."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        self.f = nn.Sequential(*layers)
        self.loss_fn, self.sample_q = guard(None, sample_q, model=self.f, log_dir="runs/lightning")

    def training_step(self, batch, index):
        """The contrastive loss, guarded."""
        (x,) = batch
        return self.loss_fn(self.f(x), self.f(self.sample_q(self.f, torch.randn_like(x))))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


angle = 2 * torch.pi * torch.rand(10_000)
data = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(10_000, 2)
module = Ring()
trainer = Trainer(
    max_steps=steps,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, DataLoader(TensorDataset(data), batch_size=128, shuffle=True))
g = module.loss_fn.guard
print(f"{g.verdict}: GradScale {g.last['grad_scale']:.3f}, energy gap {g.last['energy_gap']:.3f}")
