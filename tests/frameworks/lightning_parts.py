"""A tutorial-style LightningModule: a sampler object, one concatenated forward pass, L2, StepLR."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ebmguard import guard

BATCH = 8
SHAPE = (1, 4, 4)
N_BATCHES = 6
NOISE = 0.01
STEP_SIZE = 0.1
OUTPUT_SCALE = 2 * STEP_SIZE / NOISE**2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x).squeeze(1)


class Sampler:
    """Chains from a buffer that is a list of images, each a tensor of its own."""

    def __init__(self, model: nn.Module, noise: float = NOISE, max_len: int = 32) -> None:
        self.model = model
        self.noise = noise
        self.max_len = max_len
        self.examples = list((torch.rand(BATCH, *SHAPE) * 2 - 1).split(1))

    def sample_new_exmps(self, steps: int = 4, step_size: float = STEP_SIZE) -> Tensor:
        rows = torch.randint(len(self.examples), (BATCH,)).tolist()
        fresh = (torch.rand(BATCH) < 0.05)[:, None, None, None]
        start = torch.cat([self.examples[i] for i in rows])
        start = torch.where(fresh, torch.rand_like(start) * 2 - 1, start)
        images = Sampler.generate_samples(self.model, start, steps, step_size, self.noise)
        self.examples = [*images.detach().split(1), *self.examples][: self.max_len]
        return images

    def state_dict(self) -> dict[str, Any]:
        return {"examples": list(self.examples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.examples = state["examples"]

    @staticmethod
    def generate_samples(
        model: Any, images: Tensor, steps: int, step_size: float, noise: float = NOISE
    ) -> Tensor:
        was_training = model.training
        model.eval()
        with torch.enable_grad():
            images = images.detach().clone().requires_grad_()
            for _ in range(steps):
                images.data.add_(noise * torch.randn_like(images)).clamp_(-1, 1)
                (slope,) = torch.autograd.grad(-model(images).sum(), images)
                images.data.add_(-step_size * slope).clamp_(-1, 1)
        model.train(was_training)
        return images


def difference(real_out: Tensor, fake_out: Tensor) -> Tensor:
    return fake_out.mean() - real_out.mean()


class DeepEnergyModel(LightningModule):
    """Without a guard; ``retrofit`` is where one comes in.

    Attributes:
        seen: the real and the fake images of every training step.
    """

    def __init__(self, alpha: float = 0.1, lr: float = 0.01, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=list(options))
        self.cnn = Net()
        self.cd_loss: Any = difference
        self.sampler: Any = Sampler(self.cnn)
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.retrofit(options)

    def retrofit(self, options: dict[str, Any]) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"], betas=(0.0, 0.999))
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def training_step(self, batch, batch_idx):
        (real,) = batch
        fake = self.sampler.sample_new_exmps(steps=4)
        self.seen.append((real.detach().clone(), fake.detach().clone()))
        real_out, fake_out = self.cnn(torch.cat((real, fake))).chunk(2)
        regular = self.hparams["alpha"] * (real_out**2 + fake_out**2).mean()
        loss = regular + self.cd_loss(real_out, fake_out)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        (real,) = batch
        fake = self.sampler.sample_new_exmps(steps=2)
        self.log("val_contrastive_divergence", self.cd_loss(self.cnn(real), self.cnn(fake)))

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.sampler.sample_new_exmps(steps=2)

    # The tutorial keeps neither; a run that goes on exactly where it was needs both.

    def on_save_checkpoint(self, checkpoint):
        checkpoint["chains"] = self.sampler.state_dict()
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint):
        self.sampler.load_state_dict(checkpoint["chains"])
        self.random = checkpoint["random"]

    def on_train_start(self):
        if hasattr(self, "random"):
            torch.set_rng_state(self.random)


class Guarded(DeepEnergyModel):
    """The two lines of the retrofit."""

    def retrofit(self, options: dict[str, Any]) -> None:
        keywords: Any = {"beta_star": 0.5, "output_scale": OUTPUT_SCALE, **options}
        self.cd_loss, self.sampler = guard(
            None, self.sampler, methods=("sample_new_exmps",), model=self.cnn, **keywords
        )


def make_trainer(**options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "inference_mode": False,  # chains need gradients
        "max_epochs": 1,
    }
    return Trainer(**quiet | options)


def data(rank: int = 0, world: int = 1) -> DataLoader[Any]:
    """The batches, or one rank's part of each."""
    x = torch.rand(N_BATCHES * BATCH, *SHAPE, generator=torch.Generator().manual_seed(0))
    # A generator of its own: else every epoch draws a number from the global one.
    own = TensorDataset(x[rank::world])
    return DataLoader(own, BATCH // world, generator=torch.Generator())
