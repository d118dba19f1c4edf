"""A plain loop on accelerate, with a sampler object and accumulated gradients."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker

from ebmguard.adapters.accelerate import AcceleratorSink
from ebmguard.errors import NonFiniteError
from tests.faults.injector import FaultInjector
from tests.frameworks.accelerate_loop import Run, make_accelerator
from tests.frameworks.parts import N_BATCHES, Before, run_the_page
from tests.parts import Memory
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def _fresh():
    """An Accelerator shares its state with every other one of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_off_is_the_unguarded_trainer(precision):
    def fit(options):
        run = Run(options, make_accelerator(mixed_precision=precision))
        run.train(2)
        return run.tensors()

    unguarded = fit(None)
    memory = Memory()
    for options in ({"beta_star": 0.0, "sinks": [memory]}, {"beta_star": 2.0}):
        pairs = zip(fit(options), unguarded, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) == (options["beta_star"] == 0)
    assert memory.steps == list(range(2 * N_BATCHES))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradient_in_the_loop_is_the_closed_form(accumulated):
    memory = Memory()
    options = {"beta_star": Before.beta_star, "output_scale": Before.output_scale}
    run = Run(
        options | {"sinks": [memory]},
        make_accelerator(gradient_accumulation_steps=accumulated),
        sgd=True,
    )
    before = Before(run.net, run.chains)
    run.train(n_batches=accumulated)
    assert len(run.seen) == accumulated
    before.check_update(run.net, run.seen)
    assert memory.steps == [0]


def test_accumulated_batches_are_one_row():
    memory = Memory()
    run = Run({"sinks": [memory]}, make_accelerator(gradient_accumulation_steps=4))
    run.train(2)  # accelerate steps at the end of an epoch too
    assert memory.steps == list(range(4))


def test_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path):
    run = Run({}, make_accelerator())
    run.train(2)
    run.accelerator.save_state(tmp_path)
    run.train()
    expected, state = run.tensors(), run.loss_fn.guard.state_dict()
    assert state["step"] == 3 * N_BATCHES

    other = Run({}, make_accelerator())
    torch.manual_seed(99)
    other.train()  # what is loaded replaces it, random numbers included
    other.accelerator.load_state(tmp_path)
    other.train()
    assert all(torch.equal(a, b) for a, b in zip(other.tensors(), expected, strict=True))
    assert other.loss_fn.guard.state_dict() == state


class Kept(GeneralTracker):
    """A tracker of one's own, as accelerate allows it."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self):
        return self.logged

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.logged.append((step, values))


def test_divergence_ends_the_loop_and_is_in_the_trackers():
    kept = Kept()
    accelerator = make_accelerator(log_with=kept)
    run = Run({"action": "raise", "sinks": [AcceleratorSink(accelerator)]}, accelerator)
    accelerator.init_trackers("run")
    faults = FaultInjector()
    run.chains.sample_new_exmps = faults.sampler(run.chains.sample_new_exmps)  # type: ignore[method-assign]
    faults.nan_sample(at=3)
    with pytest.raises(NonFiniteError) as error:
        run.train()
    assert error.value.alert.step == 3
    assert all(p.isfinite().all() for p in run.net.parameters())
    rows = [step for step, values in kept.logged if "guard/energy_gap" in values]
    alerts = [(step, values) for step, values in kept.logged if "guard/energy_gap" not in values]
    assert rows == [0, 1, 2, 3]
    assert alerts == [(3, {"_alerts/ERROR_nonfinite": 2})]


def test_skips_of_the_amp_scaler_are_no_alarm():
    accelerator = make_accelerator()
    # accelerate makes one on a GPU only.
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    run = Run({}, accelerator)
    next(run.net.parameters()).register_hook(lambda gradient: 1e3 * gradient)
    run.train(2)
    g = run.loss_fn.guard
    assert g.step == 2 * N_BATCHES
    assert {alert.rule for alert in g.alerts} == {"amp_skip"}
    assert len(g.alerts) < g.step


def test_processes_have_one_guard_together(tmp_path):
    """Two processes of half a batch each are one process with the whole batch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    first, second = run_ranks("tests.frameworks.accelerate_loop", 2, tmp_path)
    one = Run({"beta_star": 2.0}, make_accelerator()).train_on_rank()
    for a, b, whole in zip(first, second, one, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, whole, rtol=1e-5, atol=1e-6)


def test_the_page(tmp_path):
    assert run_the_page("accelerate", tmp_path)["g"].step == N_BATCHES / 2
