"""A LightningModule with a sampler object, under Lightning's own Trainer."""

from __future__ import annotations

import csv
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from ebmguard import Recovery, guard
from ebmguard.adapters.lightning import GuardCallback
from ebmguard.errors import ConfigError, NonFiniteError
from ebmguard.recovery import Change
from tests.faults.injector import FaultInjector
from tests.frameworks.lightning_parts import (
    WARNS,
    DeepEnergyModel,
    Guarded,
    Mixed,
    are_equal,
    make,
    make_trainer,
    tensors,
)
from tests.frameworks.parts import N_BATCHES, Before, Sampler, data
from tests.parts import Energy, Memory
from tests.recovery.parts import Scripted

pytestmark = WARNS


class Pictures(Callback):
    """The tutorial's callback, and one that draws with the very sampler that trains."""

    def on_train_epoch_end(self, trainer, pl_module):
        Sampler.generate_samples(pl_module.cnn, torch.zeros(2, 1, 4, 4), 2, 0.1)

    def on_train_batch_end(self, trainer, pl_module, *args):
        pl_module.sampler.sample_new_exmps(steps=1)


RETROFITS: dict[str, tuple[type[DeepEnergyModel], list[Callback]]] = {
    "callback": (Guarded, [GuardCallback()]),
    "mixin": (Mixed, []),
}


@pytest.mark.parametrize("kind", list(RETROFITS))
def test_off_is_the_unguarded_trainer(kind, tmp_path):
    """Clipped gradients, a scheduler, validation, checkpoints, loggers and pictures included."""

    def fit(model, callbacks):
        trainer = make_trainer(
            max_epochs=2,
            gradient_clip_val=0.1,
            num_sanity_val_steps=1,
            logger=CSVLogger(tmp_path / str(len(callbacks))),
            log_every_n_steps=1,
            callbacks=[*callbacks, Pictures()],
        )
        trainer.fit(model, data(), data())
        return tensors(model, trainer)

    module, callbacks = RETROFITS[kind]
    unguarded = fit(make(DeepEnergyModel), [])
    memory = Memory()
    model = make(module, beta_star=0.0, sinks=[memory])
    assert are_equal(fit(model, callbacks), unguarded)
    assert memory.steps == list(range(2 * N_BATCHES))
    assert model.state_dict().keys() == DeepEnergyModel().state_dict().keys()
    assert set(model.hparams) == {"alpha", "lr"}
    assert not are_equal(fit(make(module), callbacks), unguarded)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradient_in_the_loop_is_the_closed_form(accumulated):
    class Plain(Mixed):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    memory = Memory()
    strength = {"beta_star": Before.beta_star, "output_scale": Before.output_scale}
    model = make(Plain, **strength, sinks=[memory])
    before = Before(model.cnn, model.sampler.original)
    trainer = make_trainer(max_steps=1, max_epochs=-1, accumulate_grad_batches=accumulated)
    trainer.fit(model, data())
    assert len(model.seen) == accumulated
    before.check_update(model.cnn, model.seen)
    assert memory.steps == [0]


def test_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path):
    whole = make()
    trainer = make_trainer(max_epochs=3)
    trainer.fit(whole, data())
    expected = tensors(whole, trainer)
    state = whole.loss_fn.guard.state_dict()
    assert state["step"] == 3 * N_BATCHES

    first = make()
    trainer = make_trainer(max_epochs=2)
    trainer.fit(first, data())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    second = make(alpha=0.1)
    torch.manual_seed(99)
    trainer = make_trainer(max_epochs=3)
    # As the tutorial would load what it has not written: plain values need nothing else.
    trainer.fit(second, data(), ckpt_path=tmp_path / "two.ckpt", weights_only=True)
    assert are_equal(tensors(second, trainer), expected)
    assert second.loss_fn.guard.state_dict() == state


