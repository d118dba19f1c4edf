"""A tutorial-style LightningModule: a sampler object, one concatenated forward pass, L2, StepLR."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor

from ebmguard import guard
from ebmguard.adapters.lightning import GuardedModule
from tests.frameworks.parts import OUTPUT_SCALE, Sampler, make_net
from tests.parts import difference

# What Lightning warns of that is no fault of a test.
WARNS = [
    pytest.mark.usefixtures("quiet"),
    # The loaders are a few rows in memory: workers would only cost time.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`"),
    # Lightning's own use of PyTorch.
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
    # Read through `torch.load`, of files that the test has written itself.
    pytest.mark.filterwarnings("ignore:.*weights_only"),
]


class DeepEnergyModel(LightningModule):
    """Without a guard; ``retrofit`` is where one comes in.

    Attributes:
        seen: the real and the fake images of every training step.
    """

    def __init__(self, alpha: float = 0.1, lr: float = 0.01, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=list(options))
        self.cnn = make_net()
        self.loss_fn: Any = difference
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
        loss = regular + self.loss_fn(real_out, fake_out)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        (real,) = batch
        fake = self.sampler.sample_new_exmps(steps=2)
        self.log("val_contrastive_divergence", self.loss_fn(self.cnn(real), self.cnn(fake)))

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
        self.loss_fn, self.sampler = guard(
            None, self.sampler, methods=("sample_new_exmps",), model=self.cnn, **keywords
        )


class Mixed(GuardedModule, Guarded):
    """The mixin instead of the callback."""


def make(kind: type[DeepEnergyModel] = Mixed, **options: Any) -> Any:
    seed_everything(1, verbose=False)
    return kind(**options)


def tensors(model: Any, trainer: Any) -> list[Tensor]:
    """All that a run leaves behind."""
    (optimizer,) = trainer.optimizers
    moments = [x for state in optimizer.state.values() for x in state.values()]
    rates = [torch.tensor(group["lr"]) for group in optimizer.param_groups]
    epochs = [torch.tensor(each.scheduler.last_epoch) for each in trainer.lr_scheduler_configs]
    parts = [*model.state_dict().values(), *model.sampler.examples, *moments]
    everything = [*parts, torch.get_rng_state(), *rates, *epochs]
    return [x.clone() for x in everything]


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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
