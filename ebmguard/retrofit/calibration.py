"""The measurement of a sampler's output scale at its first calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo as uncompiled
from torch.optim import Optimizer

from ..alerts import Alert, Level
from ..errors import Stateful
from ..sampling import JOINED, Drift, Measured, Substeps, Tempering, changes, is_compiled
from .strength import Settings, Strength, StrengthAt

__all__ = ["Calibration"]

_log = logging.getLogger("ebmguard")
_TURNED = (
    "The gradient that arrives at the guarded loss is %s, and the optimizer %ss: unless "
    "something else turns it round, the trainer pushes data and samples the wrong way. The "
    "guarded loss is to be minimised: add it, do not subtract it."
)
_UNTEMPERED = (
    "It runs on the energy as it is, and the weights alone act. Where it draws from exp(o f), pass "
    "output_scale=o (2 * step_size / noise_std**2)."
)
_SIGNS = ("negative", "descend"), ("positive", "ascend")

_CALLS = 5  # tries to measure the sampler exactly
_ENDS = 4  # evaluations that are kept at either end of a call
_SAME = 0.01
_SURE = 4.0  # standard errors
_COMPILED = Measured("it is compiled by torch.compile, where draws cannot be seen")


class Calibration(Stateful):
    """Records sampler calls until one of them is measured exactly, or a handful are not."""

    def __init__(self, settings: Settings) -> None:
        self.result: Measured | None = None  # of the latest call; on all ranks, the first rank's
        self.calls_left = _CALLS
        self._tempered_left = _CALLS
        self.follows, self.is_joined = "", False  # see Drift
        self.decays = False  # when it is tempered
        self._settings = settings
        self._has_watched = self._has_logged = False

    def drift(
        self, parts: Iterable[object], now: StrengthAt, finer: Substeps | None
    ) -> Drift | None:
        """Return a recorder for this call of sampler, energy module and arguments, or None."""
        if not (self.calls_left or (now.must_temper and self._tempered_left)):
            return None
        if any(map(is_compiled, parts)):
            self.result = _COMPILED if self.calls_left else self.result
            self.calls_left = self._tempered_left = 0
            return None
        looking = None if finer or now.is_off else Substeps(None)
        return Drift(len(self._settings.models), looking, _ENDS)

    def take(self, drift: Drift, tempering: Tempering | None, result: object) -> None:
        """Measure the sampler by the recorded call and the result that it returned."""
        self.follows = drift.follows or self.follows
        if tempering is not None and changes(tempering.factor):
            # Where nothing moves, the sampler may follow any function of the outputs.
            moves = any(x.gradient is not None and x.gradient.any() for x in drift.evaluations)
            self._tempered_left = 0 if moves else max(0, self._tempered_left - 1)
            if not self.is_joined and drift.is_joined(result):
                self.is_joined = True
                if self._settings.ranks.is_first:
                    _log.warning(JOINED)
            if drift.caveat and not self._has_logged and self._settings.ranks.is_first:
                self._has_logged = True
                say = _log.warning if drift.is_tested else _log.info
                say(drift.caveat.format(f"{type(tempering.module).__name__}.{tempering.energy}"))
        if self.calls_left:
            local = _measured(drift, tempering, result).after(self.result)
            measured: Measured = self._settings.ranks.from_all(local)[0]
            self.result, self.calls_left = measured, 0 if measured.is_exact else self.calls_left - 1
        if tempering is not None and changes(tempering.factor) and self.result is not None:
            self.decays |= self.result.decay != 0  # as the gradient of a prior does, by hand

    def compared(
        self, strength: Strength, step: int, *, acts: bool
    ) -> tuple[Strength, list[Alert]]:
        """Add the measured scale to the strength, and warn if the user passed a wrong one."""
        measured, speaks = self._exact, self._settings.ranks.is_first
        user_scale, awaits = strength.output_scale, strength.awaits_scale
        strength = strength.knowing(self.result, step)
        if measured is not None and awaits:
            if speaks:
                _log.info("%s", measured)
        elif measured is not None and user_scale is not None and not strength.is_measured:
            scale, error = measured.output_scale, measured.output_scale_error
            # Sampler and loss may both take a multiple of the output for the energy.
            off = min(abs(scale - user_scale), abs(scale / abs(measured.multiple) - user_scale))
            if off > max(_SAME * user_scale, _SURE * error):
                steps = f"step {measured.step:.4g} and noise {measured.noise:.4g}"
                fix = f"output_scale={scale:.6g}, as {steps} say"
                what = ("output_scale", Level.WARN, step, "output_scale")
                alert = Alert(*what, value=user_scale, limit=scale, window=0, remedies=(fix,))
                return strength, [alert]
        elif awaits and speaks and acts and not (self.calls_left or strength.tempers):
            # Without noise there is no scale, and nothing is missing.
            is_meant = self.result is not None and self.result.has_no_noise
            say = _log.info if is_meant else _log.warning
            say("%s %s", self.result, _UNTEMPERED)
        return strength, []

    def watch(self, loss: Tensor, optimizer: Optimizer | None) -> None:
        """Warn once if the gradient that reaches the first loss has the wrong sign.

        Without an optimizer, assume one that minimises.
        """
        if self._has_watched or not loss.requires_grad:
            return
        self._has_watched = True
        ascends = optimizer is not None and any(g.get("maximize") for g in optimizer.param_groups)

        @uncompiled
        def look(gradient: Tensor) -> None:
            if bool(gradient > 0 if ascends else gradient < 0):
                _log.warning(_TURNED, *_SIGNS[ascends])

        loss.register_hook(look)  # type: ignore[no-untyped-call]

    @property
    def sizes(self) -> dict[str, float] | None:
        """The measured step size and noise, where they are exact."""
        exact = self._exact
        return None if exact is None else {"step_size": abs(exact.step), "noise_std": exact.noise}

    @property
    def _exact(self) -> Measured | None:
        return self.result if self.result is not None and self.result.is_exact else None

    @property
    def _settled(self) -> Measured | None:
        result = self.result
        return result if result is not None and (result.is_exact or result.has_no_noise) else None

    def _saved(self) -> Mapping[str, Any]:
        return {"_settled": Measured | None}

    def _take(self, read: Mapping[str, Any]) -> None:
        if read["_settled"] is not None:  # else what is known stays
            self.result = read["_settled"]
            self.calls_left *= not self.result.is_exact


def _measured(drift: Drift, tempering: Tempering | None, result: object) -> Measured:
    if tempering is None:
        return Measured("the module that it calls is not known (pass model=)")
    if not tempering.reached:
        what = f"it never called {type(tempering.module).__name__}.{tempering.energy}"
        return Measured(f"{what} (pass its module as model=, its method as energy=)")
    return Measured.of(drift.evaluations, drift.draws.log, result)
