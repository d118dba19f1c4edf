"""A LightningModule with a sampler object, under Lightning's own Trainer."""

from __future__ import annotations

import copy
import csv
import logging
import socket
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from ebmguard import Recovery, guard
from ebmguard.adapters.lightning import GuardCallback, GuardedModule, _Schedulers
from ebmguard.errors import ConfigError, NonFiniteError
from ebmguard.recovery import Change
from ebmguard.sinks import read_jsonl
from tests.faults.injector import FaultInjector
from tests.frameworks.lightning_parts import WARNS, DeepEnergyModel, Guarded, make_trainer
from tests.frameworks.lightning_ranks import OnRanks, train_on_ranks
from tests.frameworks.parts import N_BATCHES, Before, Sampler, data, make_net
from tests.parts import Energy, Memory
from tests.ranks import run_ranks
from tests.recovery.parts import Scripted

pytestmark = WARNS


class Mixed(GuardedModule, Guarded):
    """The mixin instead of the callback."""


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Lightning's tips are no part of what is tested."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)


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


def test_gradients_that_are_not_finite_are_skipped():
    class Spoiled(Mixed):
        def training_step(self, batch, batch_idx):
            self.before = copy.deepcopy(self.state_dict())
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if batch_idx == N_BATCHES - 1 else loss

    model = make(Spoiled)
    make_trainer(gradient_clip_val=0.1).fit(model, data())
    assert are_equal([*model.state_dict().values()], [*model.before.values()])
    (alert,) = model.loss_fn.guard.alerts
    assert (alert.tag, alert.step) == ("nonfinite/gradients", N_BATCHES - 1)


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
    g._loop._judge = Scripted([8])
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


class Manual(Mixed):
    """Two optimizers, of which the second trains something else."""

    def retrofit(self, options):
        super().retrofit(options)
        self.automatic_optimization = False
        self.other = nn.Linear(1, 1)
        self.says_which = True

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.cnn.parameters(), lr=0.01)
        if self.says_which:
            self.loss_fn.guard.attach(optimizer=optimizer)
        both = [optimizer, torch.optim.SGD(self.other.parameters(), lr=0.1)]
        return both, [torch.optim.lr_scheduler.StepLR(each, 1) for each in both]

    def training_step(self, batch, batch_idx):
        ours, other = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        ours.zero_grad()
        self.manual_backward(loss)
        ours.step()
        other.zero_grad()
        self.manual_backward(self.other(torch.ones(1, 1)).sum())
        other.step()


def test_manual_optimization_with_two_optimizers():
    memory = Memory()
    model = make(Manual, sinks=[memory])
    for _ in range(2):  # the second fit has optimizers of its own
        make_trainer().fit(model, data())
    assert memory.steps == list(range(2 * N_BATCHES))
    attached = model.loss_fn.guard.trainer
    assert [each.optimizer for each in attached.scheduler] == [attached.optimizer]
    unclear = make(Manual)
    unclear.says_which = False
    with pytest.raises(ConfigError, match=r"2 optimizers; which one trains the energy"):
        make_trainer().fit(unclear, data())


def test_module_without_a_guard():
    with pytest.raises(ConfigError, match="found no guard in DeepEnergyModel"):
        make_trainer(callbacks=[GuardCallback()]).fit(make(DeepEnergyModel), data())


def test_a_step_that_the_instance_has_already_is_put_back():
    """As a compiled LightningModule has one."""
    model = make()
    own = model.training_step
    model.training_step = own
    make_trainer().fit(model, data())
    assert vars(model)["training_step"] is own
    assert model.loss_fn.guard.step == N_BATCHES


