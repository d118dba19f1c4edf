"""A plain loop on Fabric and on accelerate, with a sampler object and accumulated gradients."""

from __future__ import annotations

import csv
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.plugins import MixedPrecision

from ebmguard.adapters.accelerate import AcceleratorSink
from ebmguard.adapters.fabric import FabricSink
from ebmguard.errors import NonFiniteError
from tests.faults.injector import FaultInjector
from tests.frameworks.loops import OnAccelerate, OnFabric, Run
from tests.frameworks.parts import N_BATCHES, Before, run_the_page
from tests.parts import Memory
from tests.ranks import run_ranks

# Of files that the test has written itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*weights_only")
each = pytest.mark.parametrize("kind", [OnFabric, OnAccelerate])


@pytest.fixture(autouse=True)
def _fresh():
    """An Accelerator shares its state with every other one of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerated(options: Any, precision: str) -> Run:
    return OnAccelerate(options, accelerator=Accelerator(cpu=True, mixed_precision=precision))


def on_fabric(options: Any, precision: Any) -> Run:
    return OnFabric(options, fabric=Fabric(accelerator="cpu", precision=precision))


# In mixed precision Fabric itself wants no gradient of its wrapper but by `fabric.backward`.
@pytest.mark.parametrize(
    "make",
    [
        *(OnFabric, partial(OnFabric, by="wrapper"), partial(on_fabric, precision="bf16-mixed")),
        *(OnAccelerate, partial(accelerated, precision="bf16")),
    ],
)
def test_off_is_the_unguarded_trainer(make: Callable[[Any], Run]):
    def fit(options):
        run = make(options)
        run.train(2)
        return run.tensors()

    unguarded = fit(None)
    memory = Memory()
    for options in ({"beta_star": 0.0, "sinks": [memory]}, {"beta_star": 2.0}):
        pairs = zip(fit(options), unguarded, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) == (options["beta_star"] == 0)
    assert memory.steps == list(range(2 * N_BATCHES))


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("make", [OnFabric, partial(OnFabric, by="wrapper"), OnAccelerate])
def test_gradient_in_the_loop_is_the_closed_form(make, accumulated):
    memory = Memory()
    options = {"beta_star": Before.beta_star, "output_scale": Before.output_scale}
    run = make(options | {"sinks": [memory]}, sgd=True, accumulated=accumulated)
    before = Before(run.net, run.chains)
    run.train(n_batches=accumulated)
    assert len(run.seen) == accumulated
    before.check_update(run.net, run.seen)
    assert memory.steps == [0]


@each
def test_goes_on_from_a_checkpoint_as_if_nothing_had_happened(kind, tmp_path):
    run = kind({})
    run.train(2)
    run.save(tmp_path)
    run.train()
    expected, state = run.tensors(), run.loss_fn.guard.state_dict()
    assert state["step"] == 3 * N_BATCHES

    other = kind({})
    torch.manual_seed(99)
    other.train()  # what is loaded replaces it, random numbers included
    other.load(tmp_path)
    other.train()
    assert all(torch.equal(a, b) for a, b in zip(other.tensors(), expected, strict=True))
    assert other.loss_fn.guard.state_dict() == state


class Kept(GeneralTracker):
    """A tracker of one's own, as accelerate allows it."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, Any]] = []

    @property
    def tracker(self):
        return self.logged

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.logged.append({"step": step, **values})


@each
def test_divergence_ends_the_loop_and_is_in_the_loggers(kind, tmp_path):
    fabric = Fabric(accelerator="cpu", loggers=CSVLogger(tmp_path, flush_logs_every_n_steps=1))
    accelerator = Accelerator(cpu=True, log_with=(kept := Kept()))
    if kind is OnFabric:
        run: Run = OnFabric({"action": "raise", "sinks": [FabricSink(fabric)]}, fabric=fabric)
    else:
        options = {"action": "raise", "sinks": [AcceleratorSink(accelerator)]}
        run = OnAccelerate(options, accelerator=accelerator)
        accelerator.init_trackers("run")
    faults = FaultInjector()
    run.chains.sample_new_exmps = faults.sampler(run.chains.sample_new_exmps)  # type: ignore[method-assign]
    faults.nan_sample(at=3)
    with pytest.raises(NonFiniteError) as error:
        run.train()
    assert error.value.alert.step == 3
    assert all(p.isfinite().all() for p in run.net.parameters())
    rows: list[dict[str, Any]] = kept.logged
    if kind is OnFabric:
        with open(f"{fabric.logger.log_dir}/metrics.csv") as file:
            rows = list(csv.DictReader(file))
    tags = ("_alerts/ERROR_nonfinite", "guard/energy_gap")
    marks, gaps = ([int(row["step"]) for row in rows if row.get(tag)] for tag in tags)
    assert (marks, gaps) == ([3], [0, 1, 2, 3])


@each
def test_skips_of_the_amp_scaler_are_no_alarm(kind):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    if kind is OnFabric:
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        run: Run = OnFabric({}, fabric=Fabric(accelerator="cpu", plugins=[precision]))
    else:
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = scaler  # accelerate makes one on a GPU only
        run = OnAccelerate({}, accelerator=accelerator)
        next(run.net.parameters()).register_hook(lambda gradient: 1e29 * gradient)
    run.train(4)
    g = run.loss_fn.guard
    assert g.step == 4 * N_BATCHES
    assert {alert.rule for alert in g.alerts} == {"amp_skip"}
    assert len(g.alerts) < g.step


def test_the_other_package_of_the_same_fabric():
    standalone = pytest.importorskip("lightning_fabric")
    run = OnFabric({}, fabric=standalone.Fabric(accelerator="cpu"))
    run.train()
    assert run.loss_fn.guard.step == N_BATCHES


def test_processes_have_one_guard_together(tmp_path):
    """Two processes of half a batch each are one process with the whole batch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    first, second = run_ranks("tests.frameworks.loops", 2, tmp_path)
    one = OnAccelerate({"beta_star": 2.0}).train_on_rank()
    for a, b, whole in zip(first, second, one, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heading", "steps"), [("Fabric", N_BATCHES), ("accelerate", 3)])
def test_the_page(heading, steps, tmp_path):
    assert run_the_page(heading, tmp_path)["g"].step == steps
