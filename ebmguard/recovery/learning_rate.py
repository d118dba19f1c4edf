"""A factor on the learning rate that no scheduler and no assignment of the trainer undoes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["LearningRate"]


class LearningRate:
    """Multiplies the learning rate of an optimizer inside its ``step``, and only there.

    Attributes:
        factor: 1 leaves it as it is.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        # Groups whose rate is scaled now, with the trainer's own rate and the one in its place.
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []
        self._undo: list[Callable[[], None]] = []

    def watch(self, optimizer: Optimizer) -> None:
        """Act on this optimizer from now on, instead of an earlier one."""
        for undo in self._undo:
            undo()
        self._undo = [
            optimizer.register_step_pre_hook(self._before).remove,
            optimizer.register_step_post_hook(self._after).remove,
        ]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()  # a step that raised has left it scaled
        if self.factor == 1:
            return
        for group in optimizer.param_groups:
            own = group.get("lr")
            if own is not None:  # some optimizers set their own
                group["lr"] = own * self.factor
                self._scaled.append((group, own, group["lr"]))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        for group, own, scaled in self._scaled:
            if group["lr"] is scaled:  # else the trainer has set another one meanwhile
                group["lr"] = own
        self._scaled.clear()