def test_checkpoints_of_other_runs(tmp_path):
    plain = make(DeepEnergyModel)
    trainer = make_trainer()
    trainer.fit(plain, data())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    model = make()
    # Retrofitted in the middle of a run: the guard begins where it came in.
    make_trainer(max_epochs=2).fit(model, data(), ckpt_path=tmp_path / "plain.ckpt")
    assert model.loss_fn.guard.step == N_BATCHES
    trainer = make_trainer()
    trainer.fit(make(), data())
    trainer.save_checkpoint(tmp_path / "guarded.ckpt")

    class Renamed(Mixed):
        def retrofit(self, options):
            super().retrofit(options)
            self.other_loss = self.loss_fn
            del self.loss_fn

    with pytest.raises(ConfigError, match="holds the guards loss_fn, but the module has other"):
        make_trainer(max_epochs=2).fit(make(Renamed), data(), ckpt_path=tmp_path / "guarded.ckpt")


def test_divergence_leaves_fit_and_is_in_the_loggers(tmp_path, caplog):
    model = make(action="raise")
    faults = FaultInjector(step=lambda: model.loss_fn.guard.step)
    own = model.sampler.original
    own.sample_new_exmps = faults.sampler(own.sample_new_exmps)
    faults.nan_sample(at=3)
    trainer = make_trainer(logger=CSVLogger(tmp_path), log_every_n_steps=1)
    with pytest.raises(NonFiniteError) as error:
        trainer.fit(model, data())
    assert error.value.alert.step == 3
    assert model.loss_fn.guard.step == 4
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "ERROR", "WARNING"]  # fault, alert, and the verdict at the end
    assert "training_step" not in vars(model)
    assert logged(trainer, "_alerts/ERROR_nonfinite") == {3: 2.0}
    # And the model goes on in another fit.
    make_trainer().fit(model, data())
    assert model.loss_fn.guard.step == 4 + N_BATCHES


