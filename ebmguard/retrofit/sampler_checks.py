"""What is checked of a sampler: its first calls against what was told, and who uses its samples."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..alerts import Alert, Level
from ..errors import Stateful
from ..sampling import Measured, Recording, Tempering
from .settings import Settings

__all__ = ["FirstCalls", "Unused", "is_compiled"]

_log = logging.getLogger("ebmguard")
_TURNED = (
    "The gradient that arrives at the guarded loss is %s, and the optimizer %ss: unless "
    "something else turns it round, the trainer pushes data and samples the wrong way. The "
    "guarded loss is to be minimised: add it, do not subtract it."
)
_SIGNS = ("negative", "descend"), ("positive", "ascend")

_CALLS = 5  # that are tried
_ENDS = 4  # evaluations that are kept at either end of a call
_SAME = 0.01
_SURE = 4.0  # standard errors
_COMPILED = Measured("it is compiled by torch.compile, where draws cannot be seen")


class FirstCalls(Stateful):
    """Records sampler calls until one is measured exactly, or a handful was not."""

    def __init__(self, settings: Settings) -> None:
        self.result: Measured | None = None  # of the latest call; of several ranks, the first's
        self.calls_left = _CALLS
        self._settings = settings
        self._has_watched = False

    def recording(self, parts: Iterable[object]) -> Recording | None:
        """For a call of these: sampler, arguments, energy module; None: not to be recorded."""
        if not self.calls_left:
            return None
        if any(map(is_compiled, parts)):
            self.result, self.calls_left = _COMPILED, 0
            return None
        return Recording(ends=_ENDS)

    def take(self, recording: Recording, tempering: Tempering | None) -> None:
        """What the recorded call was."""
        if tempering is None:
            own = Measured("the module that it calls is not known (pass model=)")
        elif not tempering.reached:
            what = f"it never called {type(tempering.module).__name__}.{tempering.energy}"
            own = Measured(f"{what} (pass its module as model=, its method as energy=)")
        else:
            own = Measured.of(recording.evaluations, recording.draws.log)
        found: Measured = self._settings.ranks.from_all(own)[0]
        self.result, self.calls_left = found, 0 if found.is_exact else self.calls_left - 1

    def alert(self, output_scale: float | None, step: int) -> list[Alert]:
        """A WARN where the output scale that was given is not the measured one."""
        found = self._exact
        if output_scale is None or found is None:
            return []
        scale, error = found.output_scale, found.output_scale_error
        if abs(scale - output_scale) <= max(_SAME * output_scale, _SURE * error):
            return []
        fix = f"output_scale={scale:.6g}, as step {found.step:.4g} and noise {found.noise:.4g} say"
        what = ("output_scale", Level.WARN, step, "output_scale")
        return [Alert(*what, value=output_scale, limit=scale, window=0, remedies=(fix,))]

    def watch(self, loss: Tensor, optimizer: Optimizer | None) -> None:
        """Warn once where the gradient that arrives at the first loss has the wrong sign.

        An optimizer of None is taken for one that minimises.
        """
        if self._has_watched or not loss.requires_grad:
            return
        self._has_watched = True
        ascends = optimizer is not None and any(g.get("maximize") for g in optimizer.param_groups)

        def look(gradient: Tensor) -> None:
            if bool(gradient > 0 if ascends else gradient < 0):
                _log.warning(_TURNED, *_SIGNS[ascends])

        loss.register_hook(look)  # type: ignore[no-untyped-call]

    def _saved(self) -> Mapping[str, Any]:
        return {"_exact": Measured | None}

    @property
    def _exact(self) -> Measured | None:
        return self.result if self.result is not None and self.result.is_exact else None

    def _take(self, read: Mapping[str, Any]) -> None:
        if read["_exact"] is not None:  # else what is known stays
            self.result, self.calls_left = read["_exact"], 0


def is_compiled(part: object) -> bool:
    """Whether it has a mark of ``torch.compile``, which functions and modules have."""
    is_function = hasattr(part, "_torchdynamo_orig_callable")
    return is_function or getattr(part, "_compiled_call_impl", None) is not None


# Steps without a guarded loss after which something is wrong; plots need fewer sampler calls.
_STEPS = 10
_NEVER = (
    "The guarded sampler was called %d times, but the guarded loss never: tempered samples then "
    "train an unguarded loss. Use the loss that guard() returned, and draw plots inside "
    "`with g.paused():`."
)
_NO_LONGER = (
    "The guarded sampler was called %d times since the last guarded loss, against %d before it. If "
    "this is an evaluation, it judges samples of the tempered energy: give it `sampler.original`, "
    "or put it inside `with g.paused():`."
)


class Unused:
    """Counts sampler calls until a loss comes, and warns once."""

    def __init__(self) -> None:
        self._calls = 0  # since the latest loss
        self._most = 0  # before any loss; 0 until the first one
        self._steps = 0  # before the first loss
        self._versions: tuple[int, ...] | None = None
        self._has_warned = False

    def loss(self) -> None:
        """A guarded loss was called."""
        self._most, self._calls = max(self._most, self._calls), 0

    def sample(self, module: nn.Module | None, *, acts: bool, tempers: bool) -> None:
        """The sampler was called, on this energy module, if it is known.

        ``acts``: whether the guard changes the loss of this step; ``tempers``: this call.
        """
        self._calls += 1
        if self._most:
            if tempers and self._calls > _STEPS * self._most:
                self._warn(_NO_LONGER, self._calls, self._most)
            return
        # A step may need a hundred calls (of one Metropolis step, say), but moves the parameters.
        versions = None if module is None else tuple(p._version for p in module.parameters())
        self._steps += versions is None or versions != self._versions
        self._versions = versions
        if acts and self._steps >= _STEPS:
            self._warn(_NEVER, self._calls)

    def _warn(self, message: str, *numbers: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(message, *numbers)