def test_guard_that_is_made_in_setup():
    class InSetup(Mixed):
        def retrofit(self, options):
            self.plain = self.sampler

        def setup(self, stage):
            self.sampler = self.plain
            Guarded.retrofit(self, {"output_scale": 2.0})

    model, plain = make(InSetup), make(DeepEnergyModel)
    make_trainer().fit(model, data())
    assert model.loss_fn.guard.step == N_BATCHES
    # The guard of the next stage is another one, and rests as well.
    make_trainer().fit(plain, data())
    plain.cnn.load_state_dict(model.cnn.state_dict())
    plain.sampler.load_state_dict(model.sampler.state_dict())
    trainer = make_trainer(callbacks=[GuardCallback()])
    for each in (plain, model):
        torch.manual_seed(3)
        trainer.validate(each, data(), verbose=False)
    assert are_equal(model.sampler.examples, plain.sampler.examples)
    assert model.loss_fn.guard.state_dict()["sampler_calls"] == 0


def test_bfloat16():
    def fit(model):
        trainer = make_trainer(precision="bf16-mixed")
        trainer.fit(model, data())
        return tensors(model, trainer)

    memory = Memory()
    assert are_equal(fit(make(beta_star=0.0)), fit(make(DeepEnergyModel)))
    fit(make(beta_star=1.0, sinks=[memory]))
    assert memory.steps == list(range(N_BATCHES))
    assert all(0 < value < 1 for value in memory.column("grad_scale"))
    assert set(memory.column("nonfinite/energies")) == {0.0}


def test_skips_of_the_amp_scaler_are_no_alarm():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    model = make()
    trainer = make_trainer(max_epochs=4, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    trainer.fit(model, data())
    g = model.loss_fn.guard
    assert g.step == 4 * N_BATCHES
    assert {alert.rule for alert in g.alerts} == {"amp_skip"}
    assert len(g.alerts) < g.step


def test_all_rows_are_written_when_fit_is_over(tmp_path):
    make_trainer().fit(make(log_dir=tmp_path), data())
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(N_BATCHES))


def test_mixin_keeps_other_callbacks():
    class Own(Callback):
        pass

    class Base(Guarded):
        def configure_callbacks(self):
            return Own()

    class Both(GuardedModule, Base):
        pass

    assert [type(each) for each in Both().configure_callbacks()] == [Own, GuardCallback]


def test_several_schedulers_go_back_together():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    both = _Schedulers(
        [
            torch.optim.lr_scheduler.StepLR(optimizer, 1),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        ]
    )
    optimizer.step()
    both[1].step(3.0)
    state = copy.deepcopy(both.state_dict())
    both[0].step()
    both[1].step(2.0)
    both.load_state_dict(state)
    assert (both[0].last_epoch, both[1].best) == (0, 3.0)


def test_the_other_package_of_the_same_trainer():
    class Standalone(GuardedModule, pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.cnn = make_net()
            self.memory = Memory()
            self.loss_fn, self.draw = guard(
                None, self.climb, model=self.cnn, beta_star=0.5, sinks=[self.memory]
            )

        climb = OnRanks.climb
        training_step = OnRanks.training_step
        configure_optimizers = OnRanks.configure_optimizers

    model = Standalone()
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data())
    assert model.memory.steps == list(range(N_BATCHES))
    assert "guard/grad_scale" in trainer.callback_metrics


def test_ranks_have_one_guard_together(tmp_path):
    """Two processes of half a batch each are one process with the whole batch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    (first, apart), (second, _) = run_ranks("tests.frameworks.lightning_ranks", 2, tmp_path)
    one = train_on_ranks(make_trainer(), joined=False)
    for name, value in one["parameters"].items():
        assert torch.equal(first["parameters"][name], second["parameters"][name])
        torch.testing.assert_close(first["parameters"][name], value, rtol=1e-5, atol=1e-6)
    for a, b, joined in zip(first["rows"], second["rows"], one["rows"], strict=True):
        for tag in ("grad_scale", "ess", "energy_gap"):
            assert a[tag] == b[tag] == pytest.approx(joined[tag], rel=1e-4)
    # An alert is every rank's, and one of them says it.
    assert [each["alerts"] for each in (first, second)] == [["energy_blowup"]] * 2
    assert [len(each["said"]) for each in (first, second)] == [1, 0]
    # A guard that knows of one rank only is mentioned.
    assert "process_group=torch.distributed.group.WORLD" in apart["said"][0]
