"""Lightning: a callback that ties the guards of a module to its Trainer, and a mixin that adds it.

    class DeepEnergyModel(GuardedModule, LightningModule):
        def __init__(self):
            ...
            self.loss_fn, self.sampler = guard(None, Sampler(self.cnn), ..., model=self.cnn)

Or leave the class as it is, and pass ``Trainer(callbacks=[GuardCallback()])``. Both packages work,
``lightning.pytorch`` and ``pytorch_lightning``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ebmguard import Guard
from ebmguard.adapters._metrics import MetricsSink
from ebmguard.adapters._requires import requires
from ebmguard.errors import ConfigError
from ebmguard.sinks import TAG_PREFIX

with requires("lightning", extra="lightning"):
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

__all__ = ["GuardCallback", "GuardedModule"]

_KEY = "ebmguard"
_LOGGED = (
    "grad_scale",
    "ess",
    "energy_gap",
    "energy_overlap",
    "ref/grad_scale",
    "ref/ess",
    "sampler/grad_norm",
    "recovery/attempt",
)


class GuardCallback(Callback):
    """Ties the guards of a LightningModule to its Trainer.

    It finds the guards whose loss is an attribute of the module, or of a module inside it. While
    the Trainer fits,

    - the optimizer, its schedulers and the AMP scaler are attached, so that a row is a step of
      that optimizer, however many batches are accumulated;
    - they act inside ``training_step`` only: what validation and other callbacks sample is
      untempered and not recorded, as in :meth:`ebmguard.Guard.paused`;
    - the main diagnostics are logged as ``guard/...`` by the module's ``log_dict`` (of several
      guards as ``guard/<attribute>/...``), where a ModelCheckpoint can monitor them, and an alert
      is a point ``_alerts/<LEVEL>_<rule>`` in the Trainer's loggers, at the guard's step;
    - checkpoints of the Trainer hold the guards' states;
    - a :class:`~ebmguard.DivergenceError` leaves ``trainer.fit`` as it is.

    Raises:
        ConfigError: from ``fit``: the module has no guard, or several optimizers and none of them
            is attached; from loading a checkpoint of other guards.
    """

    def __init__(self) -> None:
        self._guards: dict[str, Guard] = {}
        self._logged_alerts: dict[str, int] = {}
        self._rest = ExitStack()
        self._undo = ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach what the Trainer has made, and let the guards act inside training steps only."""
        guards = _guards_of(pl_module)
        if not guards:
            raise ConfigError(
                f"GuardCallback found no guard in {type(pl_module).__name__}. Make it in the "
                "module's __init__ or setup, and keep the loss and the sampler as attributes: "
                "self.loss_fn, self.sampler = guard(None, sampler, model=self.net, ...)."
            )
        for g in guards.values():
            _attach(g, trainer)
        self._guards = guards
        self._logged_alerts = {name: len(g.alerts) for name, g in guards.items()}
        self._start_rest(trainer, pl_module)
        self._wake_in_training_step(pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the newest rows."""
        for name, g in self._guards.items():
            prefix = TAG_PREFIX if len(self._guards) == 1 else f"{TAG_PREFIX}{name}/"
            pl_module.log_dict({prefix + tag: g.last[tag] for tag in _LOGGED if tag in g.last})
        self._log_alerts(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the rows that are still waiting."""
        for g in self._guards.values():
            g.close()
        self._log_alerts(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the module as it was."""
        self._rest.close()
        self._undo.close()
        self._guards = {}  # setup may make others

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Do the same as at the end of a run; Lightning raises the exception again."""
        self.on_train_end(trainer, pl_module)
        self.teardown(trainer, pl_module, "fit")

    # -- acting and resting -----------------------------------------------------------------

    def _start_rest(self, trainer: Any, pl_module: Any) -> None:
        self._rest.close()
        for g in (self._guards or _guards_of(pl_module)).values():
            self._rest.enter_context(g.paused())

    # During a fit the guards rest already, and these change nothing.
    on_validation_start = on_test_start = on_predict_start = _start_rest

    def _wake_in_training_step(self, pl_module: Any) -> None:
        step = pl_module.training_step

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            self._rest.close()
            try:
                return step(*args, **kwargs)
            finally:
                self._start_rest(None, pl_module)

        # It is set on the instance, where a compiled module has it too.
        before = {"training_step": step} if "training_step" in vars(pl_module) else {}
        pl_module.training_step = training_step
        self._undo.callback(pl_module.__dict__.update, before)
        self._undo.callback(pl_module.__dict__.pop, "training_step")

    # -- alerts and checkpoints --------------------------------------------------------------

    def _log_alerts(self, trainer: Any) -> None:
        for name, g in self._guards.items():
            for alert in g.alerts[self._logged_alerts[name] :]:
                for logger in trainer.loggers:
                    MetricsSink(logger.log_metrics).write_alert(alert.record())
            self._logged_alerts[name] = len(g.alerts)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the guards' states, as plain values."""
        guards = _guards_of(pl_module)
        checkpoint[_KEY] = {name: g.state_dict() for name, g in guards.items()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Continue from the guards' states, if the run goes on and was guarded."""
        states = checkpoint.get(_KEY)
        if states is None or trainer.state.fn != "fit":
            return
        guards = _guards_of(pl_module)
        if guards.keys() != states.keys():
            raise ConfigError(
                f"The checkpoint holds the guards {', '.join(states)}, but the module has "
                f"{', '.join(guards) or 'none'}. Keep them under the same attributes."
            )
        for name, g in guards.items():
            g.load_state_dict(states[name])


class GuardedModule:
    """A mixin before LightningModule that brings a :class:`GuardCallback` to any Trainer.

    A ``configure_callbacks`` of the module itself should add its callbacks to ``super()``'s.
    """

    def configure_callbacks(self) -> list[Any]:
        """Return the callbacks of the classes behind this one, and a :class:`GuardCallback`."""
        others = super().configure_callbacks()  # type: ignore[misc]
        return [*(others if isinstance(others, Sequence) else [others]), GuardCallback()]


class _Schedulers(list[Any]):
    """The schedulers of one optimizer, with one state."""

    def state_dict(self) -> list[Any]:
        return [scheduler.state_dict() for scheduler in self]

    def load_state_dict(self, states: list[Any]) -> None:
        for scheduler, state in zip(self, states, strict=True):
            scheduler.load_state_dict(state)


def _guards_of(pl_module: Any) -> dict[str, Guard]:
    """Return the guards of a module by the path of their attribute."""
    guards: dict[str, Guard] = {}
    for path, module in pl_module.named_modules():
        for name, value in vars(module).items():
            g = value if isinstance(value, Guard) else getattr(value, "guard", None)
            if isinstance(g, Guard) and g not in guards.values():
                guards[f"{path}.{name}" if path else name] = g
    return guards


def _attach(g: Guard, trainer: Any) -> None:
    known = trainer.optimizers
    optimizer = next((one for one in known if one is g.trainer.optimizer), None)
    if optimizer is None and len(known) != 1:
        raise ConfigError(
            f"The Trainer has {len(known)} optimizers; which one trains the energy? Say it in "
            "configure_optimizers: self.loss_fn.guard.attach(optimizer=...)."
        )
    optimizer = optimizer or known[0]
    schedulers = [
        config.scheduler
        for config in trainer.lr_scheduler_configs
        if getattr(config.scheduler, "optimizer", None) is optimizer
    ]
    g.attach(
        optimizer=optimizer,
        scheduler=_Schedulers(schedulers) if schedulers else None,
        scaler=getattr(trainer.precision_plugin, "scaler", None),
    )
