"""What an attached optimizer tells the guard: where a step ends, and whether its gradients are
finite.

A weight of 0 does not stop ``0 * inf`` inside the network's own backward pass, so a step whose
gradients are not finite is skipped: on the device where the optimizer honours ``found_inf`` (the
fused Adam), else after one read by the host. An AMP GradScaler does the same by itself and is left
to it; its skips are reported. Ranks skip a step together: each may hold other gradients, or other
shards of them.

A closure computes the gradients inside the step. Optimizers of ``torch.optim`` call it once, before
all else, so that the same can be done at its end; L-BFGS calls it often, and what others do between
its calls is not known, so their gradients are left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Adam, AdamW, Optimizer

from .update import PendingUpdate, Update, dense

__all__ = ["OptimizerHooks"]


class OptimizerHooks:
    """Hooks on one optimizer, and on its GradScaler where there is one.

    Args:
        optimizer: any torch optimizer.
        scaler: its ``torch.amp.GradScaler``, or None.
        on_step: called after every step, also one that the scaler left out, with 1.0 where the
            gradients were not finite and the step changed nothing, 0.0 where they were, as a float
            or, where the device decides, a 0-dim tensor; and with whether the scaler decided.
        is_watched: whether the step that is about to be taken is to be measured.
        on_update: called with its sizes before `on_step`; not where the scaler left it out.
        process_group: ranks that skip a step together, for one message of one number. A step that
            the scaler left out of its own accord is reported as this rank's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None,
        on_step: Callable[[float | Tensor, bool], None],
        is_watched: Callable[[], bool],
        on_update: Callable[[Update], None],
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._on_step = on_step
        self._process_group = process_group
        self._is_watched = is_watched
        self._on_update = on_update
        self._update: PendingUpdate | None = None
        self._scaled = scaler is not None and scaler.is_enabled()
        self._skipped: float | Tensor = 0.0
        self._withheld: list[tuple[Tensor, Tensor]] = []
        self._stepped = False
        self._undo: list[Callable[[], None]] = [
            optimizer.register_step_post_hook(self._after).remove,
            optimizer.register_step_pre_hook(self._before).remove,
        ]
        if scaler is not None and self._scaled:
            self._watch_scaler(optimizer, scaler)

    def remove(self) -> None:
        """Take every hook off again."""
        for undo in self._undo:
            undo()

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._update, self._skipped = None, 0.0
        closure = next((x for x in (*args, *kwargs.values()) if callable(x)), None)
        if closure is None:
            self._watch(optimizer, has_gradients=True)
            self._withhold(optimizer)
            return None
        if not _calls_closure_first(optimizer):
            self._watch(optimizer, has_gradients=False)
            return None

        def then_look() -> Any:
            loss = closure()
            self._watch(optimizer, has_gradients=True)
            self._withhold(optimizer)
            return loss

        return (
            tuple(then_look if x is closure else x for x in args),
            {name: then_look if x is closure else x for name, x in kwargs.items()},
        )

    def _watch(self, optimizer: Optimizer, *, has_gradients: bool) -> None:
        if self._is_watched():
            self._update = PendingUpdate(
                optimizer, self._process_group, has_gradients=has_gradients
            )

    @torch.no_grad()
    def _withhold(self, optimizer: Optimizer) -> None:
        """Make the optimizer leave the step out where a gradient is not finite."""
        if self._scaled:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [dense(p.grad) for p in parameters if p.grad is not None]
        not_finite = self._of_any_rank(_not_finite(gradients, parameters[0].device))
        if isinstance(optimizer, Adam | AdamW) and all(
            group.get("fused") for group in optimizer.param_groups
        ):
            self._skipped = not_finite
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
        if self._scaled:
            # Fused optimizers leave a step out by themselves; the scaler has told them.
            found = getattr(optimizer, "found_inf", None)
            self._skipped = 0.0 if found is None else self._of_any_rank(found.detach().clone())
        else:
            optimizer.__dict__.pop("found_inf", None)
        for p, gradient in self._withheld:
            p.grad = gradient
        self._withheld.clear()
        if self._update is not None:
            update, self._update = self._update.finish(self._skipped), None
            if update is not None:
                self._on_update(update)
        self._on_step(self._skipped, self._scaled)

    def _of_any_rank(self, flag: Tensor) -> Tensor:
        if self._process_group is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX, self._process_group)
        return flag

    def _watch_scaler(self, attached: Optimizer, scaler: torch.amp.GradScaler) -> None:
        step = scaler.step

        def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._stepped = False
            result = step(optimizer, *args, **kwargs)
            if optimizer is attached and not self._stepped:
                self._on_step(1.0, True)
            return result

        # GradScaler has no hooks, and a step that it leaves out never reaches the optimizer's.
        scaler.__dict__["step"] = watched
        self._undo.append(lambda: scaler.__dict__.pop("step", None))


def _not_finite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """1 where an entry of any gradient is not finite, else 0; 0-dim, float32."""
    gradients = [x for x in gradients if x.numel()]
    if not gradients:
        return torch.zeros((), device=device)
    # The largest entry is finite only if all are; a sum of squares may overflow.
    largest = torch._foreach_norm(gradients, torch.inf)
    dtype = functools.reduce(torch.promote_types, {x.dtype for x in largest})
    each = torch.stack([x.to(device, dtype) for x in largest])
    return (~torch.isfinite(each)).any().float()


def _calls_closure_first(optimizer: Optimizer) -> bool:
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and not isinstance(optimizer, LBFGS)
