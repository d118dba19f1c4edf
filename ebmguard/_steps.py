"""What an attached optimizer tells the guard: where a step ends, and whether its gradients are
finite.

A weight of 0 does not stop ``0 * inf`` inside the network's own backward pass, so a step whose
gradients are not finite is skipped: on the device where the optimizer honours ``found_inf`` (the
fused ones), else after one read by the host. An AMP GradScaler does the same by itself and is left
to it; its skips are reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["OptimizerHooks"]


class OptimizerHooks:
    """Hooks on one optimizer, and on its GradScaler where there is one.

    Args:
        optimizer: any torch optimizer.
        scaler: its ``torch.amp.GradScaler``, or None.
        on_step: called after every ``optimizer.step()``, with 1.0 where the gradients were not
            finite and the step changed nothing, 0.0 where they were, as a float or, where the
            device decides, a 0-dim tensor; None under a scaler, which decides by itself.
        on_scaler_skip: called with the scale when the scaler left a step out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None,
        on_step: Callable[[float | Tensor | None], None],
        on_scaler_skip: Callable[[float], None],
    ) -> None:
        self._on_step = on_step
        self._skipped: float | Tensor | None = None
        self._withheld: list[tuple[Tensor, Tensor]] = []
        self._stepped = False
        self._undo: list[Callable[[], None]] = [
            optimizer.register_step_post_hook(self._after).remove
        ]
        if scaler is None:
            self._undo.append(optimizer.register_step_pre_hook(self._before).remove)
        else:
            self._watch_scaler(scaler, on_scaler_skip)

    def remove(self) -> None:
        """Take every hook off again."""
        for undo in self._undo:
            undo()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._skipped = 0.0
        if any(callable(arg) for arg in (*args, *kwargs.values())):
            return  # a closure computes the gradients later, inside the step
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return
        device = gradients[0].device
        norms = torch._foreach_norm([g.detach() for g in gradients])
        # One number: a sum of norms is finite only if all are.
        not_finite = ~torch.isfinite(
            torch.stack([n.to(device, torch.float32) for n in norms]).sum()
        )
        if all(group.get("fused") for group in optimizer.param_groups):
            self._skipped = not_finite.float()
            optimizer.found_inf = self._skipped  # type: ignore[attr-defined]
        elif bool(not_finite):
            self._skipped = 1.0
            # A parameter without a gradient is passed over, moments and all.
            for p in parameters:
                if p.grad is not None:
                    self._withheld.append((p, p.grad))
                    p.grad = None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepped = True
        optimizer.__dict__.pop("found_inf", None)
        for p, gradient in self._withheld:
            p.grad = gradient
        self._withheld.clear()
        self._on_step(self._skipped)

    def _watch_scaler(
        self, scaler: torch.amp.GradScaler, on_scaler_skip: Callable[[float], None]
    ) -> None:
        step = scaler.step

        def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._stepped = False
            result = step(optimizer, *args, **kwargs)
            if not self._stepped:
                on_scaler_skip(scaler.get_scale())
            return result

        # GradScaler has no hooks, and a step that it leaves out never reaches the optimizer's.
        scaler.__dict__["step"] = watched
        self._undo.append(lambda: scaler.__dict__.pop("step", None))
