"""A plain loop on Lightning Fabric, with a sampler object and accumulated gradients."""

from __future__ import annotations

import csv
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor

from ebmguard import guard
from ebmguard.adapters.fabric import FabricSink, attach
from ebmguard.errors import NonFiniteError
from tests.faults.injector import FaultInjector
from tests.frameworks.parts import (
    N_BATCHES,
    OUTPUT_SCALE,
    Before,
    Sampler,
    data,
    make_net,
    run_the_page,
)
from tests.parts import Memory, difference

# Of files that the test has written itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*weights_only")


class Run:
    """A trainer; ``options`` are the guard's, and None leaves it out."""

    def __init__(
        self,
        options: dict[str, Any] | None = None,
        *,
        fabric: Any = None,
        sgd: bool = False,
        by: str = "original",
    ) -> None:
        torch.manual_seed(0)
        self.fabric = fabric or Fabric(accelerator="cpu", devices=1)
        self.net = make_net()
        optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=0.5)
        if not sgd:
            optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01, betas=(0.0, 0.999))
        self.model, self.optimizer = self.fabric.setup(self.net, optimizer)
        self.chains = Sampler(self.net if by == "original" else self.model)
        self.sampler: Any = self.chains
        self.loss_fn: Any = difference
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.state = {"model": self.model, "optimizer": self.optimizer, "chains": self.chains}
        if options is not None:
            g = guard(
                None,
                self.chains,
                methods=("sample_new_exmps",),
                model=self.net,
                **{"beta_star": 0.5, "output_scale": OUTPUT_SCALE, **options},
            )
            self.loss_fn, self.sampler = attach(g, self.fabric, optimizer=self.optimizer)
            self.state["guard"] = g

    def train(self, epochs: int = 1, accumulated: int = 1, n_batches: int = N_BATCHES) -> None:
        for _ in range(epochs):
            for i, (real,) in enumerate(list(data())[:n_batches]):
                fake = self.sampler.sample_new_exmps(steps=4)
                self.seen.append((real, fake.detach().clone()))
                real_out, fake_out = self.model(torch.cat((real, fake))).chunk(2)
                loss = 0.1 * (real_out**2 + fake_out**2).mean() + self.loss_fn(real_out, fake_out)
                self.fabric.backward(loss / accumulated)
                if (i + 1) % accumulated == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    def tensors(self) -> list[Tensor]:
        states = self.optimizer.optimizer.state.values()
        moments = [x for state in states for x in state.values()]
        rng = torch.get_rng_state()
        everything = [*self.net.state_dict().values(), *self.chains.examples, rng, *moments]
        return [x.clone() for x in everything]


# In mixed precision Fabric itself wants no gradient of its wrapper but by `fabric.backward`.
@pytest.mark.parametrize(
    ("precision", "by"),
    [("32-true", "original"), ("32-true", "wrapper"), ("bf16-mixed", "original")],
)
def test_off_is_the_unguarded_trainer(precision, by):
    def fit(options):
        run = Run(options, fabric=Fabric(accelerator="cpu", precision=precision), by=by)
        run.train()
        return run.tensors()

    unguarded = fit(None)
    memory = Memory()
    for options in ({"beta_star": 0.0, "sinks": [memory]}, {"beta_star": 2.0}):
        pairs = zip(fit(options), unguarded, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) == (options["beta_star"] == 0)
    assert memory.steps == list(range(N_BATCHES))


@pytest.mark.parametrize("by", ["original", "wrapper"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradient_in_the_loop_is_the_closed_form(by, accumulated):
    memory = Memory()
    options = {"beta_star": Before.beta_star, "output_scale": Before.output_scale}
    run = Run(options | {"sinks": [memory]}, sgd=True, by=by)
    before = Before(run.net, run.chains)
    run.train(accumulated=accumulated, n_batches=accumulated)
    assert len(run.seen) == accumulated
    before.check_update(run.net, run.seen)
    assert memory.steps == [0]


def test_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path):
    run = Run({})
    run.train(2)
    run.fabric.save(tmp_path / "two.ckpt", run.state)
    random = torch.get_rng_state()
    run.train()
    expected, state = run.tensors(), run.loss_fn.guard.state_dict()
    assert state["step"] == 3 * N_BATCHES

    other = Run({})
    torch.manual_seed(99)
    other.train()  # what is loaded replaces it
    other.fabric.load(tmp_path / "two.ckpt", other.state)
    torch.set_rng_state(random)
    other.train()
    assert all(torch.equal(a, b) for a, b in zip(other.tensors(), expected, strict=True))
    assert other.loss_fn.guard.state_dict() == state


def test_divergence_ends_the_loop_and_is_in_the_loggers(tmp_path):
    fabric = Fabric(accelerator="cpu", loggers=CSVLogger(tmp_path, flush_logs_every_n_steps=1))
    run = Run({"action": "raise", "sinks": [FabricSink(fabric)]}, fabric=fabric)
    faults = FaultInjector()
    run.chains.sample_new_exmps = faults.sampler(run.chains.sample_new_exmps)  # type: ignore[method-assign]
    faults.nan_sample(at=3)
    with pytest.raises(NonFiniteError) as error:
        run.train()
    assert error.value.alert.step == 3
    assert all(p.isfinite().all() for p in run.net.parameters())
    with open(f"{fabric.logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    tags = ("_alerts/ERROR_nonfinite", "guard/energy_gap")
    marks, gaps = ([row["step"] for row in rows if row[tag]] for tag in tags)
    assert (marks, gaps) == (["3"], ["0", "1", "2", "3"])


def test_skips_of_the_amp_scaler_are_no_alarm():
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40))
    run = Run({}, fabric=Fabric(accelerator="cpu", plugins=[precision]))
    run.train(4)
    g = run.loss_fn.guard
    assert g.step == 4 * N_BATCHES
    assert {alert.rule for alert in g.alerts} == {"amp_skip"}
    assert len(g.alerts) < g.step


def test_the_other_package_of_the_same_fabric():
    standalone = pytest.importorskip("lightning_fabric")
    run = Run({}, fabric=standalone.Fabric(accelerator="cpu"))
    run.train()
    assert run.loss_fn.guard.step == N_BATCHES


def test_the_page(tmp_path):
    assert run_the_page("Fabric", tmp_path)["g"].step == N_BATCHES
