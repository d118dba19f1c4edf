"""What a guard hangs on others' objects goes again: by close(), and where nobody holds it."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import LBFGS, SGD, Adam, Optimizer

from ebmguard import Guard, Recovery, guard
from ebmguard.errors import ConfigError
from ebmguard.sinks import read_jsonl
from tests.parts import Memory, langevin
from tests.whole.parts import Broken, BrokenFused, Trainer, X


def raised(trainer: Trainer, g: Guard, scale: float = 1.0) -> Guard:
    trainer.loss(g, scale)
    with pytest.raises(MemoryError):
        trainer.opt.step()
    return g


def scaled(trainer: Trainer, scale: float = 1.0) -> Guard:
    g = trainer.guard(scaler=trainer.scaler)
    loss = g.loss_fn(scale * trainer.f(X), trainer.f(g.sampler(trainer.f, X)))
    trainer.scaler.scale(loss).backward()
    trainer.scaler.step(trainer.opt)
    return g


def unended(trainer: Trainer) -> Guard:
    """Another optimizer steps: all optimizers are watched for which one does."""
    g, other = trainer.guard(), SGD(trainer.f.parameters(), lr=0.01)
    for _ in range(7):
        trainer.loss(g)
        other.step()
    return g


def slower(trainer: Trainer) -> Guard:
    g = trainer.guard(action="rollback")
    recoverer = g._loop.actions.recoverer
    assert recoverer is not None
    recoverer.rate.factor = 0.5
    return g


def again(trainer: Trainer) -> Guard:
    g = trainer.guard(optimizer=Adam(trainer.f.parameters()))
    return trainer.steps(g.attach(optimizer=trainer.opt))


def looped(trainer: Trainer) -> Guard:
    g = trainer.guard()
    for _ in range(2):
        trainer.opt.step(lambda: trainer.loss(g).item())
    return g


# How a guard came to hang on others' objects: with which optimizer, and what it went through.
WAYS: dict[str, tuple[Callable[..., Optimizer], Callable[[Trainer], Guard]]] = {
    "made": (SGD, lambda t: t.guard()),
    "some steps": (Adam, lambda t: t.steps(t.guard())),
    "without an optimizer": (SGD, lambda t: t.steps(t.guard(optimizer=None))),
    "a step that raised, NaN": (Broken, lambda t: raised(t, t.guard(), math.nan)),
    "a fused step that raised": (BrokenFused, lambda t: raised(t, t.guard())),
    "a lower rate": (SGD, lambda t: t.steps(slower(t))),
    "a scaler": (SGD, scaled),
    "a scaler that left a step out": (SGD, lambda t: scaled(t, math.inf)),
    "another optimizer steps": (Adam, unended),
    "attached anew": (SGD, again),
    "closures": (LBFGS, looped),
    "steps by an argument": (SGD, lambda t: t.steps(t.guard(sgld_steps=3, steps_argument="steps"))),
}


@contextmanager
def collected_by_counts_alone() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("way", WAYS)
def test_close_and_being_held_by_nobody_take_off_all_that_it_hung(way: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    kind, use = WAYS[way]
    trainer = Trainer(kind)
    before = trainer.traces()
    g = use(trainer)
    assert way == "without an optimizer" or trainer.traces() != before  # else this shows nothing
    g.close()
    assert trainer.traces() == before
    trainer = Trainer(kind)
    before, own = trainer.traces(), trainer.guard
    with collected_by_counts_alone():
        trainer.guard = lambda **options: own(log_dir=tmp_path, **options)  # type: ignore[method-assign]
        loop = weakref.ref(use(trainer)._loop)
        assert loop() is None
        assert trainer.traces() == before
        guard(None, None, beta_star=0.5, log_dir=tmp_path).close()  # it is free


@pytest.mark.parametrize("kept", ["loss", "sampler", "both", "guard"])
def test_it_lives_as_long_as_what_it_returned(kept: str) -> None:
    trainer = Trainer()
    with collected_by_counts_alone():
        loss_fn, sampler = g = trainer.guard()
        assert g.loss_fn is loss_fn
        assert loss_fn.guard is g
        loop = weakref.ref(g._loop)
        held = {"loss": loss_fn, "sampler": sampler, "both": (loss_fn, sampler), "guard": g}[kept]
        del g, loss_fn, sampler
        assert loop() is not None
        del held
        assert loop() is None


def test_a_closed_guard_does_nothing_in_a_step() -> None:
    """It skipped NaN steps, wrote ERRORs, and raised out of a plain optimizer.step()."""
    trainer, memory = Trainer(), Memory()
    g = trainer.steps(trainer.guard(sinks=[memory], action="raise"))
    g.close()
    for p in trainer.f.parameters():
        p.grad = torch.full_like(p, math.nan)
    trainer.opt.step()
    assert all(p.isnan().all() for p in trainer.f.parameters())
    assert (memory.steps, memory.alerts, g.alerts) == ([0, 1, 2], [], [])


@pytest.mark.parametrize("at", ["step", "loss"])
def test_it_may_be_closed_by_its_own_alert(at: str) -> None:
    """The optimizer is then inside its loop over hooks, which must not change."""
    trainer, held = Trainer(), list[Guard]()
    g = trainer.guard(on_alert=lambda _: held[0].close(), judge_in_loss=at == "loss")
    held.append(g)
    before = Trainer().traces()
    calls = trainer.opt.register_step_post_hook(lambda *_: None)
    trainer.loss(g, math.nan)
    for _ in range(4):
        trainer.opt.step()
    calls.remove()
    g.close()
    assert trainer.traces() == before
    assert g.alerts


def test_a_callback_that_raises_in_close_keeps_no_row_from_the_disk(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    def on_alert(alert: object) -> None:
        raise MemoryError

    trainer = Trainer()
    g = trainer.guard(log_dir=tmp_path, on_alert=on_alert, judge_in_loss=False)
    trainer.loss(g, math.nan)
    trainer.opt.step()
    trainer.steps(g, 1)
    with pytest.raises(MemoryError):
        g.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1]
    guard(None, None, beta_star=0.5, log_dir=tmp_path).close()


def test_a_guard_may_be_collected_inside_a_step() -> None:
    """The optimizer is then inside its loop over hooks, too."""
    trainer = Trainer()
    before = trainer.traces()
    hooks = [trainer.opt.register_step_pre_hook, trainer.opt.register_step_post_hook]

    def collect(*_: Any) -> None:
        gc.collect()

    first = [register(collect) for register in hooks]
    with collected_by_counts_alone():
        cycle: list[Any] = [trainer.steps(trainer.guard(), 0)]
        loop = weakref.ref(cycle[0]._loop)
        cycle.append(cycle)
        del cycle
        trainer.opt.step()
        assert loop() is None
    for _ in range(2):
        trainer.opt.step()
        trainer.steps(trainer.guard(), 1).close()
    for hook in first:
        hook.remove()
    assert trainer.traces() == before


CALLS: dict[str, Callable[[Guard, Trainer], object]] = {
    "loss": lambda g, t: g.loss(t.f(X), t.f(X)),
    "loss_fn": lambda g, t: g.loss_fn(t.f(X), t.f(X)),
    "loss_fn without gradients": lambda g, t: torch.no_grad()(g.loss_fn)(t.f(X), t.f(X)),
    "reweight": lambda g, t: g.reweight(t.f(X), t.f(X)),
    "sampler": lambda g, t: g.sampler(t.f, X),
    "temper": lambda g, t: g.temper(t.f(X)),
    "next_steps": lambda g, t: g.next_steps(),
    "log": lambda g, t: g.log({"x": 1.0}),
    "resume": lambda g, t: g.resume(),
    "load_state_dict": lambda g, t: g.load_state_dict(g.state_dict()),
}


@pytest.mark.parametrize("beta_star", [0.0, 0.5])
@pytest.mark.parametrize("call", CALLS)
def test_use_after_close_is_a_typed_error(call: str, beta_star: float, tmp_path: Path) -> None:
    trainer, memory = Trainer(), Memory()
    told: dict[str, Any] = {"recovery": Recovery(folder=tmp_path), "action": "rollback"}
    g = trainer.guard(beta_star=beta_star, sinks=[memory], sgld_steps=3, **told)
    trainer.steps(g).close()
    rows = list(memory.steps)
    with pytest.raises(ConfigError, match=r"closed.* g\.attach\(\)"):
        CALLS[call](g, trainer)
    assert (memory.steps, g.step) == (rows, 3)


def test_what_was_closed_can_be_looked_at_and_rests() -> None:
    trainer = Trainer()
    g = trainer.steps(trainer.guard())
    state = g.state_dict()
    for _ in range(2):
        g.close()
    assert g.state_dict() == state
    assert (g.step, g.alerts, str(g.verdict)[:7]) == (3, [], "healthy")
    g.check()
    g.flush()
    assert g.sampler.original(trainer.f, X).shape == X.shape
    with g.paused():
        assert g.sampler(trainer.f, X).shape == X.shape
        assert g.loss_fn(trainer.f(X), trainer.f(X)).requires_grad
    assert g.step == 3


def test_attach_takes_it_into_use_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trainer = Trainer()
    g = trainer.guard(log_dir=tmp_path)
    for _ in range(2):
        trainer.steps(g.attach()).close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(6))
    other = guard(None, None, beta_star=0.5, log_dir=tmp_path)
    with pytest.raises(ConfigError, match="in use by another guard"):
        g.attach()
    with pytest.raises(ConfigError, match="closed"):
        trainer.loss(g)
    other.close()
    assert trainer.steps(g.attach()).step == 9


# -- copies ----------------------------------------------------------------------------------------


def test_a_deep_copy_writes_nothing_and_hangs_on_nothing(tmp_path: Path) -> None:
    """As one is made of a module that holds its guard, where its weights are averaged."""
    pytest.importorskip("tensorboard")
    trainer = Trainer()
    recovery = Recovery(folder=tmp_path / "snapshots", folder_every=1, certify_after=1, every=1)
    g = trainer.guard(log_dir=tmp_path, action="rollback", recovery=recovery, buffer=[X])
    trainer.steps(g)
    g.flush()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    hung = trainer.traces()
    twin, other = copy.deepcopy((g, trainer))
    assert twin.loss_fn.guard is twin
    assert not other.opt._optimizer_step_post_hooks
    twin.attach(optimizer=other.opt)
    other.steps(twin, 30)
    twin.close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert trainer.traces() == hung
    assert (g.step, twin.step) == (3, 33)
    assert trainer.steps(g).step == 6


@pytest.mark.parametrize("what", ["guard", "loss", "sampler", "a module that holds it"])
def test_a_pickle_is_refused_and_says_what_to_send(what: str) -> None:
    trainer = Trainer()
    loss_fn, sampler = g = guard(None, langevin, model=trainer.f, beta_star=0.5, output_scale=9.0)
    trainer.f.own = loss_fn
    parts = {"guard": g, "loss": loss_fn, "sampler": sampler, "a module that holds it": trainer.f}
    with pytest.raises(ConfigError, match=r"not pickled.* Send the settings.*g\.state_dict\(\)"):
        pickle.dumps(parts[what])
