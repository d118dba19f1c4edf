"""Modules of many kinds, precisions, schedulers and ranks under Lightning's own Trainer."""

from __future__ import annotations

import copy
import socket

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from ebmguard import guard
from ebmguard.adapters.lightning import GuardCallback, GuardedModule, _Schedulers
from ebmguard.errors import ConfigError
from tests.frameworks.lightning_parts import (
    WARNS,
    DeepEnergyModel,
    Guarded,
    Mixed,
    are_equal,
    make,
    make_trainer,
)
from tests.frameworks.lightning_ranks import OnRanks, train_on_ranks
from tests.frameworks.parts import N_BATCHES, data, make_net
from tests.parts import Memory
from tests.ranks import run_ranks

pytestmark = WARNS


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


def test_skips_of_the_amp_scaler_are_no_alarm():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    model = make()
    trainer = make_trainer(max_epochs=4, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    trainer.fit(model, data())
    g = model.loss_fn.guard
    assert g.step == 4 * N_BATCHES
    assert {alert.rule for alert in g.alerts} == {"amp_skip"}
    assert len(g.alerts) < g.step


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