def logged(trainer: Any, tag: str) -> dict[int, float]:
    with open(f"{trainer.logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return {int(row["step"]): float(row[tag]) for row in rows if row[tag]}


def test_diagnostics_are_logged_and_can_be_monitored(tmp_path):
    memory = Memory()
    model = make(sinks=[memory])
    best = ModelCheckpoint(tmp_path / "best", monitor="guard/energy_gap", every_n_train_steps=1)
    trainer = make_trainer(
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        enable_checkpointing=True,
        callbacks=[best],
    )
    trainer.fit(model, data())
    for tag in ("grad_scale", "energy_gap", "sampler/grad_norm", "ref/ess"):
        found = logged(trainer, f"guard/{tag}")
        assert found == pytest.approx(dict(enumerate(memory.column(tag))), rel=1e-6), tag
    assert best.best_model_score == pytest.approx(min(memory.column("energy_gap")), rel=1e-6)


def test_two_guards_are_told_apart():
    class Both(Mixed):
        def retrofit(self, options):
            first = self.sampler
            super().retrofit({})
            self.sampler = first
            self.inner = nn.Module()
            self.inner.xy_loss = self.loss_fn
            super().retrofit(options)

    model = make(Both, beta_star=1.0)
    trainer = make_trainer()
    trainer.fit(model, data())
    tags = {tag for tag in trainer.callback_metrics if tag.startswith("guard/")}
    assert {"guard/loss_fn/grad_scale", "guard/loss_fn/ess"} <= tags
    assert not any("inner" in tag for tag in tags)  # its loss was never called
    assert model.inner.xy_loss.guard.step == model.loss_fn.guard.step == N_BATCHES


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_guards_rest_in_other_loops(stage):
    memory = Memory()
    model = make(beta_star=1.0, output_scale=2.0, sinks=[memory])
    plain = make(DeepEnergyModel)
    model.cnn.load_state_dict(plain.cnn.state_dict())
    for each in (plain, model):
        torch.manual_seed(3)
        getattr(make_trainer(), stage)(each, data())
    assert are_equal(model.sampler.examples, plain.sampler.examples)
    assert model.loss_fn.guard.state_dict()["sampler_calls"] == 0
    # Outside of the Trainer it is the guarded sampler again.
    torch.manual_seed(3)
    model.sampler.sample_new_exmps()
    torch.manual_seed(3)
    plain.sampler.sample_new_exmps()
    assert not are_equal(model.sampler.examples, plain.sampler.examples)


@pytest.mark.parametrize("sanity", [0, 1])
def test_guards_act_in_training_steps_only(sanity):
    """Whoever else samples during fit, wherever the callback stands, does it untempered."""
    factors: dict[str, set[bool]] = {}

    def watch(where, model):
        x = torch.linspace(-1, 1, 32).reshape(2, 1, 4, 4)

        class Probe:
            def draw(self):
                return model.cnn(x)

        plain = Energy.forward(model.cnn, x)
        model.sampler.original.draw = Probe().draw
        drawn = model.sampler.draw()
        factors.setdefault(where, set()).add(torch.equal(drawn, plain))

    class Probing(Callback):
        def on_train_start(self, trainer, pl_module):
            watch("start", pl_module)

        def on_train_batch_start(self, trainer, pl_module, *args):
            watch("batch start", pl_module)

        def on_before_zero_grad(self, trainer, pl_module, *args):
            watch("zero grad", pl_module)

        def on_train_batch_end(self, trainer, pl_module, *args):
            watch("batch end", pl_module)

        def on_validation_batch_end(self, trainer, pl_module, *args):
            watch("validation", pl_module)

        def on_train_epoch_end(self, trainer, pl_module):
            watch("epoch end", pl_module)

    class Watched(Guarded):
        def retrofit(self, options):
            self.sampler.draw = lambda: None
            self.loss_fn, self.sampler = guard(
                None,
                self.sampler,
                methods=("sample_new_exmps", "draw"),
                model=self.cnn,
                beta_star=1.0,
                output_scale=2.0,
            )

        def training_step(self, batch, batch_idx):
            watch("training step", self)
            return super().training_step(batch, batch_idx)

    model = make(Watched)
    callbacks = [Probing(), GuardCallback(), Probing()]
    make_trainer(num_sanity_val_steps=sanity, callbacks=callbacks).fit(model, data(), data())
    assert factors.pop("training step") == {False}
    assert factors.keys() == {
        "start",
        "batch start",
        "zero grad",
        "batch end",
        "validation",
        "epoch end",
    }
    assert all(found == {True} for found in factors.values())
    assert model.loss_fn.guard.state_dict()["sampler_calls"] == 2 * N_BATCHES


def test_rollback_inside_of_the_trainers_loop():
    """The Trainer goes on counting; what the guard knows goes back, bit by bit."""
    recovery = Recovery(
        ladder=(Change(),), reseed=False, every=2, certify_after=3, relapse_within=3
    )
    states: list[list[Tensor]] = []

    class Rolled(Mixed):
        def retrofit(self, options):
            super().retrofit(options)
            self.loss_fn.guard.attach(model=self.cnn, buffer=self.sampler.original)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            states.append(tensors(self, self.trainer))

    memory = Memory()
    model = make(Rolled, action="rollback", recovery=recovery, sinks=[memory])
    g = model.loss_fn.guard
    g._loop.judge = Scripted([8])
    trainer = make_trainer(max_epochs=3)
    trainer.fit(model, data())
    (rollback,) = g.rollbacks
    assert (rollback.step, rollback.restored_step) == (8, 4)
    assert trainer.global_step == 3 * N_BATCHES
    assert g.step == trainer.global_step - 5
    assert memory.steps == [*range(9), *range(4, g.step)]
    # states[i] is that after the i-th batch: with the eighth the run is what it was at step 4, the
    # scheduler's rate of a later epoch included.
    assert are_equal(states[8], states[3])
    assert not are_equal(states[9], states[4])  # other batches
