"""Notices sampler calls whose samples no guarded loss uses: another loss, or an evaluation."""

from __future__ import annotations

import logging

from torch import nn

__all__ = ["Unused"]

_log = logging.getLogger("ebmguard")

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
        """The sampler was called.

        Args:
            module: the energy module; None is not known.
            acts: whether the guard changes the loss of this step.
            tempers: whether it changes this call.
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
